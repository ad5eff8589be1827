"""What saving rollouts costs: share of the step time, and bytes for each trained token.

1. Quick start. The run of `examples/gsm8k_multiturn/quickstart.yaml`, in which every second step
   saves rollouts, tokens and the digest of the weights. Share: seconds of saving over seconds of
   the steps that save. The median of the steps that do not save is printed next to it.
2. Made up. 512 requests of 1,500 tokens, of which 1,000 are trained, in 4 turns, with
   log-probabilities of random bits, which nothing compresses.
   Prints the seconds of saving, and the trained tokens
   that are saved in a second: a step that trains as many in 50 seconds spends 2 % on saving.
   Also the seconds of the digest of 100 million weights on this machine.

Aim: under 2 % and under 24 bytes.

Run: python benchmarks/saving_cost.py [--steps N] [--folder DIR] [KEY=VALUE ...]
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl import Trainer, load_config
from agentrl.collate import collate
from agentrl.config.schema.reward import RewardConfig
from agentrl.engines.protocol import VersionSpan
from agentrl.messages import Message
from agentrl.protocol import DataProto
from agentrl.rollout import AsyncRolloutRequest, FinishReason, RequestState, StopReason
from agentrl.trainer.credit import tensors_of
from agentrl.trainer.rollouts.files import rollout_path, save_rollouts
from agentrl.trainer.rollouts.token_files import save_tokens, tabulate_tokens, token_path
from agentrl.workers.weight_files import digest_weights, sum_placed_bits

QUICK_START = "examples/gsm8k_multiturn/quickstart.yaml"


class AlternatingTrainer(Trainer):
    """Saves every second step, and times all of them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.saving_s = 0.0
        self.num_trained = 0
        self.saved: list[tuple[float, float, int]] = []
        """Seconds, those of saving, and trained tokens of each step that saves."""
        self.others: list[float] = []
        """Seconds of the steps that do not save."""
        self._files = self.components.files

    def train_step(self) -> dict[str, float]:
        """Run a step that saves, or one that does not."""
        files = self._files
        saves = self.step % 2 == 0  # the step before
        self.engine_sync.records_digest = saves
        for name in ("save_step", "save_weights"):
            method = getattr(type(files), name)
            setattr(files, name, self._timed(method, files) if saves else lambda *_: None)
        self.saving_s, begun = 0.0, time.monotonic()
        metrics = super().train_step()
        seconds = time.monotonic() - begun
        if saves:
            saving = self.saving_s + self.engine_sync.digest_s
            self.saved.append((seconds, saving, self.num_trained))
        else:
            self.others.append(seconds)
        return metrics

    def measure(self, samples: Any, batch: DataProto, updated: Any) -> dict[str, float]:
        """Count the trained tokens too."""
        self.num_trained = int(tensors_of(batch)["response_mask"].sum())
        return super().measure(samples, batch, updated)

    def _timed(self, method: Any, files: Any) -> Any:
        def run(*arguments: Any) -> None:
            begun = time.monotonic()
            method(files, *arguments)
            self.saving_s += time.monotonic() - begun

        return run


def measure_quick_start(folder: Path, num_steps: int, changes: Sequence[str]) -> None:
    """Train, and print what the steps that save spend on it."""
    overrides = [
        f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={num_steps}",
        "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false",
        "trainer.plot=false", "data.val_files={}", *changes,
    ]  # fmt: skip
    trainer = AlternatingTrainer(load_config(QUICK_START, overrides=overrides))
    trainer.fit()
    steps = trainer.saved[1:]  # the first step also warms up
    seconds, saving, tokens = (sum(column) for column in zip(*steps, strict=True))
    share = saving / seconds
    num_bytes = sum(path.stat().st_size for path in (folder / "rollouts").glob("step_*"))
    trained = sum(one[2] for one in trainer.saved)
    print(
        f"quick start: {1e3 * saving / len(steps):.0f} ms of {seconds / len(steps):.2f} s, "
        f"{share:.2%} of a step; {num_bytes / trained:.1f} bytes per trained token "
        f"({tokens / len(steps):.0f} trained tokens a step); median of steps "
        f"{statistics.median(one[0] for one in steps):.2f} s with saving, "
        f"{statistics.median(trainer.others[1:]):.2f} s without"
    )


def make_request(index: int, draw: random.Random) -> AsyncRolloutRequest:
    """Make a finished request of 4 turns of 250 sampled tokens, and observations of 100."""
    request = AsyncRolloutRequest(
        request_id=f"train-1-{index // 8}-{index // 8}-{index % 8}",
        uid=f"train-1-{index // 8}",
        batch_data_id=index // 8,
        rollout_offset=index % 8,
        messages=[Message(role="user", content="a question " * 20)],
    )
    request.begin([draw.randrange(150_000) for _ in range(200)])
    request.take_edge(RequestState.RUNNING)
    for turn in range(4):
        ids = [draw.randrange(150_000) for _ in range(250)]
        logs = torch.empty(250).exponential_().neg().tolist()
        request.append_sampled(
            ids, logs, finish_reason=FinishReason.STOP, weight_versions=(VersionSpan(0, 0, 250),)
        )
        request.messages.append(Message(role="assistant", content="an answer of words " * 60))
        if turn < 3:
            request.append_observed([draw.randrange(150_000) for _ in range(100)], role="tool")
    request.reward = draw.random()
    request.finish(StopReason.ANSWERED)
    return request


def measure_made_up(folder: Path, num_requests: int) -> None:
    """Save made-up requests, and hash made-up weights."""
    draw = random.Random(0)
    requests = [make_request(index, draw) for index in range(num_requests)]
    batch = collate(requests, pad_token_id=0)
    tensors = tensors_of(batch)
    shape = tuple(tensors["responses"].shape)
    for name in ("old_log_probs", "entropies"):
        tensors[name] = torch.empty(shape).exponential_()
    for name in ("advantages", "returns", "token_level_rewards"):
        tensors[name] = tensors["token_level_scores"].sum(-1, keepdim=True).expand(shape)
    path = rollout_path(folder, 1, compressed=True)
    begun = time.monotonic()
    save_rollouts(path, requests, step=1, reward=RewardConfig())
    between = time.monotonic()
    save_tokens(token_path(path), [tabulate_tokens(batch, 1)])
    seconds = time.monotonic() - begun
    trained = int(tensors["response_mask"].sum())
    num_bytes = sum(one.stat().st_size for one in folder.iterdir())
    print(
        f"made up: {trained} trained tokens in {seconds:.2f} s (rollouts "
        f"{between - begun:.2f} s), {trained / seconds:.0f} in a second; "
        f"{num_bytes / trained:.1f} bytes per trained token"
    )
    weights = torch.randn(100_000, 1000)
    begun = time.monotonic()
    digest_weights([("weight", weights)], None, sum_placed_bits)
    print(f"digest of 100 million weights: {time.monotonic() - begun:.2f} s")


def main() -> None:
    """Measure both cases."""
    parser = argparse.ArgumentParser(description="What saving rollouts costs.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--requests", type=int, default=512, help="of the made-up case")
    parser.add_argument("--folder", type=Path, help="of the run; default: a temporary one")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure_made_up(Path(temporary) / "made_up", given.requests)
        measure_quick_start(given.folder or Path(temporary) / "run", given.steps, given.changes)


if __name__ == "__main__":
    main()
