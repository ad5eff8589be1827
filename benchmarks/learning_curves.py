"""Learning curves of several methods on the arithmetic task of the quick start, three seeds each.

Every run has the quick start's budget: 20 steps of 32 problems, 8 samples each. The seeds' problems
and warmed-up policies are made once and are the same for all methods; nothing but the keys of
`METHODS` differs. `docs/algorithms/learning_curves.png` is drawn by this file, whatever it shows.

Expectation before it was measured: `grpo`, `rloo`, `gspo` and `cispo` alike, for each step has two
updates and ratios stay near 1; `reinforce_plus_plus` behind them, for it has no baseline by
problem; `turn_rloo` with a discount by turn ahead in the first steps, for wasted turns cost.

Run: python -m benchmarks.learning_curves FOLDER [jobs]
(finished runs in FOLDER are not run again; each job takes one core and some three minutes)
"""

import concurrent.futures
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from agentrl.trainer.metrics.curve import Curves, Series, read_curves

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = ROOT / "examples/gsm8k_multiturn/quickstart.yaml"
PICTURE = ROOT / "docs/algorithms/learning_curves.png"
SEEDS = (0, 1, 2)
NUM_STEPS = 20
METHODS: dict[str, Sequence[str]] = {
    "grpo": ("algorithm.adv_estimator=grpo",),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "reinforce_plus_plus": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "gspo": (
        "actor.policy_loss=gspo",
        "actor.loss_agg_mode=seq-mean-token-mean",
        "actor.clip_ratio_low=3.0e-4",
        "actor.clip_ratio_high=4.0e-4",
    ),
    "cispo": ("actor.policy_loss=cispo", "actor.clip_ratio_high=0.28"),
    "turn_rloo": ("algorithm.adv_estimator=turn_rloo", "algorithm.gamma=0.9"),
}
"""By name of the curve: the overrides that make the method."""
_INK, _FAINT, _COLOUR, _HELD_OUT = "#222222", "#d9d9d9", "#2f4b7c", "#d1495b"


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    num_jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with concurrent.futures.ThreadPoolExecutor(num_jobs) as jobs:
        # The first run of a seed makes what the seed's others read.
        list(jobs.map(lambda seed: run(folder, "grpo", seed), SEEDS))
        others = [(name, seed) for name in METHODS if name != "grpo" for seed in SEEDS]
        list(jobs.map(lambda one: run(folder, *one), others))
    found = {
        name: [read_curves(place(folder, name, seed) / "metrics.jsonl") for seed in SEEDS]
        for name in METHODS
    }
    tell(found)
    draw(found).savefig(PICTURE, dpi=150, metadata={"Software": None})
    print(f"{PICTURE.relative_to(ROOT)}, load {os.getloadavg()[0]:.1f}")


def place(folder: Path, name: str, seed: int) -> Path:
    """Where a run is."""
    return folder / f"{name}_{seed}"


def run(folder: Path, name: str, seed: int) -> None:
    """Train, unless it was done before."""
    out, shared = place(folder, name, seed), folder / f"seed_{seed}"
    if (out / "summary.json").exists():
        return
    command = [
        sys.executable, "-m", "agentrl", "train", str(RUN_FILE), *METHODS[name],
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={out}",
        f"prepare.arithmetic.out_dir={shared}/data",
        f"prepare.tiny_policy.out_dir={shared}/policy",
        f"prepare.sft.out_dir={shared}/warmed_up",
        f"data.val_files={{arithmetic: {shared}/data/val.parquet}}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.test_freq=5", "trainer.save_freq=-1", "trainer.rollout_data_dir=null",
    ]  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("w") as log:
        subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    print(f"{name}, seed {seed}: done", flush=True)


def tell(found: dict[str, list[Curves]]) -> None:
    """Print the figures behind the curves."""
    print("| method | held out, before | after 5 steps | after 20 steps | seeds, after 20 |")
    print("| --- | --- | --- | --- | --- |")
    for name, curves in found.items():
        success = [curve.success["arithmetic"] for curve in curves]
        at = [dict(zip(one.steps, one.values, strict=True)) for one in success]
        means = [statistics.fmean(one[step] for one in at) for step in (0, 5, NUM_STEPS)]
        last = ", ".join(f"{one[NUM_STEPS]:.3f}" for one in at)
        print(f"| `{name}` | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.3f} | {last} |")


def draw(found: dict[str, list[Curves]]) -> Figure:
    """One panel for each method: the training reward of each seed, held-out success as points."""
    num_rows = -(-len(found) // 3)
    figure = Figure(figsize=(9, 2.6 * num_rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, 3, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, (name, curves) in zip(panels, found.items(), strict=False):
        frame(panel, name)
        for curve in curves:
            panel.plot(*curve.reward, color=_COLOUR, linewidth=0.8, alpha=0.45)
        panel.plot(*mean([curve.reward for curve in curves]), color=_COLOUR, linewidth=2.2)
        held_out = mean([curve.success["arithmetic"] for curve in curves])
        panel.plot(*held_out, color=_HELD_OUT, marker="o", markersize=4, linewidth=1.2)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    figure.supxlabel("training step", fontsize=9.5, color=_INK)
    figure.suptitle(
        "Blue: share of the training samples that are right (three seeds, and their mean).  "
        "Red: held-out problems, greedy, mean.",
        x=0.01, ha="left", fontsize=9.5, color=_INK,
    )  # fmt: skip
    return figure


def frame(panel: Axes, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=10.5, color=_INK)
    panel.set_ylim(0, 1)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.tick_params(labelsize=8.5, length=0, colors="#555555")
    panel.grid(axis="y", color=_FAINT, linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def mean(series: list[Series]) -> Series:
    """Average runs that measured at the same steps."""
    values = zip(*(one.values for one in series), strict=True)
    return Series(series[0].steps, tuple(statistics.fmean(at) for at in values))


if __name__ == "__main__":
    main()
