"""A real SGLang server of a reward model gives the scores of the training devices."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.config.schema.reward import RewardModelConfig
from agentrl.engines.sglang.arguments import (
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    SGLangNeeds,
    server_arguments,
)
from agentrl.engines.sglang.servers.launch import (
    LocalServer,
    ServeOptions,
    ServerPlan,
    choose_ports,
)
from agentrl.workers.distributed import start_world, stop_world
from agentrl.workers.reward_model import RewardModel, make_classifier, make_encoder
from tests.fakes.reward_models import ask, build_reward_model, make_reward_model, run_now

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@pytest.fixture
def world() -> Iterator[object]:
    yield start_world("cpu", timeout_s=60)
    stop_world()


def make(folder: Path, world: object, **keys: object) -> RewardModel:
    config = RewardModelConfig.model_validate({"path": str(folder), **keys})
    return RewardModel(make_encoder(config), make_classifier(config, world), world)


def save_bias(folder: Path) -> None:
    """Write the bias of the head that SGLang's Qwen2 has and transformers' has not, as zero."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"score.bias": torch.zeros(1)}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_server_gives_the_scores_of_the_training_devices(
    family: str, tmp_path: Path, world: object
):
    folder = make_reward_model(tmp_path, build_reward_model(family=family))
    if family == "Qwen2":
        save_bias(folder)
    needs = SGLangNeeds(model_path=str(folder), max_model_len=1024, max_requests=8, dtype="float32")
    [port] = choose_ports(ServeOptions())
    plan = ServerPlan(
        host="127.0.0.1", port=port,
        arguments=server_arguments(needs, on_cpu=True) | {"is_embedding": True},
        environment=dict(ENVIRONMENT) | dict(CPU_ENVIRONMENT),
    )  # fmt: skip
    requests, others = ([ask("2 + 3?", "5"), ask("Why is it so?", "It is not.")] for _ in range(2))

    async def serve() -> None:
        server = LocalServer(plan)
        try:
            await server.start()
            served = make(folder, world, engine="sglang", addresses=[plan.address])
            await asyncio.to_thread(served.check, run_now)
            await asyncio.to_thread(served.score, requests, run_now)
        finally:
            await server.end()

    asyncio.run(serve())
    make(folder, world).score(others, run_now)
    scores = [request.rm_score for request in others]
    assert [request.rm_score for request in requests] == pytest.approx(scores, abs=1e-4)
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)
