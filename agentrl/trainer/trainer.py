"""The loop. It reads like the data's way:

    data/         a row of a dataset          -> Prompt
    rollout/      Prompt x group size         -> AsyncRolloutRequest, PENDING ... COMPLETED | FAILED
    rewards/      a finished request          -> rewards per turn and per trajectory
    collate.py    finished requests           -> DataProto: the first tensors, [B, T]
    algorithms/   DataProto                   -> advantages, returns
    training/     DataProto                   -> log-probabilities, new weights
    weight_sync   new weights                 -> the engine, policy version + 1
    checkpoint    the whole run               -> disk, and back

On several ranks (torchrun) every rank runs this loop on its own share of the prompts; groups stay
whole on a rank, and only rank 0 writes.
"""

import asyncio
import logging
import time
from typing import Any

from agentrl.algorithms.credit import compute_advantages
from agentrl.collate import collate
from agentrl.config import RunConfig
from agentrl.data.prompt import Prompt
from agentrl.protocol import DataProto
from agentrl.rollout.manager import train_plan, val_plan
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.build import Parts, build_parts
from agentrl.trainer.metrics import Timer, batch_metrics, rollout_metrics
from agentrl.trainer.summary import Summary
from agentrl.trainer.validation import validation_metrics

log = logging.getLogger(__name__)


class Trainer:
    """Train a policy as a run file says.

    Args:
        config: The checked configuration.
        parts: What the loop works with; built from the configuration where it is not given.

    Example:
        >>> from agentrl import Trainer, load_config
        >>> Trainer(load_config("examples/gsm8k_multiturn/quickstart.yaml")).fit()
    """

    def __init__(self, config: RunConfig, parts: Parts | None = None) -> None:
        self.config = config
        self.parts = parts or build_parts(config)
        self.step = 0
        self.policy_version = 0
        self.timer = Timer()
        self.summary = Summary(seed=config.trainer.seed)
        self._runner = asyncio.Runner()

    def fit(self) -> Summary:
        """Train to the last step, validate, save; returns what came of it."""
        try:
            self.load_checkpoint()
            if self.config.trainer.val_before_train and self.step == 0:
                self.track(self.validate())
            while self.step < self.parts.total_steps:
                self.step += 1
                self.track(self.train_step())
            return self.finish()
        finally:
            self.close()

    def train_step(self) -> dict[str, float]:
        """One step of the data's way, from prompts to new weights in the engine."""
        with self.timer("step"):
            prompts = self.load_prompts()
            requests = self.roll_out(prompts)
            self.score(requests)
            batch = self.collate(requests)
            self.compute_log_probs(batch)
            compute_advantages(batch, self.config.algorithm, self.config.reward)
            update = self.update_actor(batch)
            self.sync_weights()
        metrics = rollout_metrics(requests) | batch_metrics(batch) | update
        ...
        return metrics
