"""Check the prompts of a run: their order against the seed, and their rows against the data."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic_core import to_jsonable_python

from agentrl.commands.audit.requests import row_of
from agentrl.commands.audit.saved_run import TRAIN, VAL, Check, SavedRun, Step
from agentrl.data.dataset import PromptDataset, load_prompts
from agentrl.data.order import DataOrder
from agentrl.data.rows import Prompt
from agentrl.errors import AgentRLError, DataError
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.rollouts.pictures import PictureCollector
from agentrl.workers.checkpoint import STATE

_OF_ROW = (
    "data_source", "ground_truth", "extra_info", "tools_kwargs", "interaction_kwargs",
    "tool_selection", "columns",
)  # fmt: skip
"""Fields of a request that come from its row."""


class PromptOrder:
    """Checks that each place of the data has one row, in the order of the file.

    Data without its overlong prompts keeps the order of the file; which rows were left out is not
    known here.

    Args:
        run: The run; one of its checkpoints has the number of rows.
    """

    def __init__(self, run: SavedRun) -> None:
        self._places: dict[int, list[int]] = {}
        """Of each step's prompts, in the order of the data."""
        self._rows: list[tuple[int, int]] = []
        """Places and rows of earlier steps, sorted."""
        if (data := read_order(run)) is None:
            return
        config = run.config.data
        order = DataOrder(data["num_rows"], seed=config.seed, shuffle=config.shuffle)
        for step in run.training_steps:
            size = run.start_of(step).config.prompts_per_rollout
            num = int(run.logged[step].get("filter_groups/num_gen_batches", 1))
            batches = [order.next_batch(size) for _ in range(num)]
            self._places[step] = [place for batch in batches for place in batch]

    def check(self, check: Check, step: Step) -> None:
        """Check the prompts of a step; steps come in order."""
        if not self._places:
            check.not_done = "not done: no checkpoint has the number of rows"
            return
        places = self._places[step.number]
        check.num += len(places)
        for request in step.sampled:
            row, index = row_of(request), request.batch_data_id
            if row is None or index >= len(places):
                raise DataError(
                    f"prompt {index} of {len(places)}, row {row}",
                    file=step.path, request=request.request_id,
                )  # fmt: skip
            self._add(places[index], row, request, step)

    def _add(self, place: int, row: int, request: AsyncRolloutRequest, step: Step) -> None:
        found, at = (place, row), bisect_left(self._rows, (place, row))
        if self._rows[at : at + 1] == [found]:
            return
        for other in self._rows[max(0, at - 1) : at + 1]:
            if (other[0] < place) is not (other[1] < row) or other[0] == place:
                raise DataError(
                    f"row {row} is at place {place} of the data, and row {other[1]} at place "
                    f"{other[0]}",
                    file=step.path,
                    request=request.request_id,
                    expected="one row at each place, in the order of the file",
                )
        self._rows.insert(at, found)


def read_order(run: SavedRun) -> Mapping[str, Any] | None:
    """Read the state of the data's order from the first checkpoint that has one."""
    for _, path in sorted(run.checkpoints.items()):
        with suppress(OSError, ValueError, KeyError):  # a damaged checkpoint is found elsewhere
            return json.loads((path / STATE).read_bytes())["data"]
    return None


def load_rows(check: Check, run: SavedRun, kind: str) -> dict[int, Prompt]:
    """Load the rows of files of a kind by index; empty if they cannot be loaded."""
    data = run.config.data
    files, limit = data.train_files, data.train_max_samples
    if kind != TRAIN:
        files, limit = [data.val_files[kind.removeprefix(VAL)]], data.val_max_samples
    try:
        rows = load_prompts(files, data, max_samples=limit)
    except (AgentRLError, OSError) as error:
        check.not_done = f"not done: no data: {error}".splitlines()[0]
        return {}
    if kind == TRAIN:
        with check.collecting():
            _check_fingerprint(check, run, rows)
    return {prompt.index: prompt for prompt in rows}


def _check_fingerprint(check: Check, run: SavedRun, rows: PromptDataset) -> None:
    saved = read_order(run)
    if saved is None or saved["num_rows"] != len(rows):
        check.not_done = "the fingerprint is not compared: rows were left out, or no checkpoint"
    elif rows.fingerprint != saved["fingerprint"]:
        raise DataError(
            "the data is not that of the run",
            file=", ".join(map(str, run.config.data.train_files)),
            saved=saved["fingerprint"],
            found=rows.fingerprint,
        )


def check_rows(check: Check, step: Step, rows: Mapping[int, Prompt]) -> None:
    """Compare what the requests have of their rows with the data."""
    made = dict[int, AsyncRolloutRequest]()
    for request in step.requests if rows else ():
        check.num += 1
        row, where = row_of(request), {"file": step.path, "request": request.request_id}
        if row is None or row not in rows:
            raise DataError(f"the data has no row {row}", **where)
        if row not in made:
            made[row] = AsyncRolloutRequest.from_prompt(rows[row])
        expected = _of_row(made[row], made[row])
        for name, value in _of_row(request, made[row]).items():
            if value != expected[name]:
                raise DataError(
                    f"{name} is not that of row {row} of the data",
                    **where, saved=value, expected=expected[name],
                )  # fmt: skip


def _of_row(request: AsyncRolloutRequest, row: AsyncRolloutRequest) -> dict[str, str]:
    """Return what a request has of its row, as JSON.

    Messages are compared if the run checked the tokens, and no program of a user wrote them.
    """
    found: dict[str, Any] = {name: getattr(request, name) for name in _OF_ROW}
    if request.is_checked and request.agent_run is None and not row.multi_modal_data:
        root = next((one for one in request.sequences if one.parent_id is None), request)
        found["messages"] = [(one.role, one.text) for one in root.messages[: len(row.messages)]]
    elif request is row:
        found["messages"] = [(one.role, one.text) for one in row.messages]
    return {
        name: json.dumps(
            to_jsonable_python(
                value,
                fallback=PictureCollector().plain,
                bytes_mode="base64",
                inf_nan_mode="constants",
            )
        )
        for name, value in found.items()
    }
