"""A program that calls one agent function: `call_function.py FOLDER module:function < row.json`.

`rollout.agent.isolation: process` runs it for each request. It imports nothing of agentrl, so that
it starts fast; modules are also found in FOLDER. The record has the attributes of
`agentrl.agent_loops.external.AgentRecord`.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def make_record(row: dict[str, Any]) -> SimpleNamespace:
    """Make the record from the environment variables and the row."""
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["AGENTRL_API_KEY"]
    anthropic_base_url = os.environ["ANTHROPIC_BASE_URL"]
    return SimpleNamespace(
        base_url=base_url,
        key=key,
        row=row,
        request_id=os.environ["AGENTRL_REQUEST_ID"],
        model=os.environ["AGENTRL_MODEL"],
        anthropic_base_url=anthropic_base_url,
        openai={"base_url": base_url, "api_key": key},
        anthropic={"base_url": anthropic_base_url, "api_key": key},
        environment=dict(os.environ),
    )


def load_function(path: str) -> Any:
    """Load `package.module:function` or `path/to/file.py:function`."""
    module_path, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if module_path.endswith(".py"):
        spec = importlib.util.spec_from_file_location("agent", module_path)
        if spec is None or spec.loader is None:
            sys.exit(f"no Python file {module_path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["agent"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_path)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


async def _await(value: Any) -> Any:
    return await value


def main() -> None:
    """Call the function, and print its reward as the last line."""
    record = make_record(json.load(sys.stdin))
    folder, path = sys.argv[1:]
    sys.path[0] = folder  # it was the folder of this file
    returned = load_function(path)(record)
    if inspect.isawaitable(returned):
        returned = asyncio.run(_await(returned))
    reward = returned.get("reward") if isinstance(returned, dict) else returned
    if reward is not None:
        print(f"\n{json.dumps({'reward': reward})}", flush=True)


if __name__ == "__main__":
    main()
