"""Life cycle of every bundled interaction: what is started is finalized, whatever breaks."""

import asyncio
import threading
from collections import Counter
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.interactions import BaseInteraction
from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction
from agentrl.interactions.gym_environment import THREAD_NAME
from agentrl.interactions.gym_interaction import GymInteraction
from agentrl.interactions.user_simulator_interaction import UserSimulatorInteraction
from agentrl.rollout.runner import run_request
from tests.fakes.chat_server import Answer, FakeChat, in_turn, serving
from tests.fakes.envs import OPEN
from tests.fakes.plugins import make_context, make_engine, make_request
from tests.fakes.tools import behave

TIMEOUT_S = 0.1

METHODS = ("start_interaction", "generate_response", "finalize_interaction")
BREAKS = st.fixed_dictionaries(
    {}, optional={m: st.sampled_from(["raise", "exit", "cancel_self", "hang"]) for m in METHODS}
)
CANCELS = st.one_of(st.none(), st.integers(1, 12), st.floats(0, 0.08))
"""Never, after so many rounds of the loop, after so many seconds."""


def breaking(
    kind: type[BaseInteraction], config: dict[str, Any], breaks: dict[str, str]
) -> tuple[BaseInteraction, Counter[str]]:
    """One of the kind that breaks in the methods named, and the count of its calls."""
    interaction, counts = kind({"name": "it", "timeout_s": TIMEOUT_S, **config}), Counter[str]()

    def broken(method: str) -> Any:
        real = getattr(interaction, method)

        @wraps(real)  # its parameters say what it is handed
        async def call(*args: Any, **kwargs: Any) -> Any:
            counts[method] += 1
            # Behind a start or an end: what was taken is there, and must be given back.
            value = await real(*args, **kwargs)
            await behave(breaks.get(method, "fine"))
            return value

        return call

    for method in METHODS:
        setattr(interaction, method, broken(method))
    return interaction, counts


async def roll_out(interaction: BaseInteraction, cancel_after: float | None, **row: Any) -> None:
    """One request, cancelled or not, behind which nothing of it may be left."""
    before = asyncio.all_tasks()
    context = make_context(make_engine("right", "#### 1", "right"), interactions=[interaction])
    request = make_request(interaction_kwargs={"name": "it"}, **row)
    task = asyncio.create_task(run_request(request, context))
    if isinstance(cancel_after, int):
        for _ in range(cancel_after):
            await asyncio.sleep(0)
        task.cancel()
    elif cancel_after is not None:
        await asyncio.sleep(cancel_after)
        task.cancel()
    await asyncio.wait({task})
    assert request.is_finished
    left = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - before}  # type: ignore[union-attr]
    assert left <= {"RequestHandler.start"}, "the fake server's own"


def check(interaction: BaseInteraction, counts: Counter[str], kept: str) -> None:
    assert counts["start_interaction"] == counts["finalize_interaction"] <= 1
    assert vars(interaction)[kept] == {}


@given(breaks=BREAKS, cancel_after=CANCELS)
@settings(max_examples=30, deadline=None)
def test_life_cycle_the_user_of_gsm8k_is_finalised(
    breaks: dict[str, str], cancel_after: float | None
):
    interaction, counts = breaking(Gsm8kInteraction, {}, breaks)
    asyncio.run(roll_out(interaction, cancel_after, ground_truth="2"))
    check(interaction, counts, "_talks")


@given(
    breaks=BREAKS,
    cancel_after=CANCELS,
    fails=st.sampled_from(["", "make", "reset", "step", "close"]),
    block_s=st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=40, deadline=None)
def test_life_cycle_an_environment_is_closed_and_its_thread_ends(
    breaks: dict[str, str], cancel_after: float | None, fails: str, block_s: float
):
    made = {"fails": fails, "block_s": block_s, "mark": "life cycle"}
    config = {"env": "tests.fakes.envs:Corridor", "env_kwargs": made}
    interaction, counts = breaking(GymInteraction, config, breaks)
    OPEN.clear()
    asyncio.run(roll_out(interaction, cancel_after))
    check(interaction, counts, "_plays")
    for thread in [t for t in threading.enumerate() if t.name == THREAD_NAME]:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert OPEN["life cycle"] == 0


@pytest.mark.slow
@given(
    breaks=BREAKS,
    cancel_after=CANCELS,
    answers=st.lists(st.sampled_from(["Go on.", "###STOP###", "", 500, None]), min_size=1),
    more=st.sampled_from([{}, {"speaks_first": True}, {"goal_check": "x"}]),
)
@settings(max_examples=6, deadline=None)
def test_life_cycle_a_simulated_user_is_finalised_and_its_calls_end(
    breaks: dict[str, str],
    cancel_after: float | None,
    answers: list[Answer],
    more: dict[str, Any],
):
    async def main(fake: FakeChat) -> None:
        config = {"chat": fake.config(), "persona": "A cook.", **more}
        interaction, counts = breaking(UserSimulatorInteraction, config, breaks)
        try:
            await roll_out(interaction, cancel_after)
        finally:
            await interaction.shutdown()
        check(interaction, counts, "_talks")

    async def serve() -> None:
        async with serving(in_turn(*answers)) as fake:
            await main(fake)
            await asyncio.wait_for(fake.is_idle.wait(), timeout=5)

    asyncio.run(serve())


@pytest.mark.parametrize("kind", [Gsm8kInteraction, GymInteraction, UserSimulatorInteraction])
async def test_what_was_never_started_is_finalised_without_a_word(kind: type[BaseInteraction]):
    configs: dict[type[BaseInteraction], dict[str, Any]] = {
        Gsm8kInteraction: {},
        GymInteraction: {"env": "tests.fakes.envs:Corridor"},
        UserSimulatorInteraction: {"chat": {"base_url": "http://here/v1", "model": "m"}},
    }
    interaction = kind(configs[kind])
    await interaction.finalize_interaction("nobody")
    await interaction.shutdown()
