"""Which engine a run file means on which machine."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2Config

from agentrl.config import RunConfig, parse_config
from agentrl.config.checks import check_config
from agentrl.engines.sglang import arguments
from agentrl.errors import ConfigError
from agentrl.trainer.setup import engine_factory as engine_choice
from agentrl.trainer.setup.engine_factory import (
    EngineLimits,
    announce_start,
    check_engine,
    check_model_config,
    check_sampled,
    choose_engine,
)
from agentrl.workers.load import override_config
from tests.fakes.families import FAMILIES


def config_of(**sections: Any) -> RunConfig:
    data = {"train_files": ["rows.jsonl"]}
    return parse_config({"data": data, "model": {"path": "policy"}} | sections)


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "has_accelerator", lambda: True)
    monkeypatch.setattr(engine_choice, "find_spec", lambda _: importlib.util.find_spec("json"))


def test_auto_is_the_embedded_engine_without_an_accelerator():
    assert choose_engine(config_of()) == "transformers"


@pytest.mark.usefixtures("gpu_machine")
def test_auto_is_sglang_where_it_has_an_accelerator():
    assert choose_engine(config_of()) == "sglang"


@pytest.mark.usefixtures("gpu_machine")
@pytest.mark.parametrize(
    "sections", [{"rollout": {"deterministic": True}}, {"trainer": {"device": "cpu"}}]
)
def test_auto_is_the_embedded_engine_where_sglang_could_not_keep_the_run_s_word(
    sections: dict[str, Any],
):
    assert choose_engine(config_of(**sections)) == "transformers"


def test_engines_of_several_ranks_that_would_share_devices_are_refused():
    config = config_of(rollout={"engine": {"name": "sglang", "sglang": {"tp_size": 2}}})
    check_config(config)
    with pytest.raises(ConfigError, match="tp_size: is 2, and each of 4 ranks has its own"):
        check_config(config, world_size=4)


@pytest.fixture
def with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed SGLang that knows two arguments."""
    for module in (engine_choice, arguments):
        monkeypatch.setattr(module, "find_spec", lambda _: importlib.util.find_spec("json"))
    monkeypatch.setattr(arguments, "known_arguments", lambda: {"tp_size", "page_size"})


@pytest.mark.usefixtures("with_sglang")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pagesize": 2}, "did you mean 'page_size'"),
        ({"dp_size": 2}, "takes no new weights"),
        ({"model_path": "a"}, "set by other keys"),
    ],
)
def test_an_argument_that_sglang_cannot_be_given_is_refused_before_it_starts(
    given: dict[str, Any], message: str
):
    def config(name: str) -> RunConfig:
        return config_of(rollout={"engine": {"name": name, "sglang": given}})

    with pytest.raises(ConfigError, match=message) as error:
        check_engine(config("sglang"))
    assert error.value.details["key"] == f"rollout.engine.sglang.{next(iter(given))}"
    check_engine(config("transformers"))


def test_only_an_engine_that_takes_long_is_announced():
    assert announce_start(config_of()) == ()
    assert "a minute" in announce_start(config_of(rollout={"engine": {"name": "sglang"}}))[0]


def policy_of(*, dp_size: int, has_lora: bool = False) -> Any:
    """A policy of 20 weights; with LoRA 5 of them are trained."""
    lm = torch.nn.Linear(3, 5)
    lm.weight.requires_grad_(not has_lora)
    trained = [(name, weight) for name, weight in lm.named_parameters() if weight.requires_grad]
    return SimpleNamespace(
        world=SimpleNamespace(dp_size=dp_size), lm=lm, trained_weights=lambda: trained,
        adapters=object() if has_lora else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, 16),
        ({"rollout": {"n": 4, "max_concurrent_requests": 5}}, 5),
        ({"data": {"train_batch_size": 8, "val_files": {"a": "a.jsonl"}}}, 256),
        (
            {
                "data": {
                    "train_batch_size": 8,
                    "val_files": {"a": "a.jsonl"},
                    "val_batch_size": 50,
                }
            },
            25,
        ),
    ],
)
def test_the_engine_is_sized_by_the_requests_of_a_batch_of_this_rank(
    sections: dict[str, Any], expected: int
):
    data = {"train_files": ["rows.jsonl"], "train_batch_size": 8} | sections.get("data", {})
    rollout = {"n": 4} | sections.get("rollout", {})
    limits = EngineLimits.of(config_of(data=data, rollout=rollout), policy_of(dp_size=2))
    assert limits.max_requests == expected


