"""Fit what tools and users say into its budget of tokens."""

from typing import NamedTuple

from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.tool_calls import Side, clip_text, cut_observation

CUT_MARKER = " ... "
"""Stands where something was cut."""
_CHARACTERS_PER_TOKEN = 64
"""No tokenizer packs more of ordinary text into a token: what is longer is clipped unencoded."""


class FittedText(NamedTuple):
    """A text within its budget."""

    text: str
    num_cut: int
    """Tokens that it lost; of a text clipped unencoded, of what was left of it."""


class TextFitter:
    """Cut texts to a budget of tokens, and leave those alone that cannot exceed it.

    Args:
        template: Encodes and decodes outside text.
        max_tokens: Budget of one observation.
        side: Which end is kept (`tool_response_truncate_side`).
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, side: Side) -> None:
        self._template = template
        self._max_tokens = max_tokens
        self._side: Side = side

    def fit(self, text: str) -> FittedText:
        """Return the text, cut where it is longer than the budget."""
        # A token is at least one byte: a text of fewer bytes than the budget fits unencoded.
        if len(text) <= self._max_tokens and len(text.encode()) <= self._max_tokens:
            return FittedText(text, 0)
        clipped = clip_text(text, self._max_tokens * _CHARACTERS_PER_TOKEN, self._side)
        ids = self._template.encode_text(clipped)
        marker = self._template.encode_text(CUT_MARKER)
        cut = cut_observation(ids, self._max_tokens, self._side, marker_ids=marker)
        if cut.num_cut == 0:
            return FittedText(clipped, len(text) - len(clipped))
        return FittedText(self._template.decode(cut.ids), cut.num_cut)
