"""Run code that a model wrote, isolated from the machine, and remove everything it leaves."""

from agentrl.sandbox.base import Execution, ExecutionEnd, Sandbox, Session
from agentrl.sandbox.factory import make_sandbox

__all__ = ["Execution", "ExecutionEnd", "Sandbox", "Session", "make_sandbox"]
