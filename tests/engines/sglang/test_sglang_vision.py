"""The real SGLang with pictures: the tokens, the log-probabilities and the weights are ours."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from agentrl.engines.protocol import Completion, SamplingParams
from agentrl.errors import EngineError
from agentrl.media.positions import place_runs
from agentrl.media.records import MediaSpan
from tests.fakes.vision_models import (
    encode_with_media,
    load_picture,
    make_processor,
    make_tokenizer,
    make_vision_model,
    plain_vision_logits,
    random_picture,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
FAMILY = "qwen3_vl"


@dataclass
class Served:
    """A running engine, and the model that it serves."""

    runner: asyncio.Runner
    engine: Any
    model: Any

    def ask(self, ids: list[int], media: list[MediaSpan], **sampling: Any) -> Completion:
        given = SamplingParams(**{"max_new_tokens": 6} | sampling)
        call = self.engine.generate(ids, given, request_id="r", media=media)
        return self.runner.run(call)

    def distance(self, ids: list[int], media: list[MediaSpan], found: Completion) -> float:
        """The largest difference to the log-probabilities of the model's own forward pass."""
        logits = plain_vision_logits(self.model, ids + found.token_ids, media)
        expected = logits.log_softmax(-1)[len(ids) - 1 : -1]
        own = expected.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        return float((own - torch.tensor(found.log_probs)).abs().max())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from transformers import Qwen3VLVideoProcessor

    from agentrl.engines.sglang.arguments import SGLangNeeds
    from agentrl.engines.sglang.inprocess.engine import SGLangEngine
    from tests.fakes.vision_runs import save_vision_model

    folder = save_vision_model(FAMILY, tmp_path_factory.mktemp("policy"))
    Qwen3VLVideoProcessor(patch_size=4, merge_size=2, temporal_patch_size=2).save_pretrained(folder)
    needs = SGLangNeeds(
        model_path=str(folder), max_model_len=512, max_requests=8, given={"dtype": "float32"}
    )
    engine = SGLangEngine.start(needs, make_tokenizer())
    with asyncio.Runner() as runner:
        yield Served(runner, engine, make_vision_model(FAMILY))
        runner.run(engine.close())


def without_placeholders(found: Completion) -> Completion:
    """The completion before a placeholder, which the model's own forward pass cannot score."""
    placeholders = set(make_processor(FAMILY).placeholder_ids.values())
    count = next(
        (n for n, one in enumerate(found.token_ids) if one in placeholders), len(found.token_ids)
    )
    return Completion(
        token_ids=found.token_ids[:count],
        log_probs=found.log_probs[:count],
        finish_reason=found.finish_reason,
        weight_versions=(),
    )


def test_three_turns_with_new_pictures_agree_with_the_model(served: Served) -> None:
    processor = make_processor(FAMILY)
    ids, media = list[int](), list[MediaSpan]()
    for turn, parts in enumerate((["Look: ", 0, "?"], ["and ", 1, " ", 2], ["so?"])):
        sizes = (40, 24), (16, 16), (24, 40)
        given = [
            one if isinstance(one, str) else load_picture(random_picture(one, sizes[one]))
            for one in parts
        ]
        new, runs = encode_with_media(processor, given)
        media += place_runs(media, runs, shift=len(ids))
        ids += new
        found = without_placeholders(served.ask(ids, media))
        assert found.token_ids, turn
        assert served.distance(ids, media, found) < 1e-5
        ids += found.token_ids


def test_prefixes_are_shared_between_equal_pictures_only(served: Served) -> None:
    processor = make_processor(FAMILY)

    def ask(seed: int) -> tuple[int, float]:
        picture = load_picture(random_picture(seed, (24, 24)))
        ids, runs = encode_with_media(processor, ["The same ", picture, "words"])
        media = place_runs([], runs)
        found = served.ask(ids, media, max_new_tokens=3)
        return found.cached_tokens, served.distance(ids, media, without_placeholders(found))

    first, again, other = ask(50), ask(50), ask(51)
    assert again[0] > first[0]
    assert other[0] < again[0]
    assert max(first[1], again[1], other[1]) < 1e-5


def test_other_numbers_of_tokens_than_the_ledgers_are_an_error(served: Served) -> None:
    larger = make_processor(FAMILY, max_pixels=256)
    ids, runs = encode_with_media(larger, ["a", load_picture(random_picture(0, (40, 24)))])
    with pytest.raises(EngineError, match=r"SGLang read .* tokens, the request has"):
        served.ask(ids, place_runs([], runs))


@pytest.mark.parametrize("language_alone", [False, True])
def test_new_weights_have_the_names_of_the_model(served: Served, language_alone: bool) -> None:
    other = make_vision_model(FAMILY, seed=5 + language_alone)
    weights = dict(other.named_parameters())
    if language_alone:
        tower = {name: value for name, value in served.model.named_parameters() if "visual" in name}
        other.load_state_dict(tower, strict=False)
        weights = {name: value for name, value in weights.items() if "visual" not in name}
    served.runner.run(served.engine.update_weights(weights.items(), version=1 + language_alone))
    served.model = other
    ids, runs = encode_with_media(
        make_processor(FAMILY), ["New ", load_picture(random_picture(3, (16, 40))), "!"]
    )
    media = place_runs([], runs)
    found = without_placeholders(served.ask(ids, media))
    assert served.distance(ids, media, found) < 1e-5
