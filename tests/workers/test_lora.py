"""LoRA: what is trained, what engines and other programs get, and what is refused."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines import SamplingParams, TransformersEngine
from agentrl.errors import CheckpointError, ConfigError, MissingExtraError
from agentrl.plugins.environment import install_command
from agentrl.workers import lora
from agentrl.workers.checkpoint import RunState, open_checkpoint
from agentrl.workers.distributed import World
from agentrl.workers.export import export_adapter, export_hf
from agentrl.workers.load import load_policy
from agentrl.workers.lora import inject_adapters
from agentrl.workers.model import PolicyModel
from agentrl.workers.scoring import Reference
from agentrl.workers.snapshot import identify, load_run, save_run
from agentrl.workers.weight_sync import iter_full_weights, sync_weights
from tests.fakes.engines import plain_logits, random_ids, tiny_model
from tests.fakes.families import FAMILIES
from tests.fakes.lora_ranks import RANK_CASES, adapters_of, run_policy, take_weights
from tests.fakes.plugins import tiny_tokenizer
from tests.fakes.torchrun import ranks_of
from tests.fakes.training import (
    LORA,
    fill_adapters,
    make_actor,
    make_batch,
    make_lora_policy,
    make_policy,
    plain_scores,
    random_rows,
)

IDS = random_ids(12, seed=1)
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(initializer_range=0.1).save_pretrained(path)
    return path


def load(world: World, folder: Path, *, seed: int = 0, **keys: Any) -> PolicyModel:
    keys = keys if "lora_adapter_path" in keys else {"lora_rank": 4} | keys
    return load_policy(ModelConfig(path=str(folder), **keys), world, FsdpConfig(), seed=seed)


def log_probs(policy: PolicyModel) -> list[Tensor]:
    """The policy's log-probabilities of some rows, by the actor."""
    scores = make_actor(policy).compute_log_probs(make_batch(ROWS), temperature=1.0).log_probs
    return [one[torch.tensor(row.mask).bool().nonzero()[:, 0]] for one, row in
            zip(scores, ROWS, strict=True)]  # fmt: skip


ROWS = random_rows(5)


@torch.no_grad()
def plain_log_probs(lm: nn.Module) -> list[Tensor]:
    """The same by a plain forward pass of transformers or peft."""
    return [plain_scores(lm, row, 1.0)[0][torch.tensor(row.mask).bool()] for row in ROWS]


def assert_close(
    found: Iterable[Tensor], expected: Iterable[Tensor], *, atol: float = 1e-5
) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=atol)


# What is trained.


def test_new_adapter_changes_nothing_and_is_trained_alone(world: World, folder: Path):
    policy, base = load(world, folder), AutoModelForCausalLM.from_pretrained(folder)
    trained = dict(policy.trained_weights())
    ends = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
    assert ends == LINEAR
    assert all(not w.any() for name, w in trained.items() if ".lora_B." in name)
    assert all(w.any() for name, w in trained.items() if ".lora_A." in name)
    assert_close(log_probs(policy), plain_log_probs(base))
    before = {name: w.detach().clone() for name, w in policy.named_weights()}
    actor = make_actor(policy)
    actor.update_policy(make_batch(ROWS), temperature=1.0)
    for name, weight in policy.named_weights():
        assert torch.equal(weight, before[name]) == (".lora_B." not in name)
    moments = {name.split("/")[0] for name in actor.optimizer.state_slices()}
    assert moments == {"exp_avg", "exp_avg_sq", "step"}
    kept = sum(tensor.numel() for tensor in actor.optimizer.state_tensors() if tensor.ndim)
    assert kept == 2 * sum(weight.numel() for weight in trained.values())


def test_first_values_depend_on_the_seed_alone(world: World, folder: Path):
    one, same, other = (adapters_of(load(world, folder, seed=seed)) for seed in (1, 1, 2))
    loaded = tiny_model(initializer_range=0.1)
    adapters = inject_adapters(loaded, ModelConfig(path=str(folder), lora_rank=4), seed=1)
    whole = PolicyModel(loaded, world, torch.float32, FsdpConfig(), adapters=adapters)
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        assert torch.equal(weight, adapters_of(whole)[name])
        assert torch.equal(weight, other[name]) == (".lora_B." in name)
        assert weight.abs().max() <= weight.shape[1] ** -0.5


