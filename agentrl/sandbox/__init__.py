"""Where code runs that a model wrote: nothing of the machine is seen, and nothing of it is kept."""

from agentrl.sandbox.base import Execution, ExecutionEnd, Sandbox, Session
from agentrl.sandbox.factory import make_sandbox

__all__ = ["Execution", "ExecutionEnd", "Sandbox", "Session", "make_sandbox"]
