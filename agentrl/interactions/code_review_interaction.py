"""A reviewer who checks the policy's code, runs its tests, and reports what fails."""

import asyncio
import json
import shutil
import sys
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from agentrl.answers import without_thought
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.schema.section import Section
from agentrl.errors import MissingExtraError
from agentrl.interactions.base import SHARED_KEYS, BaseInteraction, InteractionResult
from agentrl.interactions.session import last_answer
from agentrl.plugins.environment import install_command
from agentrl.plugins.keys import read_keys
from agentrl.sandbox.factory import SharedSandbox, check_sandbox, warn_of_unused_keys
from agentrl.sandbox.grading import (
    Grade,
    GradingLimits,
    TestCase,
    grade,
    grading_semaphore,
    last_code_block,
    read_tests,
)

TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a rule."""

    line: int
    rule: str
    """`syntax` for code that cannot be parsed."""
    message: str

    def describe(self) -> str:
        """Return the finding as one line of text."""
        return f"line {self.line}: {self.message} ({self.rule})"


class Linter:
    """Check code against rules, by ruff. The code is parsed, and never run.

    Args:
        rules: Rules of ruff, as `--select` takes them.

    Raises:
        MissingExtraError: if ruff is not installed.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        self._argv = (
            *(_find_ruff(), "check", "--isolated", "--no-cache", "--quiet", "--exit-zero"),
            *("--output-format", "json", "--select", ",".join(rules)),
            *("--stdin-filename", "solution.py", "-"),
        )

    async def check(self, code: str) -> list[Finding]:
        """Return the findings, in the order of the lines. Cancelling ends the check.

        Raises:
            RuntimeError: if ruff fails, for example for an unknown rule.
            TimeoutError: if it takes too long.
        """
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                stdout, stderr = await process.communicate(code.encode(errors="replace"))
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(f"ruff failed: {stderr.decode(errors='replace').strip()[:300]}")
        found = [_finding(item) for item in json.loads(stdout or b"[]")]
        return sorted(found, key=lambda finding: finding.line)


def _finding(item: dict[str, object]) -> Finding:
    location, code = item.get("location"), item.get("code")
    line = int(location.get("row", 1)) if isinstance(location, dict) else 1  # pyright: ignore
    is_syntax = code is None or code == "invalid-syntax"
    return Finding(line, "syntax" if is_syntax else str(code), str(item.get("message", "")))


def _find_ruff() -> str:
    bundled = Path(sys.executable).parent / "ruff"
    found = str(bundled) if bundled.exists() else shutil.which("ruff")
    if found is None:
        raise MissingExtraError(
            "the static checks of CodeReviewInteraction need ruff",
            install=install_command("lint"),
        )
    return found


_NO_CODE = "There is no code in your answer. Write the whole program in one ```python block."
_AGAIN = "Fix it, and write the whole program again in one ```python block."


class CodeReviewSettings(Section):
    """The `config` of `CodeReviewInteraction`."""

    max_rounds: int = Field(default=3, ge=0)
    """Answers that are sent back for another round."""
    rules: list[str] = Field(default=["E9", "F"], min_length=1)
    """Rules of ruff."""
    max_findings: int = Field(default=5, ge=0)
    """Findings of the linter in one reply."""
    max_tests: int = Field(default=32, ge=1)
    """Tests that are run: the first ones."""
    test_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds of one test."""
    total_timeout_s: float = Field(default=40.0, gt=0)
    """Seconds of all tests; keep `timeout_s` above it."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the code runs, and what it may use: a mapping of `SandboxConfig`'s keys."""


@dataclass(slots=True)
class _Review:
    tests: tuple[TestCase, ...]
    num_rounds: int = 0