def test_frozen_head_gets_no_gradient(world: World):
    policy = make_lora_policy(world, tiny_model(tie_word_embeddings=False))
    actor = make_actor(policy)
    gradients: list[Any] = []
    actor.optimizer.step = lambda **_: gradients.extend(  # pyright: ignore[reportAttributeAccessIssue]
        (name, weight.grad) for name, weight in policy.named_weights()
    )
    actor.update_policy(make_batch(ROWS), temperature=1.0)
    assert all((grad is not None) == (".lora_" in name) for name, grad in gradients)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}),
        ({"target_modules": r".*\.(q|o)_proj"}, {"q_proj", "o_proj"}),
        ({"exclude_modules": ["down_proj"]}, LINEAR - {"down_proj"}),
        ({"exclude_modules": ".*mlp.*"}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_modules_are_chosen_by_name(
    world: World, folder: Path, keys: dict[str, Any], expected: set[str]
):
    policy = load(world, folder, **keys)
    names = {name.split(".lora_")[0] for name, _ in policy.trained_weights()}
    assert {name.rpartition(".")[2] for name in names} == expected
    assert policy.adapters is not None
    assert set(policy.adapters.config.target_modules) == expected


def test_single_module_is_saved_by_its_whole_name(world: World, folder: Path):
    policy = load(world, folder, target_modules=["model.layers.1.mlp.up_proj"])
    assert {name.split(".lora_")[0] for name, _ in policy.trained_weights()} == {
        "model.layers.1.mlp.up_proj"
    }
    assert policy.adapters is not None
    assert policy.adapters.config.target_modules == {"model.layers.1.mlp.up_proj"}


# What is refused.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_modules": ["q_proj", "qq_proj"]}, "no module of Qwen2.* is named 'qq_proj'"),
        ({"target_modules": ".*q_prj"}, "no module of Qwen2.* is named"),
        ({"exclude_modules": ["nothing"]}, "no module of Qwen2.* is named 'nothing'"),
        ({"exclude_modules": ".*"}, "no module is left"),
        ({"target_modules": ["lm_head"]}, "lm_head is the head"),
        ({"target_modules": ["embed_tokens"]}, "is a Embedding"),
        ({"lora_adapter_path": "no/such"}, "no adapter can be loaded from 'no/such'"),
    ],
)
def test_modules_that_cannot_have_an_adapter_are_named(
    world: World, folder: Path, keys: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message) as caught:
        load(world, folder, **keys)
    assert caught.value.details["key"] == f"model.{next(iter(keys))}"
    assert caught.value.details["expected"]


def test_missing_peft_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="LoRA needs peft") as caught:
        inject_adapters(tiny_model(), LORA)
    assert caught.value.details["install"] == install_command("lora")


@pytest.fixture
def saved(world: World, folder: Path, tmp_path: Path) -> tuple[PolicyModel, Path]:
    """A policy whose adapters are not 0, and its adapter as peft's folder."""
    policy = load(world, folder, lora_alpha=8)
    fill_adapters(policy.trained_weights(), world)
    export_adapter(policy, tiny_tokenizer(), tmp_path / "adapter", about={"step": 7})
    return policy, tmp_path / "adapter"


