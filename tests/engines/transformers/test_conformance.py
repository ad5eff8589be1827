"""The embedded engine passes the conformance suite, with our attention and with the library's."""

from collections.abc import AsyncIterator

import pytest
from transformers import PreTrainedModel

from agentrl.engines import TransformersEngine, TransformersEngineSettings
from tests.engines.conformance import (
    ModelCase,
    ModelConformance,
    SeededModelConformance,
)
from tests.fakes.engines import VOCAB_SIZE, LetterTokenizer, tiny_model
from tests.fakes.vision_models import make_vision_model

SETTINGS = {
    "paged": TransformersEngineSettings(page_size=16),
    "sdpa": TransformersEngineSettings(
        page_size=16, attention="sdpa", num_pages=512, max_batch_tokens=256
    ),
    "small": TransformersEngineSettings(
        page_size=4, max_batch_tokens=24, max_batch_size=5, num_pages=400, max_model_len=1596
    ),
    "vision": TransformersEngineSettings(page_size=16),
}


@pytest.fixture(params=SETTINGS)
async def engine_case(request: pytest.FixtureRequest) -> AsyncIterator[ModelCase]:
    model = _vision_model() if request.param == "vision" else tiny_model().eval()
    engine = TransformersEngine.from_model(
        model,
        tokenizer=LetterTokenizer(),  # pyright: ignore[reportArgumentType]
        settings=SETTINGS[request.param],
    )
    yield ModelCase(engine=engine, decode=LetterTokenizer().decode, model=model)
    await engine.close()


def _vision_model() -> PreTrainedModel:
    """A vision-language model; the suite gives it texts."""
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": 5, "pad_token_id": None}
    return make_vision_model("qwen3_vl", **sizes)


class TestTransformersEngine(ModelConformance, SeededModelConformance):
    pass
