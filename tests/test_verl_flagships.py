"""The three multi-turn flagships of verl 0.6.1: what their scripts set, on small stand-ins.

Replaced are model and data, sizes, the addresses of services, and the engine (there is no SGLang
here). Every other key is as verl's scripts and run files set it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.compat import SWITCH, install_verl
from tests.fakes.runs import run_agentrl, write_yaml

Capture = pytest.CaptureFixture[str]
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

COMMON = [
    "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
    "data.filter_overlong_prompts=True", "data.truncation=error", "data.return_raw_chat=True",
    f"{M}.use_remove_padding=True", f"{M}.enable_gradient_checkpointing=True",
    f"{A}.optim.lr=1e-6", "trainer.n_gpus_per_node=8", "trainer.nnodes=1",
]  # fmt: skip
OF_SGLANG = [
    f"{A}.ppo_micro_batch_size_per_gpu=32", f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.001",
    f"{A}.kl_loss_type=low_var_kl", f"{A}.entropy_coeff=0",
    f"{A}.fsdp_config.param_offload=False", f"{A}.fsdp_config.optimizer_offload=False",
    f"{R}.log_prob_micro_batch_size_per_gpu=32", f"{R}.tensor_model_parallel_size=1",
    f"{R}.name=sglang", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True", "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
]  # fmt: skip
GSM8K = [
    *COMMON, *OF_SGLANG,
    "global_profiler.tool=torch_memory", "global_profiler.save_path=./mem_snapshots",
    "global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries=100000",
    "global_profiler.global_tool_config.torch_memory.stack_depth=32",
    f"{R}.gpu_memory_utilization=0.85", f"{R}.multi_stage_wake_up=True",
    f"{R}.over_sample_rate=0.1", f"{R}.mode=sync", f"{R}.update_weights_bucket_megabytes=512",
    "trainer.save_freq=-1", "trainer.test_freq=20", "trainer.val_before_train=True",
    "trainer.total_epochs=15",
]  # fmt: skip
SEARCH = [
    *COMMON, *OF_SGLANG, f"{A}.optim.lr_warmup_steps_ratio=0.285", "data.val_batch_size=256",
    f"{R}.gpu_memory_utilization=0.5", f"{R}.multi_turn.max_assistant_turns=2",
    "trainer.val_before_train=False", "trainer.save_freq=100", "trainer.test_freq=50",
    "trainer.total_epochs=1",
]  # fmt: skip
RETOOL = [
    *COMMON, "algorithm.kl_ctrl.kl_coef=0.0", "data.custom_cls.name=CustomRLHFDataset",
    "custom_reward_function.name=compute_score", f"{A}.use_kl_loss=False",
    f"{A}.kl_loss_coef=0.0", f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.28",
    f"{A}.clip_ratio_c=10.0", f"{A}.use_dynamic_bsz=True", f"{A}.ulysses_sequence_parallel_size=4",
    f"{A}.fsdp_config.param_offload=True", f"{A}.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=73728", f"{R}.name=vllm",
    f"{R}.mode=async", f"{R}.tensor_model_parallel_size=4", f"{R}.multi_turn.enable=True",
    f"{R}.multi_turn.max_user_turns=16", f"{R}.multi_turn.max_assistant_turns=16",
    f"{R}.multi_turn.format=hermes", f"{R}.gpu_memory_utilization=0.9",
    f"{R}.val_kwargs.top_p=0.6", f"{R}.val_kwargs.temperature=1.0",
    "trainer.logger=[console,wandb]", "trainer.val_before_train=True",
    "trainer.log_val_generations=20", "trainer.save_freq=20", "trainer.test_freq=10",
    "trainer.total_epochs=1",
]  # fmt: skip
HYDRA: dict[str, Any] = {
    "hydra": {"searchpath": ["file://verl/trainer/config"]},
    "defaults": ["ppo_trainer", "_self_"],
}
PLUGINS = """
import datasets

from verl.tools.base_tool import OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.dataset import RLHFDataset
from verl.utils.reward_score import math_dapo
from verl.utils.rollout_trace import rollout_trace_op


class PrintingSandbox(SandboxFusionTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.ending = ")"

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        code = f"print({parameters['code']}{self.ending}"
        timeout, language = self.default_timeout, self.default_language
        result = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, code, timeout, language
        )
        return result, None, None


class CustomRLHFDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        frames = [datasets.load_dataset(file)["train"] for file in self.data_files]
        self.dataframe = datasets.concatenate_datasets([f.map(self.add_agent) for f in frames])

    def add_agent(self, row: dict):
        return {**row, "agent_name": "tool_agent"}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    result["score"] -= 0.01 * extra_info["num_turns"]
    return result
"""


class Flagship(NamedTuple):
    """One of verl's runs, with its files written to a folder."""

    file: Path
    line: list[str]