def change_config(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, r"lora_A.weight is \(4, \d+\), not \(8, \d+\)"),
        ({"use_dora": True}, "not plain LoRA"),
        ({"target_modules": ["q_proj"]}, "not absent"),
        ({"init_lora_weights": "pissa"}, "initialized by pissa"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    world: World,
    folder: Path,
    saved: tuple[PolicyModel, Path],
    changes: dict[str, Any],
    message: str,
):
    change_config(saved[1], **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load(world, folder, lora_adapter_path=str(saved[1]))
    assert caught.value.details["key"] == "model.lora_adapter_path"


def test_adapter_of_another_method_is_refused(
    world: World, folder: Path, saved: tuple[PolicyModel, Path]
):
    (saved[1] / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ConfigError, match=r"is PeftType.IA3|is IA3"):
        load(world, folder, lora_adapter_path=str(saved[1]))
    (saved[1] / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no adapter can be loaded"):
        load(world, folder, lora_adapter_path=str(saved[1]))


def test_adapter_of_another_base_is_refused(
    world: World, saved: tuple[PolicyModel, Path], tmp_path: Path
):
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="trained on other weights"):
        load(world, tmp_path / "other", lora_adapter_path=str(saved[1]))
    tiny_model(hidden_size=64).save_pretrained(tmp_path / "larger")
    with pytest.raises(ConfigError, match="does not fit"):
        load(world, tmp_path / "larger", lora_adapter_path=str(saved[1]))


def test_checkpoint_holds_adapters_only_and_refuses_another_base_or_scale(
    world: World, folder: Path, tmp_path: Path
):
    actor = make_actor(load(world, folder))
    actor.update_policy(make_batch(ROWS), temperature=1.0)
    path = save_run(tmp_path / "run", actor, RunState(1, identify(actor.policy)))
    checkpoint = open_checkpoint(path)
    weights = [n for n in checkpoint.manifest.tensors if n.startswith("weight/")]
    assert {name.removeprefix("weight/") for name in weights} == adapters_of(actor.policy).keys()
    tiny_model(initializer_range=0.1, seed=1).save_pretrained(tmp_path / "other")
    for policy, message in (
        (load(world, tmp_path / "other"), "next to other frozen weights"),
        (load(world, folder, lora_alpha=8), "lora_alpha was another"),
        (load(world, folder, lora_rank=2), r"is \[4, \d+\], not \[2, \d+\]"),
        (load(world, folder, lora_rank=0), "absent"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_run(checkpoint, make_actor(policy))


# The reference.


def test_reference_is_the_base_of_a_new_adapter(world: World, folder: Path):
    policy = load(world, folder)
    fill_adapters(policy.trained_weights(), world)
    batch, actor = make_batch(ROWS), make_actor(policy)
    base = make_actor(load(world, folder, lora_rank=0)).compute_log_probs(batch, temperature=0.7)
    with_adapter = actor.compute_log_probs(batch, temperature=0.7).log_probs
    reference = Reference(policy, budget=None)
    for _ in range(2):
        found = reference.compute_ref_log_prob(batch, temperature=0.7)
        assert_close([found], [base.log_probs])
        assert torch.equal(actor.compute_log_probs(batch, temperature=0.7).log_probs, with_adapter)
        before = adapters_of(policy)
        actor.update_policy(batch, temperature=0.7)
        assert all(not torch.equal(w, before[name]) for name, w in adapters_of(policy).items())
        with_adapter = actor.compute_log_probs(batch, temperature=0.7).log_probs
        assert (with_adapter - found).abs().max() > 0.01


def test_reference_of_a_continued_adapter_is_the_policy_at_the_start(
    world: World, folder: Path, saved: tuple[PolicyModel, Path]
):
    policy = load(world, folder, lora_adapter_path=str(saved[1]))
    assert_close(log_probs(policy), log_probs(saved[0]), atol=0)
    assert {n for n, _ in policy.trained_weights()} == {n for n, _ in saved[0].trained_weights()}
    batch, actor = make_batch(ROWS), make_actor(policy)
    start = actor.compute_log_probs(batch, temperature=1.0).log_probs
    actor.update_policy(batch, temperature=1.0)
    found = Reference(policy, budget=None).compute_ref_log_prob(batch, temperature=1.0)
    assert_close([found], [start], atol=1e-6)
    assert (actor.compute_log_probs(batch, temperature=1.0).log_probs - start).abs().max() > 1e-3


# What engines and other programs get.


def test_merged_weights_give_the_policys_log_probabilities(
    world: World, folder: Path, tmp_path: Path
):
    policy = load(world, folder)
    fill_adapters(policy.trained_weights(), world)
    expected = log_probs(policy)
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert (torch.cat(expected) - torch.cat(plain_log_probs(base))).abs().max() > 0.1
    export_hf(policy, tiny_tokenizer(), tmp_path / "out")
    assert "adapter_config.json" not in {path.name for path in (tmp_path / "out").iterdir()}
    assert_close(plain_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)
    taken = take_weights(policy)
    assert taken.keys() == dict(base.named_parameters()).keys()
    base.load_state_dict(taken, strict=False)
    assert_close(plain_log_probs(base), expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_exported_adapter_is_loaded_by_peft(
    world: World, folder: Path, saved: tuple[PolicyModel, Path]
):
    policy, path = saved
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert_close(plain_log_probs(PeftModel.from_pretrained(base, path)), log_probs(policy))
    files = {file.name for file in path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (4, 8, LINEAR)
    about = json.loads((path / "agentrl.json").read_text())
    assert about["step"] == 7
    assert policy.adapters is not None
    assert about["base_digest"] == policy.adapters.base_digest


def test_adapter_of_peft_is_continued(world: World, folder: Path, tmp_path: Path):
    """One with ranks and factors of its own for some modules, and with dropout."""
    config = LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 2},
        alpha_pattern={"q_proj": 16}, use_rslora=True, lora_dropout=0.5, task_type="CAUSAL_LM",
    )  # fmt: skip
    lm = inject_adapter_in_model(config, AutoModelForCausalLM.from_pretrained(folder)).eval()
    trained = [(name, w) for name, w in lm.named_parameters() if w.requires_grad]
    fill_adapters(trained, world)
    config.save_pretrained(tmp_path)
    weights = {lora.peft_name(name): weight.detach() for name, weight in trained}
    save_file(weights, tmp_path / lora.ADAPTER_WEIGHTS)
    policy = load(world, folder, lora_adapter_path=str(tmp_path))
    assert_close(log_probs(policy), plain_log_probs(lm))
    policy.train()
    assert policy.adapters is not None
    assert set(policy.adapters.scales.values()) == {16 / 2, 8 / 2**0.5}
    base = AutoModelForCausalLM.from_pretrained(folder)
    base.load_state_dict(take_weights(policy), strict=False)
    assert_close(plain_log_probs(base), plain_log_probs(lm))


async def test_embedded_engine_samples_with_the_adapters(world: World):
    policy = make_lora_policy(world)
    engine = TransformersEngine.from_model(policy.lm)
    own = {name: weight.data_ptr() for name, weight in policy.named_weights()}
    modules = {name: type(module) for name, module in policy.lm.named_modules()}
    try:
        for version in (1, 2):
            figures = await sync_weights(policy, engine, version=version)
            # Only the weights with an adapter are copied.
            adapted = [w for n, w in policy.named_weights() if n.endswith("base_layer.weight")]
            biases = [w for n, w in policy.named_weights() if n.endswith("base_layer.bias")]
            assert figures.num_bytes == sum(w.nbytes for w in [*adapted, *biases])
            sampling = SamplingParams(max_new_tokens=10, temperature=1.0, seed=version)
            done = await engine.generate(IDS, sampling, request_id=f"{version}")
            every = (await plain(policy, done.token_ids)).log_softmax(-1)
            expected = every.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(done.log_probs), expected, rtol=0, atol=2e-5)
            fill_adapters(policy.trained_weights(), world, seed=version)
    finally:
        await engine.close()
    assert {name: weight.data_ptr() for name, weight in policy.named_weights()} == own
    assert {name: type(module) for name, module in policy.lm.named_modules()} == modules
    assert all(weight.requires_grad for _, weight in policy.trained_weights())


async def plain(policy: PolicyModel, ids: list[int]) -> Tensor:
    """The logits of the sampled tokens by a model with merged weights."""
    lm = tiny_model(initializer_range=0.1)
    lm.load_state_dict(dict(iter_full_weights(policy)), strict=False)
    return plain_logits(lm, IDS, ids)


def tiny_gpt2() -> PreTrainedModel:
    """Its linear modules store their weights transposed."""
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=97,
                                      initializer_range=0.2)).eval()  # fmt: skip


