"""Each page of docs/tutorials works as printed: its files, its commands, the output it shows."""

from pathlib import Path

import pytest

from tests.fakes.pages import follow, steps_of
from tests.fakes.runs import ROOT

CHANGES = {
    "first_run.md": (
        "prepare.arithmetic={num_train: 64, num_val: 16, num_demos: 8000}",
        "prepare.sft.steps=250",
        "data.train_batch_size=16",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
    )
}
"""Keys that make the runs of a page shorter. The output has the same lines, with other figures."""
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
    for name in ("examples", "configs"):  # the pages' commands run in a clone
        (tmp_path / name).symlink_to(ROOT / name)
    follow(f"tutorials/{page}", tmp_path, capsys, monkeypatch, changes=CHANGES.get(page, ()))


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_shows_output_of_its_commands(page: str):
    steps = steps_of(f"tutorials/{page}")
    assert len(steps) >= 2
    assert any(lines for _, lines in steps)
