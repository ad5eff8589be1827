"""The work of `soak.py`: requests whose tool fails in every way, and what must become of them.

Everything is drawn beforehand, from a seed: how each call of each method of the tool ends stands in
the row (`tools_kwargs`) and in the policy's calls. So it is known what is to come out of every
request and call, and for how long nothing can be done but wait.
"""

import heapq
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from soak_tool import NotesTool, RiskyTool

from agentrl.config import parse_config
from agentrl.config.schema.reward import RewardConfig
from agentrl.data.rows import Prompt
from agentrl.engines import ScriptedEngine
from agentrl.engines.scripted import ScriptedAnswer
from agentrl.messages import Message
from agentrl.rewards import make_reward_manager
from agentrl.rollout import AsyncRolloutRequest, RolloutManager, StopReason
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model

FAULTS = {"raise": 0.05, "hang": 0.02, "garbage": 0.02, "kill": 0.01}
"""How often a call of one of the tool's methods ends so; the others are fine."""
OUTCOMES = {"fine": "ok", "hang": "timeout", "raise": "crashed", "garbage": "crashed"}
LOSES_PROCESS = frozenset({"hang", "kill"})
MOST_CALLS = 4
TURN_S = 0.05


@dataclass(frozen=True)
class Sizes:
    """How much work, and how much of it at once."""

    requests: int = 5000
    slots: int = 32
    """Requests at once."""
    timeout_s: float = 10.0
    """Of one call of one method of the tool."""
    seed: int = 1
    faults: Mapping[str, float] = field(default_factory=lambda: FAULTS)


@dataclass(frozen=True)
class Life:
    """How each call of a tool's methods ends, in one request."""

    create: str
    execute: Sequence[str]
    calc_reward: str
    release: str

    @property
    def is_answered(self) -> bool:
        """Whether the request completes; failures of `execute` are shown to the model."""
        return self.create == self.calc_reward == "fine"

    @property
    def kwargs(self) -> dict[str, dict[str, str]]:
        """What the row says to the tool."""
        acts = {"create": self.create, "calc_reward": self.calc_reward, "release": self.release}
        return {f"{method}_kwargs": {"act": act} for method, act in acts.items()}

    def num_hangs(self) -> int:
        """Time-outs that are waited for, one after another."""
        return [*self._acts()].count("hang")

    def num_processes(self) -> int:
        """Processes that are started."""
        acts = [*self._acts()]
        return 1 + sum(before in LOSES_PROCESS for before, _ in pairwise(acts))

    def _acts(self) -> Iterator[str]:
        """In order; a lost process is made again, with `release` and `create`, before a call."""
        yield self.create
        if self.create == "fine":
            is_lost = False
            for act in [*self.execute, self.calc_reward]:
                if is_lost:
                    yield from (self.release, self.create)
                yield act
                is_lost = act in LOSES_PROCESS
        yield self.release


class Work:
    """The requests, and all that rolls them out.

    Args:
        tokenizer: Folder or hub name of a tokenizer with a chat template.
        log: A file in which the tool notes its life.
        sizes: How much work.
    """

    def __init__(self, tokenizer: str, log: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        self.log = log
        self.notes = NotesTool()
        self._random = random.Random(sizes.seed)
        self.lives = [self._draw_life() for _ in range(sizes.requests)]
        risky = RiskyTool({"isolation": "process", "log": str(log)})
        plugins = Plugins([risky, self.notes], {}, make_reward_manager(RewardConfig()))
        config = parse_config(_run_file(tokenizer, sizes))
        setup = make_rollout_setup(config, plugins, probe_model(config, plugins))
        engine = ScriptedEngine(self._answer, tokenizer=setup.tokenizer)
        self.manager: RolloutManager = make_manager(config, setup, engine)
        prompts = [self._prompt(index, life) for index, life in enumerate(self.lives)]
        self.requests = self.manager.make_requests(prompts, self.manager.train_plan())
        self._of_request = dict(
            zip((request.request_id for request in self.requests), self.lives, strict=True)
        )

    def waits(self) -> list[float]:
        """Seconds for which each request can only wait: for the engine, and for time-outs."""
        hangs = (life.num_hangs() * self.sizes.timeout_s for life in self.lives)
        turns = ((len(life.execute) + 1) * (life.create == "fine") for life in self.lives)
        return [hang + turn * TURN_S for hang, turn in zip(hangs, turns, strict=True)]

    def bound_s(self) -> float:
        """Wall time of a rollout that costs nothing: the waits alone, on as many slots, in order.

        A request takes the slot that is free first, as in the rollout itself.
        """
        free_at = [0.0] * self.sizes.slots
        for wait in self.waits():
            heapq.heapreplace(free_at, free_at[0] + wait)
        return max(free_at)

    def check(self, finished: Sequence[AsyncRolloutRequest]) -> None:
        """Hold what came out against what was drawn.

        Raises:
            AssertionError: for a sample that is missing, and an end or outcome that is another.
        """
        assert [r.request_id for r in finished] == [*self._of_request], "a sample was lost"
        for request, life in zip(finished, self.lives, strict=True):
            assert request.is_finished, request.request_id
            answered = request.stop_reason is StopReason.ANSWERED
            assert answered == life.is_answered, (life, request.stop_reason, request.error)
            found = [call.outcome for turn in request.turns for call in turn.calls]
            expected = [OUTCOMES.get(act, "crashed") for act in life.execute]
            assert found == (expected if life.create == "fine" else []), (life, found)
        assert not self.notes.open, "instances were not released"
        assert self.notes.num_created == len(finished)
        life = self.log.read_text()
        assert life.count("c") == life.count("r"), "a tool was created and not released"

    def _draw_life(self) -> Life:
        executed = [self._draw_act() for _ in range(self._random.randint(1, MOST_CALLS))]
        return Life(self._draw_act(), executed, self._draw_act(), self._draw_act())

    def _draw_act(self) -> str:
        faults = self.sizes.faults
        return self._random.choices(
            [*faults, "fine"], [*faults.values(), 1 - sum(faults.values())]
        )[0]

    def _prompt(self, index: int, life: Life) -> Prompt:
        message = Message(role="user", content=f"Take {len(life.execute)} risks.")
        return Prompt(index=index, messages=[message], tools_kwargs={"risky": life.kwargs})

    def _answer(self, ids: Sequence[int], sampling: Any, name: str, turn: int) -> ScriptedAnswer:
        acts = self._of_request[name].execute
        if turn >= len(acts):
            return ScriptedAnswer("Done.", delay_s=TURN_S)
        call = json.dumps({"name": "risky", "arguments": {"act": acts[turn]}})
        return ScriptedAnswer(f"<tool_call>\n{call}\n</tool_call>", delay_s=TURN_S)


def _run_file(tokenizer: str, sizes: Sizes) -> dict[str, Any]:
    turns = {"tool_timeout_s": sizes.timeout_s, "max_assistant_turns": MOST_CALLS + 1}
    rollout = {"n": 1, "max_concurrent_requests": sizes.slots, "multi_turn": turns}
    return {
        "data": {"train_files": ["none.parquet"]},
        "model": {"path": tokenizer},
        "rollout": rollout,
    }
