"""Draw the quick start's task as three agents learn it: `docs/agent_curves.png`.

The state machine, an AgentLoop, and a loop around OpenAI's client that goes through the gateway,
with the same problems, policy and seed. Each run is `agentrl train RUN_FILE` with
`trainer.default_local_dir=FOLDER/NAME trainer.total_training_steps=12 trainer.test_freq=3` and
`prepare.*.out_dir` the same for all.

Run: python -m benchmarks.agent_curves FOLDER
"""

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.trainer.metrics.curve import read_curves
from benchmarks.learning_curves import frame

PICTURE = Path(__file__).resolve().parents[1] / "docs/agent_curves.png"
RUNS = {
    "state_machine": ("state machine", "#2f4b7c"),
    "agent_loop": ("AgentLoop", "#2a9d8f"),
    "gateway": ("openai client, through the gateway", "#d1495b"),
}
"""By folder: the name and the colour of the curve."""


def main() -> None:
    folder = Path(sys.argv[1])
    figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    reward, success = figure.subplots(1, 2, sharex=True, sharey=True)
    frame(reward, "training reward")
    frame(success, "success on 256 held-out problems")
    success.set_ylim(0, 1.03)
    for name, (label, colour) in RUNS.items():
        curves = read_curves(folder / name / "metrics.jsonl")
        found = curves.success["arithmetic"]
        reward.plot(*curves.reward, color=colour, linewidth=1.6, label=label)
        success.plot(*found, color=colour, marker="o", markersize=4, linewidth=1.6)
        print(label, dict(zip(found.steps, found.values, strict=True)))
    reward.legend(loc="lower right", frameon=False, fontsize=9)
    figure.supxlabel("training step", fontsize=9.5)
    figure.savefig(PICTURE, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
