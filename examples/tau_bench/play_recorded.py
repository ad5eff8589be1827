"""Play the recorded actions of every task and print the mean score: a check of the adapter.

A script takes the policy's place, and the user states the task once, so no model is asked. With
all recorded actions every task must score 1.0; without the last action fewer must.

    python examples/tau_bench/tau_retail.py data/tau_retail.jsonl
    python examples/tau_bench/play_recorded.py /models/Qwen2.5-0.5B-Instruct data/tau_retail.jsonl
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl import Trainer, load_config
from agentrl.data.files import read_rows
from agentrl.engines import SamplingParams, ScriptedEngine
from agentrl.interactions import BaseInteraction, InteractionResult

RUN_FILE = Path(__file__).with_name("run.yaml")


class StatesTheTask(BaseInteraction):
    """A user who says what the task is and has nothing to add."""

    async def start_interaction(self, instance_id: Any = None, goal: str = "", **_: Any) -> Any:
        """Say the task."""
        return instance_id, goal

    async def generate_response(self, *_: Any, **__: Any) -> InteractionResult:
        """End the conversation."""
        return InteractionResult(should_terminate=True)


def play(model: str, rows: Sequence[dict[str, Any]], *, num_left_out: int) -> float:
    """Return the mean score of all rows.

    Args:
        model: A model folder with a Qwen2.5 tokenizer. Its weights are loaded and not asked.
        rows: From `tau_retail.py`.
        num_left_out: Actions that are not played, from the last one on.
    """

    def script(_ids: Sequence[int], _sampling: SamplingParams, request_id: str, turn: int) -> str:
        row = rows[int(request_id.rsplit("-", 3)[1])]  # PLAN-STEP-ROW-INDEX-SAMPLE
        actions = row["extra_info"]["actions"]
        actions = actions[: len(actions) - num_left_out]
        if turn == len(actions):
            return f"Done: {', '.join(row['reward_model']['ground_truth'])}."
        call = '{{"name": "{name}", "arguments": {arguments}}}'.format_map(actions[turn])
        return f"<tool_call>\n{call}\n</tool_call>"

    overrides = [
        f"model.path={model}",
        "rollout.multi_turn.interaction_config_path=null",
        "trainer.val_only=true",
        f"trainer.default_local_dir=runs/tau_recorded_{num_left_out}",
    ]
    summary = Trainer(
        load_config(RUN_FILE, overrides),
        interactions=[StatesTheTask({"name": "user"})],
        val_rows={"recorded": rows},
        engine=lambda _model, tokenizer: ScriptedEngine(script, tokenizer=tokenizer),
    ).fit()
    assert summary.val_success_before is not None
    return summary.val_success_before


if __name__ == "__main__":
    recorded = read_rows(sys.argv[2])
    print("all actions:", play(sys.argv[1], recorded, num_left_out=0))
    print("without the last:", play(sys.argv[1], recorded, num_left_out=1))
