"""Tests of programming problems, run so that the code cannot say of itself that it passed."""

from agentrl.sandbox.grading.answers import last_code_block
from agentrl.sandbox.grading.cases import AssertTest, CallTest, StdinTest, TestCase, read_tests
from agentrl.sandbox.grading.grade import Grade, GradingLimits, TestReport, grade
from agentrl.sandbox.grading.room import grading_room

__all__ = [
    "AssertTest",
    "CallTest",
    "Grade",
    "GradingLimits",
    "StdinTest",
    "TestCase",
    "TestReport",
    "grade",
    "grading_room",
    "last_code_block",
    "read_tests",
]