def tiny_mixture() -> PreTrainedModel:
    """Its files have one tensor for each expert, and the module one for all."""
    return MixtralForCausalLM(
        MixtralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=97,
                      num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    ).eval()  # fmt: skip


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_mixture])
def test_merge_equals_pefts_own(world: World, make: Any, tmp_path: Path):
    lm = make()
    lm.save_pretrained(tmp_path / "model")
    policy = load(world, tmp_path / "model")
    fill_adapters(policy.trained_weights(), world)
    taken, layers = take_weights(policy), dict(policy.lm.named_modules())
    adapted = {n.split(".lora_")[0] for n, _ in policy.trained_weights()}
    assert adapted
    for name, weight in lm.named_parameters():
        module = name.removesuffix(".weight")
        delta: Any = 0
        if module in adapted:
            layer: Any = layers[module]
            delta = layer.get_delta_weight("default").detach()
            assert delta.abs().max() > 0.01
        torch.testing.assert_close(taken[name], weight.detach() + delta, rtol=0, atol=1e-6)
    export_hf(policy, tiny_tokenizer(), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(plain_log_probs(again), log_probs(policy), atol=1e-4)


# Several ranks.


@pytest.mark.slow
def test_layout_is_invisible_lora_from_file_to_engine_on_two_ranks(
    world: World, folder: Path, tmp_path: Path
):
    """Adapters, update, merge, checkpoint and exports equal those of one rank."""
    model = ModelConfig(path=str(folder), lora_rank=4)
    one = run_policy(world, model, FsdpConfig(), tmp_path / "one")
    assert one["change"] > 0.01 > 1e-5 > one["drift_of_reference"]
    with ranks_of("tests.fakes.lora_ranks", str(folder), str(tmp_path)) as ranks:
        ended = [rank.wait() for rank in ranks]
    assert not any(rank.code for rank in ended), "\n".join(rank.err for rank in ended)
    for rank in range(2):
        every = torch.load(tmp_path / f"rank_{rank}.pt")
        assert every.keys() == RANK_CASES.keys()
        for found in every.values():
            assert found["base"] == one["base"]
            assert found["drift_of_reference"] < 1e-5
            for part in ("first", "trained", "resumed", "engine"):
                assert found[part].keys() == one[part].keys()
                for name, tensor in one[part].items():
                    torch.testing.assert_close(found[part][name], tensor, rtol=1e-5, atol=1e-5)
            assert all(torch.equal(found["resumed"][n], w) for n, w in found["trained"].items())
    for name in RANK_CASES:
        for file in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
            found, expected = (load_file(tmp_path / case / file) for case in (name, "one"))
            assert_close([found[key] for key in expected], expected.values())
    # Saved on two ranks, resumed on one; and the reverse.
    resumed = make_actor(load(world, folder, seed=9), optim={"lr": 1e-2})
    load_run(open_checkpoint(tmp_path / "sharded/checkpoints/global_step_2"), resumed)
    resumed.update_policy(make_batch(random_rows(8)), temperature=1.0)
    assert_close(adapters_of(resumed.policy).values(), one["trained"].values())


def test_policy_without_lora_has_no_adapters(world: World, tmp_path: Path):
    policy = make_policy(world)
    with pytest.raises(ValueError, match="no adapters"):
        export_adapter(policy, tiny_tokenizer(), tmp_path / "out")
    with policy.as_at_start():
        assert dict(policy.merged_weights()).keys() == dict(policy.named_weights()).keys()
    shutil.rmtree(tmp_path)


DECODERS = [name for name, family in FAMILIES.items() if not family.refused]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("name", DECODERS)
def test_all_linear_is_all_linear_modules_of_any_family(name: str):
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(FAMILIES[name].config())
    linear = {n for n, module in lm.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = next(n for n, module in lm.named_modules() if module is lm.get_output_embeddings())
    stacks = sum(w.numel() for n, w in lm.named_parameters() if w.ndim == 3)
    share = stacks / sum(weight.numel() for weight in lm.parameters())
    inject_adapters(lm, LORA)
    adapted = {n for n, module in lm.named_modules() if hasattr(module, "lora_A")}
    assert adapted == linear - {head}
    assert lora.frozen_experts_share(lm) == share


NAMES = st.lists(
    st.lists(st.sampled_from("abc01"), min_size=1, max_size=4).map(".".join),
    min_size=1, max_size=8, unique=True,
)  # fmt: skip


@given(NAMES, st.data())
def test_peft_selects_the_chosen_modules_and_no_others(every: list[str], data: st.DataObject):
    chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    config = LoraConfig(target_modules=lora._shorten(chosen, every))
    found = [name for name in every if check_target_module_exists(config, name)]
    assert sorted(found) == sorted(chosen)
