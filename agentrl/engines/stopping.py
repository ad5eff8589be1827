"""When a completion ends: stop tokens and stop strings, which are kept in the output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from agentrl.engines.protocol import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept."""

EMPTY_TOKENS = 8
"""Tokens of a stop string's window that may decode to an empty text."""


@dataclass(frozen=True, slots=True)
class StopCheck:
    """Decides whether the last sampled token ends a completion."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    decode: Decode
    window: int
    """How many of the last tokens can contain a stop string."""

    @classmethod
    def of(cls, sampling: SamplingParams, decode: Decode) -> Self:
        """Make the check for `sampling`."""
        # A token that does not decode to an empty text has at least one byte.
        strings = tuple(filter(None, sampling.stop))
        longest = max((len(text.encode()) for text in strings), default=0)
        window = longest + EMPTY_TOKENS
        return cls(frozenset(sampling.stop_token_ids), strings, decode, window)

    def is_met(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last of `token_ids` ends the completion."""
        if token_ids[-1] in self.token_ids:
            return True
        if not self.strings:
            return False
        tail = self.decode(token_ids[-self.window :])
        return any(text in tail for text in self.strings)

    def first_end(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first that ends the completion, or None."""
        if not self.strings:
            met = self.token_ids.intersection(token_ids)
            return min((token_ids.index(token_id) + 1 for token_id in met), default=None)
        return next((n for n in range(1, len(token_ids) + 1) if self.is_met(token_ids[:n])), None)


def decoder_of(tokenizer: "PreTrainedTokenizerBase") -> Decode:
    """Return the decoder for stop strings, which keeps special tokens."""
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
