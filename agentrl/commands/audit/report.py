"""Run all checks on what a run saved, and print what differs.

The functions are those of the run itself: collation, rewards, credit and metrics of each step are
computed from the saved requests, and compared with the saved tokens and the logged metrics.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.commands.audit.batches import check_batch
from agentrl.commands.audit.integrity import (
    check_digests,
    check_pictures,
    check_recorded,
    check_steps,
    check_versions,
    check_weights,
)
from agentrl.commands.audit.prompts import DataRows, PromptOrder, check_rows
from agentrl.commands.audit.requests import (
    check_combined,
    check_exclusions,
    check_requests,
    check_template,
    check_validation,
    load_template,
)
from agentrl.commands.audit.resample import TurnChoice, resample
from agentrl.commands.audit.saved_run import TRAIN, Check, SavedRun, Step, read_run
from agentrl.errors import DataError
from agentrl.progress import NO_PROGRESS, Progress, ProgressDisplay
from agentrl.trainer.rollouts.token_files import token_path
from agentrl.trainer.setup.plugins import import_plugins
from agentrl.trainer.state.run_folder import check_run_folder

WHAT = {
    "digests": "files of rollouts and tokens, their chain, and pictures",
    "lines": "trajectories: tokens, masks, turns, states; each once, all samples",
    "rewards": "combined rewards, and token rewards by their placement",
    "advantages": "masks, log-probabilities, advantages, returns of tokens",
    "versions": "turns: the weights that sampled their tokens",
    "weights": "checkpoints: their weights with the digest of their step",
    "template": "trajectories: tokens against the template's rendering",
    "order": "prompts: rows of the data in the order of the seed",
    "data": "trajectories: what they have of their row, with the data",
    "metrics": "metrics that follow from the rows",
}
"""What each check compares, by its name."""
_MAX_SHOWN = 20


def audit(folder: Path, console: Console, *, num_resampled: int = 0, seed: int = 0) -> int:
    """Audit a run, and print a line for each check; return the number of differences.

    Args:
        folder: The run's folder.
        console: Where the result is printed.
        num_resampled: Number of turns whose log-probabilities are computed again.
        seed: Chooses these turns.

    Raises:
        DataError: If the folder has no saved rollouts of training, or no record of its start.
    """
    check_run_folder(folder)
    run = read_run(folder)
    if not any(file.kind == TRAIN for file in run.files):
        raise DataError(
            "no training rollouts are in the folder in which the run saved them",
            file=run.rollouts,
            expected="the files step_* of trainer.rollout_data_dir",
        )
    for one in run.folders:
        if folder.resolve() not in one.resolve().parents:
            console.print(f"rollouts: {one}", markup=False, highlight=False, soft_wrap=True)
    choice = TurnChoice(num_resampled, {0: None, **run.checkpoints}, random.Random(seed))
    checks = run_checks(run, choice, ProgressDisplay(console))
    table = Table("check", "compared", "differences", "what was compared", box=None)
    for one in checks:
        found = str(len(one.differences)) if one.num or one.differences else "-"
        table.add_row(one.name, str(one.num), found, Text(one.not_done or one.what))
    console.print(table)
    differences = [(one.name, found) for one in checks for found in one.differences]
    for name, found in differences[:_MAX_SHOWN]:
        console.print(f"\n{name}: {found.args[0]}", markup=False, highlight=False, soft_wrap=True)
        for key, value in found.details.items():
            console.print(f"  {key}: {value}", markup=False, highlight=False, soft_wrap=True)
    number = len(differences)
    what = f"{number} difference{'' if number == 1 else 's'}" if number else "no difference"
    console.print(f"\n{what}: {folder}", markup=False, highlight=False, soft_wrap=True)
    return number


def run_checks(
    run: SavedRun, choice: TurnChoice | None = None, progress: Progress = NO_PROGRESS
) -> list[Check]:
    """Run every check on every step, and compare the log-probabilities of chosen turns."""
    for start in run.starts:
        import_plugins(start.config.plugins)
    checks = {name: Check(name, what) for name, what in WHAT.items()}
    recorded = check_digests(checks["digests"], run)
    with checks["weights"].collecting():
        check_recorded(run, recorded)
    check_weights(checks["weights"], run, recorded)
    with checks["lines"].collecting():
        check_steps(checks["lines"], run)
    _check_files(checks, run, recorded, choice, progress)
    if choice is not None and choice.num:
        checks["resample"] = _resample(run, choice, recorded)
    return list(checks.values())


def _check_files(
    checks: Mapping[str, Check],
    run: SavedRun,
    recorded: Mapping[int, str],
    choice: TurnChoice | None,
    progress: Progress,
) -> None:
    """Check each file, in the order of the steps."""
    template, pictures = load_template(run.config, checks["template"]), set[str]()
    order, rows = PromptOrder(run), DataRows(checks["data"], run)
    with progress.bar("audit", len(run.files)) as advance:
        for file in filter(run.is_complete, run.files):
            with checks["lines"].collecting(file.path):
                step = run.read(file)
                with checks["digests"].collecting(file.path):
                    check_pictures(checks["digests"], step, pictures)
                with checks["versions"].collecting(file.path):
                    check_versions(checks["versions"], step, run, recorded)
                with checks["data"].collecting(file.path):
                    check_rows(checks["data"], step, rows.of(step))
                with checks["template"].collecting(file.path):
                    check_template(checks["template"], step, template)
                with checks["rewards"].collecting(file.path):
                    check_combined(checks["rewards"], step)
                if file.kind == TRAIN:
                    _check_training(checks, step, order)
                    if choice is not None:
                        choice.offer(step.path, step.sampled)
                else:
                    with checks["metrics"].collecting(file.path):
                        check_validation(checks["metrics"], step)
                check_requests(checks["lines"], step)
                check_exclusions(step)
            advance()


def _check_training(checks: Mapping[str, Check], step: Step, order: PromptOrder) -> None:
    with checks["order"].collecting(step.path):
        order.check(checks["order"], step)
    with checks["advantages"].collecting(token_path(step.path)):
        check_batch(checks["advantages"], checks["rewards"], checks["metrics"], step)


def _resample(run: SavedRun, choice: TurnChoice, recorded: Mapping[int, str]) -> Check:
    check = Check("resample", "", len(choice.chosen))
    if choice.left_out:
        versions = ", ".join(map(str, sorted(choice.left_out)))
        check.not_done = f"no checkpoint of weights of version {versions}; "
    if not choice.chosen:
        check.not_done += "no turn to compute again"
        return check
    with check.collecting():
        result = resample(run, choice, recorded)
        check.differences += result.differences
        check.what = (
            f"turns: log-probabilities of {result.num_tokens} tokens; largest difference "
            f"{result.largest:.2g} nats, largest mean of the same weights {result.largest_mean:.2g}"
        )
        check.not_done = check.not_done and check.not_done + check.what
    return check
