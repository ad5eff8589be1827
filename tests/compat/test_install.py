"""`import verl` finds agentrl's stand-in if, and only if, it was asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(
    code: str, cwd: Path = ROOT, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "AGENTRL_VERL"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": f"{path or cwd}{os.pathsep}{ROOT}", **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_the_switch_there_is_no_verl():
    done = run("import agentrl.compat.verl.tools.base_tool\nimport verl")
    assert "No module named 'verl'" in done.stderr


def test_with_the_switch_each_class_exists_once_and_nothing_heavy_is_imported():
    code = """
import sys, agentrl
from verl.tools.base_tool import BaseTool
import verl.tools.base_tool as aliased
import agentrl.compat.verl.tools.base_tool as own
import agentrl.tools
assert aliased is own and BaseTool is agentrl.tools.BaseTool
assert aliased.__spec__.name == "agentrl.compat.verl.tools.base_tool"
assert not {"torch", "transformers"} & set(sys.modules)
missing = "verl.workers import fsdp_workers", "verl.utils import no", "verl.tools.schemas import No"
for line in missing:
    try:
        exec(f"from {line}")
    except ImportError as error:
        print(error)
"""
    done = run(code, AGENTRL_VERL="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agentrl's stand-in for verl has no such module or name") == 3


def test_an_installed_verl_goes_first_and_a_checkout_in_the_current_folder_does_not(
    tmp_path: Path,
):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/__init__.py").write_text("")
    code = "import agentrl, verl\nprint(verl.__name__)"
    installed = run(code, path=tmp_path, AGENTRL_VERL="1")
    assert installed.stdout == "verl\n", installed.stderr
    checkout = run(code, cwd=tmp_path, AGENTRL_VERL="1")
    assert checkout.stdout == "agentrl.compat.verl\n", checkout.stderr


def test_install_verl_reaches_child_processes():
    code = """
import subprocess, sys
from agentrl.compat import install_verl
install_verl()
import verl
child = "import agentrl; from verl.utils.reward_score import gsm8k; print(gsm8k.__name__)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
"""
    done = run(code)
    assert "agentrl.compat.verl.utils.reward_score.gsm8k" in done.stdout, done.stderr


@pytest.mark.parametrize("installed", [False, True])
def test_error_of_a_reward_function_that_imports_verl_names_the_switch(
    tmp_path: Path, installed: bool
):
    scorer = (
        "from verl.utils.reward_score import gsm8k\n\ndef compute_score(*args):\n    return 1.0"
    )
    (tmp_path / "scorer.py").write_text(scorer)
    code = """
from agentrl.errors import PluginError
from agentrl.plugins import load_object
try:
    print(load_object("scorer.py:compute_score")())
except PluginError as error:
    print(error)
"""
    done = run(code, cwd=tmp_path, **({"AGENTRL_VERL": "1"} if installed else {}))
    expected = "1.0" if installed else "set AGENTRL_VERL=1 in the environment"
    assert expected in done.stdout, done.stderr
