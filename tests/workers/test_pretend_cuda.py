"""The training path on a CUDA device that does not exist (`tests/fakes/pretend_cuda.py`).

The rank's device is `cuda:1`, so that code that uses the first device is found too.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from agentrl.config.schema.run import ModelConfig, RunConfig
from agentrl.config.schema.training import ActorConfig, FsdpConfig
from agentrl.engines import SamplingParams
from agentrl.trainer.setup.engine_factory import build_engine
from agentrl.workers.actor import Actor
from agentrl.workers.checkpoint import RunState, open_checkpoint
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.load import load_policy
from agentrl.workers.model import PolicyModel
from agentrl.workers.scoring import Reference, find_implausible
from agentrl.workers.shards import local_tensor
from agentrl.workers.snapshot import identify, load_run, save_run
from agentrl.workers.weight_sync import sync_weights
from tests.fakes.engines import tiny_model
from tests.fakes.flash_attention import install_flash_attention
from tests.fakes.pretend_cuda import (
    CurrentDeviceError,
    DeviceMixError,
    PretendCuda,
    device_of,
    pretend_cuda,
)
from tests.fakes.training import make_batch, random_rows

DEVICE = torch.device("cuda", 1)
DTYPES = ["float32", "bfloat16"]
of_lora = pytest.mark.parametrize("lora_rank", [0, 4], ids=["whole", "lora"])


@pytest.fixture
def local_rank(request: pytest.FixtureRequest) -> int:
    return getattr(request, "param", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> Iterator[PretendCuda]:
    monkeypatch.setenv("LOCAL_RANK", f"{local_rank}")
    with pretend_cuda() as pretend:
        yield pretend


@pytest.fixture
def cuda_world(cuda: PretendCuda) -> Iterator[World]:
    yield start_world("cuda", timeout_s=60)
    stop_world()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(initializer_range=0.1, tie_word_embeddings=False).save_pretrained(path)
    return path


def load(
    folder: Path, world: World, dtype: str = "float32", *, lora_rank: int = 0, **fsdp: bool
) -> PolicyModel:
    model = ModelConfig(path=str(folder), dtype=dtype, lora_rank=lora_rank)
    policy = load_policy(model, world, FsdpConfig(**fsdp))
    if lora_rank:
        with policy.on_device():
            for name, weight in policy.trained_weights():
                if ".lora_B." in name:
                    local_tensor(weight.detach()).fill_(0.02)
    return policy


def new_actor(policy: PolicyModel, **config: object) -> Actor:
    return Actor(
        policy, ActorConfig(ppo_max_token_len_per_gpu=40, **config), total_steps=10,
        response_budget=16,
    )  # fmt: skip


def whole(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Return a copy of each weight on the CPU."""
    return {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight)
        .detach().cpu().clone()
        for name, weight in policy.named_weights()
    }  # fmt: skip


def state_devices(actor: Actor) -> set[torch.device]:
    """Return the devices of everything that the optimizer keeps."""
    return {
        device_of(value)
        for part in actor.optimizer._parts
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }


def test_tool_finds_a_mix_of_devices_and_keeps_torchs_exceptions(cuda: PretendCuda):
    torch.cuda.set_device(1)
    on_device, on_host = torch.arange(3, device="cuda"), torch.arange(3)
    assert on_device[1:].device == (on_device * 2).float().device == DEVICE
    assert on_host.to(DEVICE).device == DEVICE
    assert on_device.cpu().device == torch.device("cpu")
    assert torch.equal(on_device[on_host].cpu(), on_host)
    assert (on_device + torch.tensor(1)).device == DEVICE
    for mix in (
        lambda: on_device + on_host,
        lambda: on_host[on_device],
        lambda: on_device.index_select(0, on_host),
        lambda: torch.cat([on_device, torch.ones(1)]),
    ):
        with pytest.raises(DeviceMixError):
            mix()
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()
    with pytest.raises(CurrentDeviceError):
        torch.ones(1, device="cuda:0")
    before = sum(cuda.num_waits.values())
    on_device[on_device > 1].sum().item()
    assert sum(cuda.num_waits.values()) == before + 2


def test_attention_makes_no_plan_for_each_shape(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch):
    chosen: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    start_world("cuda", timeout_s=60)
    stop_world()
    assert chosen == [False]


