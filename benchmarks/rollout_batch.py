"""From prompts to tensors: CPU time a turn and wall time over the critical path, with collation.

256 and 1,024 requests of 4 turns (groups of 8), the work of `rollout_overhead.py`. Each case makes
the requests, rolls them out and collates them to `[B, 1024 + 4096]`. In half of the cases engine
and tool answer at once. In the others the engine takes 0.1 s a turn and the tool a lognormal time
(median 0.08 s, sigma 0.5), so that the slowest request waits for about a second.

CPU time is that of the whole process, tokenizer and all threads included. The critical path is the
longest sum of one request's own waits. The fastest of the repeats counts, as other load slows all.

Expectation: at most 0.4 ms a turn with collation; at most 1.2 times the critical path.

Run: python benchmarks/rollout_batch.py [--tokenizer FOLDER_OR_HUB_NAME] [--requests N ...]
    [--repeats N]
"""

import argparse
import asyncio
import os
import time

from rollout_work import Bench, Sizes, check_outcome

from agentrl.collate import collate
from agentrl.protocol import DataProto
from agentrl.rollout import AsyncRolloutRequest
from agentrl.rollout.scheduling import rare_gc

MS_BOUND, RATIO_BOUND = 0.4, 1.2
PROMPT_WIDTH, RESPONSE_WIDTH = 1024, 4096
PAD_TOKEN_ID = 151_643


class Clock:
    """CPU and wall time of a block, in seconds; a context manager."""

    def __enter__(self) -> "Clock":
        self._started = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s = time.process_time() - self._started[0]
        self.wall_s = time.perf_counter() - self._started[1]


def measure(bench: Bench, *, waits: bool) -> tuple[Clock, Clock]:
    """Roll out and collate; the clocks of both parts."""
    manager = bench.make_manager(waits=waits)
    with Clock() as rollout:
        finished = asyncio.run(manager.rollout(bench.make_requests(manager)))
    with Clock() as collation:
        batch = make_batch(finished)
    assert len(batch) == bench.sizes.requests
    check_outcome(finished, bench.sizes)
    return rollout, collation


def make_batch(finished: list[AsyncRolloutRequest]) -> DataProto:
    """Collate to the widths of a run with fixed lengths."""
    return collate(
        finished,
        pad_token_id=PAD_TOKEN_ID,
        prompt_width=PROMPT_WIDTH,
        response_width=RESPONSE_WIDTH,
    )


def report(bench: Bench, repeats: int, *, waits: bool) -> None:
    """Print the fastest of some repeats."""
    clocks = [measure(bench, waits=waits) for _ in range(repeats)]
    cpu_s = min(rollout.cpu_s + collation.cpu_s for rollout, collation in clocks)
    collate_s = min(collation.cpu_s for _, collation in clocks)
    rollout_s = min(rollout.wall_s for rollout, _ in clocks)
    wall_s = min(rollout.wall_s + collation.wall_s for rollout, collation in clocks)
    turns = bench.sizes.num_turns
    name = f"{bench.sizes.requests} x {bench.sizes.turns}, {'waits' if waits else 'no waits'}"
    line = f"{name:>18}: {cpu_s / turns * 1e3:.3f} ms a turn (at most {MS_BOUND})"
    line += f", of it collation {collate_s / turns * 1e3:.3f}; wall {wall_s:.2f} s"
    if waits:
        path_s = max(episode.wait_s for episode in bench.episodes)
        line += f" = {wall_s / path_s:.2f} critical paths (at most {RATIO_BOUND}), "
        line += f"{rollout_s / path_s:.2f} without collation"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="From prompts to tensors.")
    parser.add_argument("--tokenizer", default="../shared/data/tokenizers/qwen2_5")
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    for requests in asked.requests:
        sizes = Sizes(requests, turn_s=0.1, tool_median_s=0.08, tool_sigma=0.5)
        bench = Bench(asked.tokenizer, sizes)
        bench.roll_out(bench.make_manager(waits=False))
        with rare_gc():  # as round a training run
            for waits in (False, True):
                report(bench, asked.repeats, waits=waits)
    print(f"   load: {os.getloadavg()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
