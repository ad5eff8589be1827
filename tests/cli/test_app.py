"""The commands, as a user meets them."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import load_config
from agentrl.errors import EngineError
from tests.fakes.runs import (
    CALCULATOR,
    CALL,
    ROOT,
    put,
    read_lines,
    run_agentrl,
    scripted,
    spawn_agentrl,
    tiny_run,
    write_jsonl,
    write_yaml,
)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_file(tiny_home: Path, tmp_path: Path) -> Path:
    return write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run"))


# Looking round.


def test_help_names_every_command(capsys: Capture):
    output = run_agentrl(capsys, "--help")
    assert output.code == 0
    assert all(name in output.out for name in ("train", "sft", "rollout", "prepare", "config"))


def test_version(capsys: Capture):
    assert re.fullmatch(r"agentrl \d+\.\d+\.\d+\n", run_agentrl(capsys, "--version").out)


def test_unknown_command_names_the_nearest(capsys: Capture):
    output = run_agentrl(capsys, "trian")
    assert output.code == 2
    assert "Did you mean 'train'?" in output.err


def test_python_dash_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout[:8], done.stderr) == (0, "agentrl ", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("serve", "rollout.engine.sglang_server.addresses=[http://127.0.0.1:30000]"),
        ("rollout", "rollout.engine.scripted.answers=[first turn, second turn]"),
    ],
)
def test_help_shows_lists_as_they_are_written(capsys: Capture, command: str, words: str):
    output = run_agentrl(capsys, command, "--help")
    assert "".join(words.split()) in "".join(output.out.split())


def test_help_shows_no_type_of_flags_and_no_nested_dots(capsys: Capture):
    shown = run_agentrl(capsys, "view", "--help").out
    assert "RUN..." not in shown
    [line] = [line for line in shown.splitlines() if "--terminal " in line and "Print" in line]
    assert "bool" not in line


def test_a_command_that_is_interrupted_before_its_run_begins_says_so(
    capsys: Capture, run_file: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.commands.run_file.read_config", interrupted)
    assert run_agentrl(capsys, "train", run_file) == (130, "interrupted\n", "")


def test_ctrl_c_in_the_imports_of_a_command_leaves_at_once(run_file: Path):
    process = spawn_agentrl("train", run_file, environment={"PYTHONUNBUFFERED": "1"})
    try:
        until_imported("torch", process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "interrupted\n", "")


def until_imported(library: str, process: subprocess.Popen[str], timeout_s: float = 60) -> None:
    """Wait until a process has opened a library's shared objects."""
    maps, end = Path(f"/proc/{process.pid}/maps"), time.monotonic() + timeout_s
    while f"/{library}/" not in maps.read_text():
        assert time.monotonic() < end, f"{library} was never imported"
        time.sleep(0.01)


# prepare


def test_prepare_arithmetic_names_its_files_and_keeps_them(capsys: Capture, tmp_path: Path):
    sizes = ("--num-train", 6, "--num-val", 3, "--num-demos", 5)
    output = run_agentrl(capsys, "prepare", "arithmetic", tmp_path / "a", *sizes)
    assert (output.code, output.err) == (0, "")
    names = ["train.parquet", "val.parquet", "val_unseen.parquet", "demos.jsonl"]
    assert output.out.splitlines() == [f"made: {tmp_path}/a/{name}" for name in names]
    again = run_agentrl(capsys, "prepare", "arithmetic", tmp_path / "a", *sizes)
    assert again.out.splitlines()[0] == f"there already: {tmp_path}/a/train.parquet"