def rows_of(
    folder: Path, source: str, truth: Callable[[int], Any], tool: str | None = None
) -> Path:
    """Write rows as verl's preprocessing makes them."""
    rows: list[dict[str, Any]] = []
    for number in range(4):
        question = f"What is {number} + 40?"
        row: dict[str, Any] = {
            "data_source": source,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": truth(number + 40)},
        }
        if tool is not None:
            created = {"create_kwargs": {"ground_truth": truth(number + 40)}}
            kwargs = {"need_tools_kwargs": True, "tools_kwargs": {tool: created}}
            row["extra_info"] = {"index": number, "split": "train", **kwargs}
        rows.append(row)
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def tool_file(folder: Path, path: str, name: str, kind: str, **config: Any) -> Path:
    argument = {"search": "query_list", "code_interpreter": "code"}.get(name, "answer")
    parameters = {"type": "object", "properties": {argument: {"type": kind}}}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    schema = {"type": "function", "function": function | {"required": [argument]}}
    tool = {"class_name": path, "config": {"type": "native", **config}, "tool_schema": schema}
    return write_yaml(folder / "tools.yaml", {"tools": [tool]})


def run_file(folder: Path, turns: dict[str, Any], **data: Any) -> Path:
    """Write one of the run files of verl's multi-turn examples."""
    rollout = {"name": "sglang", "multi_turn": {"enable": True, **turns}}
    lengths = {"max_prompt_length": 1024, "max_response_length": 1024, "train_batch_size": 256}
    tree = {
        "data": {**lengths, "return_raw_chat": True, **data},
        "actor_rollout_ref": {"hybrid_engine": True, "rollout": rollout},
    }
    return write_yaml(folder / "run.yaml", HYDRA | tree)


def gsm8k(folder: Path) -> Flagship:
    rows = rows_of(folder / "rows", "openai/gsm8k", str, "calc_gsm8k_reward")
    tools = tool_file(folder, "verl.tools.gsm8k_tool.Gsm8kTool", "calc_gsm8k_reward", "string")
    paths = [f"data.train_files={rows}", f"data.val_files={rows}",
             f"{R}.multi_turn.tool_config_path={tools}"]  # fmt: skip
    return Flagship(run_file(folder, {"max_assistant_turns": 5}), [*GSM8K, *paths])


def search(folder: Path) -> Flagship:
    rows = rows_of(folder / "rows", "searchR1_nq", lambda n: {"target": [str(n)]}, "search")
    tools = tool_file(
        folder, "verl.tools.search_tool.SearchTool", "search", "array",
        retrieval_service_url="http://127.0.0.1:8000/retrieve", num_workers=120, rate_limit=120,
        timeout=30,
    )  # fmt: skip
    paths = [f"data.train_files={rows}", f"data.val_files={rows}",
             f"{R}.multi_turn.tool_config_path={tools}", f"{R}.max_model_len=15000"]  # fmt: skip
    turns = {"max_assistant_turns": 2, "format": "qwen"}
    return Flagship(run_file(folder, turns, shuffle=False), [*SEARCH, *paths])


def retool(folder: Path) -> Flagship:
    rows = rows_of(folder / "rows", "math_dapo", str)
    plugins = folder / "their_retool.py"
    plugins.write_text(PLUGINS)
    tools = tool_file(
        folder, "their_retool.PrintingSandbox", "code_interpreter", "string",
        sandbox_fusion_url="http://localhost:8080/run_code", num_workers=128,
        enable_global_rate_limit=True, rate_limit=128, default_timeout=30,
        default_language="python", memory_limit_mb=1024,
    )  # fmt: skip
    paths = [
        f"data.train_files=['{rows.parent}']", f"data.val_files=['{rows.parent}']",
        f"data.custom_cls.path={plugins}", f"custom_reward_function.path={plugins}",
        f"{R}.multi_turn.tool_config_path={tools}",
    ]  # fmt: skip
    return Flagship(write_yaml(folder / "run.yaml", {}), [*RETOOL, *paths])


def small(home: Path, folder: Path) -> list[str]:
    """Sizes for two cores, the model, and an engine that is here."""
    return [
        f"{M}.path={home / 'policy'}", "data.train_batch_size=4", f"{A}.ppo_mini_batch_size=2",
        f"{R}.n=2", f"{R}.val_kwargs.n=2", "data.max_prompt_length=800",
        "data.max_response_length=200", f"{A}.ppo_max_token_len_per_gpu=1000",
        f"{R}.max_model_len=1000", "rollout.multi_turn.max_tokens_per_turn=16",
        "rollout.engine.name=transformers", f"{A}.ulysses_sequence_parallel_size=1",
        "trainer.total_training_steps=2", "trainer.plot=false", "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,jsonl]",  # wandb is an extra
        f"trainer.default_local_dir={folder / 'out'}", f"data.cache_dir={folder / 'cache'}",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("flagship", [gsm8k, search, retool])
def test_a_flagship_of_verl_trains_two_steps(
    capsys: Capture,
    tiny_home: Path,
    tmp_path: Path,
    flagship: Callable[[Path], Flagship],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(SWITCH, "1")
    install_verl()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    run = flagship(tmp_path)
    output = run_agentrl(capsys, "train", run.file, *run.line, *small(tiny_home, tmp_path))
    assert output.code == 0, output.err
    assert "2 steps in" in output.out
    assert (tmp_path / "out/checkpoints/global_step_2").is_dir()
