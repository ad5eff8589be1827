"""verl's `AgentLoopManager`: a batch of rows in, a batch of sequences out."""

from pathlib import Path

import numpy as np
import pytest

from agentrl import DataProto
from agentrl.config.schema.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.trainer.agent_loop_manager import AgentLoopManager
from tests.fakes.plugins import make_engine, tiny_tokenizer


def give_length(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    scorer = {"path": __file__, "name": "give_length"}
    return RunConfig.model_validate(
        {
            "data": {"max_prompt_length": 60, "max_response_length": 30},
            "model": {"path": str(tmp_path / "policy")},
            "reward": {"custom_reward_function": scorer},
        }
    )


def batch_of(*names: str | None) -> DataProto:
    prompts = np.empty(len(names), dtype=object)
    prompts[:] = [[{"role": "user", "content": f"Hi {n}"}] for n in range(len(names))]
    columns = {"raw_prompt": prompts, "agent_name": np.array(names, dtype=object)}
    return DataProto.from_dict(non_tensors=columns)


def test_each_row_is_driven_by_its_agent_and_scored(config: RunConfig):
    manager = AgentLoopManager(config, make_engine("Hello", max_model_len=90))
    made = manager.generate_sequences(batch_of("single_turn_agent", "tool_agent", None))
    manager.close()
    assert made.batch["responses"].shape == (3, 30)
    assert made.batch["prompts"].shape == (3, 60)
    assert made.batch["response_mask"].sum(-1).tolist() == [6, 6, 6]
    assert made.batch["rm_scores"].sum(-1).tolist() == [5.0, 5.0, 5.0]
    assert made.non_tensor_batch["__num_turns__"].tolist() == [2, 2, 2]
    assert made.meta_info["timing"]["agent_loop/generate_sequences/max"] >= 0


def test_an_engine_is_needed(config: RunConfig):
    with pytest.raises(ConfigError, match="llm_client is a NoneType"):
        AgentLoopManager(config, None)  # pyright: ignore[reportArgumentType]
