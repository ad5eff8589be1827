"""Sandboxes for code that a model wrote: it sees nothing of the machine and leaves nothing
behind.
"""

from agentrl.sandbox.base import Execution, ExecutionEnd, Sandbox, Session
from agentrl.sandbox.factory import make_sandbox

__all__ = ["Execution", "ExecutionEnd", "Sandbox", "Session", "make_sandbox"]
