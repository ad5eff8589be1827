"""A run as users of verl have it: their file, their overrides, their tools, their rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config import load_config
from tests.fakes.runs import read_lines, run_agentrl, write_yaml

Capture = pytest.CaptureFixture[str]

TOOLS = {
    "tools": [
        {
            "class_name": "verl.tools.gsm8k_tool.Gsm8kTool",
            "config": {"type": "native"},
            "tool_schema": {
                "type": "function",
                "function": {
                    "name": "calc_gsm8k_reward",
                    "description": "Tells how good an answer is.",
                    "parameters": {
                        "type": "object",
                        "properties": {"answer": {"type": "string", "description": "A number."}},
                        "required": ["answer"],
                    },
                },
            },
        }
    ]
}
INTERACTION = {
    "interaction": [
        {
            "name": "gsm8k",
            "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction",
            "config": {},
        }
    ]
}
RUN = {
    "hydra": {"searchpath": ["file://verl/trainer/config"]},
    "defaults": ["ppo_trainer", "_self_"],
    "data": {"max_prompt_length": 700, "max_response_length": 300, "return_raw_chat": True},
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "rollout": {"name": "sglang", "multi_turn": {"enable": True, "max_assistant_turns": 4}},
    },
}
CALL = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "41"}}\n</tool_call>'
SCORER = """
from itertools import count

TURN = count()


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(next(TURN) % 2)
"""


def verl_rows(file: Path) -> Path:
    """Rows with the columns that verl's preprocessing writes."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n} + 40? Answer behind ####."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 40)},
            "extra_info": {
                "split": "train",
                "index": n,
                "answer": f"#### {n + 40}",
                "question": f"What is {n} + 40?",
                "need_tools_kwargs": True,
                "tools_kwargs": {
                    "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(n + 40)}}
                },
                "interaction_kwargs": {"name": "gsm8k", "query": "?", "ground_truth": str(n + 40)},
            },
        }
        for n in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def overrides(home: Path, folder: Path) -> list[str]:
    """The command line, as verl's scripts write it; and three keys that verl does not have."""
    rows = verl_rows(folder / "train.parquet")
    tools = write_yaml(folder / "gsm8k_tool_config.yaml", TOOLS)
    users = write_yaml(folder / "gsm8k_interaction_config.yaml", INTERACTION)
    (folder / "score.py").write_text(SCORER)
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "data.train_batch_size=4",
        "data.filter_overlong_prompts=True",
        "data.truncation=error",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"actor_rollout_ref.model.path={home / 'policy'}",
        "actor_rollout_ref.model.use_remove_padding=True",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{actor}.use_kl_loss=True",
        f"{actor}.kl_loss_type=low_var_kl",
        f"{actor}.fsdp_config.param_offload=False",
        f"{actor}.clip_ratio=0.3",
        f"{rollout}.n=2",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.5",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
        f"{rollout}.multi_turn.tool_config_path={tools}",
        f"+{rollout}.multi_turn.max_user_turns=1",
        f"{rollout}.multi_turn.interaction_config_path={users}",
        f"custom_reward_function.path={folder / 'score.py'}",
        "trainer.logger=['console','clearml']",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={folder / 'run'}",
        f"trainer.rollout_data_dir={folder / 'run/rollouts'}",
        "trainer.total_training_steps=1",
        "trainer.plot=false",
        f"data.cache_dir={folder / 'cache'}",
        "rollout.multi_turn.max_tokens_per_turn=24",
    ]


SCRIPT = [
    "rollout.engine.name=scripted",
    f"rollout.engine.scripted.answers={json.dumps([CALL, 'It is #### 7', 'Then #### 8'])}",
    "rollout.multi_turn.max_tokens_per_turn=null",
]


@pytest.fixture
def verl_run(tiny_home: Path, tmp_path: Path) -> list[Any]:
    """What stands behind `agentrl train`."""
    file = write_yaml(tmp_path / "gsm8k_multiturn_grpo.yaml", RUN)
    return [file, *overrides(tiny_home, tmp_path)]


def test_a_run_of_verls_trains_a_step(capsys: Capture, verl_run: list[Any], tmp_path: Path):
    output = run_agentrl(capsys, "train", *verl_run, "rollout.engine.name=transformers")
    assert (output.code, output.err) == (0, "")
    assert "keys of verl's tree read" in output.out
    assert "agentrl has no clearml" in output.out
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" not in output.out, "verl's default"
    assert "actor_rollout_ref.model.use_remove_padding: rows are always packed" in output.out
    [step] = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if line["step"] == 1]
    assert step["actor/grad_norm"] > 0
    assert "actor/kl_loss" in step
    assert len(read_lines(tmp_path / "run/rollouts/step_000001.jsonl.zst")) == 8


