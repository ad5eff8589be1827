"""Conversations as tokens with loss weights, for the supervised warm-up."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.config.schema.prepare import SftConfig
from agentrl.data.rows import Conversation, load_conversations
from agentrl.errors import DataError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.templates import ChatTemplate, encode_conversation
from agentrl.workers.packing import PaddedRows


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation as tokens, with the weight of each in the loss."""

    ids: list[int]
    weights: list[float]
    """1 on assistant tokens, `observed_loss_weight` on others, 0 on the system prompt."""


class _Opening(NamedTuple):
    """How every conversation with these tools begins."""

    tools: Sequence[OpenAIFunctionToolSchema]
    """Kept, so that their identity stays theirs."""
    ids: list[int]


class DemonstrationEncoder:
    """Encodes conversations as a rollout would have made them, with the weights of their tokens.

    Args:
        template: The policy's.
        observed_loss_weight: Of user and tool tokens.
    """

    def __init__(self, template: ChatTemplate, observed_loss_weight: float) -> None:
        self._template = template
        self._observed_loss_weight = observed_loss_weight
        self._openings: dict[tuple[str, int], _Opening] = {}

    def encode(
        self, messages: Sequence[Message], tools: Sequence[OpenAIFunctionToolSchema]
    ) -> Demonstration:
        """Encode one conversation.

        Raises:
            TemplateError: where the template cannot carry it.
        """
        encoded = encode_conversation(self._template, messages, tools)
        weights = [1.0 if one else self._observed_loss_weight for one in encoded.loss_mask]
        opening = _common_prefix(encoded.ids, self._opening(messages, tools))
        weights[:opening] = [0.0] * opening
        return Demonstration(encoded.ids, weights)

    def _opening(
        self, messages: Sequence[Message], tools: Sequence[OpenAIFunctionToolSchema]
    ) -> list[int]:
        """What stays when the first user message is another: the system prompt and its tools."""
        system = [message for message in messages[:1] if message.role in ("system", "developer")]
        key = ("".join(message.text for message in system), id(tools))
        if key not in self._openings:
            asked = ([*system, Message(role="user", content=text)] for text in ("?", "#"))
            first, second = (self._template.encode_prompt(prompt, tools) for prompt in asked)
            self._openings[key] = _Opening(tools, first[: _common_prefix(first, second)])
        return self._openings[key].ids


class Demonstrations:
    """A file's conversations in a seeded order, encoded as they are needed, each once.

    Args:
        config: File, order, length, weights.
        template: The policy's.
        tools: What rows without `tools` are shown.

    Raises:
        DataError: for a file that cannot be read, and for a call of a tool that its conversation
            is not shown.
    """

    def __init__(
        self,
        config: SftConfig,
        template: ChatTemplate,
        tools: Sequence[OpenAIFunctionToolSchema] = (),
    ) -> None:
        self._config = config
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
        """Conversations met so far that are longer than `max_length`."""
        return len(self._too_long)

    def held_out(self) -> list[Demonstration]:
        """Encode the conversations that no batch has, without those that are too long."""
        encoded = [self._encode(self._rows[row]) for row in self._held_out]
        return [one for one in encoded if len(one.ids) <= self._config.max_length]

    def batches(self) -> Iterator[list[Demonstration]]:
        """Give `config.steps` batches of `config.batch_size`.

        Raises:
            DataError: where no conversation is short enough.
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
            self._encoded[row] = found
            yield found
        raise DataError(
            f"no conversation has at most {self._config.max_length} tokens",
            file=self._config.train_file,
            expected="a larger max_length",
        )

    def _order(self) -> Iterator[int]:
        """Rows epoch after epoch, without those known to be too long; ends if all are."""
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
        return self._encoder.encode(row.messages, self._tools if row.tools is None else row.tools)


def check_calls(
    rows: Iterable[Conversation], tools: Sequence[OpenAIFunctionToolSchema], *, file: Path
) -> None:
    """Check that conversations call only tools that they are shown.

    Args:
        rows: The conversations.
        tools: What rows without `tools` are shown.
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
                    f"the conversation calls the tool {name!r}, and it is not shown that tool",
                    file=file,
                    row=number,
                    expected=f"one of {', '.join(sorted(shown)) or 'none: it is shown no tools'}",
                )


def pad_demonstrations(batch: Sequence[Demonstration]) -> tuple[PaddedRows, Tensor]:
    """Lay demonstrations out as rows: the first token is the prompt, all others the response."""
    length = max((len(one.ids) for one in batch), default=2)
    ids = torch.zeros(len(batch), length, dtype=torch.int64)
    weights = torch.zeros(len(batch), length)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        weights[row, : len(one.ids)] = torch.tensor(one.weights)
    present = torch.tensor([len(one.ids) for one in batch])
    attention_mask = (torch.arange(length) < present[:, None]).long()
    return PaddedRows(ids, attention_mask, weights[:, 1:].ne(0)), weights[:, 1:]


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(takewhile(bool, (x == y for x, y in zip(one, other, strict=False))))
