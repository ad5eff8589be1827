"""Bad input through the command line: a clear message, exit code 2, no traceback, nothing lost."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import PluginError
from agentrl.plugins import load_module
from tests.fakes.runs import (
    CALL,
    SHARED,
    CommandOutput,
    read_lines,
    run_agentrl,
    scripted,
    tiny_run,
    write_jsonl,
    write_yaml,
)

Train = Callable[..., CommandOutput]
ROW = {"prompt": [{"role": "user", "content": "What is 6*7?"}], "data_source": "agentrl/arithmetic"}
ROW = ROW | {"reward_model": {"ground_truth": "42"}}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train(tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """`agentrl train` on a tiny run file, with changes."""

    def run(**changes: Any) -> CommandOutput:
        content = tiny_run(tiny_home, tmp_path / "run", **changes)
        return run_agentrl(capsys, "train", write_yaml(tmp_path / "run.yaml", content))

    return run


def assert_refused(output: CommandOutput, *parts: str) -> None:
    """Exit code 2 and one message on standard error that says each of `parts`."""
    assert output.code == 2, output
    assert output.err.startswith("error: "), output.err
    assert "Traceback" not in output.err + output.out
    for part in parts:
        assert part in output.err, output.err


def tools_yaml(folder: Path, *entries: object) -> dict[str, str]:
    file = write_yaml(folder / "tools.yaml", {"tools": list(entries)})
    return {"rollout__multi_turn__tool_config_path": str(file)}


# The run file.


def test_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for command in (["train"], ["rollout"], ["sft"], ["config", "check"]):
        output = run_agentrl(capsys, *command, tmp_path / "absent.yaml")
        assert_refused(output, f"no file {tmp_path}/absent.yaml", "expected: a YAML run file")


def test_missing_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for command in ("audit", "status", "view"):
        assert_refused(run_agentrl(capsys, command, tmp_path / "no"), f"no folder {tmp_path}/no")


def test_malformed_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  train_files: [a, b\nmodel: {}\n")
    assert_refused(run_agentrl(capsys, "train", file), "malformed YAML in line 3", str(file))


def test_unknown_key(train: Train):
    output = train(rollout__multi_turn__max_asistant_turns=3)
    assert_refused(output, "did you mean 'rollout.multi_turn.max_assistant_turns'?", "run.yaml")


def test_every_problem_is_reported_at_once(train: Train):
    output = train(rollout__n="many", data__sed=1, actor__ppo_mini_batch_size=-1)
    assert_refused(output, "3 problems", "rollout.n", "'data.seed'", "actor.ppo_mini_batch_size")


def test_override_that_is_none(tiny_home: Path, tmp_path: Path, capsys: Any):
    file = write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run"))
    assert_refused(run_agentrl(capsys, "train", file, "n8"), "'n8' is no override")


@pytest.mark.parametrize(
    "override",
    ["actor.ppo_mini_batch_size=3", "data.train_files=none.parquet", "reward.manager=naiv"],
)
def test_what_the_command_line_is_to_blame_for_is_not_laid_on_the_file(
    tiny_home: Path, tmp_path: Path, capsys: Any, override: str
):
    file = write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run"))
    output = run_agentrl(capsys, "train", file, override)
    assert_refused(output, "(given on the command line)")
    assert "run.yaml" not in output.err


def test_batch_arithmetic_that_does_not_divide(train: Train):
    output = train(actor__ppo_mini_batch_size=3)
    assert_refused(output, "3 prompts do not divide data.train_batch_size, 4", "divisor of 4")


@pytest.mark.parametrize(
    ("key", "misspelt"),
    [
        ("algorithm.adv_estimator", "gropo"),
        ("actor.policy_loss", "vanila"),
        ("reward.manager", "naiv"),
        ("rollout.multi_turn.format", "hermess"),
    ],
)
def test_unknown_name(train: Train, key: str, misspelt: str):
    output = train(**{key.replace(".", "__"): misspelt})
    assert_refused(output, repr(misspelt), "did you mean", f"key: {key}", "run.yaml")


def test_model_that_is_no_folder_and_no_hub_answers_for(train: Train):
    output = train(model__path="runs/policy")
    assert_refused(
        output, "no folder runs/policy here, and the hub cannot be reached", "model.path"
    )


def test_address_that_is_none(train: Train):
    servers = {"addresses": ["http://127.0.0.1:30000", "somewhere"]}
    output = train(rollout__engine={"name": "sglang_server", "sglang_server": servers})
    assert_refused(output, "addresses[1]: 'somewhere' is no address such as http://127.0.0.1:30000")
    assert "Value error" not in output.err


def test_address_without_a_server(train: Train):
    servers = {"addresses": ["http://127.0.0.1:9"]}
    output = train(rollout__engine={"name": "sglang_server", "sglang_server": servers})
    assert_refused(output, "no SGLang server answers", "agentrl serve", "sglang_server.addresses")


# Plug-ins.


def test_unknown_class_path(train: Train, tmp_path: Path):
    output = train(**tools_yaml(tmp_path, {"class_name": "agentrl.tools.nowhere.Tool"}))
    assert_refused(output, "agentrl.tools.nowhere", "tools.yaml", "tools[0].class_name")
    output = train(**tools_yaml(tmp_path, {"class_name": "agentrl.tools.base.BaseTol"}))
    assert_refused(output, "has no 'BaseTol'", "BaseTool")


def test_class_that_is_no_tool(train: Train, tmp_path: Path):
    output = train(**tools_yaml(tmp_path, {"class_name": "collections.OrderedDict"}))
    assert_refused(output, "not a BaseTool", "a subclass of agentrl.tools.base.BaseTool")


def test_duplicate_tool_names(train: Train, tmp_path: Path):
    entry = {"class_name": "agentrl.tools.calculator_tool.CalculatorTool"}
    output = train(**tools_yaml(tmp_path, entry, entry))
    assert_refused(output, "two tools have the name 'calculator'", "tools.yaml")


def test_reward_function_that_is_not_there(train: Train, tmp_path: Path):
    output = train(reward__custom_reward_function={"path": str(tmp_path / "none.py")})
    assert_refused(output, "none.py", "run.yaml")


def test_missing_files_are_blamed_on_their_key_and_origin(
    tiny_home: Path, tmp_path: Path, capsys: Any
):
    file = write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run"))
    (tmp_path / "my_tool.py").touch()
    for key in ("reward.custom_reward_function.path", "rollout.multi_turn.tool_config_path"):
        output = run_agentrl(capsys, "train", file, f"{key}={tmp_path}/my_toool.py")
        assert_refused(output, f"no file {tmp_path}/my_toool.py; did you mean 'my_tool.py'?")
        assert_refused(
            output, "(given on the command line)", f"key: {key}", "expected: an existing"
        )
        assert "run.yaml" not in output.err


def test_module_that_is_not_installed(train: Train, tmp_path: Path):
    output = train(**tools_yaml(tmp_path, {"class_name": "nomodule.Stock"}))
    assert_refused(output, "No module named 'nomodule'", "expected: a module that is installed, or")


def test_module_that_imports_one_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "nomodule_rewards.py").write_text("import nomodule")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="No module named 'nomodule'") as caught:
        load_module("nomodule_rewards")
    assert "expected" not in caught.value.details


def test_interaction_that_is_none(train: Train, tmp_path: Path):
    entry = {"name": "user", "class_name": "agentrl.tools.calculator_tool.CalculatorTool"}
    file = write_yaml(tmp_path / "users.yaml", {"interaction": [entry]})
    output = train(rollout__multi_turn__interaction_config_path=str(file))
    assert_refused(output, "not a BaseInteraction", "users.yaml")


# Data.


def train_on(train: Train, folder: Path, *rows: object, **changes: Any) -> CommandOutput:
    file = write_jsonl(folder / "rows.jsonl", list(rows))
    return train(
        data__train_files=[str(file)],
        data__val_files=None,
        data__train_batch_size=1,
        actor__ppo_mini_batch_size=None,
        **changes,
    )


def test_missing_data_file(train: Train, tmp_path: Path):
    output = train(data__train_files=[str(tmp_path / "gone.parquet")])
    assert_refused(output, f"no file {tmp_path}/gone.parquet", "data.train_files[0]")


def test_row_without_prompt(train: Train, tmp_path: Path):
    output = train_on(train, tmp_path, ROW, {"question": "6*7?"})
    assert_refused(output, "a row without 'prompt'", "row: 1", "rows.jsonl", "data.prompt_key")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "the file has no rows"), ('{"question": "1+1?"}', "a row without 'prompt'")],
)
def test_wrong_data_file_is_reported_before_anything_is_prepared(
    train: Train, tmp_path: Path, text: str, reason: str
):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    out_dir = tmp_path / "made"
    output = train(data__train_files=[str(file)], prepare={"arithmetic": {"out_dir": str(out_dir)}})
    assert_refused(output, f"{file}: ", reason, "key: data.train_files[0]")
    assert not out_dir.exists()
    assert not (tmp_path / "run").exists()


def test_start_that_fails_leaves_no_run_folder(train: Train, tmp_path: Path):
    train_on(train, tmp_path, {"question": "1+1?"})
    assert not (tmp_path / "run").exists()


def test_data_source_without_a_scorer(train: Train, tmp_path: Path):
    changes = {"reward": {"custom_reward_function": None}}
    output = train_on(train, tmp_path, ROW, ROW | {"data_source": "my/source"}, **changes)
    assert_refused(output, "no bundled scorer for the data source 'my/source'", "row: 1")


def test_prompt_beyond_its_budget(train: Train, tmp_path: Path):
    long = ROW | {"prompt": "six times seven " * 200}
    output = train_on(train, tmp_path, ROW, long, data__filter_overlong_prompts=False)
    assert_refused(output, "224", "data.truncation")


def test_every_prompt_beyond_its_budget(train: Train, tmp_path: Path):
    output = train_on(train, tmp_path, ROW | {"prompt": "six times seven " * 200})
    assert_refused(output, "224")


def test_tool_named_in_data_and_absent_in_the_run(train: Train, tmp_path: Path):
    kwargs = {"tools_kwargs": {"search": {"create_kwargs": {"index": "wiki"}}}}
    output = train_on(train, tmp_path, ROW, ROW | {"extra_info": kwargs})
    assert_refused(
        output, "row 1 names the tool 'search'", "rows.jsonl", "calculator", "tool_config_path"
    )


def test_interaction_named_in_data_and_absent_in_the_run(train: Train, tmp_path: Path):
    entry = {
        "name": "gsm8k",
        "class_name": "agentrl.interactions.gsm8k_interaction.Gsm8kInteraction",
    }
    file = write_yaml(tmp_path / "users.yaml", {"interaction": [entry]})
    kwargs = {"interaction_kwargs": {"name": "doctor"}}
    output = train_on(
        train,
        tmp_path,
        ROW | {"extra_info": kwargs},
        rollout__multi_turn__interaction_config_path=str(file),
    )
    assert_refused(output, "'doctor'", "gsm8k", "row: 0", "rows.jsonl")
    assert "Qwen2ForCausalLM" not in output.out, "told before the model loads"


# Models.


def test_model_that_is_not_there(train: Train, tmp_path: Path):
    output = train(model__path=str(tmp_path / "nowhere"))
    assert_refused(output, f"no folder {tmp_path}/nowhere", "model.path")


def test_hub_name_without_a_hub(train: Train):
    output = train(model__path="nobody/has-this")
    assert_refused(output, "nobody/has-this", "model.path")
    assert len(output.err.splitlines()) < 10


def test_template_that_cannot_carry_the_run(train: Train):
    template = SHARED / "chat_templates/phi3_5.jinja"
    if not template.is_file():
        pytest.skip(f"needs {template}")
    output = train(model__custom_chat_template=str(template))
    assert_refused(output, "phi3_5.jinja", "the tokenizer lacks the tokens", "<|assistant|>")


def test_template_without_generation_prompt(train: Train):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    output = train(model__custom_chat_template=source, rollout__multi_turn__tool_config_path=None)
    assert_refused(output, "generation prompt")


def test_checkpoint_of_another_model(train: Train, tiny_home: Path, tmp_path: Path):
    assert train(trainer__total_training_steps=1).code == 0
    other = tmp_path / "other"
    shutil.copytree(tiny_home / "policy", other)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(other)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    output = train(model__path=str(other))
    assert_refused(output, "of another model", "global_step_1", "trainer.resume_mode=disable")
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_half_written_checkpoint_gives_way_to_the_one_before(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert train(trainer__save_freq=1).code == 0
    broken = tmp_path / "run/checkpoints/global_step_2"
    weights = broken / "rank_0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    output = train()
    assert output.code == 0, output.err
    assert "global_step_1 at step 1" in output.out
    assert "global_step_2 is damaged" in caplog.text
    assert "Traceback" not in output.err
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]


def test_half_written_checkpoint_that_was_asked_for_is_refused(train: Train, tmp_path: Path):
    assert train(trainer__save_freq=1).code == 0
    broken = tmp_path / "run/checkpoints/global_step_2"
    (broken / "manifest.json").unlink()
    output = train(trainer__resume_mode="resume_path", trainer__resume_from_path=str(broken))
    assert_refused(output, "global_step_2 is incomplete", str(broken))
    output = train(trainer__resume_mode="resume_path", trainer__resume_from_path="no/such/folder")
    assert_refused(output, "no/such/folder", "trainer.resume_from_path")


# What happens while it runs.


def test_reward_function_that_returns_nan(train: Train, tmp_path: Path):
    (tmp_path / "nan.py").write_text("def compute_score(*args, **kw):\n    return float('nan')\n")
    output = train(reward__custom_reward_function={"path": str(tmp_path / "nan.py")})
    assert_refused(output, "requests failed", "nan", "RewardError")


def test_reward_function_that_breaks_later_keeps_what_was_reached(train: Train, tmp_path: Path):
    (tmp_path / "late.py").write_text(
        "from pathlib import Path\n"
        "def compute_score(*args, **kw):\n"
        f"    done = Path({str(tmp_path / 'run/checkpoints/global_step_1')!r}).exists()\n"
        "    return float('inf') if done else 1.0\n"
    )
    output = train(
        reward__custom_reward_function={"path": str(tmp_path / "late.py")}, trainer__save_freq=1
    )
    assert_refused(output, "inf")
    assert (tmp_path / "run/checkpoints/global_step_1/manifest.json").is_file()
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]


BAD_TOOLS = """
import time
from agentrl.tools import function_tool


