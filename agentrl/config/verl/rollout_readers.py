"""Readers of the values of generation; see `agentrl.config.verl.mapping`.

verl 0.6.1 has two rollouts. `rollout.mode: sync` is the request state machine that agentrl keeps;
`async` are its agent loops. Each reads keys that the other does not.
"""

from typing import Any

from agentrl.config.verl.mapping import (
    Ignored,
    KeyMapping,
    Mapped,
    Tree,
    Unsupported,
    count,
    integer,
)
from agentrl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
OUR_TURNS = "rollout.multi_turn"
OUR_ENGINE = "rollout.engine.name"

ENGINES = {
    "sglang": "sglang",
    "sglang_async": "sglang",
    "vllm": "auto",
    "hf": "transformers",
}
"""agentrl's engine for each of verl's."""


def is_async(tree: Tree) -> bool:
    """Whether verl would roll out with agent loops, not with its request state machine."""
    return tree.value(f"{ROLLOUT}.mode") == "async"


def has_turns(tree: Tree) -> bool:
    """Whether a tool, an interaction or an agent loop may make a conversation of several turns."""
    paths = ("tool_config_path", "function_tool_path", "interaction_config_path")
    loops = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.agent.agent_loop_config_path"
    return any(tree.value(f"{TURNS}.{path}") for path in paths) or any(map(tree.is_changed, loops))


