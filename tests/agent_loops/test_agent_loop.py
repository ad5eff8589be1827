"""Agent loops of users: what they get, what may be returned, and what a bad loop costs."""

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent_loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from agentrl.agent_loops.registry import LoopEntry, load_agent_loops
from agentrl.agent_loops.routing import make_run
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.config.schema.run import RunConfig
from agentrl.engines.scripted import ScriptedAnswer
from agentrl.errors import AgentError, ConfigError, EngineError, Fault, PluginError
from agentrl.interactions import BaseInteraction
from agentrl.plugins.watchdog import LoopWatchdog
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import RequestState, StopReason
from tests.fakes.plugins import (
    make_context,
    make_engine,
    make_request,
    make_scripted,
    tiny_tokenizer,
)

HIGH = ScriptedAnswer("abcdefgh", log_probs=[-0.1 * n for n in range(1, 10)])


def config_of(**agent: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"max_response_length": 200, "max_prompt_length": 300},
            "model": {"path": "policy"},
            "rollout": {"agent": agent},
        }
    )


class TurnsLoop(AgentLoopBase):
    """Two completions with a user's message between them; `change` spoils the output."""

    change: Callable[[AgentLoopOutput], Any] = staticmethod(lambda output: output)
    num_inits = 0

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        TurnsLoop.num_inits += 1

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        ids = await self.apply_chat_template(messages)
        prompt_len, mask, log_probs = len(ids), list[int](), list[float]()
        for turn in range(2):
            output = await self.server_manager.generate(
                "own-id", prompt_ids=ids, sampling_params=sampling_params
            )
            ids += output.token_ids  # loops of verl append in place
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs or []
            if turn == 0:
                more = [{"role": "user", "content": "And then?<|im_end|>"}]
                new = await self.apply_chat_template(more, remove_system_prompt=True)
                ids += new
                mask += [0] * len(new)
                log_probs += [0.0] * len(new)
        output = AgentLoopOutput(
            prompt_ids=ids[:prompt_len],
            response_ids=ids[prompt_len:],
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=4,
            metrics=AgentLoopMetrics(tool_calls=0.5),
            extra_fields={"turn_scores": [1.0]},
        )
        return self.change(output)


async def drive(
    loop: type[AgentLoopBase], *answers: Any, config: RunConfig | None = None, **fields: Any
) -> AsyncRolloutRequest:
    context = make_context(make_engine(*(answers or (HIGH, "Done."))))
    runner = AgentLoopRunner(LoopEntry("mine", loop), config or config_of(), tiny_tokenizer())
    return await runner(make_request(**fields), context, context.engine)


def spoiled(change: Callable[[AgentLoopOutput], Any]) -> type[AgentLoopBase]:
    return type("SpoiledLoop", (TurnsLoop,), {"change": staticmethod(change)})


