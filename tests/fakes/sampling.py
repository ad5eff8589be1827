"""A loop without an engine: what a sample earns is written down beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl.collate import collate
from agentrl.config import parse_config
from agentrl.data.order import DataOrder
from agentrl.data.rows import Prompt
from agentrl.engines.protocol import SamplingParams
from agentrl.rollout.manager import SamplingPlan
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import ENDS, RequestState, StopReason
from agentrl.trainer.sampling import StepSampler
from agentrl.workers.distributed import World
from tests.fakes.plugins import make_prompts
from tests.fakes.requests import build_request, said

GREEDY = -1
"""Offset under which a prompt's greedy rollout is asked for."""


class SampleResult(NamedTuple):
    """What came of one sample."""

    reward: float = 0.0
    num_tokens: int = 4
    extra: dict[str, Any] = {}  # noqa: RUF012 - copied before it is changed
    stop_reason: StopReason = StopReason.ANSWERED


Outcome = Callable[[int, int], SampleResult]
"""From a row of the data and a sample's offset to what came of it."""


@dataclass
class FakeManager:
    """Knows the plans, and nothing else."""

    n: int

    def train_plan(self) -> SamplingPlan:
        return SamplingPlan("train", self.n, SamplingParams(max_new_tokens=8))

    def greedy_plan(self) -> SamplingPlan:
        return SamplingPlan("greedy", 1, SamplingParams(max_new_tokens=8, temperature=0.0))


@dataclass
class FakeRunLogger:
    """Remembers what it was told."""

    lines: list[str] = field(default_factory=list)

    def info(self, *lines: str) -> None:
        self.lines += lines


class FakeLoop:
    """The stations before and behind the sampler.

    Args:
        world: One rank.
        outcome: What comes of each sample.
        num_rows: Of the data, taken in their order.
        **sections: Of the run file.
    """

    def __init__(
        self, world: World, outcome: Outcome, *, num_rows: int = 12, **sections: Any
    ) -> None:
        base = {
            "data": {
                "train_files": ["a.parquet"], "train_batch_size": 2, "max_response_length": 10,
            },
            "model": {"path": "policy"},
            "rollout": {"n": 2},
        }  # fmt: skip
        self.config = parse_config(base | sections)
        self.outcome = outcome
        self.order = DataOrder(num_rows, seed=0, shuffle=False)
        self.rows = make_prompts(num_rows)
        self.run_logger = FakeRunLogger()
        manager: Any = FakeManager(self.config.rollout.n)
        run_logger: Any = self.run_logger
        batches = self.order.num_batches(self.config.prompts_per_rollout)
        self.sampler = StepSampler(self.config, manager, world, run_logger, num_batches=batches)

    def take(self, step: int = 1) -> Any:
        return self.sampler.take(step, self.load_prompts, self.roll_out)

    def collate(self, requests: Sequence[AsyncRolloutRequest]) -> Any:
        return collate(requests, pad_token_id=0, reward=self.config.reward)

    def load_prompts(self) -> list[Prompt]:
        places = self.order.next_batch(self.config.prompts_per_rollout)
        return [self.rows[place] for place in places]

    def roll_out(
        self, prompts: Sequence[Prompt], *plans: SamplingPlan
    ) -> list[AsyncRolloutRequest]:
        return [
            self._finish(prompt, plan, plan.index_offset + at, offset)
            for plan in plans
            for at, prompt in enumerate(prompts)
            for offset in range(plan.n)
        ]

    def _finish(
        self, prompt: Prompt, plan: SamplingPlan, place: int, offset: int
    ) -> AsyncRolloutRequest:
        came = self.outcome(prompt.index, GREEDY if plan.name == "greedy" else offset)
        failed = ENDS[came.stop_reason].state is RequestState.FAILED
        uid = f"{plan.name}-{prompt.index}-{place}"
        return build_request(
            said(came.num_tokens),
            stop_reason=came.stop_reason,
            request_id=f"{uid}-{offset}",
            uid=uid,
            batch_data_id=place,
            rollout_offset=offset,
            sampling=plan.sampling,
            budgets=Budgets(max_response_tokens=self.config.data.max_response_length),
            reward=None if failed else came.reward,
            reward_extra_info=dict(came.extra),
        )
