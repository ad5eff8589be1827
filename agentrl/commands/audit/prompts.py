"""Check the prompts of a run: their order against the seed, and their rows against the data."""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic_core import to_jsonable_python

from agentrl.commands.audit.requests import row_of
from agentrl.commands.audit.saved_run import TRAIN, VAL, Check, SavedRun, Step
from agentrl.config.schema.run import DataConfig
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
    """Checks that each position of the data has one row, in the order of the file.

    Data without its overlong prompts keeps the order of the file; which rows were left out is not
    known here.

    Args:
        run: The run; one of its checkpoints has the number of rows.
    """

    def __init__(self, run: SavedRun) -> None:
        self._positions: dict[int, list[int]] = {}
        """Of each step's prompts, in the order of the data."""
        self._rows: list[tuple[int, int]] = []
        """Positions and rows of earlier steps, sorted."""
        data = read_order(run)
        self._why_not = "no checkpoint has the number of rows" if data is None else ""
        if run.config.data.sampler is not None:
            self._why_not = "data.sampler orders the rows"
        if data is None or self._why_not:
            return
        config = run.config.data
        order = DataOrder(data["num_rows"], seed=config.seed, shuffle=config.shuffle)
        for step in run.training_steps:
            size = run.start_of(step).config.prompts_per_rollout
            num = run.logged[step].get("filter_groups/num_gen_batches", 1)
            if not math.isfinite(num):
                break  # the positions of later steps depend on it
            batches = [order.next_batch(size) for _ in range(int(num))]
            self._positions[step] = [position for batch in batches for position in batch]

    def check(self, check: Check, step: Step) -> None:
        """Check the prompts of a step; steps come in order."""
        if self._why_not:
            check.not_done = f"not done: {self._why_not}"
            return
        if (positions := self._positions.get(step.number)) is None:
            raise DataError(
                "the step has no rollout metrics, or an earlier one no number of batches",
                file=step.path,
                expected="rollout/num_requests and a finite filter_groups/num_gen_batches",
            )
        check.num += len(positions)
        for request in step.sampled:
            row, index = row_of(request), request.batch_data_id
            if row is None or index >= len(positions):
                raise DataError(
                    f"prompt {index} of {len(positions)}, row {row}",
                    file=step.path, request=request.request_id,
                )  # fmt: skip
            self._add(positions[index], row, request, step)

    def _add(self, position: int, row: int, request: AsyncRolloutRequest, step: Step) -> None:
        found, at = (position, row), bisect_left(self._rows, (position, row))
        if self._rows[at : at + 1] == [found]:
            return
        for other in self._rows[max(0, at - 1) : at + 1]:
            if (other[0] < position) is not (other[1] < row) or other[0] == position:
                raise DataError(
                    f"row {row} is at position {position} of the data, and row {other[1]} at "
                    f"position {other[0]}",
                    file=step.path,
                    request=request.request_id,
                    expected="one row at each position, in the order of the file",
                )
        self._rows.insert(at, found)


def read_order(run: SavedRun) -> Mapping[str, Any] | None:
    """Read the state of the data's order from the first checkpoint that has one."""
    for _, path in sorted(run.checkpoints.items()):
        # A damaged checkpoint is found elsewhere.
        with suppress(OSError, ValueError, LookupError, TypeError):
            data = json.loads((path / STATE).read_bytes())["data"]
            return {"num_rows": int(data["num_rows"]), "fingerprint": data["fingerprint"]}
    return None


class DataRows:
    """Loads the rows of the data, once for each kind of file and configuration.

    Args:
        check: Gets the reason if rows cannot be loaded, and a difference if they are other rows.
        run: The run; one of its checkpoints has the fingerprint of the training data.
    """

    def __init__(self, check: Check, run: SavedRun) -> None:
        self._check = check
        self._run = run
        self._loaded: dict[tuple[str, str], dict[int, Prompt]] = {}

    def of(self, step: Step) -> dict[int, Prompt]:
        """Return the rows of a step's data by index; empty if they cannot be loaded."""
        key = step.file.kind, step.config.data.model_dump_json()
        if key not in self._loaded:
            rows = self._load(step.file.kind, step.config.data)
            self._loaded[key] = {} if rows is None else {prompt.index: prompt for prompt in rows}
        return self._loaded[key]

    def _load(self, kind: str, data: DataConfig) -> PromptDataset | None:
        files, limit = list(data.train_files), data.train_max_samples
        if kind != TRAIN:
            if (file := data.val_files.get(name := kind.removeprefix(VAL))) is None:
                self._check.not_done = f"not done: no data file of {name}"
                return None
            files, limit = [file], data.val_max_samples
        try:
            rows = load_prompts(files, data, max_samples=limit)
        except (AgentRLError, OSError) as error:
            self._check.not_done = f"not done: no data: {error}".splitlines()[0]
            return None
        if kind == TRAIN:
            with self._check.collecting():
                self._check_fingerprint(rows, data)
        return rows

    def _check_fingerprint(self, rows: PromptDataset, data: DataConfig) -> None:
        saved = read_order(self._run)
        if saved is None or saved["num_rows"] != len(rows):
            self._check.not_done = (
                "the fingerprint is not compared: rows were left out, or no checkpoint"
            )
        elif rows.fingerprint != saved["fingerprint"]:
            raise DataError(
                "the data is not that of the run",
                file=", ".join(map(str, data.train_files)),
                saved=saved["fingerprint"],
                found=rows.fingerprint,
            )


def check_rows(check: Check, step: Step, rows: Mapping[int, Prompt]) -> None:
    """Compare what the requests have of their rows with the data."""
    made = dict[int, tuple[AsyncRolloutRequest, dict[str, str]]]()
    for request in step.requests if rows else ():
        check.num += 1
        row, where = row_of(request), {"file": step.path, "request": request.request_id}
        if row is None or row not in rows:
            raise DataError(f"the data has no row {row}", **where)
        if row not in made:
            of_data = AsyncRolloutRequest.from_prompt(rows[row])
            made[row] = of_data, _of_row(of_data, of_data)
        of_data, expected = made[row]
        for name, value in _of_row(request, of_data).items():
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