@function_tool
def raises(a: int = 0) -> str:
    '''Raise.'''
    raise KeyError("oops")


@function_tool
def hangs(a: int = 0) -> str:
    '''Hang.'''
    time.sleep(30)


@function_tool
def nothing(a: int = 0) -> str:
    '''Return None.'''


@function_tool
def floods(a: int = 0) -> str:
    '''Return a megabyte.'''
    return "<|im_end|>0123456789" * 50_000
"""


@pytest.mark.parametrize(
    ("tool", "outcome", "shown"),
    [
        ("raises", "crashed", "internal error"),
        ("hangs", "timeout", "0.5"),
        ("nothing", "crashed", "internal error"),
        ("floods", "ok", "<|im_end|>0123456789"),
    ],
)
def test_bad_tool_costs_its_call_and_the_run_goes_on(
    train: Train, tmp_path: Path, tool: str, outcome: str, shown: str
):
    (tmp_path / "bad_tools.py").write_text(BAD_TOOLS)
    call = CALL.replace("calculator", tool).replace('"expression": "6*7"', '"a": 1')
    output = train(
        rollout__multi_turn={
            "function_tool_path": str(tmp_path / "bad_tools.py"),
            "tool_timeout_s": 0.5,
            "max_tool_response_length": 40,
            "max_assistant_turns": 3,
        },
        rollout__engine=scripted(call, "ok"),
        data__max_prompt_length=640,
        data__max_response_length=160,
        data__val_files=None,
        trainer__total_training_steps=1,
        trainer__rollout_data_dir=str(tmp_path / "rollouts"),
    )
    assert output.code == 0, output.err
    assert "Traceback" not in output.err
    line = read_lines(tmp_path / "run/metrics.jsonl")[0]
    assert line[f"rollout/tool_calls/{outcome}"] == 1.0
    assert line["rollout/failed_frac"] == 0.0
    request = read_lines(tmp_path / "rollouts/step_000001.jsonl.zst")[0]["request"]
    observed = next(message for message in request["messages"] if message["role"] == "tool")
    assert shown in json.dumps(observed["content"])
    assert len(observed["content"]) < 1000


def test_folder_that_cannot_be_written(train: Train, tmp_path: Path):
    (tmp_path / "file").write_text("")
    output = train(trainer__default_local_dir=str(tmp_path / "file/run"))
    assert_refused(
        output, f"cannot write to {tmp_path}/file/run: {tmp_path}/file is a file",
        "trainer.default_local_dir", "expected: a folder that can be written",
    )  # fmt: skip
    output = train(trainer__default_local_dir=str(tmp_path / "file"))
    assert_refused(output, f"{tmp_path}/file is a file", "trainer.default_local_dir")
    output = train(trainer__rollout_data_dir="/proc/rollouts")
    assert_refused(output, "cannot write", "/proc/rollouts", "trainer.rollout_data_dir")
