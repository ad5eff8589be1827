"""The suite of every engine, on two real servers that `agentrl serve` starts on loopback."""

from collections.abc import AsyncIterator, Sequence

import pytest

from agentrl.errors import EngineError
from agentrl.media.positions import place_runs
from tests.engines.conformance import PROMPT, ModelCase, ModelConformance, greedy
from tests.fakes.engines import tiny_model
from tests.fakes.serve_command import Serving, connect
from tests.fakes.sglang_policy import letter_tokenizer
from tests.fakes.vision_models import (
    encode_with_media,
    load_picture,
    make_processor,
    random_picture,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


class TestSGLangServerEngine(ModelConformance):
    async def test_picture_for_a_model_without_a_tower_is_refused(self, engine_case: ModelCase):
        processor = make_processor("qwen2_vl")
        _, runs = encode_with_media(processor, [load_picture(random_picture(0))])
        media = place_runs([], runs)
        with pytest.raises(EngineError, match="has a model without a vision tower"):
            await engine_case.engine.generate(PROMPT, greedy(), request_id="a", media=media)

    @pytest.fixture
    async def engine_case(self, serving: Serving) -> AsyncIterator[ModelCase]:
        tokenizer, model = letter_tokenizer(), tiny_model().eval()

        def decode(token_ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

        engine = connect(serving.start(), decode)
        await engine.update_weights(model.named_parameters(), version=0)
        yield ModelCase(engine, decode, model)
        await engine.close()
