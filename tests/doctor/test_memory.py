"""The arithmetic of memory, against the bytes of the tensors of real updates."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config import parse_config
from agentrl.config.schema.run import ModelConfig, RunConfig
from agentrl.doctor.memory import (
    Machine,
    MemoryPlan,
    ModelSize,
    activation_bytes_per_token,
    check_memory,
    find_remedy,
    picture_bytes_per_token,
    plan_memory,
)
from agentrl.engines.vision import compute_features
from agentrl.workers.load import enable_checkpointing
from agentrl.workers.vision_tower import tower_weights
from tests.fakes.vision_models import (
    load_picture,
    make_processor,
    make_vision_config,
    make_vision_model,
    random_picture,
)

TOKENS = 256
HOST = 2 * 10**12
DATA = {"train_files": ["none.parquet"]}
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
LARGER = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
          "num_attention_heads": 6, "num_key_value_heads": 6}  # fmt: skip
BIG = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def tiny_config(**settings: Any) -> Qwen2Config:
    return Qwen2Config(vocab_size=64, tie_word_embeddings=False, **settings)


def run_config(**sections: Any) -> RunConfig:
    given: dict[str, Any] = {
        "data": DATA,
        "model": {"path": "none", "enable_gradient_checkpointing": True},
    }
    return parse_config(given | sections)


def plan(devices: int, config: RunConfig, device_bytes: float = 80e9):
    machine = Machine(num_devices=devices, device_bytes=int(device_bytes), host_bytes=HOST)
    return plan_memory(ModelSize.of(BIG), config, machine, engine="sglang"), machine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [SMALL, LARGER])
def test_activations_are_the_tensors_that_a_forward_pass_keeps(settings, dtype):
    model = Qwen2ForCausalLM(tiny_config(**settings)).to(dtype)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    measured = sum(storage.nbytes() for key, storage in kept.items() if key not in own)
    size = ModelSize.of(model.config)
    computed = TOKENS * activation_bytes_per_token(size, dtype.itemsize, checkpointing=False)
    assert computed == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("settings", [SMALL, LARGER])
def test_the_peak_of_an_update_is_that_of_its_tensors(settings, checkpointing):
    model = Qwen2ForCausalLM(tiny_config(**settings))
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    held = sum(weight.nbytes for weight in model.parameters())
    with LiveBytes() as live:
        for _ in range(2):  # the second one has moments
            optimizer.zero_grad()
            ids = torch.zeros(1, TOKENS, dtype=torch.long)
            model.model(ids, use_cache=False).last_hidden_state.sum().backward()
            model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
            optimizer.step()
    config = run_config(
        model={"path": "none", "enable_gradient_checkpointing": checkpointing, "dtype": "float32"},
        actor={"ppo_max_token_len_per_gpu": TOKENS, "logits_block_bytes": 1},
        data={**DATA, "max_prompt_length": 16, "max_response_length": 16},
    )
    machine = Machine(num_devices=1, device_bytes=10**9, host_bytes=10**9, is_cpu=True)
    found = plan_memory(ModelSize.of(model.config), config, machine, engine="scripted")
    assert found.update_bytes == pytest.approx(held + live.peak, rel=0.15)


def test_more_devices_share_the_states_and_a_larger_model_does_not_fit():
    one, alone = plan(1, run_config())
    eight, many = plan(8, run_config())
    assert not one.fits(alone)
    assert eight.fits(many)
    assert eight.parts[0].num_bytes == one.parts[0].num_bytes // 8
    assert eight.host_bytes == pytest.approx(one.host_bytes / 8, rel=0.01)


def test_each_setting_has_its_effect():
    base, _ = plan(8, run_config())
    fsdp = {"fsdp_config": {"offload_policy": True}}
    offloaded, _ = plan(8, run_config(actor=fsdp))
    assert offloaded.update_bytes < base.update_bytes
    assert offloaded.host_bytes > base.host_bytes
    kept, _ = plan(8, run_config(model={"path": "none"}))
    assert kept.update_bytes > 2 * base.update_bytes
    reference, _ = plan(8, run_config(actor={"use_kl_loss": True}))
    assert reference.update_bytes - base.update_bytes == base.parts[0].num_bytes
    muon, _ = plan(8, run_config(actor={"optim": {"name": "muon"}}))
    assert muon.update_bytes < base.update_bytes
    copies, _ = plan(8, run_config(actor={"fsdp_config": {"fsdp_size": 2}}))
    assert copies.parts[0].num_bytes == 4 * base.parts[0].num_bytes
    assert copies.host_bytes == pytest.approx(base.host_bytes, rel=0.01)
    awake, _ = plan(8, run_config(rollout={"free_cache_engine": False}))
    assert awake.update_bytes > base.update_bytes


def activations(memory: MemoryPlan) -> int:
    return next(part.num_bytes for part in memory.parts if part.name == "activations")


def test_a_row_longer_than_the_limit_is_a_micro_batch():
    long = {**DATA, "max_prompt_length": 20_000, "max_response_length": 20_000}
    short, _ = plan(8, run_config(data=long, actor={"ppo_max_token_len_per_gpu": 1024}))
    assert short.update_bytes == plan(8, run_config(data=long))[0].update_bytes


def test_ranks_that_compute_rows_together_hold_a_part_of_each():
    long = {**DATA, "max_prompt_length": 20_000, "max_response_length": 20_000}
    alone, _ = plan(8, run_config(data=long))
    actor = {"ulysses_sequence_parallel_size": 2}
    assert activations(plan(8, run_config(data=long, actor=actor))[0]) == activations(alone) // 2
    short, _ = plan(8, run_config())
    assert activations(plan(8, run_config(actor=actor))[0]) == activations(short)


@pytest.mark.parametrize(
    ("num_devices", "gigabytes", "remedy"),
    [
        (8, 48, "`model.enable_gradient_checkpointing: true`, 8 devices"),
        (1, 80, "`model.enable_gradient_checkpointing: true`, "
                "`actor.fsdp_config.offload_policy: true`, 1 device"),
        (8, 1, "a smaller `actor.ppo_max_token_len_per_gpu`, or a smaller model"),
    ],
)  # fmt: skip
def test_the_remedy_is_the_smallest_that_fits(num_devices, gigabytes, remedy):
    config = run_config(model={"path": "none"})
    machine = Machine(num_devices=num_devices, device_bytes=gigabytes * 10**9, host_bytes=HOST)
    assert find_remedy(ModelSize.of(BIG), config, machine, engine="sglang") == remedy


def test_the_doctor_names_the_parts_of_a_run_that_does_not_fit(tmp_path):
    BIG.save_pretrained(tmp_path)  # a configuration; there are no weights
    config = run_config(model={"path": str(tmp_path)}, trainer={"device": "cpu"})
    checked = check_memory(config)
    assert len(checked.faults) == 1
    assert "weights 30.5 GB" in checked.faults[0]


def test_lora_counts_gradients_and_moments_of_the_adapters_only():
    whole, _ = plan(1, run_config(actor={"use_kl_loss": True}))
    lora = ModelConfig(path="none", lora_rank=8)
    size = ModelSize.of(BIG, lora)
    assert 0 < size.trained_weights < 0.05 * size.num_weights
    assert size.num_weights - size.trained_weights == ModelSize.of(BIG).num_weights
    config = run_config(model=lora.model_dump(), actor={"use_kl_loss": True})
    machine = Machine(num_devices=1, device_bytes=int(80e9), host_bytes=HOST)
    parts = {p.name: p.num_bytes for p in
             plan_memory(size, config, machine, engine="sglang").parts}  # fmt: skip
    assert parts["moments"] == 2 * parts["gradients"] == 8 * size.trained_weights
    assert parts["weights"] == 4 * size.num_weights
    assert "reference" in {part.name for part in whole.parts}
    assert "reference" not in parts


# The critic.


def sizes(memory: MemoryPlan) -> dict[str, int]:
    return {part.name: part.num_bytes for part in memory.parts}


def plan_with_critic(device_bytes: float = 80e9, devices: int = 8, **sections: Any):
    config = run_config(algorithm={"adv_estimator": "gae"}, **sections)
    machine = Machine(num_devices=devices, device_bytes=int(device_bytes), host_bytes=HOST)
    critic = ModelSize.of_critic(BIG)
    return plan_memory(ModelSize.of(BIG), config, machine, engine="sglang", critic=critic)


CHECKPOINTED = {"enable_gradient_checkpointing": True}


def test_the_critic_is_a_second_model_with_its_optimizer():
    with_one, (alone, _) = plan_with_critic(critic={"model": CHECKPOINTED}), plan(8, run_config())
    weights = 4 * ModelSize.of_critic(BIG).num_weights // 8
    found, before = sizes(with_one), sizes(alone)
    assert found["critic: weights"] == weights
    assert found["critic: moments"] == pytest.approx(2 * weights, rel=1e-6)
    both = alone.update_bytes + 3 * weights
    assert with_one.update_bytes == pytest.approx(both, rel=1e-6), "one is updated at a time"
    assert with_one.host_bytes == pytest.approx(alone.host_bytes + 3 * weights, rel=1e-6)
    assert found["engine: SGLang"] == pytest.approx(
        before["engine: SGLang"] - 1.5 * weights, rel=1e-6
    )


def test_the_larger_update_counts():
    own = {"model": CHECKPOINTED, "ppo_max_token_len_per_gpu": 65_536}
    found = sizes(plan_with_critic(critic=own))
    assert "critic: activations" in found
    assert not {"activations", "logits"} & found.keys(), "values need no logits"


def test_a_critic_in_host_memory_is_on_the_device_in_its_update_only():
    larger = {"model": CHECKPOINTED, "ppo_max_token_len_per_gpu": 65_536}
    fsdp = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
    kept, moved = plan_with_critic(critic=larger), plan_with_critic(critic=larger | fsdp)
    state = sum(sizes(kept)[f"critic: {name}"] for name in ("weights", "moments"))
    assert moved.update_bytes == kept.update_bytes
    assert moved.host_bytes == kept.host_bytes + state
    smaller = {"model": CHECKPOINTED, "ppo_max_token_len_per_gpu": 5120}
    long = {"actor": {"ppo_max_token_len_per_gpu": 65_536}}
    found, alone = plan_with_critic(critic=smaller | fsdp, **long), plan(8, run_config(**long))[0]
    assert found.update_bytes == alone.update_bytes
    assert found.rollout_bytes == alone.rollout_bytes


def test_the_remedy_has_the_keys_of_the_critic():
    machine = Machine(num_devices=8, device_bytes=60 * 10**9, host_bytes=HOST)
    config = run_config(algorithm={"adv_estimator": "gae"})
    size, critic = ModelSize.of(BIG), ModelSize.of_critic(BIG)
    remedy = find_remedy(size, config, machine, engine="sglang", critic=critic)
    assert remedy == "`critic.model.enable_gradient_checkpointing: true`, 8 devices"


def test_a_tower_is_counted_next_to_the_language_part():
    config = make_vision_config("qwen3_vl")
    lm = make_vision_model("qwen3_vl")
    tower = sum(weight.numel() for weight in tower_weights(lm))
    size = ModelSize.of(config)
    assert size.num_weights == size.trained_weights == sum(w.numel() for w in lm.parameters())
    assert size.tower is not None
    assert size.tower.num_weights == tower
    assert size.tower.patches_per_token == 4
    assert (size.num_layers, size.tower.num_blocks) == (2, 2)
    frozen = ModelSize.of(config, ModelConfig(path="none"))
    assert frozen.num_weights - frozen.trained_weights == tower
    assert not frozen.has_adapters
    critic = ModelSize.of_critic(config, ModelConfig(path="none"))
    assert critic.num_weights - critic.trained_weights == tower
    lora = ModelSize.of(config, ModelConfig(path="none", lora_rank=2))
    assert lora.has_adapters
    assert lora.root_weights == size.root_weights


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_pictures_are_about_those_that_a_trained_tower_keeps(checkpointing):
    lm = make_vision_model("qwen3_vl")
    if checkpointing:
        enable_checkpointing(lm)
        lm.train()
    item = make_processor("qwen3_vl").process(load_picture(random_picture(0, (64, 64))))
    own = {weight.untyped_storage().data_ptr() for weight in lm.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    item.inputs()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (features,) = compute_features(lm, [item])
    measured = features.nbytes + sum(
        storage.nbytes() for key, storage in kept.items() if key not in own
    )
    size = ModelSize.of(lm.config)
    computed = item.num_tokens * picture_bytes_per_token(size, 4, checkpointing=checkpointing)
    assert computed == pytest.approx(measured, rel=0.35)
