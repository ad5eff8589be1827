"""Runs of small vision models: rows with pictures, and a tool and a user that show more."""

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from agentrl.data.files import write_parquet
from agentrl.interactions import BaseInteraction, InteractionResult
from agentrl.tools import BaseTool, ToolResponse, ToolResult
from tests.fakes.runs import write_yaml
from tests.fakes.vision_chat import VISION_TEMPLATE
from tests.fakes.vision_models import make_hf_processor, make_vision_model, random_picture


class Look(BaseTool):
    """Shows the picture that the row names, cropped."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.seeds: dict[str, int] = {}

    async def create(self, instance_id: str, seed: int = 0, **_: Any) -> tuple[str, ToolResponse]:
        assert instance_id
        self.seeds[instance_id] = seed
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: Any, **_: Any) -> ToolResult:
        picture = random_picture(self.seeds[instance_id], (24, 16))
        return ToolResult(ToolResponse(text="here", image=[picture]))

    async def release(self, instance_id: str, **_: Any) -> None:
        del self.seeds[instance_id]


class ShowMore(BaseInteraction):
    """Shows another picture after each answer."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **_: Any
    ) -> InteractionResult:
        picture = random_picture(len(messages), (24, 24))
        return InteractionResult(False, ToolResponse(text="And this?", image=[picture]))


SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def save_vision_model(family: str, folder: Path, seed: int = 0, **text: Any) -> Path:
    """Save a small model with its processor and a chat template."""
    make_vision_model(family, seed, **text).save_pretrained(folder)
    processor = make_hf_processor(family)
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(VISION_TEMPLATE)
    return folder


def encode_png(picture: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def picture_rows(number: int) -> list[dict[str, Any]]:
    """Rows with one or two pictures as bytes."""
    return [
        {
            "data_source": "pictures",
            "prompt": [{"role": "user", "content": "<image>" * (1 + index % 2) + "What is it?"}],
            "images": [
                {"bytes": encode_png(random_picture(10 * index + one, (16, 24))), "path": None}
                for one in range(1 + index % 2)
            ],
            "reward_model": {"ground_truth": "a"},
            "extra_info": json.dumps(
                {"tools_kwargs": {"look": {"create_kwargs": {"seed": index}}}}
            ),
        }
        for index in range(number)
    ]


def score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Share of an even byte in the answer."""
    return sum(sign % 2 == 0 for sign in solution_str.encode()) / max(1, len(solution_str))


def vision_run(folder: Path, family: str = "qwen2_5_vl", **changes: Any) -> Path:
    """Write model, data, tool and user, and a run file of two steps; return the run file."""
    from tests.fakes.runs import put

    write_parquet(folder / "train.parquet", picture_rows(8))
    tool = {"class_name": "tests.fakes.vision_runs.Look", "config": {}, "tool_schema": SCHEMA}
    user = {
        "name": "more",
        "class_name": "tests.fakes.vision_runs.ShowMore",
        "config": {},
        "data_sources": ["pictures"],
    }
    run: dict[str, Any] = {
        "data": {
            "train_files": [str(folder / "train.parquet")],
            "train_batch_size": 4,
            "max_prompt_length": 512,
            "max_response_length": 200,
            "cache_dir": str(folder / "cache"),
        },
        "model": {"path": str(save_vision_model(family, folder / "policy"))},
        "rollout": {
            "n": 2,
            "multi_turn": {
                "tool_config_path": str(write_yaml(folder / "tools.yaml", {"tools": [tool]})),
                "interaction_config_path": str(
                    write_yaml(folder / "users.yaml", {"interaction": [user]})
                ),
                "max_assistant_turns": 3,
                "max_tokens_per_turn": 12,
            },
        },
        "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}},
        "reward": {
            "custom_reward_function": {"path": "tests/fakes/vision_runs.py", "name": "score"}
        },
        "trainer": {
            "default_local_dir": str(folder / "run"),
            "total_training_steps": 2,
            "device": "cpu",
            "plot": False,
            "rollout_data_dir": str(folder / "rollouts"),
        },
    }
    for path, value in changes.items():
        put(run, path.replace("__", "."), value)
    return write_yaml(folder / "run.yaml", run)