async def test_a_loop_becomes_a_request_with_turns_versions_and_an_end():
    request = await drive(TurnsLoop)
    assert request.stop_reason is StopReason.ANSWERED
    roles = [turn.role for turn in request.turns]
    assert roles == ["assistant", "user", "assistant"]
    sampled = [turn for turn in request.turns if turn.role == "assistant"]
    assert all(turn.weight_versions and turn.finish_reason for turn in sampled)
    first = request.turns[0]
    recorded = request.rollout_log_probs[first.start : first.end]
    assert recorded == list(HIGH.log_probs or ())
    assert [message.role for message in request.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert request.messages[-1].text == "Done."
    assert request.columns["turn_scores"] == request.extra_info["turn_scores"] == [1.0]
    assert request.metrics["agent_loop/tool_calls"] == 0.5


async def test_a_loop_trains_what_the_state_machine_would():
    """The same conversation, token by token, with the same seeds."""
    seeds: list[int | None] = []

    def script(ids: Any, sampling: Any, request_id: str, turn: int) -> str:
        seeds.append(sampling.seed)
        return "Done."

    context = make_context(make_scripted(script))
    runner = AgentLoopRunner(LoopEntry("mine", TurnsLoop), config_of(), tiny_tokenizer())
    own = await runner(make_request(seed=5), context, context.engine)
    machine = await run_request(make_request(seed=5), context)
    assert own.prompt_ids == machine.prompt_ids
    assert own.response_ids[: machine.num_response_tokens] == machine.response_ids
    assert seeds[0] == seeds[2]
    assert seeds[0] != seeds[1]


async def test_outside_text_does_not_become_a_control_token():
    request = await drive(TurnsLoop)
    (end,) = tiny_tokenizer().encode("<|im_end|>", add_special_tokens=False)
    observed = request.turns[1]
    shown = request.response_ids[observed.start : observed.end]
    assert "And then?<|im_end|>" in tiny_tokenizer().decode(shown)
    assert shown.count(end) == 1  # the end of the user's turn; that of the policy was sampled


async def test_missing_log_probabilities_are_the_recorded_ones():
    def leave_out(output: AgentLoopOutput) -> AgentLoopOutput:
        output.response_logprobs = None
        return output

    request = await drive(spoiled(leave_out))
    assert request.rollout_log_probs == (await drive(TurnsLoop)).rollout_log_probs


def set_item(name: str, index: int, value: Any) -> Callable[[AgentLoopOutput], AgentLoopOutput]:
    def change(output: AgentLoopOutput) -> AgentLoopOutput:
        getattr(output, name)[index] = value
        return output

    return change


def set_field(name: str, value: Any) -> Callable[[AgentLoopOutput], AgentLoopOutput]:
    def change(output: AgentLoopOutput) -> AgentLoopOutput:
        setattr(output, name, value)
        return output

    return change


BAD = {
    "an altered token": (set_item("response_ids", 2, 40), r"response_ids\[2\].*mask 1.*call 0"),
    "mask 1 on an observed token": (set_item("response_mask", 12, 1), r"response_ids\[12\]"),
    "another prompt": (set_item("prompt_ids", 1, 40), r"prompt_ids\[1\] is 40"),
    "a mask of 2": (set_item("response_mask", 0, 2), r"response_mask\[0\] is 2"),
    "an unknown id": (set_item("response_ids", 12, 10**6), r"response_ids\[12\] is 1000000"),
    "a negative id": (set_item("prompt_ids", 0, -1), r"prompt_ids\[0\] is -1"),
    "another log-probability": (
        set_item("response_logprobs", 1, -5.0), r"response_logprobs\[1\] is -5.0.*-0.2",
    ),
    "a log-probability above 0": (set_item("response_logprobs", 1, 0.5), "finite number <= 0"),
    "a log-probability of nan": (
        set_item("response_logprobs", 1, float("nan")), "finite number <= 0",
    ),
    "a short mask": (set_field("response_mask", [1]), "response_mask has 1 entries"),
    "short log-probabilities": (set_field("response_logprobs", [-1.0]), "has 1 entries"),
    "no prompt": (set_field("prompt_ids", []), "prompt_ids are empty"),
    "no response": (
        lambda o: AgentLoopOutput(prompt_ids=o.prompt_ids, response_ids=[], response_mask=[]),
        "response_ids are empty",
    ),
    "texts": (set_field("response_ids", "hello"), "response_ids"),
    "a reward of nan": (set_field("reward_score", float("nan")), "reward_score is nan"),
    "media": (set_field("multi_modal_data", {"image": [1]}), "text only"),
    "nothing": (lambda output: None, "returned a NoneType"),
    "an empty list": (lambda output: [], "empty list"),
    "a text": (lambda output: "done", "returned a str"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_output_fails_its_request_and_says_where(what: str):
    change, message = BAD[what]
    request = await drive(spoiled(change))
    assert request.state is RequestState.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert re.search(message, request.error.message, re.DOTALL), request.error.message
    assert not request.is_trained


async def test_a_response_over_the_budget_fails_its_request():
    def pad(output: AgentLoopOutput) -> AgentLoopOutput:
        output.response_ids += [40] * 200
        output.response_mask += [0] * 200
        output.response_logprobs = None
        return output

    request = await drive(spoiled(pad), budgets=budgets(max_response_tokens=100))
    assert request.error is not None
    assert "expected: at most 100" in request.error.message


def budgets(**fields: Any) -> Any:
    return Budgets(**fields)


async def test_calls_share_the_response_budget_and_then_return_nothing():
    class Endless(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            ids = await self.apply_chat_template(kwargs["raw_prompt"])
            start = len(ids)
            while (output := await self.server_manager.generate(
                "a", prompt_ids=ids, sampling_params=sampling_params
            )).token_ids:  # fmt: skip
                ids = ids + output.token_ids
            num = len(ids) - start
            return AgentLoopOutput(
                prompt_ids=ids[:start], response_ids=ids[start:], response_mask=[1] * num
            )

    request = await drive(Endless, budgets=budgets(max_response_tokens=21))
    assert request.num_response_tokens == 21
    assert request.stop_reason is StopReason.RESPONSE_BUDGET
    assert sum(request.loss_mask) == 21


async def test_a_loop_that_ignores_the_end_of_its_budget_fails():
    class Stubborn(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            ids = await self.apply_chat_template(kwargs["raw_prompt"])
            while True:
                output = await self.server_manager.generate(
                    "a", prompt_ids=ids, sampling_params=sampling_params
                )
                ids += output.token_ids

    request = await drive(Stubborn, budgets=budgets(max_response_tokens=21))
    assert request.error is not None
    assert "budget of the request was used up" in request.error.message
    assert request.num_response_tokens == 21  # what was sampled stays readable


async def test_masked_and_dropped_tokens_are_reported():
    def mask_first(output: AgentLoopOutput) -> AgentLoopOutput:
        output.response_mask[0] = 0
        for end in (output.response_ids, output.response_mask, output.response_logprobs or []):
            del end[-2:]
        return output

    request = await drive(spoiled(mask_first))
    assert request.stop_reason is StopReason.ANSWERED
    assert request.loss_mask[0] == 0
    assert request.loss_mask[1] == 1
    assert request.turns[0].excluded == "the agent loop set its mask to 0"
    assert request.metrics["agent_loop/masked_tokens"] == 1
    assert request.metrics["agent_loop/dropped_tokens"] == 2


class Raising(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        await self.server_manager.generate("a", prompt_ids=ids, sampling_params=sampling_params)
        raise KeyError("price")


class Exiting(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raise SystemExit(3)


class Hanging(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        await asyncio.sleep(1000)
        raise AssertionError


class NotBuilt(Raising):
    def __init__(self) -> None:
        raise ValueError("not built")


async def test_what_a_loop_raises_fails_its_request_and_keeps_its_tokens():
    request = await drive(Raising)
    assert request.error is not None
    assert (request.error.fault, request.error.kind) == (Fault.AGENT, "KeyError")
    assert "test_agent_loop.py" in request.error.message
    assert request.messages[-1].text == "abcdefgh"
    exited = await drive(Exiting)
    assert exited.error is not None
    assert "SystemExit" in exited.error.message
    assert (await drive(NotBuilt)).state is RequestState.FAILED


class WantsColumn(Raising):
    async def run(self, sampling_params: Any, *, question: str) -> AgentLoopOutput:  # type: ignore
        raise AssertionError(question)


class Plain(Raising):
    def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return 3


@pytest.mark.parametrize(
    ("loop", "message"), [(WantsColumn, "WantsColumn.run cannot be called"), (Plain, "`async def`")]
)
async def test_a_run_with_another_signature_fails_its_request(
    loop: type[AgentLoopBase], message: str
):
    request = await drive(loop)
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert message in request.error.message
    assert "async def run(self, sampling_params, **row)" in request.error.message


async def test_a_row_without_the_column_of_a_loop_names_its_columns():
    request = await drive(WantsColumn)
    assert request.error is not None
    assert "data_source, extra_info" in request.error.message


async def test_a_loop_that_hangs_ends_at_its_limits():
    idle = await drive(Hanging, config=config_of(loop_timeout_s=0.05))
    assert idle.error is not None
    assert "neither returned nor called generate for 0.05 s" in idle.error.message
    assert idle.error.fault is Fault.AGENT
    late = await drive(Hanging, budgets=budgets(timeout_s=0.05))
    assert late.stop_reason is StopReason.WALL_CLOCK


async def test_the_time_of_completions_is_not_idle_time():
    slow = ScriptedAnswer("Done.", delay_s=0.3)
    request = await drive(TurnsLoop, slow, config=config_of(loop_timeout_s=0.2))
    assert request.stop_reason is StopReason.ANSWERED


async def test_an_engine_error_that_the_loop_catches_fails_the_request():
    class Catching(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            ids = await self.apply_chat_template(row["raw_prompt"])
            first = await self.server_manager.generate(
                "a", prompt_ids=ids, sampling_params=sampling_params
            )
            with suppress(EngineError):
                await self.server_manager.generate(
                    "a", prompt_ids=ids + first.token_ids + ids, sampling_params=sampling_params
                )
            mask = [1] * len(first.token_ids)
            return AgentLoopOutput(prompt_ids=ids, response_ids=first.token_ids, response_mask=mask)

    request = await drive(Catching, "Hello", EngineError("gone"))
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.ENGINE


async def test_an_error_of_the_engine_is_the_engines_fault():
    request = await drive(TurnsLoop, EngineError("gone"))
    assert request.error is not None
    assert request.error.fault is Fault.ENGINE


async def test_a_cancelled_rollout_aborts_the_request():
    context = make_context(make_engine("Hi"))
    runner = AgentLoopRunner(LoopEntry("mine", Hanging), config_of(), tiny_tokenizer())
    request = make_request()
    task = asyncio.create_task(runner(request, context, context.engine))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.stop_reason is StopReason.ABORTED


async def test_calls_after_the_loop_returned_are_refused():
    late: list[Any] = []

    class Leaving(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            ids = await self.apply_chat_template(kwargs["raw_prompt"])
            output = await self.server_manager.generate(
                "a", prompt_ids=ids, sampling_params=sampling_params
            )
            late.append((self.server_manager, ids, sampling_params))
            mask = [1] * len(output)
            return AgentLoopOutput(prompt_ids=ids, response_ids=list(output), response_mask=mask)

    assert (await drive(Leaving)).stop_reason is StopReason.ANSWERED
    manager, ids, params = late[0]
    with pytest.raises(RuntimeError, match="after the loop had returned"):
        await manager.generate("a", prompt_ids=ids, sampling_params=params)


async def test_init_class_is_called_once_per_class():
    class Sub(TurnsLoop):
        pass

    before = TurnsLoop.num_inits
    await asyncio.gather(*(drive(Sub) for _ in range(3)))
    assert TurnsLoop.num_inits == before + 1


async def test_tokens_of_another_temperature_are_not_trained():
    class Cold(TurnsLoop):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            return await super().run({**sampling_params, "temperature": 0.5}, **kwargs)

    request = await drive(Cold)
    assert not any(request.loss_mask)
    assert request.turns[0].excluded == "sampled at temperature 0.5, not 1"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"warmth": 1.0}, "unknown sampling parameter 'warmth'"),
        ({"n": 2}, "n is 2"),
    ],
)
async def test_sampling_that_training_cannot_repeat_is_refused(
    params: dict[str, Any], message: str
):
    class Odd(TurnsLoop):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            return await super().run({**sampling_params, **params}, **kwargs)

    request = await drive(Odd)
    assert request.error is not None
    assert message in request.error.message


async def test_several_outputs_become_sequences_and_no_call_is_trained_twice():
    class Forking(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            ids = await self.apply_chat_template(kwargs["raw_prompt"])
            call = self.server_manager.generate
            first = await call("a", prompt_ids=ids, sampling_params=sampling_params)
            shared = [*ids, *first.token_ids, 40]
            two = await asyncio.gather(
                *(call(n, prompt_ids=shared, sampling_params=sampling_params) for n in "bc")
            )
            return [
                AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=[*shared[len(ids) :], *one.token_ids],
                    response_mask=[1] * len(first) + [0] + [1] * len(one),
                )
                for one in two
            ]

    request = await drive(Forking, HIGH, "left")
    assert request.stop_reason is StopReason.ANSWERED
    (branch,) = request.branches
    assert branch.branch_cause == "branch"
    assert sum(branch.loss_mask) == 9 + branch.turns[-1].num_tokens
    assert sum(request.loss_mask) == request.turns[-1].num_tokens
    assert request.turns[0].excluded == "trained in another sequence of the trajectory"


async def test_a_call_that_one_output_cuts_is_trained_to_its_end_in_the_next():
    class Cutting(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            ids = await self.apply_chat_template(kwargs["raw_prompt"])
            call = self.server_manager.generate
            first = await call("a", prompt_ids=ids, sampling_params=sampling_params)
            cut = [*first.token_ids[:3], 40]
            second = await call("a", prompt_ids=[*ids, *cut], sampling_params=sampling_params)
            return [
                AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=[*cut, *second.token_ids],
                    response_mask=[1] * 3 + [0] + [1] * len(second),
                ),
                AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=first.token_ids,
                    response_mask=[1] * len(first),
                ),
            ]

    request = await drive(Cutting, HIGH, "again")
    assert request.stop_reason is StopReason.ANSWERED
    (branch,) = request.branches
    num_again = branch.turns[-1].num_tokens
    assert branch.loss_mask == [1] * 3 + [0] + [1] * num_again
    assert request.loss_mask == [0] * 3 + [1] * 6
    assert request.rollout_log_probs[3:] == list(HIGH.log_probs or ())[3:]
    assert request.turns[1].finish_reason is not None
    assert [message.role for message in request.messages] == ["user", "assistant"]
    for name in ("unused_calls", "dropped_tokens", "masked_tokens"):
        assert request.metrics[f"agent_loop/{name}"] == 0


class Calling(AgentLoopBase):
    """Calls the policy without end; `catches` says whether it ignores what a call raises."""

    catches = False

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        while True:
            try:
                await self.server_manager.generate(
                    "a", prompt_ids=ids, sampling_params=sampling_params
                )
            except AgentError:
                if not self.catches:
                    raise


class Returning(TurnsLoop):
    """Catches what its third call raises, and returns what it has."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        with suppress(AgentError):
            await self.server_manager.generate(
                "a", prompt_ids=output.prompt_ids, sampling_params=sampling_params
            )
        return output


@pytest.mark.parametrize(
    "loop", [Calling, type("Catching", (Calling,), {"catches": True}), Returning]
)
async def test_a_loop_that_calls_too_often_fails_its_request(loop: type[AgentLoopBase]):
    engine_calls: list[str] = []

    def script(ids: Any, sampling: Any, request_id: str, turn: int) -> str:
        engine_calls.append(request_id)
        return "Again."

    context = make_context(make_scripted(script))
    config = config_of(max_loop_calls=2)
    runner = AgentLoopRunner(LoopEntry("mine", loop), config, tiny_tokenizer())
    async with asyncio.timeout(20):
        request = await runner(make_request(), context, context.engine)
    assert len(engine_calls) == 2
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert "generate more than 2 times" in request.error.message
    assert "rollout.agent.max_loop_calls" in request.error.message


class BlockingLoop(Hanging):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        time.sleep(0.8)  # noqa: ASYNC251 - on purpose
        raise ValueError("done blocking")


async def test_the_watchdog_names_a_loop_that_blocks(caplog: pytest.LogCaptureFixture):
    with LoopWatchdog(threshold_s=0.2) as watchdog:
        await drive(BlockingLoop)
    assert "agent loop mine" in watchdog.blocked_s


async def test_a_yaml_list_names_classes_and_their_arguments(tmp_path: Path):
    path = tmp_path / "loops.yaml"
    path.write_text(
        f"- {{name: mine, _target_: '{__file__}:Configured', greeting: {{text: hi}}}}\n"
    )
    run = make_run(
        config_of(agent_loop_config_path=str(path), default_agent_loop="mine"), tiny_tokenizer()
    )
    context = make_context(make_engine("Hi"))
    request = await run(make_request(), context, context.engine)
    assert request.columns["greeting"] == "hi"


class Configured(TurnsLoop):
    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any,
                 greeting: Any, **kwargs: Any) -> None:  # fmt: skip
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        self.greeting = greeting

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        output.extra_fields["greeting"] = self.greeting.text
        assert self.config.actor_rollout_ref.rollout.response_length == 200
        assert self.config.data.max_prompt_length == 300
        return output


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a: b", ConfigError, "entry 0"),
        ("- {name: a}", ConfigError, "_target_"),
        ("- {name: a, _target_: no.such.Loop}", PluginError, "no.such"),
        ("- {name: a, _target_: agentrl.tools.BaseTool}", PluginError, "AgentLoopBase"),
        ("- [", ConfigError, "agent_loop_config_path"),
        (
            f"- {{name: a, _target_: '{__file__}:Raising', greeting: hi}}",
            ConfigError,
            "no argument 'greeting'",
        ),
        (
            f"- {{name: a, _target_: '{__file__}:Strict', greting: hi}}",
            ConfigError,
            "did you mean 'greeting'",
        ),
        (
            f"- {{name: a, _target_: '{__file__}:Configured'}}",
            ConfigError,
            "needs the argument 'greeting'",
        ),
    ],
)
def test_a_bad_yaml_list_is_refused(
    tmp_path: Path, text: str, error: type[Exception], message: str
):
    path = tmp_path / "loops.yaml"
    path.write_text(text)
    with pytest.raises(error, match=message):
        load_agent_loops(path)


class Strict(Raising):
    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any,
                 greeting: str = "hi") -> None:  # fmt: skip
        super().__init__(trainer_config, server_manager, tokenizer)


def test_arguments_that_init_class_reads_are_taken(tmp_path: Path):
    path = tmp_path / "loops.yaml"
    path.write_text(f"- {{name: a, _target_: '{__file__}:TurnsLoop', folder: index}}\n")
    assert load_agent_loops(path)["a"].arguments == {"folder": "index"}


def test_only_an_agent_loop_can_be_registered():
    with pytest.raises(ConfigError, match="AgentLoopBase"):
        register("mine")(int)  # pyright: ignore[reportArgumentType]


async def test_the_bundled_single_turn_agent_samples_one_answer():
    run = make_run(config_of(default_agent_loop="single_turn_agent"), tiny_tokenizer())
    context = make_context(make_engine("Hi"))
    request = await run(make_request(), context, context.engine)
    assert request.stop_reason is StopReason.ANSWERED
    assert request.num_assistant_turns == 1


class Partnered(TurnsLoop):
    """Reads no columns but the messages, and knows the run's interactions."""

    found: dict[str, BaseInteraction]

    async def run(self, sampling_params: dict[str, Any], raw_prompt: Any) -> AgentLoopOutput:
        Partnered.found = dict(self.interactions)
        return await super().run(sampling_params, raw_prompt=raw_prompt)


class TakesInteractions(Partnered):
    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, interactions: Any):
        super().__init__(trainer_config, server_manager, tokenizer)
        self.interactions = interactions


class TakesAnything(Partnered):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert self.interactions


@pytest.mark.parametrize("loop", [Partnered, TakesInteractions, TakesAnything])
async def test_a_loop_gets_the_columns_that_it_takes_and_the_interactions(
    loop: type[AgentLoopBase],
):
    partner = BaseInteraction({"name": "user"})
    context = make_context(make_engine(HIGH, "Done."), interactions=[partner])
    runner = AgentLoopRunner(LoopEntry("mine", loop), config_of(), tiny_tokenizer())
    request = await runner(make_request(), context, context.engine)
    assert request.error is None, request.error
    assert Partnered.found == {"user": partner}