def test_first_prompt_is_scored(cuda_world: World, folder: Path):
    find_implausible(load(folder, cuda_world), list(range(2, 20)), budget=64)


def test_packed_attention_is_one_call_for_16_bits(cuda_world: World, folder: Path):
    assert load(folder, cuda_world, "bfloat16").kernel.name == "varlen"


@of_lora
@pytest.mark.parametrize("dtype", DTYPES)
def test_step_is_that_of_a_cpu(cuda_world: World, folder: Path, dtype: str, lora_rank: int):
    cpu_world = World(
        rank=0, size=1, device=torch.device("cpu"),
        mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), status=cuda_world.status,
    )  # fmt: skip
    results = []
    for world in (cpu_world, cuda_world):
        policy = load(folder, world, dtype, lora_rank=lora_rank)
        reference = Reference(policy if lora_rank else load(folder, world, dtype), budget=64)
        batch = make_batch(random_rows(10))
        assert policy.world.device == next(policy.parameters()).device == world.device
        batch.batch["ref_log_prob"] = reference.compute_ref_log_prob(batch, temperature=1.0)
        actor = new_actor(policy, use_kl_loss=True, entropy_coeff=0.01)
        scores = actor.compute_log_probs(batch, temperature=0.7, with_sum_pi_squared=True)
        metrics = actor.update_policy(batch, temperature=0.7).metrics
        assert state_devices(actor) == {world.device}
        results.append((scores, metrics, whole(policy)))
    (scores, metrics, weights), (cuda_scores, cuda_metrics, cuda_weights) = results
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.05, "atol": 0.01}
    for mine, theirs in zip(scores, cuda_scores, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert metrics == pytest.approx(cuda_metrics, rel=0.05, abs=0.01)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, cuda_weights[name], **tolerance)


def resume(cuda_world: World, folder: Path, root: Path, optimizer: str, **settings: Any) -> None:
    """Save after one step, resume, and take a second one in both."""
    batch = make_batch(random_rows(10))
    fsdp = FsdpConfig(**{key: value for key, value in settings.items() if key != "lora_rank"})
    actors = [
        new_actor(load(folder, cuda_world, **settings), optim={"name": optimizer}, fsdp_config=fsdp)
        for _ in "ab"
    ]
    actors[0].update_policy(batch, temperature=1.0)
    state = RunState(step=1, identity=identify(actors[0].policy))
    path = save_run(root, actors[0], state)
    load_run(open_checkpoint(path), actors[1])
    assert state_devices(actors[1]) == state_devices(actors[0])
    ended = []
    for actor in actors:
        actor.update_policy(batch, temperature=1.0)
        with actor.on_device():
            ended.append(whole(actor.policy))
    first, second = ended
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_state_is_on_the_device_after_a_resume(
    cuda_world: World, folder: Path, tmp_path: Path, optimizer: str
):
    resume(cuda_world, folder, tmp_path, optimizer)


@of_lora
def test_offloaded_shards_resume_in_host_memory(
    cuda_world: World, folder: Path, tmp_path: Path, lora_rank: int
):
    resume(cuda_world, folder, tmp_path, "adamw", offload_policy=True, lora_rank=lora_rank)


OFFLOADS = {"param_offload": True, "optimizer_offload": True}


def device_bytes(actor: Actor) -> int:
    """The memory of weights and moments on the device."""
    weights = [local_tensor(weight.detach()) for _, weight in actor.policy.named_weights()]
    tensors = [*weights, *(moment for moment in actor.optimizer.state_tensors() if moment.ndim)]
    assert {device_of(tensor) for tensor in tensors} == {DEVICE}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@of_lora
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_moments_are_on_the_device_only_during_an_update(
    cuda_world: World, folder: Path, dtype: str, lora_rank: int
):
    batch, ended = make_batch(random_rows(10)), []
    for settings in ({}, OFFLOADS):
        policy = load(folder, cuda_world, dtype, lora_rank=lora_rank, **settings)
        actor = new_actor(policy, fsdp_config=FsdpConfig(**settings))
        for _ in range(2):
            actor.update_policy(batch, temperature=1.0)
        assert bool(device_bytes(actor)) is not bool(settings)
        with actor.on_device():
            assert device_bytes(actor)
            ended.append(whole(policy))
    assert all(torch.equal(weight, ended[1][name]) for name, weight in ended[0].items())


