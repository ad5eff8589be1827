"""Notes on a loaded policy, before the first step."""

from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.config.schema.run import RunConfig
from agentrl.trainer.components import find_unshared
from agentrl.workers.attention_kernels import SdpaKernel
from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.training import make_policy

WINDOW: dict[str, Any] = {
    "use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield start_world("cpu", timeout_s=60)
    stop_world()


def run_config(**actor: Any) -> RunConfig:
    data = {"train_files": ["none"], "max_prompt_length": 32, "max_response_length": 64}
    return parse_config({"data": data, "model": {"path": "none"}, "actor": actor})


def test_rows_that_share_no_prefix_are_reported_if_the_run_asks_for_it(world: World):
    asked, policy = run_config(share_prefixes=True), make_policy(world)
    assert list(find_unshared(asked, policy)) == []
    windows = make_policy(world, **WINDOW)
    (note,) = find_unshared(asked, windows)
    assert "rows of more than 64 tokens share no prefix" in note
    assert list(find_unshared(run_config(), windows)) == []
    assert list(find_unshared(run_config(share_prefixes=False), windows)) == []
    policy.noise = ["attention_dropout"]
    (note,) = find_unshared(asked, policy)
    assert "has no effect: the update has dropout" in note
    policy.noise, policy.kernel = (), SdpaKernel()
    (note,) = find_unshared(asked, policy)
    assert "attention is scaled_dot_product_attention" in note
