"""The tree of errors: what went wrong, where, what was expected, and whose fault it is.

Every error inherits the standard error that it refines, takes one message and keyword details that
become attributes, and survives pickling (workers send errors across processes).
"""

import difflib
import re
from collections.abc import Iterable
from enum import StrEnum


class Fault(StrEnum):
    """Whose fault a failed request is. Decides, with the ends table, whether a group sees it."""

    MODEL = "model"
    """The policy: a malformed call under `stop`, a template's refusal of what it wrote."""
    TOOL = "tool"
    """A tool broke in its own life; or, under `on_tool_failure: fail`, in answering a call."""
    INTERACTION = "interaction"
    """A simulated user or environment raised or hung."""
    ENGINE = "engine"
    """The inference engine failed or went away."""
    REWARD = "reward"
    """A scorer raised, hung, or returned something that is no finite number."""
    LIMIT = "limit"
    """The wall clock of the request ran out, the run was stopped, or the row asks for what the run
    does not have (a tool, an interaction, room for its prompt)."""


class AgentRLError(Exception):
    """The root of what agentrl raises.

    Args:
        message: What happened, with the offending value.
        **details: Where and what was expected (`file`, `key`, `expected`, ...); each becomes an
            attribute and is shown behind the message.
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
        told = str(self.args[0])  # an ImportError would tell what it was made with
        # A message that begins with the key need not be followed by it.
        shown = {
            n: v for n, v in self.details.items() if n != "key" or not told.startswith(f"{v}: ")
        }
        return "\n".join([told, *(f"  {name}: {value}" for name, value in shown.items())])


class ConfigError(AgentRLError, ValueError):
    """A configuration that cannot mean anything (details: `file`, `key`, `expected`)."""


class DataError(AgentRLError, ValueError):
    """A data file or row that cannot be used (details: `file`, `row`, counted from 0,
    or `line`, counted from 1, `expected`).
    """


class PluginError(AgentRLError, ImportError):
    """A class path or function path that does not lead to what was asked for."""


class MissingExtraError(AgentRLError, ImportError):
    """A feature whose optional packages are not installed (detail: `install`)."""


class TemplateError(AgentRLError, ValueError):
    """A chat template that cannot carry what the run needs (details: `template`, `role`)."""


class LedgerError(AgentRLError, ValueError):
    """Tokens, mask and log-probabilities that would no longer agree (ledger consistency)."""


class TransitionError(AgentRLError, RuntimeError):
    """A request was asked to take an edge that is not in the state table."""


class CheckpointError(AgentRLError, RuntimeError):
    """A checkpoint that is incomplete, damaged, or of another model (detail: `path`)."""


class TrainingError(AgentRLError, RuntimeError):
    """An update that can do nothing any more (details: `key`, `expected`)."""


class OutOfMemoryError(AgentRLError, MemoryError):
    """Memory that ran out in training (detail `expected`: the keys that make it need less)."""


class EngineError(AgentRLError, RuntimeError):
    """An inference engine that failed; the requests it touched fail with `Fault.ENGINE`."""


class InteractionError(AgentRLError, RuntimeError):
    """A simulated user that raised or hung; the request fails with `Fault.INTERACTION`."""


class RewardError(AgentRLError, ValueError):
    """A scorer that raised or returned no finite number; fails with `Fault.REWARD`."""


class SandboxError(AgentRLError, RuntimeError):
    """A sandbox that cannot start or went away: its own fault, not that of the code it runs
    (details: `provider`, `expected`).
    """


class ServiceError(AgentRLError, ConnectionError):
    """A service behind a tool that cannot be reached, or does not answer as it should (details:
    `service`, `expected`, `last_words`): its own fault, not that of the call.
    """


class ToolLifeError(AgentRLError, RuntimeError):
    """A tool broke in its own life (create, calc_reward, release), not in answering a call."""


class ToolCallError(AgentRLError, RuntimeError):
    """A tool crashed or hung in answering a call, which ends the request under `on_tool_failure:
    fail` (details: `tool`, `call`).
    """


class RankError(AgentRLError, RuntimeError):
    """A rank that cannot go on because another one failed, left or did not come (detail: `others`,
    `key`, `expected`).
    """


class RolloutError(AgentRLError, RuntimeError):
    """A batch of which too much failed (details: `reasons`, `expected`)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: the device's, or the process's.

    torch says so by a class of its own on a device, and by the text of a `RuntimeError` on a CPU.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the end of a message on an unknown name; empty if no known name is similar to it.

    Args:
        name: The unknown name.
        known: The names that exist.
        cutoff: The least similarity, of 1.

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


def printable(text: str) -> str:
    r"""Escape what a terminal would obey, and what would begin a new line of a log.

    Example:
        >>> printable("red \x1b[31m\n")
        'red \\x1b[31m\\n'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def text_of(error: BaseException) -> str:
    """Say what an error says of itself; raises nothing, though the error be users' own and broken.

    Example:
        >>> text_of(ValueError("too large"))
        'too large'
    """
    try:
        return f"{error}"
    except BaseException as broken:  # noqa: BLE001 - an error's `__str__` is users' code
        return f"(saying what it is raises {type(broken).__name__})"


def words_of(error: BaseException) -> str:
    """Say an error in one line of words for a record or a log: its class and its text.

    Example:
        >>> words_of(ValueError("too large"))
        'ValueError: too large'
    """
    return f"{type(error).__name__}: {text_of(error)}"


class ToolError(AgentRLError):
    """Raise this in `BaseTool.execute`: its text is shown to the model as the call's result.

    Any other exception of `execute` counts as an infrastructure failure of the tool: the model sees
    a neutral error text and the failure is counted apart; under `on_tool_failure: fail` the request
    fails.
    """