def test_prepare_gsm8k_from_local_files(capsys: Capture, tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    row = {"question": "What is 6*7?", "answer": "6*7=42\n#### 42"}
    for split in ("train", "test"):
        write_jsonl(source / f"{split}.jsonl", [row] * 3)
    output = run_agentrl(
        capsys, "prepare", "gsm8k", tmp_path / "g", "--source-dir", source, "--max-samples", 2
    )
    assert (output.code, output.err) == (0, "")
    assert output.out.splitlines() == [f"made: {tmp_path}/g/{s}.parquet" for s in ("train", "test")]


def test_prepare_gsm8k_without_a_hub_says_what_to_do(capsys: Capture, tmp_path: Path):
    output = run_agentrl(capsys, "prepare", "gsm8k", tmp_path / "g")
    assert output.code == 2
    assert "cannot be downloaded" in output.err
    assert "source_dir" in output.err


# config check


def test_config_check_prints_a_run_file_that_reads_back(
    capsys: Capture, run_file: Path, tmp_path: Path
):
    output = run_agentrl(capsys, "config", "check", run_file, "rollout.n=4")
    assert (output.code, output.err) == (0, "")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(output.out.partition("\n# One training step")[0])
    assert load_config(resolved) == load_config(run_file, ["rollout.n=4"])
    for part in (
        "4 prompts x 4 samples = 16 rows",
        "tools: calculator",
        "interactions: none",
        "supports: several tool results",
        "rows of train: 14",
        "10 of 24 prompts were dropped",
    ):
        assert part in output.out, part


def test_config_check_of_the_example_before_anything_is_made(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    output = run_agentrl(
        capsys,
        "config",
        "check",
        "examples/gsm8k_multiturn/quickstart.yaml",
        f"trainer.default_local_dir={tmp_path}/run",
    )
    assert (output.code, output.err) == (0, "")
    assert f"`prepare` must first make {tmp_path}/run/warmed_up" in output.out
    assert not (tmp_path / "run").exists(), "looking makes nothing"


@pytest.mark.parametrize(
    ("override", "words"),
    [("data.train_batch_size=16", "a batch of 16 prompts from 14 rows"), ("data.val_files={}", "")],
)
def test_config_check_refuses_what_train_refuses_for_its_rows(
    capsys: Capture, run_file: Path, override: str, words: str
):
    output = run_agentrl(capsys, "config", "check", run_file, override)
    assert output.code == (2 if words else 0)
    assert words in output.err
    assert ("rows of val" in output.out) is False


def test_config_check_tells_dead_keys(capsys: Capture, run_file: Path):
    output = run_agentrl(capsys, "config", "check", run_file, "actor.kl_loss_coef=0.1")
    assert "note: actor.kl_loss_coef has no effect: actor.use_kl_loss is false" in output.out


# rollout


def test_rollout_shows_a_real_policy_token_by_token(capsys: Capture, run_file: Path):
    output = run_agentrl(capsys, "rollout", run_file, "--num", 2, "--samples", 2)
    assert (output.code, output.err) == (0, "")
    assert output.out.count("=== request train-") == 4
    assert "--- turn 0 · assistant · " in output.out
    assert re.search(r"^\+ \| ", output.out, re.MULTILINE), "trained tokens are marked"
    assert "reward: 0" in output.out


def test_rollout_of_a_script_walks_the_tool(capsys: Capture, run_file: Path, tmp_path: Path):
    output = run_agentrl(
        capsys,
        "rollout",
        run_file,
        "rollout.engine.name=scripted",
        f"rollout.engine.scripted.answers={json.dumps([CALL, '#### 42'])}",
        "rollout.multi_turn.max_tokens_per_turn=null",
        "data.max_response_length=160",
        *("--num", 1, "--split", "arithmetic", "--greedy", "--tokens"),
        *("--out", tmp_path / "out/rollouts.jsonl"),
    )
    assert (output.code, output.err) == (0, "")
    assert "=== request arithmetic-" in output.out
    assert '> calculator({"expression": "6*7"}) -> ok' in output.out
    assert "  | 42↵" in output.out
    assert "+ | #### 42<|im_end|>" in output.out
    assert "log-prob" in output.out
    assert "saved 1 rollouts to" in output.out
    saved = read_lines(tmp_path / "out/rollouts.jsonl")
    assert saved[0]["request"]["stop_reason"] == "answered"


def test_rollout_shows_requests_that_fail(capsys: Capture, run_file: Path, tmp_path: Path):
    (tmp_path / "bad.py").write_text("def compute_score(*a, **k):\n    raise OSError('no judge')\n")
    output = run_agentrl(
        capsys, "rollout", run_file, f"reward.custom_reward_function.path={tmp_path}/bad.py"
    )
    assert output.code == 0, output.err
    assert f"OSError: the reward function '{tmp_path}/bad.py:compute_score': no judge" in output.out
    assert f"  at {tmp_path}/bad.py:2, in compute_score" in output.out
    assert "Traceback" not in output.out


def test_rollout_of_an_unknown_split_names_those_there_are(capsys: Capture, run_file: Path):
    output = run_agentrl(capsys, "rollout", run_file, "--split", "test")
    assert output.code == 2
    assert "'test'" in output.err
    assert "arithmetic" in output.err


def prepared_run(folder: Path) -> dict[str, Any]:
    """A run file that makes everything itself."""
    run = tiny_run(folder, folder / "run", data__max_prompt_length=400)
    run["prepare"] = {
        "arithmetic": {"out_dir": f"{folder}/data", "num_train": 8, "num_val": 4, "num_demos": 60},
        "tiny_policy": {
            "out_dir": f"{folder}/policy",
            "corpus": f"{folder}/data/demos.jsonl",
            "vocab_size": 400,
            "hidden_size": 32,
            "num_heads": 2,
            "num_kv_heads": 1,
            "intermediate_size": 48,
        },
        "sft": {
            "model_path": f"{folder}/policy",
            "train_file": f"{folder}/data/demos.jsonl",
            "out_dir": f"{folder}/warmed_up",
            "steps": 2,
            "batch_size": 2,
            "tool_config_path": str(CALCULATOR),
        },
    }
    put(run, "model.path", f"{folder}/warmed_up")
    return run


def test_sft_makes_what_it_needs_and_the_next_command_finds_it(capsys: Capture, tmp_path: Path):
    file = write_yaml(tmp_path / "run.yaml", prepared_run(tmp_path))
    output = run_agentrl(capsys, "sft", file)
    assert (output.code, output.err) == (0, "")
    assert re.search(r"warm-up step 2: loss \d", output.out)
    assert (tmp_path / "warmed_up/model.safetensors").is_file()
    again = run_agentrl(capsys, "sft", file)
    assert again.out.splitlines() == [
        f"problems: {tmp_path}/data, made before",
        f"policy: {tmp_path}/policy, made before",
        f"warmed-up policy: {tmp_path}/warmed_up, made before",
    ]


def test_rollout_makes_first_what_the_run_file_prepares(capsys: Capture, tmp_path: Path):
    file = write_yaml(tmp_path / "run.yaml", prepared_run(tmp_path))
    output = run_agentrl(capsys, "rollout", file, "--num", 1)
    assert (output.code, output.err) == (0, "")
    assert "warmed-up policy" in output.out
    assert output.out.count("=== request") == 1


def test_sft_of_a_run_without_one_says_so(capsys: Capture, run_file: Path):
    output = run_agentrl(capsys, "sft", run_file)
    assert output.code == 2
    assert "prepare.sft" in output.err


def test_late_mistakes_are_reported_before_anything_is_made(capsys: Capture, tmp_path: Path):
    run = prepared_run(tmp_path)
    put(run, "reward.custom_reward_function", {"path": "nowhere.py"})
    output = run_agentrl(capsys, "train", write_yaml(tmp_path / "run.yaml", run))
    assert output.code == 2
    assert "nowhere.py" in output.err
    assert not (tmp_path / "data").exists()


@pytest.fixture
def with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed SGLang that knows two arguments, and does not start."""

    def start(*_: object, **__: object) -> None:
        raise EngineError("it does not start")

    for module in ("trainer.setup.engine_factory", "engines.sglang.arguments"):
        monkeypatch.setattr(f"agentrl.{module}.find_spec", lambda _: find_spec("json"))
    known = "agentrl.engines.sglang.arguments.known_arguments"
    monkeypatch.setattr(known, lambda: {"tp_size", "page_size"})
    monkeypatch.setattr("agentrl.engines.sglang.inprocess.engine.SGLangEngine.start", start)


@pytest.mark.usefixtures("with_sglang")
def test_mistakes_about_the_engine_are_reported_before_anything_is_made(
    capsys: Capture, tmp_path: Path
):
    file = write_yaml(tmp_path / "run.yaml", prepared_run(tmp_path))
    mistake = "rollout.engine.sglang.pagesize=2"
    output = run_agentrl(capsys, "train", file, "rollout.engine.name=sglang", mistake)
    assert output.code == 2
    assert (
        "no server argument 'pagesize'; did you mean 'page_size'? (given on the command line)"
        in output.err
    )
    assert not (tmp_path / "data").exists()
    assert run_agentrl(capsys, "sft", file, "rollout.engine.name=sglang", mistake).code == 0


@pytest.mark.usefixtures("with_sglang")
def test_serve_says_of_a_server_argument_that_the_command_line_gave_it(
    capsys: Capture, run_file: Path
):
    output = run_agentrl(capsys, "serve", run_file, "rollout.engine.sglang.pagesize=2")
    assert output.code == 2
    assert (
        "no server argument 'pagesize'; did you mean 'page_size'? (given on the command line)"
        in output.err
    )


def test_sglang_that_is_not_installed_names_the_key_that_asks_for_it(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.trainer.setup.engine_factory.find_spec", lambda _: None)
    file = write_yaml(tmp_path / "run.yaml", prepared_run(tmp_path))
    output = run_agentrl(capsys, "train", file, "rollout.engine.name=sglang")
    assert output.code == 2
    message = "rollout.engine.name: asks for SGLang, which is not installed"
    assert f"{message} (given on the command line)" in output.err
    assert "pip install 'sglang==" in output.err
    assert not (tmp_path / "data").exists()
    looked_at = run_agentrl(capsys, "config", "check", file, "rollout.engine.name=sglang")
    assert looked_at.code == 0, "it may be meant for another machine"
    assert "note: on this machine, rollout.engine.name: asks for SGLang" in looked_at.out


@pytest.mark.usefixtures("with_sglang")
@pytest.mark.parametrize("command", ["train", "rollout"])
def test_sglang_is_announced_before_it_starts(capsys: Capture, run_file: Path, command: str):
    output = run_agentrl(capsys, command, run_file, "rollout.engine.name=sglang")
    assert "it does not start" in output.err
    assert output.out.splitlines()[-1] == "starting SGLang: this takes a minute"


def test_an_interrupted_warm_up_is_not_made_yet_and_is_made_again(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    file, folder = write_yaml(tmp_path / "run.yaml", prepared_run(tmp_path)), tmp_path / "warmed_up"
    with monkeypatch.context() as patch:
        patch.setattr("agentrl.trainer.setup.prepare.run_sft", interrupted)
        assert run_agentrl(capsys, "sft", file).code == 130
    checked = run_agentrl(capsys, "config", "check", file)
    assert (checked.code, checked.err) == (0, "")
    assert f"`prepare` must first make {folder}" in checked.out
    again = run_agentrl(capsys, "sft", file)
    assert f"warmed-up policy: {folder}, made again: it was not finished\n" in again.out
    assert "settings or inputs" not in again.out


# train


def test_train_prints_its_figures_and_nothing_else(
    capfd: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path
):
    code, out, err = run_agentrl(capfd, "train", run_file)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "engine: transformers" in lines[2]
    assert lines[3] == "success on arithmetic is the scorer's `success`"
    assert lines[4].split()[:3] == ["step", "reward", "val"]
    # A policy that knows nothing solves nothing: no step has anything to learn from.
    assert [line.split()[0] for line in lines[5:9]] == ["0/2", "1/2", "no", "2/2"]
    assert lines[9].startswith(f"checkpoint: {tmp_path}/run/checkpoints/global_step_2")
    assert lines[10].startswith("2 steps in ")
    assert lines[11] == "2 of 2 steps had no learning signal: every advantage was 0"
    assert lines[12].startswith("success on 4 held-out problems: ")
    assert lines[13].startswith("the best validation was ")
    assert len(lines) == 14


HANGING = """
import asyncio
from pathlib import Path
from agentrl.tools import BaseTool, OpenAIFunctionToolSchema

HERE = Path(__file__).parent


class Hanging(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"function": {"name": "calculator"}})

    async def execute(self, instance_id, parameters, **execute_kwargs):
        (HERE / "called").touch()
        await asyncio.sleep(300)

    async def release(self, instance_id, **release_kwargs):
        (HERE / f"released-{instance_id}").touch()
"""


@pytest.mark.slow  # every day in one process: `tests/trainer/test_interruption.py`
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_releases_its_tools_and_ends_without_a_traceback(
    tiny_home: Path, tmp_path: Path, number: signal.Signals
):
    (tmp_path / "hanging.py").write_text(HANGING)
    tools = write_yaml(tmp_path / "tools.yaml", {"tools": [{"class_name": "hanging.Hanging"}]})
    run = tiny_run(
        tiny_home,
        tmp_path / "run",
        data__val_files=None,
        data__max_response_length=160,
        rollout__engine=scripted(CALL),
        rollout__multi_turn={"tool_config_path": str(tools), "tool_timeout_s": 200},
    )
    process = spawn_agentrl("train", write_yaml(tmp_path / "run.yaml", run), cwd=tmp_path)
    try:
        wait_for(tmp_path / "called", process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err, err
    assert out.endswith("interrupted: no step was completed\n")
    assert len(list(tmp_path.glob("released-*"))) == 8


def wait_for(file: Path, process: subprocess.Popen[str], timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{file} never came"
        time.sleep(0.05)


# A user's own code, with the package installed and the repository far away.

OWN_CODE = '''
from agentrl.interactions import BaseInteraction, InteractionResult
from agentrl.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, ToolResult


class Doubler(BaseTool):
    """Double a number."""

    def get_openai_tool_schema(self):
        schema = {
            "type": "function",
            "function": {
                "name": "double",
                "description": "Double a number.",
                "parameters": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}},
                    "required": ["x"],
                },
            },
        }
        return OpenAIFunctionToolSchema.model_validate(schema)

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse(text=str(2 * parameters["x"])), 0.5, {})


class Examiner(BaseInteraction):
    """Ask once more."""

    def __init__(self, config):
        super().__init__(config)
        self.asked = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        self.asked[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.asked[instance_id] += 1
        return self.asked[instance_id] > 1, "Are you sure?", 0.25, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.asked[instance_id]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0.0):
    return {"score": bonus + float(ground_truth in solution_str), "seen": extra_info["num_turns"]}
'''


def test_user_trains_with_own_tool_interaction_and_scorer(tiny_home: Path, tmp_path: Path):
    (tmp_path / "my_agent.py").write_text(OWN_CODE)
    write_yaml(tmp_path / "tools.yaml", {"tools": [{"class_name": "my_agent.Doubler"}]})
    user = {"name": "examiner", "class_name": "my_agent.py:Examiner"}
    write_yaml(tmp_path / "users.yaml", {"interaction": [user]})
    row = {
        "prompt": "Double 21.",
        "data_source": "mine",
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"interaction_kwargs": {"name": "examiner"}},
    }
    write_jsonl(tmp_path / "rows.jsonl", [row] * 4)
    run = tiny_run(
        tiny_home,
        Path("runs/mine"),
        data__train_files="rows.jsonl",
        data__val_files=None,
        data__max_prompt_length=600,
        data__max_response_length=256,
        rollout__engine=scripted(
            '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>', "It is 42."
        ),
        rollout__multi_turn={
            "tool_config_path": "tools.yaml",
            "interaction_config_path": "users.yaml",
            "max_tool_response_length": 32,
        },
        reward__custom_reward_function={"path": "my_agent", "reward_kwargs": {"bonus": 1.0}},
        trainer__total_training_steps=1,
        trainer__rollout_data_dir="runs/mine/rollouts",
    )
    write_yaml(tmp_path / "run.yaml", run)
    process = spawn_agentrl("train", "run.yaml", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), out + err
    request = read_lines(tmp_path / "runs/mine/rollouts/step_000001.jsonl.zst")[0]["request"]
    roles = [message["role"] for message in request["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert request["messages"][2]["content"] == "42"
    assert request["messages"][4]["content"] == "Are you sure?"
    assert request["reward"] == 2.0
    assert request["stop_reason"] == "interaction_ended"
    assert [turn["reward"] for turn in request["turns"]] == [0.5, None, 0.25, None, 0.25]


def test_rollout_that_is_stopped_promises_no_file(
    capfd: pytest.CaptureFixture[str], run_file: Path, tmp_path: Path
):
    scorer = "import os, signal, time\n\ndef compute_score(*a, **k):\n"
    scorer += "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.2)\n    return 0.0\n"
    (tmp_path / "stops.py").write_text(scorer)
    custom = f"reward.custom_reward_function.path={tmp_path}/stops.py"
    output = run_agentrl(capfd, "rollout", run_file, "--num", 1, custom)
    assert output.code == 130
    assert "stopping: tools are released, nothing is shown or saved; Ctrl-C exits" in output.err


def test_rollout_shows_what_would_be_trained(capsys: Capture, run_file: Path):
    output = run_agentrl(
        capsys,
        "rollout",
        run_file,
        "rollout.engine.name=scripted",
        f"rollout.engine.scripted.answers={json.dumps([CALL, '#### 42'])}",
        "rollout.multi_turn.max_tokens_per_turn=null",
        "data.max_response_length=160",
        "reward.tool_call_bonus=0.25",
        "reward.placement=turn_last_token",
        *("--num", 1, "--split", "arithmetic", "--tokens"),
    )
    assert (output.code, output.err) == (0, "")
    assert "reward: 0.25, on response token" in output.out
    assert "  tool_call_bonus: 0.25\n  scorer: 0\n" in output.out
    assert output.out.count(" · reward 0.25\n") == 1
    assert "┃ reward" in output.out
