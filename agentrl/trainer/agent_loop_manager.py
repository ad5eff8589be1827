"""Roll out batches with agent loops, for another trainer: verl's `AgentLoopManager`.

Each row of the batch is driven by the agent that its `agent_name` names, and scored. agentrl's own
trainer does not use these classes: its rollout manager drives the same agents.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

import numpy as np
from omegaconf import DictConfig, OmegaConf

from agentrl.collate import collate
from agentrl.config import RunConfig, parse_config
from agentrl.config.schema.run import DataConfig
from agentrl.data.rows import RowReader, with_media_columns
from agentrl.engines import Engine
from agentrl.errors import ConfigError
from agentrl.protocol import DataProto
from agentrl.rewards import drive_and_score
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.interruption import NestableRunner
from agentrl.trainer.setup.plugins import load_plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model

Config = RunConfig | DictConfig | Mapping[str, Any]


class AgentLoopWorker:
    """Rolls out and scores batches in this process.

    Args:
        config: A run: agentrl's configuration, or verl's tree.
        llm_client: The engine.

    Raises:
        AgentRLError: If the configuration, a plug-in or the model's tokenizer cannot be used.
    """

    def __init__(self, config: Config, llm_client: Engine) -> None:
        if not isinstance(llm_client, Engine):
            raise ConfigError(
                f"llm_client is a {type(llm_client).__name__}",
                expected="an engine, such as agentrl.engines.SGLangServerEngine",
            )
        self.config = _read_config(config)
        self._plugins = load_plugins(self.config)
        probed = probe_model(self.config, self._plugins, now=datetime.now())
        self._setup = make_rollout_setup(self.config, self._plugins, probed)
        self._manager = make_manager(self.config, self._setup, llm_client)

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Roll out and score a batch, each row once.

        Args:
            batch: The columns of a dataset's rows as objects, with the messages in `raw_prompt` or
                `prompt`. `meta_info`: `validate` (sample as validation does), `global_steps` (part
                of the seeds).

        Returns:
            The columns of `agentrl.collate`, padded to `data.max_prompt_length` and
            `data.max_response_length`, and `rm_scores` (the combined rewards on their tokens) and
            `__num_turns__`. A trajectory of several sequences has several rows.

        Raises:
            DataError: For a row that cannot be read.
            RolloutError: See `rollout.failure`.
        """
        requests = self._make_requests(batch)
        finished = await drive_and_score(
            self._manager, self._plugins.rewards, requests, on_finished=lambda _: None
        )
        self._manager.apply_failure_policy(finished)
        data = self.config.data
        longest = max(len(one.prompt_ids) for request in finished for one in request.sequences)
        made = collate(
            finished,
            pad_token_id=self._setup.pad_token_id,
            reward=self.config.reward,
            processor=self._setup.processor,
            prompt_width=max(data.max_prompt_length, longest),
            response_width=data.max_response_length,
        )
        tensors = cast("Any", made.batch)
        tensors["rm_scores"] = tensors["token_level_scores"].clone()
        by_id = {one.request_id: request for request in finished for one in request.sequences}
        own = [by_id[str(row)] for row in made.non_tensor_batch["request_id"]]
        made.non_tensor_batch["__num_turns__"] = np.array([r.num_turns for r in own], np.int32)
        made.meta_info["metrics"] = [_metrics_of(request) for request in finished]
        return made

    def _make_requests(self, batch: DataProto) -> list[AsyncRolloutRequest]:
        given = batch.non_tensor_batch
        key = "raw_prompt" if "raw_prompt" in given else "prompt"
        reader = RowReader("batch", DataConfig(prompt_key=key))
        rows = [{k: column[row] for k, column in given.items()} for row in range(len(batch))]
        read = [reader.read(with_media_columns(row), at, at) for at, row in enumerate(rows)]
        is_val = bool(batch.meta_info.get("validate", False))
        plan = self._manager.val_plan("batch") if is_val else self._manager.train_plan()
        step = int(batch.meta_info.get("global_steps", 0))
        requests = self._manager.make_requests(read, plan._replace(n=1), step=step)
        for request, row in zip(requests, rows, strict=True):
            request.uid = str(row.get("uid", request.uid))
        return requests

    async def close(self) -> None:
        """Shut the plug-ins down. The engine belongs to the caller."""
        await self._plugins.shutdown()


class AgentLoopManager:
    """Rolls out batches from synchronous code; the interface of verl's class.

    The engine works on the event loop of this object: use it nowhere else.

    Args:
        config: A run: agentrl's configuration, or verl's tree.
        llm_client: The engine.

    Example:
        >>> manager = AgentLoopManager(config, engine)
        >>> prompts = DataProto.from_dict(non_tensors={"raw_prompt": conversations})
        >>> responses = manager.generate_sequences(prompts).batch["responses"]
    """

    def __init__(self, config: Config, llm_client: Engine) -> None:
        self._runner = NestableRunner()
        self.worker = AgentLoopWorker(config, llm_client)

    @classmethod
    def create(cls, config: Config, llm_client: Engine) -> "AgentLoopManager":
        """Make a manager, as verl 0.9.1 does."""
        return cls(config, llm_client)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Roll out and score a batch; see `AgentLoopWorker.generate_sequences`.

        `meta_info["timing"]` has the least, mean and most seconds of completions and of tools.
        """
        made = self._runner.run(self.worker.generate_sequences(prompts))
        made.meta_info["timing"] = _summarize(made.meta_info.pop("metrics"))
        return made

    def close(self) -> None:
        """Shut the plug-ins and the event loop down."""
        try:
            self._runner.run(self.worker.close())
        finally:
            self._runner.close()


def _read_config(config: Config) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    tree = OmegaConf.to_container(config) if isinstance(config, DictConfig) else dict(config)
    if not isinstance(tree, dict):
        raise ConfigError("the configuration is a list", expected="a mapping")
    return parse_config({str(name): value for name, value in tree.items()})


def _metrics_of(request: AsyncRolloutRequest) -> dict[str, float]:
    """Return the seconds of completions and of everything else."""
    sampled = [turn for one in request.sequences for turn in one.turns if turn.role == "assistant"]
    generating = sum(turn.seconds for turn in sampled)
    rest = max(0.0, request.metrics.get("seconds", 0.0) - generating)
    return {"generate_sequences": generating, "tool_calls": rest}


def _summarize(metrics: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("generate_sequences", "tool_calls"):
        values = [one[name] for one in metrics]
        for statistic in (min, max):
            found[f"agent_loop/{name}/{statistic.__name__}"] = statistic(values)
        found[f"agent_loop/{name}/mean"] = sum(values) / len(values)
    return found
