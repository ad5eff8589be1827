"""The real SGLang with images and videos: its log-probabilities are those of the model itself."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.protocol import Completion, Engine, SamplingParams
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.servers.launch import LocalServers, ServeOptions, plan_servers
from agentrl.engines.sglang.weights.buckets import ModelWeights
from agentrl.engines.sglang.weights.tensor import TensorTransport
from agentrl.engines.stopping import decoder_of
from agentrl.errors import ConfigError, EngineError
from agentrl.media.positions import place_runs
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import LoadedMedia, MediaKind, MediaSpan, Video
from tests.engines.conformance import TOLERANCE
from tests.fakes.vision_models import (
    FAMILIES,
    encode_with_media,
    load_picture,
    make_tokenizer,
    make_vision_config,
    plain_vision_logits,
    random_picture,
)

if TYPE_CHECKING or find_spec("torchvision"):
    from tests.fakes.sglang_vision import SIDE, make_model, make_processor, save_vision_policy
else:
    pytest.skip("torchvision is not installed", allow_module_level=True)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

MAX_MODEL_LEN = 512
SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=1)
"""The most likely tokens, so that no placeholder is sampled, at the temperature of training."""
BEFORE = len("A picture: ") + 1
"""Tokens before the first placeholder."""


@dataclass
class Case:
    """An engine of a family, and what it is compared with."""

    family: str
    engine: Engine
    processor: MediaProcessor
    model: PreTrainedModel
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    async def update(self, model: PreTrainedModel, *, with_tower: bool = True) -> int:
        """Send a model's weights; return their version."""
        version, self.model = next(self.versions), model
        named = [
            (name, weight)
            for name, weight in model.named_parameters()
            if with_tower or "visual" not in name
        ]
        await self.engine.update_weights(named, version=version)
        return version

    async def check(self, text: "Text", sampling: SamplingParams = SAMPLING) -> Completion:
        """Continue a text, and compare its log-probabilities with the model's."""
        completion = await self.engine.generate(
            text.ids, sampling, request_id="check", media=text.spans
        )
        self.compare(text, completion)
        return completion

    def compare(self, text: "Text", completion: Completion) -> None:
        """Compare the log-probabilities of a completion with the model's."""
        expected = log_probs_of(self.model, text, completion.token_ids)
        found = torch.tensor(completion.log_probs)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


class Text:
    """A sequence with media."""

    def __init__(self, processor: MediaProcessor) -> None:
        self.ids = list[int]()
        self.spans = list[MediaSpan]()
        self._processor = processor

    def add(self, *parts: "str | LoadedMedia | Image.Image") -> "Text":
        """Append texts and media; return the text itself."""
        loaded = [load_picture(part) if isinstance(part, Image.Image) else part for part in parts]
        new, runs = encode_with_media(self._processor, loaded)
        self.spans += place_runs(self.spans, runs, shift=len(self.ids))
        self.ids += new
        return self


def log_probs_of(model: PreTrainedModel, text: Text, sampled: Sequence[int]) -> torch.Tensor:
    """The model's own log-probabilities of sampled tokens."""
    logits = plain_vision_logits(model, [*text.ids, *sampled], text.spans)
    start = len(text.ids) - 1
    scores = logits[start : start + len(sampled)].log_softmax(-1)
    return scores.gather(1, torch.tensor(sampled)[:, None])[:, 0]


def one_picture(processor: MediaProcessor, picture: Image.Image) -> Text:
    return Text(processor).add("A picture: ", picture, ". What is it?")


def needs_of(folder: object) -> SGLangNeeds:
    return SGLangNeeds(
        model_path=str(folder), max_model_len=MAX_MODEL_LEN, max_requests=8, dtype="float32"
    )


@pytest.fixture
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    """A server. Its test is the first one, so that no other SGLang needs memory too."""
    family = "qwen2_5_vl"
    folder = tmp_path_factory.mktemp("served")
    needs = needs_of(save_vision_policy(family, folder / "policy"))
    async with LocalServers(plan_servers(needs, ServeOptions()), say=print) as servers:
        engine = SGLangServerEngine(
            SGLangServerConfig(addresses=[one.plan.address for one in servers.servers]),
            decoder_of(make_tokenizer()),
            max_model_len=MAX_MODEL_LEN,
            transport=TensorTransport.to_servers(torch.device("cpu"), 200_000),
            weights=ModelWeights.of(needs),
        )
        yield Case(family, engine, make_processor(family), make_model(family))
        await engine.close()


async def test_server_gets_pictures_over_http(served: Case):
    _, second, third = await continue_over_turns(served)
    assert third > second > BEFORE
    await served.update(make_model(served.family, seed=1))
    await continue_over_turns(served)


@pytest.fixture(scope="module", params=FAMILIES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """The engine inside this process."""
    folder = save_vision_policy(request.param, tmp_path_factory.mktemp("seeing") / "policy")
    engine = SGLangEngine.start(needs_of(folder), make_tokenizer(), bucket_bytes=200_000)
    model = make_model(request.param)
    yield Case(request.param, engine, make_processor(request.param), model)
    engine._host.close()


def test_tower_with_patches_that_sglang_does_not_run_is_refused(tmp_path: Path):
    make_vision_config("qwen2_5_vl").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="with patches of 4 pixels"):
        ModelWeights.of(needs_of(tmp_path))


