# pyright: reportIncompatibleMethodOverride=false
"""Simulated users: their life in one request, their YAML, the bundled one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.compat.interactions import Gsm8kInteraction as VerlGsm8kInteraction
from agentrl.errors import AgentRLError, ConfigError, InteractionError, PluginError
from agentrl.interactions import (
    BaseInteraction,
    InteractionResult,
    initialize_interactions_from_config,
)
from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction
from agentrl.interactions.session import InteractionSession
from agentrl.messages import ContentPart, Message
from tests.fakes.raising_values import UNPRINTABLE_MESSAGE, ExitsWhenRead, UnprintableError
from tests.fakes.tools import BEHAVIOURS, FlakyInteraction

CONFIGS = Path(__file__).resolve().parents[2] / "configs/interaction_config"

ANSWER = [Message(role="user", content="2 + 3?"), Message(role="assistant", content="#### 5")]


def session_of(interaction: BaseInteraction, **kwargs: Any) -> InteractionSession:
    return InteractionSession(interaction, instance_id="r", timeout_s=0.05, kwargs=kwargs)


class Recorder(BaseInteraction):
    """Answers with what it was given; its signatures are those of verl's own base class."""

    def __init__(self, value: Any = None) -> None:
        super().__init__({"name": "recorder"})
        self.value = value
        self.seen: list[Any] = []

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None
    ) -> str:
        self.seen.append(("start", instance_id, ground_truth))
        return "mine"

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> Any:
        self.seen.append(("respond", instance_id, messages, kwargs))
        messages.clear()
        return self.value

    async def finalize_interaction(self) -> None:
        self.seen.append("finalize")


class Waiting(Recorder):
    """Replies one at a time."""

    def __init__(self) -> None:
        super().__init__((False, "yes", None, {}))
        self.semaphore = asyncio.Semaphore(1)

    def waiting_room(self) -> asyncio.Semaphore:
        return self.semaphore


async def test_waiting_for_the_semaphore_is_not_in_the_time_of_a_reply():
    interaction = Waiting()
    session = session_of(interaction)
    async with interaction.semaphore:
        reply = asyncio.create_task(session.respond(ANSWER))
        await asyncio.sleep(0.1)
        assert not interaction.seen
    assert (await reply).content == "yes"


async def test_failures_are_data_a_semaphore_that_raises_is_the_interactions_failure():
    interaction = Waiting()
    del interaction.semaphore
    with pytest.raises(InteractionError, match="waiting_room"):
        await session_of(interaction).respond(ANSWER)


async def test_methods_as_users_of_verl_wrote_them_are_served():
    interaction = Recorder((False, "again", 0.5, {"a": 1}))
    session = session_of(interaction, name="recorder", ground_truth="5")
    messages = list(ANSWER)
    await session.start()
    reply = await session.respond(messages)
    assert await session.finalize() is None
    assert reply == InteractionResult(False, "again", 0.5, {"a": 1})
    assert len(messages) == 2, "what it is given is a copy"
    assert interaction.seen[0] == ("start", "r", "5")
    assert interaction.seen[1][1] == "mine"
    assert interaction.seen[1][3] == {"name": "recorder", "ground_truth": "5"}
    assert interaction.seen[2] == "finalize"


async def test_messages_come_as_plain_dicts():
    class Echo(BaseInteraction):
        async def generate_response(
            self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
        ) -> Any:
            return True, repr(messages), 0, None

    parts = [ContentPart(type="text", text="Hi")]
    reply = await session_of(Echo({})).respond([Message(role="user", content=parts)])
    assert eval(reply.content) == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert reply.metadata == {}


async def test_a_plain_def_will_do():
    class Plain(BaseInteraction):
        def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return False, "why?", None, {}

    assert (await session_of(Plain({})).respond(ANSWER)).content == "why?"


@pytest.mark.parametrize(
    "value",
    [
        None,
        "again",
        (False, "again"),
        (False, 3, 0.0, {}),
        (False, "a", "much", {}),
        (False, "a", float("inf"), {}),
        (False, "a", 10**400, {}),
        (False, "a", 10**5000, {}),
        (False, "a", 0.0, 3),
    ],
)
async def test_what_is_no_reply_fails_the_request_and_names_the_interaction(value: Any):
    session = session_of(Recorder(value))
    with pytest.raises(InteractionError, match="interaction 'recorder', generate_response"):
        await session.respond(ANSWER)


