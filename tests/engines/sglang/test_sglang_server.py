"""The suite of every engine, on two real servers that `agentrl serve` starts on loopback."""

from collections.abc import AsyncIterator, Sequence

import pytest

from tests.engines.conformance import ModelCase, ModelConformance
from tests.fakes.engines import tiny_model
from tests.fakes.serve_command import Serving, connect
from tests.fakes.sglang_policy import letter_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


class TestSGLangServerEngine(ModelConformance):
    @pytest.fixture
    async def engine_case(self, serving: Serving) -> AsyncIterator[ModelCase]:
        tokenizer, model = letter_tokenizer(), tiny_model().eval()

        def decode(token_ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

        engine = connect(serving.start(), decode)
        await engine.update_weights(model.named_parameters(), version=0)
        yield ModelCase(engine, decode, model)
        await engine.close()
