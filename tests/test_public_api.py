"""What can be imported from where, what that costs, and how errors travel."""

import importlib
import inspect
import pickle
import subprocess
import sys

import pytest

from agentrl import errors

HEAVY = ("torch", "ray", "sglang", "transformers", "datasets", "tensordict", "matplotlib")
OPTIONAL = (
    "aiohttp", "bm25s", "gymnasium", "httpx", "math_verify", "mcp", "openai", "ruff",
    "sandlock",
)  # fmt: skip
"""What only some plug-ins need, or which is slow to import: loaded where it is first used."""
LIGHT_MODULES = (
    "agentrl",
    "agentrl.tools",
    "agentrl.interactions",
    "agentrl.rollout",
    "agentrl.agent_loops",
    "agentrl.rewards",
    "agentrl.sandbox",
    "agentrl.clients.chat",
    "agentrl.engines",
    "agentrl.config",
    "agentrl.data",
    "agentrl.cli",
    "agentrl.cluster",
)
NAMES = {
    "agentrl": ["DataProto", "load_config", "parse_config", "Trainer"],
    "agentrl.tools": [
        "BaseTool", "ToolResponse", "ToolResult", "ToolError", "function_tool",
        "OpenAIFunctionToolSchema", "initialize_tools_from_config",
    ],
    "agentrl.interactions": [
        "BaseInteraction", "InteractionResult", "initialize_interactions_from_config",
    ],
    "agentrl.rollout": [
        "AsyncRolloutRequest", "RequestState", "StopReason", "FinishReason", "TRANSITIONS",
        "RolloutManager",
    ],
    "agentrl.agent_loops": [
        "AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "AsyncLLMServerManager",
        "DictConfigWrap", "SingleTurnAgentLoop", "TokenOutput", "ToolListWrap", "register",
    ],
    "agentrl.trainer.agent_loop_manager": ["AgentLoopManager", "AgentLoopWorker"],
    "agentrl.engines": [
        "Engine", "Completion", "FinishReason", "SamplingParams", "TransformersEngine",
        "ScriptedEngine",
    ],
    "agentrl.rewards": ["register_reward_manager"],
    "agentrl.algorithms": [
        "register_adv_est", "get_adv_estimator_fn", "register_policy_loss", "get_policy_loss_fn",
        "kl_penalty", "agg_loss",
    ],
    "agentrl.cluster": [
        "Dispatch", "Execute", "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup",
        "ResourcePool", "Worker", "WorkerGroup", "create_colocated_worker_cls", "register",
    ],
    "agentrl.collate": ["generate_sequences"],
    "agentrl.config": ["RunConfig"],
    "agentrl.data": ["Prompt"],
    "agentrl.rollout.tool_parsers": ["ToolParser", "register_tool_parser"],
}  # fmt: skip
"""Public names, by module."""
NO_EXPORT_LIST = (
    "agentrl.trainer.agent_loop_manager",
    "agentrl.collate",
    "agentrl.config",
    "agentrl.data",
)
PUBLIC_NAMES = [(module_name, name) for module_name, names in NAMES.items() for name in names]
METHODS = {
    "agentrl.tools.BaseTool": [
        "create", "execute", "calc_reward", "release", "get_openai_tool_schema",
    ],
    "agentrl.interactions.BaseInteraction": [
        "start_interaction", "generate_response", "calculate_score", "finalize_interaction",
    ],
    "agentrl.engines.Engine": [
        "generate", "generate_together", "abort", "update_weights", "sleep", "wake",
        "flush_cache", "close",
    ],
    "agentrl.rollout.RolloutManager": ["rollout"],
    "agentrl.Trainer": ["fit"],
}  # fmt: skip
FIELDS = {
    "agentrl.tools.ToolResult": ["response", "reward", "metrics", "should_stop"],
    "agentrl.interactions.InteractionResult": ["should_terminate", "content", "score", "metadata"],
}
ERRORS = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, errors.AgentRLError)
]


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def find(path: str) -> object:
    module_name, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module_name), name)


