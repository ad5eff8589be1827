"""The retail domain of tau-bench: 16 tools over one database, its tasks as rows, its score.

`python examples/tau_bench/tau_retail.py FILE` writes the 115 test tasks as rows.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tau_bench.envs.retail.data import load_data
from tau_bench.envs.retail.tasks_test import TASKS_TEST
from tau_bench.envs.retail.tools import ALL_TOOLS
from tau_bench.envs.retail.wiki import WIKI

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.tools import BaseTool, ToolError, ToolResult

TOOLS = {tool.get_info()["function"]["name"]: tool for tool in ALL_TOOLS}
TRANSFER = "transfer_to_human_agents"
"""Calling it ends the conversation. Its `calc_reward` compares the databases."""
DATABASES: dict[str, dict[str, Any]] = {}
"""One database for each conversation: all tools of a request get the same `instance_id`."""


class RetailTool(BaseTool):
    """One of the domain's tools; `config.tool` is its name."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the domain's own schema."""
        return OpenAIFunctionToolSchema(**TOOLS[self.config["tool"]].get_info())

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        """Load the conversation's database once."""
        if instance_id not in DATABASES:
            DATABASES[instance_id] = load_data()
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> ToolResult:
        """Run the tool on the conversation's database."""
        try:
            text = TOOLS[self.name].invoke(DATABASES[instance_id], **parameters)
        except Exception as error:
            raise ToolError(f"Error: {error}") from error
        return ToolResult(text, should_stop=self.name == TRANSFER)

    async def calc_reward(self, instance_id: str, actions: Any = (), **_: Any) -> float:
        """Return 1.0 if the database is as the task's own actions leave it."""
        if self.name != TRANSFER:
            return 0.0
        expected = load_data()
        for action in actions:
            TOOLS[action["name"]].invoke(expected, **json.loads(action["arguments"]))
        return float(DATABASES[instance_id] == expected)

    async def release(self, instance_id: str, **_: Any) -> None:
        """Drop the conversation's database."""
        DATABASES.pop(instance_id, None)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **_: Any
) -> dict[str, float]:
    """Return 1.0 if the database is right and the policy said every required output."""
    said = [m["content"].lower() for m in extra_info["messages"] if m["role"] == "assistant"]
    said = [text.replace(",", "") for text in said]
    database = extra_info["rollout_reward_scores"][TRANSFER]
    outputs = float(all(any(o.lower() in text for text in said) for o in ground_truth or ()))
    return {"score": database * outputs, "database": database, "outputs": outputs}


def make_row(task: Any) -> dict[str, Any]:
    """Return a task as a row; arguments are JSON text, so that all rows have one Parquet type."""
    actions = [{"name": a.name, "arguments": json.dumps(a.kwargs)} for a in task.actions]
    score = {"calc_reward_kwargs": {"actions": [a for a in actions if a["name"] != TRANSFER]}}
    return {
        "prompt": [{"role": "system", "content": WIKI}],
        "data_source": "tau_bench/retail",
        "reward_model": {"ground_truth": task.outputs},
        "extra_info": {
            "tools_kwargs": {TRANSFER: score},
            "interaction_kwargs": {"name": "user", "goal": task.instruction},
            "actions": actions,
        },
    }


if __name__ == "__main__":
    lines = [json.dumps(make_row(task)) for task in TASKS_TEST]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
