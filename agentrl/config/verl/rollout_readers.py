"""How values of generation are read: the engine, the conversation, validation.

verl 0.6.1 has two rollouts. `rollout.mode: sync` is the request state machine that agentrl keeps;
`async` are its agent loops, which read keys that the other does not.
"""

from typing import Any

from agentrl.config.verl.mapping import Left, Reader, Reading, Tree, Unused, count, integer
from agentrl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
OURS_TURNS = "rollout.multi_turn"
OUR_ENGINE = "rollout.engine.name"

ENGINES = {
    "sglang": "sglang",
    "sglang_async": "sglang",
    "vllm": "auto",
    "hf": "transformers",
}
"""verl's engines, and ours."""


def is_async(tree: Tree) -> bool:
    """Whether verl would roll out with agent loops, not with its request state machine."""
    return tree.value(f"{ROLLOUT}.mode") == "async"


def engine(value: Any, tree: Tree) -> Reading:
    """Choose our engine for verl's."""
    if value is None:
        return Reading()
    chosen = ENGINES.get(str(value))
    if chosen is None:
        known = f"one of {', '.join(ENGINES)}"
        raise ConfigError(f"there is no engine {value!r} here", expected=known)
    if tree.value(OUR_ENGINE):
        return Reading(note=f"{OUR_ENGINE} is given, and holds")
    if chosen == "auto":
        return Reading(note=f"the best engine that is installed here, not {value}")
    return Reading({"rollout.engine.name": chosen})


def of_sglang(theirs: str, ours: str, elsewhere: str) -> Reader:
    """Take a server argument of SGLang, where that is the engine and somebody chose the value.

    verl's default is not taken: it holds for other machines than those that agentrl starts on.

    Args:
        theirs: verl's key, below its `rollout`.
        ours: The key below `rollout.engine.sglang`.
        elsewhere: What is done with any other engine.
    """

    def read(value: Any, tree: Tree) -> Reading | Left:
        if not _is_sglang(tree):
            return Left(elsewhere)
        if not tree.is_chosen(f"{ROLLOUT}.{theirs}"):
            told = f"verl's default is not taken; see rollout.engine.sglang.{ours}"
            return Reading(note=told) if tree.is_given(f"{ROLLOUT}.{theirs}") else Left(told)
        return Reading({f"rollout.engine.sglang.{ours}": value})

    return read


def _is_sglang(tree: Tree) -> bool:
    beside = tree.value(OUR_ENGINE) or tree.value(f"{ROLLOUT}.engine.name")
    chosen = beside or ENGINES.get(str(tree.value(f"{ROLLOUT}.name")), "")
    return str(chosen).startswith("sglang")


def bucket_megabytes(value: Any, tree: Tree) -> Reading:
    """Take the size of a bucket of weights."""
    return Reading({"weight_sync.bucket_bytes": integer(value) * 1024**2})


def rollout_mode(value: Any, tree: Tree) -> Reading:
    """Say which of verl's two rollouts is meant."""
    if value not in ("sync", "async"):
        raise ConfigError(f"is {value!r}", expected="sync or async")
    settings = _tools_as_there(value, tree)
    return Reading(settings, (_IN_ASYNC if value == "async" else _IN_SYNC) if settings else "")


_MIXED = (
    "a turn with a call that cannot be read ends the request, also if another of its calls can be"
)
_IN_SYNC = f"as there, a row is shown the tools of its tools_kwargs alone; {_MIXED}"
_IN_ASYNC = (
    f"a row has every tool of the run, whatever its agent_name; {_MIXED}; every call of a turn is "
    "executed, where verl drops those beyond max_parallel_calls (1 by default)"
)


def _tools_as_there(mode: str, tree: Tree) -> dict[str, Any]:
    """Show tools to the policy, and take its calls, as verl does; our own keys go before."""
    if not (tree.value(f"{TURNS}.tool_config_path") or tree.value(f"{TURNS}.function_tool_path")):
        return {}
    theirs = {
        "check_tool_arguments": False,
        "tool_schema_style": f"verl_{mode}",
        "on_malformed_call": "stop" if mode == "sync" else "stop_unreadable",
        "tools_per_row": "tools_kwargs" if mode == "sync" else "all",
    }
    return {
        f"{OURS_TURNS}.{key}": value
        for key, value in theirs.items()
        if not (tree.is_given(f"{OURS_TURNS}.{key}") or tree.is_given(f"{TURNS}.{key}"))
    }


