"""What `agentrl.engines` exports, and what importing it costs."""

import subprocess
import sys

import pytest

import agentrl.engines as engines


@pytest.mark.parametrize("name", engines.__all__)
def test_every_exported_name_loads(name: str):
    assert getattr(engines, name).__name__ == name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoEngine"):
        _ = engines.NoEngine  # pyright: ignore[reportAttributeAccessIssue]


def test_scripted_engine_loads_no_torch():
    program = (
        "import sys, agentrl.engines as e; e.ScriptedEngine; e.SamplingParams;"
        "sys.exit(', '.join({'torch', 'transformers', 'sglang', 'ray'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