def test_reference_is_on_the_device_only_while_it_scores(cuda_world: World, folder: Path):
    batch, found = make_batch(random_rows(10)), []
    for offloads in (False, True):
        policy = load(folder, cuda_world, param_offload=offloads)
        reference = Reference(policy, budget=64)
        found.append(reference.compute_ref_log_prob(batch, temperature=1.0))
        on_device = sum(weight.untyped_storage().nbytes() for weight in policy.parameters())
        assert bool(on_device) is not offloads
    assert torch.equal(*found)


@of_lora
def test_offloaded_weights_and_moments_are_saved_and_resumed(
    cuda_world: World, folder: Path, tmp_path: Path, lora_rank: int
):
    resume(cuda_world, folder, tmp_path, "adamw", **OFFLOADS, lora_rank=lora_rank)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_in_host_memory_between_the_passes(
    cuda: PretendCuda, cuda_world: World, folder: Path, checkpointing: bool
):
    ended, num_copies = [], []
    for offloads in (False, True):
        model = ModelConfig(
            path=str(folder), dtype="float32", enable_activation_offload=offloads,
            enable_gradient_checkpointing=checkpointing,
        )  # fmt: skip
        policy = load_policy(model, cuda_world, FsdpConfig())
        before = cuda.num_waits["copy_"]
        new_actor(policy).update_policy(make_batch(random_rows(10)), temperature=1.0)
        num_copies.append(cuda.num_waits["copy_"] - before)
        ended.append(whole(policy))
    assert num_copies[1] - num_copies[0] > 2  # at least the input of each of two layers
    assert all(torch.equal(weight, ended[1][name]) for name, weight in ended[0].items())


async def generate(policy: PolicyModel) -> None:
    """Generate, sync the weights, sleep, wake, and generate again, with the engine of a run."""
    config = RunConfig.model_validate(
        {
            "data": {"train_files": ["none.jsonl"], "train_batch_size": 1},
            "model": {"path": "none"},
            "rollout": {
                "max_model_len": 64,
                "max_concurrent_requests": 4,
                "engine": {"name": "transformers", "transformers": {"page_size": 4}},
            },
        }
    )
    device, dtype = policy.world.device, policy.compute_dtype
    with policy.on_device():
        engine = build_engine(config, policy.lm, None, device=device, dtype=dtype)
    try:
        sampling = SamplingParams(max_new_tokens=6, top_k=20, top_p=0.9)
        for version in (1, 2):
            await sync_weights(policy, engine, version=version)
            assert {device_of(p) for p in engine._weights.module.parameters()} == {device}
            calls = [
                engine.generate([5, 6, 7 + n], sampling, request_id=f"{n}") for n in range(version)
            ]
            for completion in await asyncio.gather(*calls):
                assert len(completion.token_ids) == 6
            await engine.sleep()
            await engine.wake()
    finally:
        await engine.close()


@of_lora
@pytest.mark.parametrize("dtype", DTYPES)
async def test_engine_generates_on_the_ranks_device(
    cuda_world: World, folder: Path, dtype: str, lora_rank: int
):
    await generate(load(folder, cuda_world, dtype, lora_rank=lora_rank))


@pytest.mark.parametrize("key", ["offload_policy", "param_offload"])
async def test_engine_generates_on_the_device_from_offloaded_weights(
    cuda_world: World, folder: Path, key: str
):
    await generate(load(folder, cuda_world, "bfloat16", **{key: True}))


async def test_engine_uses_the_librarys_attention_for_sliding_windows(
    cuda_world: World, tmp_path: Path
):
    tiny_model(
        initializer_range=0.1, tie_word_embeddings=False, use_sliding_window=True, sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
    ).save_pretrained(tmp_path)  # fmt: skip
    await generate(load(tmp_path, cuda_world, "bfloat16"))


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return install_flash_attention(monkeypatch)


@pytest.mark.parametrize("local_rank", [0], indirect=True)
async def test_flash_attention_is_used_for_16_bits(
    cuda_world: World, folder: Path, flash_attention: list[int]
):
    await generate(load(folder, cuda_world, "bfloat16"))
    assert max(flash_attention) == 2


@pytest.mark.parametrize("local_rank", [0], indirect=True)
async def test_flash_attention_is_not_used_for_float32(
    cuda_world: World, folder: Path, flash_attention: list[int]
):
    await generate(load(folder, cuda_world, "float32"))
    assert not flash_attention
