"""What docs/warm_up.md shows works as it stands there."""

import re
import runpy
from pathlib import Path

import pytest

from tests.fakes.runs import ROOT, run_agentrl

PAGE = (ROOT / "docs/warm_up.md").read_text(encoding="utf-8")


def test_the_files_of_the_page_warm_a_policy_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    files = dict(
        zip(
            ("my_tools.py", "my_demos.py", "run.yaml", "my_score.py"),
            re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL),
            strict=True,
        )
    )
    for name, content in files.items():
        assert f"`{name}`" in PAGE
        Path(name).write_text(content)
    runpy.run_path("my_demos.py")
    output = run_agentrl(capsys, "sft", "run.yaml", "prepare.sft.steps=2")
    assert (output.code, output.err) == (0, "")
    assert re.search(
        r"made/warmed_up, 60 conversations, loss on held-out conversations \d", output.out
    )
    again = run_agentrl(capsys, "sft", "run.yaml", "prepare.sft.steps=3")
    assert again.code == 2
    assert "changed: steps: 2 -> 3" in again.err
