"""Run files are read and checked before torch is imported; `plugins` come before the checks."""

import gc
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from agentrl.algorithms import adv_estimator_names
from agentrl.commands.run_file import Purpose, read_run_file
from agentrl.commands.train import TrainingRank, freeze_objects
from agentrl.doctor.inputs import check_run_file
from tests.fakes.runs import ROOT, run_agentrl, tiny_run, write_yaml

OWN = """
from agentrl.algorithms import register_adv_est


@register_adv_est("{name}")
def compute_best(token_level_rewards, response_mask):
    scores = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return scores, scores
"""
TELL = """
import sys
from agentrl.cli import main
for given in sys.argv[2:]:
    try:
        main(["train", sys.argv[1], given])
    except SystemExit as end:
        assert end.code == 2, end
assert not {'torch', 'transformers', 'tensordict', 'datasets'} & set(sys.modules)
"""


def test_mistakes_are_reported_before_torch_is_imported(tiny_home: Path, tmp_path: Path):
    file = write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run"))
    mistakes = {
        "data.train_fils=[x]": "data.train_fils: unknown key",
        "algorithm.adv_estimator=gpro": "did you mean 'grpo'?",
        "actor.policy_loss.loss_mode=gsp": "did you mean 'gspo'?",
        "reward.manager=navie": "did you mean 'naive'?",
        "data.train_files=[nowhere.jsonl]": f"looked_in: {ROOT}",
        "rollout.multi_turn.function_tool_path=nowhere.py": "no file",
    }
    output = subprocess.run(
        [sys.executable, "-c", TELL, str(file), *mistakes],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert output.returncode == 0, output
    for said in mistakes.values():
        assert said in output.stderr


def own_methods(folder: Path, name: str) -> Path:
    (folder / "own.py").write_text(OWN.format(name=name))
    return folder / "own.py"


def own_run(home: Path, folder: Path) -> tuple[Path, str]:
    """A run file whose estimator is registered by a module of the user's."""
    name = f"best_of_{folder.name}"
    content = tiny_run(
        home,
        folder / "run",
        plugins=[str(own_methods(folder, name))],
        algorithm__adv_estimator=name,
        trainer__total_training_steps=1,
        trainer__val_before_train=False,
        data__val_max_samples=1,
    )
    return write_yaml(folder / "run.yaml", content), name


def test_a_run_trains_with_an_estimator_of_a_plugin(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, name = own_run(tiny_home, tmp_path)
    assert name not in adv_estimator_names()
    output = run_agentrl(capsys, "train", file)
    assert (output.code, output.err) == (0, "")
    assert name in adv_estimator_names()


def test_plugins_are_imported_by_the_commands_that_look(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for command, folder in (("doctor", tmp_path / "a"), ("config check", tmp_path / "b")):
        folder.mkdir()
        file, name = own_run(tiny_home, folder)
        if command == "doctor":
            assert check_run_file(file, []).faults == ()
        else:
            assert run_agentrl(capsys, *command.split(), file).code == 0
        assert name in adv_estimator_names()


def test_rescoring_imports_plugins(tmp_path: Path):
    from agentrl.commands.rescore import read_reward_config

    name = f"manager_of_{tmp_path.name}"
    (tmp_path / "own.py").write_text(
        "from agentrl.rewards import NaiveRewardManager, register_reward_manager\n"
        f"register_reward_manager({name!r})(type('Mine', (NaiveRewardManager,), {{}}))\n"
    )
    content = {"data": {}, "model": {"path": "m"}, "reward": {"manager": name}}
    file = write_yaml(tmp_path / "run.yaml", content | {"plugins": [str(tmp_path / "own.py")]})
    assert read_reward_config(file, []).manager == name


def test_a_plugin_that_cannot_be_imported_is_named(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = tiny_run(tiny_home, tmp_path / "run", plugins=["json", str(tmp_path / "gone.py")])
    output = run_agentrl(capsys, "train", write_yaml(tmp_path / "run.yaml", content))
    assert output.code == 2
    assert f"no file {tmp_path}/gone.py" in output.err
    assert "key: plugins[1]" in output.err


def test_a_weight_on_rewards_that_no_tool_gives_is_noted(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = tiny_run(tiny_home, tmp_path / "run", reward__weights={"tool": 1.0})
    output = run_agentrl(capsys, "config", "check", write_yaml(tmp_path / "run.yaml", content))
    assert "no tool of the run has a calc_reward" in output.out


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_thawed")
def test_training_collects_its_own_garbage_only():
    before = Ring()
    older, frozen = weakref.ref(before), gc.get_freeze_count()
    with freeze_objects():
        newer = weakref.ref(Ring())
        assert gc.get_freeze_count() > frozen + 1000
        del before
        gc.collect()
        assert newer() is None
        assert older() is not None
    gc.collect()
    assert older() is None
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_frozen():
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    with freeze_objects():
        pass
    assert gc.get_freeze_count() > frozen - 100  # some objects may be freed meanwhile


def test_the_port_at_which_ranks_meet_is_given_to_no_other_process(tiny_home: Path, tmp_path: Path):
    file = write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run"))
    rank = TrainingRank(read_run_file(file, [], Purpose.TRAIN))
    port = rank.free_port()
    assert rank._reserved is not None
    with closing(rank._reserved):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
        store.set("met", "yes")
        assert store.get("met") == b"yes"