def engine(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Choose agentrl's engine for verl's."""
    if value is None:
        return Mapped()
    chosen = ENGINES.get(str(value))
    if chosen is None:
        raise ConfigError(
            f"agentrl has no engine {value!r}", expected=f"one of {', '.join(ENGINES)}"
        )
    if tree.value(OUR_ENGINE):
        return Mapped(note=f"{OUR_ENGINE} is given and replaces it")
    if chosen == "auto":
        return Mapped(note=f"the best engine that is installed, not {value}")
    return Mapped({OUR_ENGINE: chosen})


def of_sglang(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Unsupported:
    """Take a server argument that the user chose, if the engine is SGLang.

    verl's default is not taken: it is meant for other machines than those that agentrl starts on.
    """
    ours = tree.value(OUR_ENGINE) or tree.value(f"{ROLLOUT}.engine.name")
    if not str(ours or ENGINES.get(str(tree.value(f"{ROLLOUT}.name")))).startswith("sglang"):
        return Unsupported(row.note)
    if tree.is_chosen(row.name):
        return Mapped({row.ours[0]: value})
    message = f"verl's default is not taken; see {row.ours[0]}"
    return Mapped(note=message) if tree.is_given(row.name) else Unsupported(message)


def bucket_megabytes(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the size of a bucket of weights."""
    return Mapped({"weight_sync.bucket_bytes": integer(value) * 1024**2})


def rollout_mode(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Show tools to the policy, and read its calls, as verl does in the chosen rollout."""
    if value not in ("sync", "async"):
        raise ConfigError(f"is {value!r}", expected="sync or async")
    if not (tree.value(f"{TURNS}.tool_config_path") or tree.value(f"{TURNS}.function_tool_path")):
        return Mapped()
    is_sync = value == "sync"
    theirs = {
        "check_tool_arguments": False,
        "tool_schema_style": f"verl_{value}",
        "on_malformed_call": "stop" if is_sync else "stop_unreadable",
        "tools_per_row": "tools_kwargs" if is_sync else "all",
    }
    settings = {
        f"{OUR_TURNS}.{key}": setting
        for key, setting in theirs.items()
        if not (tree.is_given(f"{OUR_TURNS}.{key}") or tree.is_given(f"{TURNS}.{key}"))
    }
    return Mapped(settings, (_IN_SYNC if is_sync else _IN_ASYNC) if settings else "")


_AGENT = "rollout.agent"
_NO_LOOPS = "verl's sync rollout is the request state machine and runs no agent loops"


def default_agent_loop(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the agent loop that the user chose.

    verl's default samples one turn. Without a choice agentrl's state machine drives the requests,
    which does the same if there are no tools.
    """
    if not tree.is_given(f"{ROLLOUT}.agent.default_agent_loop"):
        return Mapped()
    if not is_async(tree):
        return Ignored(_NO_LOOPS)
    return Mapped({f"{_AGENT}.default_agent_loop": value})


def agent_loop_config_path(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the file of agent loops."""
    if value is None:
        return Mapped()
    if not is_async(tree):
        return Ignored(_NO_LOOPS)
    return Mapped({f"{_AGENT}.agent_loop_config_path": value})


_MIXED = (
    "a turn with a call that cannot be read ends the request, even if another call of it can be"
)
_IN_SYNC = f"as in verl, a row is shown only the tools of its tools_kwargs; {_MIXED}"
_IN_ASYNC = (
    f"a row has every tool of the run; {_MIXED}; every call of a turn is "
    "executed, and verl drops those beyond max_parallel_calls (1 by default)"
)


def multi_turn_enabled(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Refuse tools and interactions that verl would not call."""
    paths = [f"{TURNS}.tool_config_path", f"{TURNS}.interaction_config_path"]
    idle = [path for path in paths if tree.value(path)]
    if not value and idle and not is_async(tree):
        raise ConfigError(
            f"is false, so verl would roll out a single turn and never use {' and '.join(idle)}",
            expected=f"{TURNS}.enable=true, or a file without them",
        )
    return Mapped()


def max_assistant_turns(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the limit of assistant turns; agent loops also stop at `max_user_turns` + 1.

    Without a limit verl allows a third of the model's length in turns, which is never reached.
    """
    users = tree.value(f"{TURNS}.max_user_turns") if is_async(tree) else None
    # In verl a limit of 0 means no limit.
    limits = [integer(value)] if value else []
    limits += [integer(users, f"{TURNS}.max_user_turns") + 1] if users else []
    return Mapped({f"{OUR_TURNS}.max_assistant_turns": min(limits)} if limits else {})


def max_user_turns(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the limit of an interaction's replies; agent loops also count tool answers."""
    if value is None or is_async(tree):
        return Mapped(part_of=f"{TURNS}.max_assistant_turns" if value else "")
    return Mapped({f"{OUR_TURNS}.max_user_turns": value})


def observation_budget(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take characters as tokens; if verl cuts nothing, allow the whole response budget."""
    longest = count(tree, "data.max_response_length")
    if not tree.is_changed(row.name) and not is_async(tree):
        note = "verl's sync rollout cuts no tool response; here the response's budget is the limit"
        return Mapped({row.ours[0]: longest}, note if has_turns(tree) else "")
    cuts = "" if is_async(tree) else "; verl's sync rollout cuts nothing"
    note = f"tokens here, characters in verl{cuts}" if has_turns(tree) else ""
    return Mapped({row.ours[0]: min(integer(value), longest)}, note)


def parallel_calls(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take how many calls of one request run at once; agentrl drops none."""
    if not tree.is_chosen(row.name):
        return Mapped()
    there = "drops the calls beyond it" if is_async(tree) else "does not read it"
    note = f"how many run at once, the others queue; verl {there}"
    return Mapped({row.ours[0]: value}, note if has_turns(tree) else "")


def tool_format(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the tool-call format; verl's request path derives it from the tokenizer."""
    if not is_async(tree):
        return Ignored("verl's sync rollout, and agentrl, derive the format from the template")
    return Mapped({row.ours[0]: value} if tree.is_chosen(row.name) else {})


def token_check(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take how the tokens are checked; verl's strict check warns, and agentrl's would refuse."""
    if value == "strict":
        return Mapped(note="differences are recorded and stop nothing, as in verl")
    return Mapped({row.ours[0]: value})


def val_temperature(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take validation's temperature; verl's sync rollout reads it only if validation samples."""
    samples = is_async(tree) or tree.value(f"{ROLLOUT}.val_kwargs.do_sample")
    if value and not samples:
        return Ignored("val_kwargs.do_sample is false, so validation is greedy")
    return Mapped({row.ours[0]: value if samples else 0.0})


def do_sample(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Read whether validation samples; verl's agent loops do not read it."""
    if is_async(tree):
        return Ignored("verl's agent loops sample validation by val_kwargs.temperature alone")
    return Mapped(part_of=f"{ROLLOUT}.val_kwargs.temperature")


def top_k(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take `top_k`, which verl's agent loops send to no engine."""
    if is_async(tree):
        return Ignored("verl's agent loops do not pass it to the engine")
    return Mapped({row.ours[0]: value})


def over_sample_rate(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Wait for every request; verl cancels the slowest share and trains on the rest."""
    note = (
        f"read as 0: every request is finished and trained; verl cancels the last {value} of them. "
        "rollout.request_timeout_s limits each"
    )
    return Mapped(note=note if value else "")