async def continue_over_turns(case: Case) -> list[int]:
    """Compare three turns, the first two with a new picture; return the cached tokens of each."""
    text, cached = Text(case.processor), list[int]()
    for turn in range(3):
        text.add(f"Turn {turn}: ")
        if turn < 2:
            text.add(random_picture(turn, ((2 + turn) * SIDE, 3 * SIDE)))
        completion = await case.check(text.add(" So?"))
        cached.append(completion.cached_tokens)
        text.ids += [min(token_id, 255) for token_id in completion.token_ids]
    return cached


async def test_turns_with_new_pictures_have_the_models_log_probs(case: Case):
    first, second, third = await continue_over_turns(case)
    assert first == 0
    assert second > BEFORE + 6, "the first turn and its picture are cached"
    assert third > second + 9


async def test_pictures_with_the_same_tokens_share_only_the_text_before_them(case: Case):
    await case.engine.flush_cache()
    wide, high = (4 * SIDE, 2 * SIDE), (2 * SIDE, 4 * SIDE)
    pictures = [
        *(random_picture(7, size) for size in (wide, high)),
        *(Image.new("RGB", size, "gray") for size in (wide, high)),  # the same pixel values
    ]
    texts = [one_picture(case.processor, picture) for picture in pictures]
    assert all(text.ids == texts[0].ids for text in texts)
    cached = [(await case.check(text)).cached_tokens for text in texts]
    assert cached == [0, BEFORE, BEFORE, BEFORE]
    again = [(await case.check(text)).cached_tokens for text in texts]
    assert again == [len(text.ids) - 1 for text in texts]


async def test_calls_at_the_same_time_get_their_own_pictures(case: Case):
    texts = [one_picture(case.processor, random_picture(n, (3 * SIDE, SIDE))) for n in range(3)]
    twice = random_picture(3, (SIDE, 2 * SIDE))
    texts += [Text(case.processor).add("Two: ", twice, " and ", twice, "."), Text(case.processor)]
    texts[-1].add("No picture.")
    completions = await asyncio.gather(
        *(
            case.engine.generate(text.ids, SAMPLING, request_id=f"{n}", media=text.spans)
            for n, text in enumerate(texts)
        )
    )
    for text, completion in zip(texts, completions, strict=True):
        case.compare(text, completion)


async def test_new_tower_sees_a_known_picture_with_its_new_weights(case: Case):
    text = one_picture(case.processor, random_picture(9))
    await case.check(text)
    version = await case.update(make_model(case.family, seed=1))
    completion = await case.check(text)
    assert [span.version for span in completion.weight_versions] == [version]


async def test_weights_of_a_frozen_tower_are_not_needed(case: Case):
    text = one_picture(case.processor, random_picture(9))
    model = make_model(case.family, seed=2)
    tower = {name: weight for name, weight in case.model.state_dict().items() if "visual" in name}
    model.load_state_dict(tower, strict=False)
    version = await case.update(model, with_tower=False)
    completion = await case.check(text)
    assert [span.version for span in completion.weight_versions] == [version]


async def test_running_call_with_a_picture_continues_with_new_weights(case: Case):
    text = one_picture(case.processor, random_picture(11))
    old, new = case.model, make_model(case.family, seed=3)
    long = replace(SAMPLING, max_new_tokens=300)
    call = asyncio.create_task(
        case.engine.generate(text.ids, long, request_id="long", media=text.spans)
    )
    await case.check(text)
    assert not call.done()
    await case.update(new)
    completion = await call
    before, after = completion.weight_versions
    expected = torch.cat(
        [
            log_probs_of(old, text, completion.token_ids)[: before.end],
            log_probs_of(new, text, completion.token_ids)[after.start :],
        ]
    )
    found = torch.tensor(completion.log_probs)
    torch.testing.assert_close(found, expected, atol=3 * TOLERANCE, rtol=3 * TOLERANCE)


async def test_videos_have_the_models_log_probs(case: Case):
    frames = np.random.default_rng(0).integers(0, 256, (4, 2 * SIDE, 3 * SIDE, 3), dtype=np.uint8)
    video = LoadedMedia(MediaKind.VIDEO, Video(frames, 2.0), "a video")
    text = Text(case.processor).add("See ", video, " and ", random_picture(1), ".")
    await case.check(text)
    await case.check(text.add(" And ", random_picture(2), "?"))


async def test_update_without_a_weight_of_the_language_model_is_refused(case: Case):
    weights = [
        (name, weight) for name, weight in case.model.named_parameters() if "norm" not in name
    ]
    with pytest.raises(EngineError, match=r"are missing: model\.language_model"):
        await case.engine.update_weights(weights, version=next(case.versions))
    await case.update(case.model)
    await case.check(one_picture(case.processor, random_picture(0)))