@pytest.mark.parametrize(
    ("actor", "floats"),
    [
        ({}, 2),
        ({"use_kl_loss": True}, 3),
        ({"use_kl_loss": True, "fsdp_config": {"offload_policy": True}}, 0),
    ],
)
def test_the_engine_leaves_memory_for_the_moments_and_the_reference(
    actor: dict[str, Any], floats: int
):
    limits = EngineLimits.of(config_of(actor=actor), policy_of(dp_size=1))
    assert limits.reserved_bytes == (3 * 5 + 5) * 4 * floats


@pytest.mark.parametrize(("ref", "floats"), [({}, 2 * 5), ({"path": "other"}, 2 * 5 + 20)])
def test_with_lora_only_adapters_have_moments_and_the_reference_is_the_base(
    ref: dict[str, Any], floats: int
):
    config = config_of(actor={"use_kl_loss": True}, model={"path": "m", "lora_rank": 1}, ref=ref)
    limits = EngineLimits.of(config, policy_of(dp_size=1, has_lora=True))
    assert limits.reserved_bytes == 4 * floats


@pytest.mark.parametrize("name", ["deepseek_v3", "youtu", "minicpm3", "gemma4_released", "lfm2"])
def test_model_that_the_embedded_engine_cannot_run_needs_another(name: str):
    found = FAMILIES[name].config()
    with pytest.raises(ConfigError, match="the embedded engine cannot sample from a") as caught:
        check_sampled(config_of(), found)
    assert caught.value.key == "model.path"
    check_sampled(config_of(rollout={"engine": {"name": "sglang"}}), found)


LONG = {"data": {"train_files": ["rows.jsonl"], "max_prompt_length": 40, "max_response_length": 25}}


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.path", {}),
        ("ref.path", {"ref": {"path": "other"}, "actor": {"use_kl_loss": True}}),
        ("critic.model.path", {"critic": {"model": {"path": "other"}},
                               "algorithm": {"adv_estimator": "gae"}}),
    ],
)  # fmt: skip
def test_length_border_of_every_model_of_the_run_is_checked(
    monkeypatch: pytest.MonkeyPatch, key: str, sections: dict[str, Any]
):
    plain, border = FAMILIES["qwen2"].config(), FAMILIES["phi3_longrope"].config()
    monkeypatch.setattr(engine_choice, "load_hf_config", lambda _: border)
    own = border if key == "model.path" else plain
    config = config_of(**LONG, **sections)
    with pytest.raises(ConfigError, match="more than 64 tokens, and the run allows 65") as caught:
        check_model_config(config, own)
    assert caught.value.key == key


def test_length_border_of_a_model_that_the_run_does_not_load_is_not_checked(
    monkeypatch: pytest.MonkeyPatch,
):
    border = FAMILIES["phi3_longrope"].config()
    monkeypatch.setattr(engine_choice, "load_hf_config", lambda _: border)
    unused = {"ref": {"path": "other"}, "critic": {"model": {"path": "other"}}}
    check_model_config(config_of(**LONG, **unused), FAMILIES["qwen2"].config())


def test_budget_is_not_checked_against_a_model_without_a_longest_sequence():
    check_model_config(config_of(**LONG), FAMILIES["bloom"].config())


@pytest.mark.parametrize(
    ("overrides", "placed"),
    [
        ({}, {}),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
        ({"rms_norm_eps": 0.5}, {"text_config": {"rms_norm_eps": 0.5}}),
        (
            {"rms_norm_eps": 0.5, "text_config": {"hidden_act": "gelu"}, "image_token_id": 3},
            {"image_token_id": 3, "text_config": {"rms_norm_eps": 0.5, "hidden_act": "gelu"}},
        ),
    ],
)
def test_sglang_gets_each_override_where_the_trainer_has_it(
    overrides: dict[str, Any], placed: dict[str, Any]
):
    config = Qwen2_5_VLConfig()
    override_config(config, overrides)
    assert engine_choice.place_overrides(config, overrides) == placed
    flat = {key: value for key, value in overrides.items() if key.startswith(("rms", "tie"))}
    assert engine_choice.place_overrides(Qwen2Config(), flat) == flat
