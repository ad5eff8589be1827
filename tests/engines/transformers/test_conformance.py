"""The embedded engine passes the conformance suite, with our attention and with the library's."""

from collections.abc import AsyncIterator

import pytest

from agentrl.engines import TransformersEngine, TransformersEngineSettings
from tests.engines.conformance import (
    ModelCase,
    ModelConformance,
    SeededModelConformance,
)
from tests.fakes.engines import LetterTokenizer, tiny_model

SETTINGS = {
    "paged": TransformersEngineSettings(page_size=16),
    "sdpa": TransformersEngineSettings(
        page_size=16, attention="sdpa", num_pages=512, max_batch_tokens=256
    ),
    "small": TransformersEngineSettings(
        page_size=4, max_batch_tokens=24, max_batch_size=5, num_pages=400, max_model_len=1596
    ),
}


@pytest.fixture(params=SETTINGS)
async def engine_case(request: pytest.FixtureRequest) -> AsyncIterator[ModelCase]:
    model = tiny_model().eval()
    engine = TransformersEngine.from_model(
        model,
        tokenizer=LetterTokenizer(),  # pyright: ignore[reportArgumentType]
        settings=SETTINGS[request.param],
    )
    yield ModelCase(engine=engine, decode=LetterTokenizer().decode, model=model)
    await engine.close()


class TestTransformersEngine(ModelConformance, SeededModelConformance):
    pass