# What importing costs.


def test_light_modules_load_nothing_heavy():
    imports = "; ".join(f"import {module_name}" for module_name in LIGHT_MODULES)
    slow = {*HEAVY, *OPTIONAL}
    done = run_python(f"import sys; {imports}; print(*{slow} & set(sys.modules))")
    assert (done.stdout.split(), done.stderr) == ([], "")


def test_names_that_users_subclass_load_nothing_heavy():
    names = (
        "from agentrl.tools import BaseTool, ToolError, function_tool;"
        "from agentrl.interactions import BaseInteraction;"
        "from agentrl.rollout import AsyncRolloutRequest, TRANSITIONS, RequestState, StopReason;"
        "from agentrl.rewards import register_reward_manager;"
        "from agentrl.engines import ScriptedEngine, SamplingParams;"
        "from agentrl import load_config"
    )
    done = run_python(f"import sys; {names}; print(*set({HEAVY}) & set(sys.modules))")
    assert (done.stdout.split(), done.stderr) == ([], "")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]):
    program = (
        f"import sys, atexit; sys.argv = ['agentrl', *{arguments}];"
        f"atexit.register(lambda: print('loaded:', *set({HEAVY}) & set(sys.modules)));"
        "from agentrl.cli import main; main()"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


# Public names.


@pytest.mark.parametrize(("module_name", "name"), PUBLIC_NAMES)
def test_public_name_is_exported_by_its_module(module_name: str, name: str):
    module = importlib.import_module(module_name)
    assert getattr(module, name) is not None
    assert name in getattr(module, "__all__", [name])


@pytest.mark.parametrize("path", METHODS)
def test_public_methods_are_there(path: str):
    missing = [name for name in METHODS[path] if not callable(getattr(find(path), name, None))]
    assert not missing


@pytest.mark.parametrize("path", FIELDS)
def test_results_are_named_tuples_of_the_public_fields(path: str):
    assert list(getattr(find(path), "_fields", ())) == FIELDS[path]


@pytest.mark.parametrize("module_name", [name for name in NAMES if name not in NO_EXPORT_LIST])
def test_exports_are_unique_and_documented(module_name: str):
    module = importlib.import_module(module_name)
    assert len(set(module.__all__)) == len(module.__all__)
    undocumented = [
        name
        for name in module.__all__
        if inspect.isclass(found := getattr(module, name)) or inspect.isfunction(found)
        if not inspect.getdoc(found)
    ]
    assert not undocumented
    assert inspect.getdoc(module)


@pytest.mark.parametrize("module_name", ["agentrl", "agentrl.rollout", "agentrl.engines"])
def test_lazy_module_refuses_unknown_names_as_any_module_does(module_name: str):
    module = importlib.import_module(module_name)
    with pytest.raises(AttributeError, match=f"'{module_name}' has no attribute 'nothing'"):
        _ = module.nothing


# Errors.


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_survive_pickling_with_their_details(kind: type[errors.AgentRLError]):
    error = kind("it broke", file="run.yaml", key="data.seed", expected="an integer", row=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.details == error.details
    assert (again.key, again.row) == ("data.seed", 3)


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_inherit_a_standard_one_and_have_message_and_details(
    kind: type[errors.AgentRLError],
):
    error = kind("it broke", file="run.yaml", expected="something else")
    assert str(error).splitlines() == ["it broke", "  file: run.yaml", "  expected: something else"]
    assert inspect.getdoc(kind)
    standard = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert len(standard) > 3 or kind in (errors.AgentRLError, errors.ToolError)


def test_absent_details_are_left_out_and_unknown_ones_are_attribute_errors():
    error = errors.ConfigError("it broke", file=None)
    assert error.details == {}
    with pytest.raises(AttributeError, match="file"):
        _ = error.file
