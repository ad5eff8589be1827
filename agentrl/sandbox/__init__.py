"""Where code runs that a model wrote: nothing of the machine is seen, and nothing of it is kept."""

from agentrl.sandbox.base import Sandbox, Session
from agentrl.sandbox.choice import make_sandbox
from agentrl.sandbox.records import Execution, ExecutionEnd

__all__ = ["Execution", "ExecutionEnd", "Sandbox", "Session", "make_sandbox"]
