"""Each page of docs/tutorials works as printed: its files, its commands, the output it shows."""

from pathlib import Path

import pytest

from tests.fakes.pages import follow, steps_of
from tests.fakes.runs import ROOT

PAGES = sorted(file.name for file in (ROOT / "docs/tutorials").glob("*.md"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_works_as_printed(
    page: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    follow(f"tutorials/{page}", tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_shows_output_of_its_commands(page: str):
    steps = steps_of(f"tutorials/{page}")
    assert len(steps) >= 2
    assert any(lines for _, lines in steps)