@pytest.mark.parametrize(
    "value",
    [
        ExitsWhenRead(),
        (ExitsWhenRead(), "a", 0.0, {}),
        (False, ExitsWhenRead(), 0.0, {}),
        (False, "a", ExitsWhenRead(), {}),
        (False, "a", 0.0, ExitsWhenRead()),
    ],
)
async def test_failures_are_data_a_reply_that_exits_when_it_is_read_fails_the_request_alone(
    value: Any,
):
    message = "interaction 'recorder', generate_response: RuntimeError: raised "
    with pytest.raises(InteractionError, match=message):
        await session_of(Recorder(value)).respond(ANSWER)


async def test_failures_are_data_an_unprintable_error_is_reported_as_such():
    class Untold(BaseInteraction):
        async def start_interaction(self, instance_id: str | None = None, **_: Any) -> str:
            raise UnprintableError

        async def finalize_interaction(self, instance_id: str, **_: Any) -> None:
            raise UnprintableError

    session = session_of(Untold({}))
    with pytest.raises(InteractionError, match="start_interaction: UnprintableError: "):
        await session.start()
    assert UNPRINTABLE_MESSAGE in str(await session.finalize())


@pytest.mark.parametrize("behaviour", ["raise", "exit", "cancel_self", "hang", "ignore_cancel"])
async def test_a_failure_is_an_interaction_error_in_time(behaviour: str):
    session = session_of(FlakyInteraction(respond=behaviour))
    started = asyncio.get_running_loop().time()
    with pytest.raises(InteractionError):
        await session.respond(ANSWER)
    assert asyncio.get_running_loop().time() - started < 0.2


async def test_an_interaction_may_have_its_own_timeout():
    interaction = FlakyInteraction(respond="hang")
    interaction.config["timeout_s"] = 0.02
    session = InteractionSession(interaction, instance_id="r", timeout_s=60)
    with pytest.raises(InteractionError, match=r"no answer within 0\.02 s"):
        await session.respond(ANSWER)


async def test_a_finalize_that_fails_is_recorded_and_nothing_more():
    session = session_of(FlakyInteraction(finalize="raise"))
    await session.start()
    assert "secret detail" in str(await session.finalize())


@given(
    start=st.sampled_from(BEHAVIOURS),
    respond=st.sampled_from(BEHAVIOURS),
    finalize=st.sampled_from(BEHAVIOURS),
    num_turns=st.integers(0, 3),
    cancel_after=st.one_of(st.none(), st.integers(0, 6)),
)
@settings(max_examples=20, deadline=None)
def test_life_cycle_what_was_started_is_finalised_once_whatever_happens(
    start: str, respond: str, finalize: str, num_turns: int, cancel_after: int | None
):
    interaction = FlakyInteraction(start=start, respond=respond, finalize=finalize)

    async def request() -> None:
        session = InteractionSession(interaction, instance_id="r", timeout_s=0.02)
        try:
            await session.start()
            for _ in range(num_turns):
                await session.respond(ANSWER)
        finally:
            await session.finalize()
            await session.finalize()

    async def main() -> None:
        task = asyncio.create_task(request())
        if cancel_after is not None:
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() or isinstance(task.exception(), InteractionError | None)

    asyncio.run(main())
    assert interaction.counts["start"] == interaction.counts["finalize"] <= 1


async def test_the_gsm8k_user_asks_again_so_many_times_and_then_ends():
    user = Gsm8kInteraction({"max_hints": 2})
    await user.start_interaction("r", ground_truth="42", name="gsm8k")
    wrong = [{"role": "assistant", "content": "#### 41"}, {"role": "tool", "content": "#### 42"}]
    replies = [await user.generate_response("r", wrong) for _ in range(3)]
    assert [reply.should_terminate for reply in replies] == [False, False, True]
    assert [reply.score for reply in replies] == [0.0, 0.0, 0.0]
    assert "not correct" in replies[0].content
    await user.finalize_interaction("r")
    assert vars(user)["_talks"] == {}


async def test_the_gsm8k_user_ends_with_a_right_answer():
    user = Gsm8kInteraction({})
    await user.start_interaction("r", ground_truth="1,200")
    content = [{"type": "text", "text": "So it is "}, {"type": "text", "text": "$1200."}]
    reply = await user.generate_response("r", [{"role": "assistant", "content": content}])
    assert (reply.should_terminate, reply.score) == (True, 1.0)
    strict = Gsm8kInteraction({"method": "strict"})
    await strict.start_interaction("r", ground_truth="1,200")
    messages = [{"role": "assistant", "content": "So it is 1200."}]
    assert (await strict.generate_response("r", messages)).score == 0.0
    assert (await strict.generate_response("r", [])).score == 0.0


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "interactions.yaml"
    path.write_text(text)
    return path


