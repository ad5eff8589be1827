"""The errors of agentrl: what went wrong, where, what was expected, and whose fault it is.

Every error inherits a standard error, takes one message and keyword details that become attributes,
and can be pickled (workers send errors to other processes).
"""

import difflib
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path


class Fault(StrEnum):
    """Whose fault a failed request is."""

    MODEL = "model"
    """The policy: a malformed call under `stop`."""
    TOOL = "tool"
    """A tool failed in create, calc_reward or release; in a call under `on_tool_failure: fail`."""
    INTERACTION = "interaction"
    """A simulated user or environment raised or timed out."""
    AGENT = "agent"
    """An agent loop or an agent's program raised, crashed, or did not use the policy."""
    ENGINE = "engine"
    """The inference engine failed or is gone."""
    REWARD = "reward"
    """A scorer raised, timed out, or returned a value that is not a finite number."""
    LIMIT = "limit"
    """The request ran out of time, the run was stopped, or the row needs something that the run
    does not have (a tool, an interaction, enough tokens for its prompt, a chat template that can
    show its tool results)."""


class AgentRLError(Exception):
    """The base class of the errors of agentrl.

    Args:
        message: What happened, with the wrong value.
        **details: Where it happened and what was expected (`file`, `key`, `expected`, ...). Each
            becomes an attribute and is shown after the message.
    """

    def __init__(self, message: str = "", **details: object) -> None:
        super().__init__(message)
        self.details = {name: value for name, value in details.items() if value is not None}

    def __getattr__(self, name: str) -> object:
        try:
            return self.__dict__["details"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        lines = [str(self.args[0])]  # ImportError has another `__str__`
        for name, value in self.details.items():
            if name != "key" or not lines[0].startswith(f"{value}: "):  # do not repeat the key
                lines.append(f"  {name}: {value}")
        return "\n".join(lines)


class ConfigError(AgentRLError, ValueError):
    """A configuration that is not valid (details: `file`, `key`, `expected`)."""


class DataError(AgentRLError, ValueError):
    """A data file or row that cannot be used (details: `file`, `row`, counted from 0,
    or `line`, counted from 1, `expected`).
    """


class PluginError(AgentRLError, ImportError):
    """A class path or function path that does not name the expected object."""


class MissingExtraError(AgentRLError, ImportError):
    """A feature needs an optional package that is not installed (detail: `install`)."""


class TemplateError(AgentRLError, ValueError):
    """A chat template that cannot render what the run needs (details: `template`, `role`)."""


class LedgerError(AgentRLError, ValueError):
    """Tokens, mask and log-probabilities that would no longer agree (ledger consistency)."""


class TransitionError(AgentRLError, RuntimeError):
    """A request was asked to take an edge that is not in the state table."""


class CheckpointError(AgentRLError, RuntimeError):
    """A checkpoint that is incomplete, damaged, or of another model (detail: `path`)."""


class StoreError(AgentRLError, RuntimeError):
    """A store at a URL (`s3://...`) cannot be read or written (details: `path`, `reason`)."""


class TrainingError(AgentRLError, RuntimeError):
    """Training cannot continue (details: `key`, `expected`)."""


class OutOfMemoryError(AgentRLError, MemoryError):
    """Training ran out of memory (detail `expected`: the keys that reduce its use)."""


class AgentError(AgentRLError, RuntimeError):
    """An agent of the user raised, crashed or ended without a call. The request fails with
    `Fault.AGENT` (details: `exit_code`, `output`, `expected`).
    """


class EngineError(AgentRLError, RuntimeError):
    """An inference engine failed. The affected requests fail with `Fault.ENGINE`."""


class InteractionError(AgentRLError, RuntimeError):
    """A simulated user raised or timed out. The request fails with `Fault.INTERACTION`."""


class RewardError(AgentRLError, ValueError):
    """A scorer raised, or returned no finite number. The request fails with `Fault.REWARD`."""


class SandboxError(AgentRLError, RuntimeError):
    """A sandbox cannot start, or is gone. The code that it runs is not at fault (details:
    `provider`, `expected`).
    """


class ServiceError(AgentRLError, ConnectionError):
    """The service of a tool cannot be reached, or its answer is not valid. The call is not at fault
    (details: `service`, `expected`, `last_words`).
    """


class ToolLifeError(AgentRLError, RuntimeError):
    """A tool failed in create, calc_reward or release, not in a call."""


class ToolCallError(AgentRLError, RuntimeError):
    """A tool crashed or timed out in a call. This ends the request under `on_tool_failure: fail`
    (details: `tool`, `call`).
    """


class RankError(AgentRLError, RuntimeError):
    """A rank cannot continue because another rank failed, ended or did not respond (details:
    `others`, `key`, `expected`).
    """


class ClusterError(AgentRLError, RuntimeError):
    """A process or resource of a Ray cluster failed, or is not there (details: `rank`, `node`,
    `process`, `last_lines`, `expected`).
    """


class WorkerLostError(AgentRLError, ConnectionError):
    """A process of the cluster ended, was restarted, or did not answer within its time limit.

    What it did for the caller is lost; another process may do it again.
    """


class WorkerLateError(WorkerLostError):
    """A process of the cluster did not answer within its time limit: it hangs, or is overloaded."""


class RolloutError(AgentRLError, RuntimeError):
    """Too much of a batch failed (details: `reasons`, `expected`)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the process ran out of memory.

    On a device, torch raises a class of its own; on a CPU, a `RuntimeError` with a certain text.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown name; empty if no known name is similar.

    Args:
        name: The unknown name.
        known: The names that exist.
        cutoff: The minimum similarity, from 0 to 1.

    Example:
        >>> did_you_mean("trainr", ["data", "trainer"])
        "; did you mean 'trainer'?"
    """
    nearest = find_nearest(name, known, cutoff=cutoff)
    return f"; did you mean {nearest!r}?" if nearest else ""


def find_nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to a name, if any has the least similarity."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def describe_missing(path: Path) -> str:
    """Return the message for a missing file, with the most similar name in its folder."""
    names = (other.name for other in path.parent.glob("*"))
    return f"no file {path}" + did_you_mean(path.name, names)


def printable(text: str) -> str:
    r"""Escape control characters and line breaks, for terminals and logs.

    Example:
        >>> printable("red \x1b[31m\n")
        'red \\x1b[31m\\n'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def text_of(error: BaseException) -> str:
    """Return `str(error)`. Never raises, even if the `__str__` of the error does.

    Example:
        >>> text_of(ValueError("too large"))
        'too large'
    """
    try:
        return f"{error}"
    except BaseException as broken:  # noqa: BLE001 - an error's `__str__` is users' code
        return f"(its message raises {type(broken).__name__})"


def words_of(error: BaseException) -> str:
    """Describe an error for a record or a log: its class and its text.

    Example:
        >>> words_of(ValueError("too large"))
        'ValueError: too large'
    """
    return f"{type(error).__name__}: {text_of(error)}"


class ToolError(AgentRLError):
    """Raise this in `BaseTool.execute` to show its text to the model as the result of the call.

    Any other exception of `execute` is an infrastructure failure of the tool: the model sees a
    neutral error text, and the failure is counted separately. Under `on_tool_failure: fail` the
    request fails.
    """
