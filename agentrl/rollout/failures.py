"""Whose fault a failure is, and how it is written down."""

import traceback

from agentrl.errors import (
    EngineError,
    Fault,
    InteractionError,
    ToolCallError,
    ToolLifeError,
    text_of,
)
from agentrl.plugins.call import at_place_of
from agentrl.rollout.records import Failure
from agentrl.rollout.states import RequestState

_LONGEST_MESSAGE = 2000
_LONGEST_TRACEBACK = 4000

_FAULT_OF_TYPE = {
    EngineError: Fault.ENGINE,
    InteractionError: Fault.INTERACTION,
    ToolLifeError: Fault.TOOL,
    ToolCallError: Fault.TOOL,
}
_FAULT_IN_STATE = {
    RequestState.PENDING: Fault.LIMIT,
    RequestState.RUNNING: Fault.ENGINE,
    RequestState.TOOL_CALLING: Fault.TOOL,
    RequestState.INTERACTING: Fault.INTERACTION,
    RequestState.COMPLETED: Fault.TOOL,
}


def find_fault(error: BaseException, state: RequestState) -> Fault:
    """Say whose fault an exception is: by its type, else by the state in which it came.

    What breaks before the first turn, and is no plug-in's, is a row that this run cannot roll out.
    """
    by_type = (fault for kind, fault in _FAULT_OF_TYPE.items() if isinstance(error, kind))
    return next(by_type, _FAULT_IN_STATE[state])


def describe_failure(error: BaseException, fault: Fault, *, turn: int) -> Failure:
    """Write an exception down; raises nothing, even where the exception cannot be printed.

    Args:
        error: What was raised.
        fault: Whose doing it is.
        turn: Turns that the request had.
    """
    return Failure(
        fault=fault,
        kind=type(error).__name__,
        message=_with_place(text_of(error), error)[:_LONGEST_MESSAGE],
        turn=turn,
        traceback=_traceback_of(error)[-_LONGEST_TRACEBACK:],
    )


def _with_place(message: str, error: BaseException) -> str:
    """Add the line of users' code that raised, unless the message names it already."""
    place = at_place_of(error)
    return message if place in message else f"{message}{place}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - users' errors may break when their notes are asked for
        return "".join(traceback.format_tb(error.__traceback__))
