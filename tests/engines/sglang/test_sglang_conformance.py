"""The suite of every engine, on the real SGLang."""

from collections.abc import AsyncIterator

import pytest

from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from tests.engines.conformance import ModelCase, ModelConformance
from tests.fakes.engines import tiny_model
from tests.fakes.sglang_policy import SharedHost

pytestmark = pytest.mark.sglang


class TestSGLangEngine(ModelConformance):
    @pytest.fixture
    async def engine_case(self, running: SGLangEngine) -> AsyncIterator[ModelCase]:
        model = tiny_model().eval()
        await running.update_weights(model.named_parameters(), version=0)
        engine = SGLangEngine(
            SharedHost(running._host),
            running._decode,
            max_model_len=running.max_model_len,
            bucket_bytes=20_000,
        )
        yield ModelCase(engine, running._decode, model)
        await engine.close()
