"""What each rank of `tests/workers/test_loading.py` runs: load, compare, train, export."""

import sys
from pathlib import Path

import torch

from agentrl.cli import leave_rank
from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.errors import ConfigError
from agentrl.workers.distributed import start_world, stop_world
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_causal_lm, load_policy
from tests.fakes.plugins import tiny_tokenizer
from tests.fakes.training import gradients, make_actor, make_batch, random_rows, weights


def run(folder: Path) -> None:
    """Check each model folder, and export it again."""
    world = start_world("cpu", timeout_s=60)
    for path in sorted(folder.iterdir()):
        config = ModelConfig(path=str(path))
        if path.name == "damaged":
            try:
                load_policy(config, world, FsdpConfig())
            except ConfigError as error:
                print(error)
            continue
        policy = load_policy(config, world, FsdpConfig())
        whole = load_causal_lm(config)
        for name, weight in weights(policy).items():
            assert torch.equal(weight, whole.get_parameter(name)), name
        for name, buffer in policy.lm.named_buffers():
            assert torch.equal(buffer, whole.get_buffer(name)), name
        batch = make_batch(random_rows(8))
        make_actor(policy).update_policy(batch, temperature=1.0)
        assert all(grad.isfinite().all() for grad in gradients(policy).values())
        export_hf(policy, tiny_tokenizer(), folder.parent / "exported" / path.name)
    stop_world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
    leave_rank(SystemExit(0))