def multi_turn_enabled(value: Any, tree: Tree) -> Reading:
    """Refuse tools and users that verl would not have called."""
    paths = [f"{TURNS}.tool_config_path", f"{TURNS}.interaction_config_path"]
    idle = [path for path in paths if tree.value(path)]
    if not value and idle and not is_async(tree):
        raise ConfigError(
            f"is false, so verl would roll out a single turn and never use {' and '.join(idle)}",
            expected=f"{TURNS}.enable=true, or a file without them",
        )
    return Reading()


def max_assistant_turns(value: Any, tree: Tree) -> Reading:
    """Take the limit of the policy's turns; agent loops have another one for what follows them."""
    users = tree.value(f"{TURNS}.max_user_turns") if is_async(tree) else None
    # A limit of 0 is none there.
    limits = [integer(value)] if value else []
    limits += [integer(users, f"{TURNS}.max_user_turns") + 1] if users else []
    return Reading({f"{OURS_TURNS}.max_assistant_turns": min(limits)} if limits else {})


def max_user_turns(value: Any, tree: Tree) -> Reading:
    """Take the limit of an interaction's replies; agent loops count the answers of tools too."""
    if value is None or is_async(tree):
        return Reading(part_of=f"{TURNS}.max_assistant_turns" if value else "")
    return Reading({f"{OURS_TURNS}.max_user_turns": value})


def observation_budget(value: Any, tree: Tree) -> Reading:
    """Take characters as tokens, which cuts no earlier; where verl cuts nothing, cut late."""
    ours, longest = f"{OURS_TURNS}.max_tool_response_length", _response_budget(tree)
    if not tree.is_changed(f"{TURNS}.max_tool_response_length") and not is_async(tree):
        note = "verl's sync rollout cuts no tool response; here the response's budget is the limit"
        return Reading({ours: longest}, note)
    where = "" if is_async(tree) else "; verl's sync rollout cuts nothing"
    return Reading({ours: min(integer(value), longest)}, f"tokens here, characters there{where}")


def _response_budget(tree: Tree) -> int:
    return count(tree, "data.max_response_length")


def parallel_calls(value: Any, tree: Tree) -> Reading:
    """Take how many calls of one request run at once; none is dropped here."""
    if not tree.is_chosen(f"{TURNS}.max_parallel_calls"):
        return Reading()
    there = "drops the calls beyond it" if is_async(tree) else "does not look at it"
    note = f"how many run at once, the others queue; verl {there}"
    return Reading({f"{OURS_TURNS}.max_parallel_calls": value}, note)


def tool_format(value: Any, tree: Tree) -> Reading | Unused:
    """Take the tool-call format, which verl's request path finds out by the tokenizer."""
    if not is_async(tree):
        return Unused("verl's sync rollout, and agentrl, find the format out by the template")
    if not tree.is_chosen(f"{TURNS}.format"):
        return Reading()
    return Reading({f"{OURS_TURNS}.format": value})


def token_check(value: Any, tree: Tree) -> Reading:
    """Take how the tokens are checked; verl's strict check warns, and ours would refuse."""
    if value == "strict":
        return Reading(note="differences are recorded and stop nothing, as there")
    return Reading({f"{OURS_TURNS}.tokenization_sanity_check_mode": value})


def val_temperature(value: Any, tree: Tree) -> Reading | Unused:
    """Take validation's temperature; verl's sync rollout reads it only if validation samples."""
    if is_async(tree) or tree.value(f"{ROLLOUT}.val_kwargs.do_sample"):
        return Reading({"rollout.val_kwargs.temperature": value})
    if value:
        return Unused("val_kwargs.do_sample is false, so validation is greedy")
    return Reading({"rollout.val_kwargs.temperature": 0.0})


def do_sample(value: Any, tree: Tree) -> Reading | Unused:
    """Read whether validation samples, which verl's agent loops never look at."""
    if is_async(tree):
        return Unused("verl's agent loops sample validation by val_kwargs.temperature alone")
    return Reading(part_of=f"{ROLLOUT}.val_kwargs.temperature")


def top_k(ours: str) -> Reader:
    """Take `top_k`, which verl's agent loops send to no engine."""

    def read(value: Any, tree: Tree) -> Reading | Unused:
        if is_async(tree):
            return Unused("verl's agent loops do not hand it to the engine")
        return Reading({ours: value})

    return read


def over_sample_rate(value: Any, tree: Tree) -> Reading:
    """Wait for every request, where verl cancels the slowest share and trains on the rest."""
    told = f"read as 0: every request is waited for and trained; verl cancels the last {value} of "
    return Reading(note=f"{told}them. rollout.request_timeout_s bounds each" if value else "")