def test_the_config_we_ship_loads_and_so_does_verls(tmp_path: Path):
    path = CONFIGS / "gsm8k_interaction_config.yaml"
    verls = path.read_text().replace("agentrl.interactions.", "verl.interactions.")
    for source in (path, written(tmp_path, verls)):
        interactions = initialize_interactions_from_config(source)
        assert list(interactions) == ["gsm8k"]
        kinds = Gsm8kInteraction, VerlGsm8kInteraction
        assert isinstance(interactions["gsm8k"], kinds[source != path])
        assert interactions["gsm8k"].name == "gsm8k"


GSM8K = "  - class_name: agentrl.interactions.gsm8k_interaction.Gsm8kInteraction\n"


async def test_verls_gsm8k_user_is_strict_and_asks_as_often_as_the_run_allows(tmp_path: Path):
    path = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    file = tmp_path / "users.yaml"
    file.write_text(f"interaction: [{{class_name: {path}, config: {{}}}}]\n")
    interactions = initialize_interactions_from_config(file)
    session = session_of(interactions["gsm8k"], name="gsm8k", ground_truth="5")
    await session.start()
    loose = [Message(role="user", content="2 + 3?"), Message(role="assistant", content="It is 5")]
    replies = [await session.respond(loose) for _ in range(9)]
    assert not any(reply.should_terminate for reply in replies)
    assert (await session.respond(ANSWER)).score == 1.0
    await session.finalize()


def test_an_interaction_of_verls_without_counterpart_is_refused_by_name(tmp_path: Path):
    path = "verl.interactions.my_interaction.MyInteraction"
    file = tmp_path / "users.yaml"
    file.write_text(f"interaction: [{{class_name: {path}, config: {{}}}}]\n")
    with pytest.raises(PluginError, match="is a path into verl") as caught:
        initialize_interactions_from_config(file)
    assert caught.value.details["key"] == "interaction[0].class_name"
    assert str(caught.value.details["file"]) == str(file)


def test_the_name_is_the_classes_where_it_is_left_out(tmp_path: Path):
    text = f"interaction:\n{GSM8K}  - class_name: tests.interactions.test_session.Quiet\n"
    interactions = initialize_interactions_from_config(written(tmp_path, text))
    assert list(interactions) == ["gsm8k", "quiet"]
    assert interactions["quiet"].config == {"name": "quiet"}


class Quiet(BaseInteraction):
    async def generate_response(self, *args: Any, **kwargs: Any) -> InteractionResult:
        return InteractionResult(should_terminate=True)


@pytest.mark.parametrize(
    ("text", "kind", "key", "what"),
    [
        ("interactions: []\n", ConfigError, None, "no key 'interaction'"),
        (
            f"interaction:\n{GSM8K}{GSM8K}",
            ConfigError,
            "interaction[1].name",
            "have the name 'gsm8k'",
        ),
        (f"interaction:\n{GSM8K}    nam: x\n", ConfigError, "interaction[0].nam", "'name'"),
        (
            f"interaction:\n{GSM8K}    config: {{method: x}}\n",
            ConfigError,
            "interaction[0].config.method",
            "one of 'strict', 'flexible'",
        ),
        (
            f"interaction:\n{GSM8K}    config: {{timeout_s: 0}}\n",
            ConfigError,
            "interaction[0].config.timeout_s",
            "timeout_s is 0",
        ),
        (
            "interaction: [{class_name: agentrl.tools.BaseTool}]\n",
            PluginError,
            "interaction[0].class_name",
            "not a BaseInteraction",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_key(
    tmp_path: Path, text: str, kind: type[AgentRLError], key: str | None, what: str
):
    with pytest.raises(kind) as error:
        initialize_interactions_from_config(written(tmp_path, text))
    assert what in str(error.value)
    assert error.value.details.get("key") == key


class Short(BaseInteraction):
    """Takes no keywords that it does not read, keeps its state in `instances`."""

    async def start_interaction(self, instance_id, ground_truth):
        await super().start_interaction(instance_id, ground_truth)
        self.instances[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages):
        return InteractionResult(True, str(self.instances[instance_id]))

    async def finalize_interaction(self, instance_id):
        del self.instances[instance_id]


async def test_each_method_gets_the_rows_entries_that_it_takes():
    partner = Short({"name": "short"})
    session = session_of(partner, name="short", ground_truth="42", query="6 * 7?", hints=[])
    await session.start()
    assert (await session.respond(ANSWER)).content == "42"
    assert await session.finalize() is None
    assert partner.instances == {}
