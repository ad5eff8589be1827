"""Conversations as tokens with loss weights, for the supervised warm-up."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentrl.config.schema.prepare import SftConfig
from agentrl.data.rows import Conversation, load_conversations
from agentrl.errors import DataError
from agentrl.media.records import MediaSpan
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.media import load_messages
from agentrl.rollout.templates import ChatTemplate, encode_conversation
from agentrl.workers.packing import PaddedRows


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation as tokens, with the weight of each in the loss."""

    ids: list[int]
    weights: list[float]
    """1 on assistant tokens, `observed_loss_weight` on others, 0 on the system prompt and on the
    placeholders of pictures."""
    spans: tuple[MediaSpan, ...] = ()
    """The runs of placeholder tokens."""


class DemonstrationEncoder:
    """Encodes conversations as a rollout does, with a loss weight for each token.

    Args:
        template: The policy's.
        observed_loss_weight: The weight of user and tool tokens.
    """

    def __init__(self, template: ChatTemplate, observed_loss_weight: float) -> None:
        self._template = template
        self._observed_loss_weight = observed_loss_weight
        # Holds the tools too, so that no other object gets their `id`.
        self._openings: dict[tuple[str, int], tuple[object, list[int]]] = {}

    def encode(
        self, messages: Sequence[Message], tools: Sequence[OpenAIFunctionToolSchema]
    ) -> Demonstration:
        """Encode one conversation.

        Raises:
            TemplateError: if the template cannot render it.
        """
        encoded = encode_conversation(self._template, messages, tools)
        weights = [1.0 if one else self._observed_loss_weight for one in encoded.loss_mask]
        opening = _common_prefix(encoded.ids, self._opening(messages, tools))
        weights[:opening] = [0.0] * opening
        for span in encoded.spans:
            weights[span.start : span.end] = [0.0] * (span.end - span.start)
        return Demonstration(encoded.ids, weights, tuple(encoded.spans))

    def _opening(
        self, messages: Sequence[Message], tools: Sequence[OpenAIFunctionToolSchema]
    ) -> list[int]:
        """Return the tokens before the first user message: the system prompt and its tools."""
        system = [message for message in messages[:1] if message.role in ("system", "developer")]
        key = ("".join(message.text for message in system), id(tools))
        if key not in self._openings:
            asked = ([*system, Message(role="user", content=text)] for text in ("?", "#"))
            first, second = (self._template.encode_prompt(prompt, tools) for prompt in asked)
            self._openings[key] = tools, first[: _common_prefix(first, second)]
        return self._openings[key][1]


class Demonstrations:
    """A file's conversations in a seeded order, each encoded once on demand.

    Args:
        config: File, order, length, weights.
        template: The policy's.
        tools: The tools of rows without `tools`.

    Raises:
        DataError: for a file that cannot be read, and for a call of a tool that its
            conversation does not have.
    """

    def __init__(
        self,
        config: SftConfig,
        template: ChatTemplate,
        tools: Sequence[OpenAIFunctionToolSchema] = (),
    ) -> None:
        self._config = config
        self._processor = template.media
        self._encoder = DemonstrationEncoder(template, config.observed_loss_weight)
        self._rows = load_conversations(config.train_file)
        self._encoded: dict[int, Demonstration] = {}
        self._too_long: set[int] = set()
        self._tools = list(tools)
        check_calls(self._rows, self._tools, file=config.train_file)
        num_held_out = min(config.num_held_out, len(self._rows) // 10)
        self._held_out = self._permutation(0)[len(self._rows) - num_held_out :]

    @property
    def num_conversations(self) -> int:
        """Conversations in the file."""
        return len(self._rows)

    @property
    def num_dropped(self) -> int:
        """Conversations found so far that are longer than `max_length`."""
        return len(self._too_long)

    def held_out(self) -> list[Demonstration]:
        """Encode the held-out conversations, without those that are too long."""
        encoded = [self._encode(self._rows[row]) for row in self._held_out]
        return [one for one in encoded if len(one.ids) <= self._config.max_length]

    def batches(self) -> Iterator[list[Demonstration]]:
        """Yield `config.steps` batches of `config.batch_size`.

        Raises:
            DataError: if no conversation is short enough.
        """
        endless = self._endless()
        for _ in range(self._config.steps):
            yield list(islice(endless, self._config.batch_size))

    def _endless(self) -> Iterator[Demonstration]:
        for row in self._order():
            found = self._encoded.get(row) or self._encode(self._rows[row])
            if len(found.ids) > self._config.max_length:
                self._too_long.add(row)
                continue
            if not found.spans:  # pictures take too much memory
                self._encoded[row] = found
            yield found
        raise DataError(
            f"no conversation has at most {self._config.max_length} tokens",
            file=self._config.train_file,
            expected="a larger max_length",
        )

    def _order(self) -> Iterator[int]:
        """Yield rows epoch after epoch, without those known to be too long; end if all are."""
        held_out = set(self._held_out)
        for epoch in count():
            if len(self._too_long) + len(held_out) == len(self._rows):
                return
            order = (row for row in self._permutation(epoch) if row not in held_out)
            yield from (row for row in order if row not in self._too_long)

    def _permutation(self, epoch: int) -> list[int]:
        rng = np.random.default_rng([self._config.seed, epoch])
        return rng.permutation(len(self._rows)).tolist()

    def _encode(self, row: Conversation) -> Demonstration:
        messages = row.messages
        if row.multi_modal_data:
            messages = load_messages(messages, row.multi_modal_data, self._processor)
        return self._encoder.encode(messages, self._tools if row.tools is None else row.tools)


def check_calls(
    rows: Iterable[Conversation], tools: Sequence[OpenAIFunctionToolSchema], *, file: Path
) -> None:
    """Check that conversations call only tools that they have.

    Args:
        rows: The conversations.
        tools: The tools of rows without `tools`.
        file: Named in the error.

    Raises:
        DataError: with the first row that calls another tool.
    """
    of_run = {tool.name for tool in tools}
    for number, row in enumerate(rows):
        shown = of_run if row.tools is None else {tool.name for tool in row.tools}
        for name in row.tools_called:
            if name not in shown:
                raise DataError(
                    f"the conversation calls the tool {name!r}, which is not among its tools",
                    file=file,
                    row=number,
                    expected=f"one of {', '.join(sorted(shown)) or 'none: it has no tools'}",
                )


def pad_demonstrations(batch: Sequence[Demonstration]) -> tuple[PaddedRows, Tensor]:
    """Pad demonstrations to rows: the first token is the prompt, all others the response."""
    length = max((len(one.ids) for one in batch), default=2)
    ids = torch.zeros(len(batch), length, dtype=torch.int64)
    weights = torch.zeros(len(batch), length)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        weights[row, : len(one.ids)] = torch.tensor(one.weights)
    present = torch.tensor([len(one.ids) for one in batch])
    attention_mask = (torch.arange(length) < present[:, None]).long()
    rows = PaddedRows(
        input_ids=ids,
        attention_mask=attention_mask,
        response_mask=weights[:, 1:].ne(0),
        media=tuple(one.spans for one in batch),
    )
    return rows, weights[:, 1:]


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(takewhile(bool, (x == y for x, y in zip(one, other, strict=False))))