class CodeReviewInteraction(BaseInteraction):
    """Answer code with the findings of a linter and of its tests, until all tests pass.

    An answer's score is the fraction of the tests that its code passes (0.0 if there is no code).
    The conversation ends when all tests pass, and after the answer that follows the last round.
    Findings of the linter are reported; if all tests pass, they do not continue the conversation.
    `agentrl.sandbox.grading` describes how the tests run, and why code cannot fake their result.

    Reviews and scorers of code share one limit: as many run at once as there are cores, so that no
    code times out because other code computes. Waiting does not count as time of a reply.

    A row has the tests in its `interaction_kwargs`, as `tests` or `ground_truth`, in any of the
    forms of `agentrl.sandbox.grading.read_tests`.

    Args:
        config: `max_rounds` (answers that are sent back, 3); `rules` (of ruff, `[E9, F]`);
            `max_findings` (in one reply, 5); `max_tests` (the first ones are run, 32);
            `test_timeout_s` (seconds of one test, 5.0); `total_timeout_s` (seconds of all, 40.0;
            keep `timeout_s` above it); `sandbox`: the keys of `SandboxConfig`.

    Raises:
        ConfigError: for an invalid key.
        MissingExtraError: if ruff is not installed.
        SandboxError: if this machine has no sandbox provider.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_keys(CodeReviewSettings, config, key="", also_known=SHARED_KEYS)
        self._linter = Linter(self._settings.rules)
        check_sandbox(self._settings.sandbox, key="sandbox")
        warn_of_unused_keys(self._settings.sandbox, key=f"{self.name}: config.sandbox")
        self._shared = SharedSandbox(self._settings.sandbox)
        self._reviews: dict[str, _Review] = {}

    @property
    def sandbox_config(self) -> SandboxConfig:
        """The keys of the sandbox in which the tests run."""
        return self._settings.sandbox

    async def start_interaction(
        self,
        instance_id: str | None = None,
        tests: Any = None,
        ground_truth: Any = None,
        **kwargs: Any,
    ) -> str:
        """Read the tests of one request.

        Raises:
            DataError: if the row has none.
        """
        instance_id = instance_id or uuid.uuid4().hex
        self._reviews[instance_id] = _Review(read_tests(ground_truth if tests is None else tests))
        return instance_id

    def waiting_room(self) -> AbstractAsyncContextManager[Any]:
        """Limit reviews and scorers of code together to the number of cores."""
        return grading_semaphore()

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        """Review the code of the last answer.

        Raises:
            SandboxError: if the sandbox failed.
        """
        review = self._reviews[instance_id]
        code = last_code_block(without_thought(last_answer(messages)))
        if code is None:
            return self._reply(review, [_NO_CODE], None, [])
        findings = await self._linter.check(code)
        limits = GradingLimits(
            test_timeout_s=self._settings.test_timeout_s,
            total_timeout_s=self._settings.total_timeout_s,
            max_tests=self._settings.max_tests,
        )
        graded = await grade(code, review.tests, self._shared.get(), limits)
        if graded.passed_all:
            text = f"All {graded.num_tests} tests pass."
            return InteractionResult(True, text, 1.0, _metadata(review, graded, findings))
        words = [*self._describe_findings(findings), _describe_tests(graded), _AGAIN]
        return self._reply(review, words, graded, findings)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the request."""
        self._reviews.pop(instance_id, None)

    async def shutdown(self) -> None:
        """End the sandbox."""
        await self._shared.close()

    def _describe_findings(self, findings: list[Finding]) -> list[str]:
        shown = [f"- {finding.describe()}" for finding in findings[: self._settings.max_findings]]
        num_more = len(findings) - len(shown)
        if shown and num_more:
            shown.append(f"- and {num_more} more")
        return ["The static checks say:", *shown] if shown else []

    def _reply(
        self, review: _Review, words: list[str], graded: Grade | None, findings: list[Finding]
    ) -> InteractionResult:
        """Send the answer back, unless no round is left."""
        score = graded.passed_frac if graded else 0.0
        is_over = review.num_rounds >= self._settings.max_rounds
        review.num_rounds += not is_over
        text = "" if is_over else "\n".join(words)
        return InteractionResult(is_over, text, score, _metadata(review, graded, findings))


def _metadata(review: _Review, graded: Grade | None, findings: list[Finding]) -> dict[str, Any]:
    return {
        "num_rounds": review.num_rounds,
        "num_tests": graded.num_tests if graded else len(review.tests),
        "num_passed": graded.num_passed if graded else 0,
        "num_findings": len(findings),
    }


def _describe_tests(graded: Grade) -> str:
    """Return how many tests pass, and the first one that fails."""
    lines = [f"{graded.num_passed} of {graded.num_tests} tests pass."]
    failure = graded.first_failure
    if failure is not None:
        lines += ["The first that fails:", f"  test: {failure.given}"]
        lines += [f"  expected: {failure.expected}"] if failure.expected else []
        lines += [f"  your code: {failure.got}"]
    return "\n".join(lines)
