"""A small model's folder for SGLang, and a SGLang that is lent to one test at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from agentrl.engines.sglang.inprocess.host import SGLangHost
from agentrl.errors import EngineError
from tests.fakes.engines import VOCAB_SIZE

UNKNOWN = "\u00a1"


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Token id n is one printable character, as in `LetterTokenizer`."""
    letters = {chr(32 + i): i for i in range(VOCAB_SIZE - 1)} | {UNKNOWN: VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_policy(model: Qwen2ForCausalLM, folder: Path) -> Path:
    """Write what SGLang is started with."""
    model.save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


class SharedHost:
    """A running SGLang that a test may close: it is closed to that test alone."""

    def __init__(self, host: SGLangHost) -> None:
        self.name = host.name
        self._host = host
        self._is_closed = False

    async def generate(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        self._raise_if_closed()
        return await self._host.generate(fields)

    async def control(self, request: str, fields: Mapping[str, Any] | None = None) -> None:
        self._raise_if_closed()
        await self._host.control(request, fields)

    def close(self) -> None:
        self._is_closed = True

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError("the engine was closed")