def test_the_classes_that_replace_verls_are_named(capsys: Capture, verl_run: list[Any]):
    output = run_agentrl(capsys, "config", "check", *verl_run)
    assert (output.code, output.err) == (0, "")
    for path in (
        "verl.tools.gsm8k_tool.Gsm8kTool",
        "verl.interactions.gsm8k_interaction.Gsm8kInteraction",
    ):
        assert f"{path} -> agentrl.compat.{path}\n" in output.out


def test_tool_and_user_of_verls_take_their_part(
    capsys: Capture, verl_run: list[Any], tmp_path: Path
):
    out = tmp_path / "rollouts.jsonl"
    output = run_agentrl(capsys, "rollout", *verl_run, *SCRIPT, "--num", 1, "--out", out)
    assert (output.code, output.err) == (0, "")
    request = read_lines(out)[0]["request"]
    roles = [message["role"] for message in request["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert request["stop_reason"] == "max_user_turns"
    assert request["tool_rewards"] == {"calc_gsm8k_reward": 0.0}


def test_config_check_shows_the_report_and_a_file_of_ours(
    capsys: Capture, verl_run: list[Any], tmp_path: Path
):
    output = run_agentrl(capsys, "config", "check", *verl_run)
    assert (output.code, output.err) == (0, "")
    for part in (
        "# Read from the key tree of verl 0.6.1.",
        "no counterpart (",
        "no effect in verl too (",
        "tools: calc_gsm8k_reward",
        "interactions: gsm8k",
        "rows of train: 4",
    ):
        assert part in output.out, part
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(output.out.partition("\n# One training step")[0])
    assert load_config(resolved) == load_config(verl_run[0], verl_run[1:])


def test_from_verl_writes_the_run_in_our_keys(capsys: Capture, verl_run: list[Any], tmp_path: Path):
    ours = tmp_path / "ours.yaml"
    output = run_agentrl(capsys, "config", "from-verl", *verl_run, "--out", ours)
    assert (output.code, output.out) == (0, f"written: {ours}\n")
    assert load_config(ours) == load_config(verl_run[0], verl_run[1:])
    printed = run_agentrl(capsys, "config", "from-verl", *verl_run)
    assert printed.out == ours.read_text()


def test_a_contradiction_is_reported_with_verls_names_too(capsys: Capture, verl_run: list[Any]):
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    output = run_agentrl(capsys, "train", *verl_run, f"{mini}=3")
    assert output.code == 2
    assert f"actor.ppo_mini_batch_size is {mini}" in output.err


@pytest.mark.parametrize(
    "name", ["algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"]
)
def test_an_algorithm_that_is_not_here_is_refused(capsys: Capture, verl_run: list[Any], name: str):
    output = run_agentrl(capsys, "train", *verl_run, f"{name}=not_here")
    assert output.code == 2
    assert "'not_here'" in output.err


def test_rows_with_tools_in_a_run_without_tools_are_a_note_as_there(
    capsys: Capture, verl_run: list[Any]
):
    ablation = [line for line in verl_run if "tool_config_path" not in str(line)]
    output = run_agentrl(capsys, "config", "check", *ablation)
    assert (output.code, output.err) == (0, "")
    assert "rows name the tools calc_gsm8k_reward, and the run has none" in output.out
    strict = run_agentrl(capsys, "config", "check", *ablation, "data.strict_rows=true")
    assert strict.code == 2
    assert "names the tool 'calc_gsm8k_reward'" in strict.err


def test_rows_with_images_need_a_model_that_sees(
    capsys: Capture, verl_run: list[Any], tmp_path: Path
):
    prompt = [{"role": "user", "content": "<image>Find x"}]
    rows = [{"prompt": prompt, "data_source": "openai/gsm8k", "images": [{"path": "a.png"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    output = run_agentrl(capsys, "config", "check", *verl_run, "data.image_key=images")
    assert output.code == 2
    assert "the prompt has images or videos, and the model reads text only" in output.err
    assert "a vision-language model in model.path" in output.err


def test_verls_way_to_name_a_file_is_answered_with_ours(capsys: Capture, tmp_path: Path):
    for line in (
        ["--config-path", "examples/config", "--config-name=gsm8k_multiturn_grpo"],
        ["--config-path=examples/config", "--config-name", "gsm8k_multiturn_grpo.yaml"],
        ["--config-dir", "examples/config", "--config-name", "gsm8k_multiturn_grpo"],
    ):
        output = run_agentrl(capsys, "train", *line, "trainer.total_epochs=15")
        assert output.code == 2
        assert "agentrl train examples/config/gsm8k_multiturn_grpo.yaml KEY=VALUE" in output.err
