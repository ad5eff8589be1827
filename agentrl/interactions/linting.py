"""Static checks of code that a model wrote, by ruff. The code is read, and never run."""

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import MissingExtraError
from agentrl.plugins.environment import install_command

TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found."""

    line: int
    rule: str
    """`syntax` for code that cannot be read."""
    message: str

    def in_words(self) -> str:
        """Say it in one line."""
        return f"line {self.line}: {self.message} ({self.rule})"


class Linter:
    """Checks code against rules.

    Args:
        rules: Of ruff, as `--select` takes them.

    Raises:
        MissingExtraError: where ruff is not installed.
        ValueError: for rules that ruff does not know.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        self._argv = (
            *(_find_ruff(), "check", "--isolated", "--no-cache", "--quiet", "--exit-zero"),
            *("--output-format", "json", "--select", ",".join(rules)),
            *("--stdin-filename", "solution.py", "-"),
        )

    async def check(self, code: str) -> list[Finding]:
        """Give the findings, in the order of the lines. Cancelling ends the check.

        Raises:
            RuntimeError: where ruff fails.
            TimeoutError: where it takes too long.
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
    place, code = item.get("location"), item.get("code")
    line = int(place.get("row", 1)) if isinstance(place, dict) else 1  # pyright: ignore
    is_syntax = code is None or code == "invalid-syntax"
    return Finding(line, "syntax" if is_syntax else str(code), str(item.get("message", "")))


def _find_ruff() -> str:
    beside = Path(sys.executable).parent / "ruff"
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        raise MissingExtraError(
            "the static checks of CodeReviewInteraction need ruff",
            install=install_command("lint"),
        )
    return found
