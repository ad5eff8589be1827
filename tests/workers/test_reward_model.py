"""The reward model: the same scores in any batch, one failure fails one request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2ForCausalLM

from agentrl.clients.classify import ClassifyClient
from agentrl.config.schema.reward import RewardModelConfig
from agentrl.errors import ConfigError, Fault
from agentrl.rollout.states import RequestState
from agentrl.workers.distributed import World
from agentrl.workers.reward_model import (
    LocalClassifier,
    RewardModel,
    Run,
    ServedClassifier,
    make_classifier,
    make_encoder,
    split_by_length,
)
from tests.fakes.reward_models import (
    VOCAB_SIZE,
    ask,
    build_encoder_model,
    build_reward_model,
    byte_tokenizer,
    make_reward_model,
    run_now,
)
from tests.fakes.vision_models import make_vision_config

ROWS = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), min_size=1, max_size=8
)


def load(folder: Path, world: World, **keys: Any) -> RewardModel:
    config = RewardModelConfig(path=str(folder), **keys)
    return RewardModel(make_encoder(config), make_classifier(config, world), world)


def test_a_score_is_the_models_own_for_its_own_rendering(tmp_path: Path, world: World):
    folder = make_reward_model(tmp_path)
    requests = [ask("2 + 3?", "5"), ask("A longer question than the first one?", "No. Yes.")]
    load(folder, world).score(requests, run_now)

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for request in requests:
        messages = [message.to_template() for message in request.messages]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            expected = float(model(input_ids=ids).logits[0, 0])
        assert request.rm_score == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert request.metrics["rm_num_tokens"] == ids.shape[1]
    assert requests[0].rm_score != pytest.approx(requests[1].rm_score, abs=1e-3)


MODELS = {
    "no padding token": build_reward_model(),
    "padding token": build_reward_model(pad_token_id=byte_tokenizer().pad_token_id),
    "bidirectional": build_encoder_model(),
}


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=25)
@given(rows=ROWS, budget=st.integers(1, 200), data=st.data())
def test_the_composition_of_a_batch_is_invisible(
    kind: str, rows: list[list[int]], budget: int, data: st.DataObject, world: World
):
    model = MODELS[kind]
    alone = [LocalClassifier(model, world, budget=1).score([row], run_now)[0] for row in rows]
    order = data.draw(st.permutations(range(len(rows))))
    together = LocalClassifier(model, world, budget=budget).score([rows[i] for i in order], run_now)
    assert together == pytest.approx([alone[i] for i in order], rel=1e-5, abs=1e-5)


@given(lengths=st.lists(st.integers(1, 50)), budget=st.integers(1, 120))
def test_a_batch_with_padding_fits_into_the_budget(lengths: list[int], budget: int):
    batches = split_by_length(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= budget


class Recorded:
    """A classifier that scores by length, and keeps what it was given."""

    def __init__(self, scores: Sequence[float | Exception] | None = None) -> None:
        self.rows: list[list[int]] = []
        self._scores = scores

    def check(self, row: list[int], run: Run) -> None:
        pass

    def score(self, rows: Sequence[list[int]], run: Run) -> list[float | Exception]:
        self.rows += rows
        return [float(len(row)) for row in rows] if self._scores is None else list(self._scores)


def with_classifier(tmp_path: Path, world: World, classifier: Recorded, **keys: Any) -> RewardModel:
    config = RewardModelConfig(path=str(make_reward_model(tmp_path)), **keys)
    return RewardModel(make_encoder(config), classifier, world)


def test_equal_conversations_are_scored_once(tmp_path: Path, world: World):
    classifier = Recorded()
    requests = [ask("a?", "b"), ask("c?", "d"), ask("a?", "b")]
    with_classifier(tmp_path, world, classifier).score(requests, run_now)
    assert len(classifier.rows) == 2
    assert requests[0].rm_score == requests[2].rm_score


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), ConnectionError("gone")], ids=["nan", "inf", "lost"]
)
def test_a_bad_score_fails_its_request_alone(tmp_path: Path, world: World, bad: float | Exception):
    requests = [ask("a?", "b"), ask("c?", "d")]
    if isinstance(bad, Exception):
        bad = ConfigError("gone")
    with_classifier(tmp_path, world, Recorded([bad, 0.5])).score(requests, run_now)
    failed, scored = requests
    assert failed.state is RequestState.FAILED
    assert failed.rm_score is None
    assert failed.error is not None
    assert failed.error.fault is Fault.REWARD
    assert failed.error.kind == "RewardError"
    assert "reward model" in failed.error.message
    assert scored.state is RequestState.COMPLETED
    assert scored.rm_score == 0.5


def test_a_failed_request_is_not_scored(tmp_path: Path, world: World):
    broken, classifier = ask("a?", "b"), Recorded()
    model = with_classifier(tmp_path, world, classifier)
    with_classifier(tmp_path, world, Recorded([float("nan")])).score([broken], run_now)
    model.score([broken], run_now)
    assert classifier.rows == []
    assert broken.rm_score is None


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-12, None)), ("right", slice(None, 12))])
def test_a_long_conversation_is_cut_at_the_declared_side(
    tmp_path: Path, world: World, side: str, kept: slice
):
    whole, cut, request = Recorded(), Recorded(), ask("a?", "b")
    with_classifier(tmp_path, world, whole).score([ask("a?", "b")], run_now)
    with_classifier(tmp_path, world, cut, max_length=12, truncation=side).score([request], run_now)
    assert cut.rows[0] == whole.rows[0][kept]
    assert request.metrics["rm_num_cut_tokens"] == len(whole.rows[0]) - 12


def test_a_long_conversation_fails_if_the_run_says_so(tmp_path: Path, world: World):
    request = ask("a?", "b")
    model = with_classifier(tmp_path, world, Recorded(), max_length=12, truncation="error")
    model.score([request], run_now)
    assert request.error is not None
    assert "at most 12" in request.error.message


def test_a_model_with_two_labels_is_refused(tmp_path: Path, world: World):
    folder = make_reward_model(tmp_path, build_reward_model(num_labels=2))
    with pytest.raises(ConfigError, match="2 labels") as caught:
        load(folder, world)
    assert caught.value.details["key"] == "reward.model.path"


def test_a_model_that_reads_pictures_is_refused(tmp_path: Path):
    make_vision_config("qwen3_vl").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="reward models read text only") as caught:
        make_encoder(RewardModelConfig(path=str(tmp_path)))
    assert caught.value.details["key"] == "reward.model.path"


def test_a_model_without_a_head_is_refused(tmp_path: Path, world: World):
    config = build_reward_model().config
    folder = make_reward_model(tmp_path, Qwen2ForCausalLM(config))
    with pytest.raises(ConfigError, match=r"lacks weights.*score\.weight") as caught:
        load(folder, world)
    assert caught.value.details["key"] == "reward.model.path"


def test_errors_name_the_keys_of_the_reward_model(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        make_encoder(RewardModelConfig(path=str(tmp_path / "nothing")))
    assert caught.value.details["key"] == "reward.model.path"


def test_a_model_that_gives_no_number_is_found_before_the_first_step(tmp_path: Path, world: World):
    model = build_reward_model()
    torch.nn.init.constant_(model.score.weight, float("nan"))
    with pytest.raises(ConfigError, match="gives no score"):
        load(make_reward_model(tmp_path, model), world).check(run_now)


def test_a_length_that_no_conversation_fits_into_is_found_before_the_first_step(
    tmp_path: Path, world: World
):
    model = with_classifier(tmp_path, world, Recorded(), max_length=3, truncation="error")
    with pytest.raises(ConfigError, match="gives no score: the conversation has"):
        model.check(run_now)


class Answering(ClassifyClient):
    """Servers that answer with given scores."""

    def __init__(self, *scores: float) -> None:
        super().__init__([], timeout_s=1, max_concurrency=1)
        self.scores = scores

    async def check(self, row: list[int]) -> dict[str, float]:
        return {f"http://{number}": score for number, score in enumerate(self.scores)}


def test_servers_that_disagree_are_refused():
    """Each process of SGLang draws a bias that the files of a Qwen2 or Qwen3 model lack."""
    ServedClassifier(Answering(1.0, 1.01)).check([1], run_now)
    with pytest.raises(ConfigError, match="different scores") as caught:
        ServedClassifier(Answering(1.0, 1.2)).check([1], run_now)
    assert caught.value.details["key"] == "reward.model.addresses"
