"""The example of compaction: a task whose conversation does not fit the context."""

import random
from pathlib import Path
from typing import Any

import pytest

from agentrl import Trainer, load_config
from agentrl.plugins import load_object

FOLDER = Path(__file__).parents[2] / "examples/compaction"


def test_a_demonstrations_second_sequence_begins_with_the_summary_of_the_first():
    draw_notes = load_object(f"{FOLDER}/pages.py:draw_notes")
    demonstrate = load_object(f"{FOLDER}/pages.py:demonstrate")
    draw = random.Random(0)
    for _ in range(20):
        first, second = demonstrate(draw_notes(draw), draw)
        summary = first[-1]["content"]
        assert second[0]["content"].endswith(f"\n\nSummary:\n{summary}")
        assert second[-1]["content"].startswith(f"{summary}\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_task_is_learned_with_compaction_and_not_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(FOLDER.parents[1])
    load_object(f"{FOLDER}/pages.py:write_files")(tmp_path / "data")
    files: Any = [
        f"prepare.tiny_policy.corpus={tmp_path}/data/demos.jsonl",
        f"prepare.sft.train_file={tmp_path}/data/demos.jsonl",
        f"data.train_files=[{tmp_path}/data/train.jsonl]",
        f"data.val_files.pages={tmp_path}/data/val.jsonl",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.total_training_steps=6",
        "trainer.test_freq=-1",
        "trainer.plot=false",
    ]
    summary = Trainer(load_config(FOLDER / "run.yaml", files)).fit()
    assert (summary.val_success_after or 0) > 0.8
    without = [
        *files,
        "prepare.sft=null",
        "prepare.tiny_policy=null",
        f"model.path={tmp_path}/run/trained",
        f"trainer.default_local_dir={tmp_path}/without",
        "rollout.multi_turn.compaction=null",
        "trainer.total_training_steps=1",
    ]
    summary = Trainer(load_config(FOLDER / "run.yaml", without)).fit()
    assert summary.val_success_after == 0.0
