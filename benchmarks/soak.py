"""A soak: thousands of requests whose tool raises, hangs, returns garbage and loses its process.

The tool runs in a process for each request (`isolation: process`). Each call of each of its
methods (`create`, `execute`, `calc_reward`, `release`) raises with 5 %, hangs with 2 %, returns
garbage with 2 %, and has its process killed with 1 %; a request makes 1 to 4 calls. The policy is
scripted and takes 50 ms a turn. All is drawn from a seed, and every request's end and every call's
outcome are held against what was drawn.

1. Wall time over the bound. The bound is what must be waited for, and nothing else: the time-outs
   of the calls that hang (those of `release` and of the life that a lost process begins anew too)
   and the engine's time, of each request in order, on as many slots as there are. It has no time
   for starting processes, nor for any other work. How many processes were started is printed, and
   what starting and ending one takes when nothing else runs.
2. What is left. File descriptors, processes, threads, tasks and instances of tools, before (behind
   one request, which starts what a run keeps) and after; resident memory before, at its peak, and
   after, with all finished requests still held.

Expectation: a ratio of at most 1.15, and not one more of anything that is counted.

Run: python benchmarks/soak.py [--tokenizer FOLDER_OR_HUB_NAME] [--requests N] [--slots N]
    [--timeout-s SECONDS] [--seed N]
"""

import argparse
import asyncio
import logging
import os
import tempfile
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soak_run import Soaked
    from soak_work import Work

RATIO_BOUND = 1.15
_MIB = 1 << 20


def report(work: "Work", found: "Soaked", process_s: float) -> None:
    num_processes = sum(life.num_processes() for life in work.lives)
    num_hangs = sum(life.num_hangs() for life in work.lives)
    outcomes = Counter(c.outcome for r in found.finished for t in r.turns for c in t.calls)
    print(f"{len(found.finished)} requests, {work.sizes.slots} at once; each ended as was drawn:")
    for reason, number in Counter(str(r.stop_reason) for r in found.finished).most_common():
        print(f"{number:9d} {reason}")
    print(f"calls: {dict(outcomes)}; {num_hangs} time-outs of {work.sizes.timeout_s:g} s in all")
    print(f"{found.wall_s:9.1f} s of wall time, {found.bound_s:.1f} s is the bound of the waits")
    print(f"{found.ratio:9.3f} ratio (at most {RATIO_BOUND:.2f} is expected)")
    print(f"{num_processes:9d} processes, {process_s * 1e3:.0f} ms each where nothing else runs")
    print("          held: before, at most, after")
    for name, *counts in zip(
        found.before.__slots__, *map(astuple, (found.before, found.most, found.after)), strict=True
    ):
        print(f"{name:>13}: {', '.join(map(str, counts))}")
    print(f"{'memory':>13}: {', '.join(f'{size / _MIB:.0f} MiB' for size in found.memory_bytes)}")
    print(f"   load: {os.getloadavg()}, {os.cpu_count()} cores")


def main() -> None:
    # Not above: the tools' processes are forked from a server that imports this module.
    from soak_run import run
    from soak_work import Sizes

    parser = argparse.ArgumentParser(description="Thousands of requests whose tool fails.")
    parser.add_argument("--tokenizer", default="../shared/data/tokenizers/qwen2_5")
    parser.add_argument("--requests", type=int, default=Sizes.requests)
    parser.add_argument("--slots", type=int, default=Sizes.slots)
    parser.add_argument("--timeout-s", type=float, default=Sizes.timeout_s)
    parser.add_argument("--seed", type=int, default=Sizes.seed)
    asked = parser.parse_args()
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # a warning for each fault
    sizes = Sizes(asked.requests, asked.slots, asked.timeout_s, asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        report(*asyncio.run(run(asked.tokenizer, sizes, Path(folder))))


if __name__ == "__main__":
    main()
