"""Grade code by tests so that the code cannot claim to have passed (see docs/grading.md)."""

from agentrl.sandbox.grading.cases import AssertTest, CallTest, StdinTest, TestCase, read_tests
from agentrl.sandbox.grading.grader import (
    Grade,
    GradingLimits,
    TestReport,
    grade,
    grading_semaphore,
    last_code_block,
)

__all__ = [
    "AssertTest",
    "CallTest",
    "Grade",
    "GradingLimits",
    "StdinTest",
    "TestCase",
    "TestReport",
    "grade",
    "grading_semaphore",
    "last_code_block",
    "read_tests",
]
