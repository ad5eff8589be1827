"""The suite that every engine passes.

A test file of an engine defines a fixture `engine_case` (an `EngineCase`, made anew for each test)
and subclasses `ProtocolConformance`, or `ModelConformance` where a model's weights are behind the
engine; and `SeededConformance` or `SeededModelConformance` where the engine keeps a call's seed.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from agentrl.engines.protocol import (
    Completion,
    Engine,
    EngineCall,
    FinishReason,
    SamplingParams,
    VersionSpan,
)
from agentrl.errors import EngineError
from tests.fakes.engines import VOCAB_SIZE, plain_log_probs, plain_logits, random_ids

TOLERANCE = 1e-5
PROMPT = random_ids(20, seed=0)


@dataclass
class EngineCase:
    """An engine under test."""

    engine: Engine
    decode: Callable[[Sequence[int]], str]
    """How the engine reads tokens when it looks for stop strings."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What `update_weights` gets."""
        return []


@dataclass
class ModelCase(EngineCase):
    """An engine that samples from a model."""

    model: torch.nn.Module
    """A plain module with the engine's weights; after a change, `update_weights` gets its
    parameters."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()

    async def sync(self, version: int) -> None:
        """Give the engine the model's weights."""
        await self.engine.update_weights(self.weights(), version=version)


def covers(completion: Completion) -> bool:
    """Whether the version spans cover the tokens from 0 to the end without a gap."""
    spans = completion.weight_versions
    starts = [0, *(span.end for span in spans)]
    return [span.start for span in spans] == starts[:-1] and starts[-1] == len(completion.token_ids)


def greedy(max_new_tokens: int = 16, **rest: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, **rest)  # pyright: ignore


async def start_endless(engine: Engine, request_id: str) -> asyncio.Task[Completion]:
    """A call that only the engine's length would end, and that has sampled something."""
    sampling = SamplingParams(max_new_tokens=engine.max_model_len)
    call = engine.generate(PROMPT, sampling, request_id=request_id)
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    await some_steps(engine)
    assert not task.done(), "the engine's length is too short for this test"
    return task


def calls_of(number: int, **sampling: Any) -> list[EngineCall]:
    """Calls of other lengths, each with a seed of its own."""
    return [
        EngineCall(
            input_ids=random_ids(8 + 5 * place, seed=place),
            sampling=SamplingParams(
                **{"max_new_tokens": 10, "temperature": 1.5, "seed": place} | sampling
            ),
            request_id=f"{place}",
        )
        for place in range(number)
    ]


def ids_of(answer: Completion | BaseException) -> list[int]:
    assert isinstance(answer, Completion), answer
    return answer.token_ids


async def some_steps(engine: Engine) -> None:
    """Wait until every running call has sampled more: calls run together."""
    await engine.generate(PROMPT, greedy(6), request_id="clock")


class ProtocolConformance:
    """What holds for every engine."""

    async def test_it_is_an_engine(self, engine_case: EngineCase):
        assert isinstance(engine_case.engine, Engine)
        assert engine_case.engine.max_model_len > 0

    async def test_every_token_has_a_log_prob_and_a_version(self, engine_case: EngineCase):
        completion = await engine_case.engine.generate(PROMPT, greedy(), request_id="a")
        assert completion.token_ids
        assert len(completion.log_probs) == len(completion.token_ids)
        assert all(log_prob <= 0 for log_prob in completion.log_probs)
        assert covers(completion)

    async def test_the_input_is_left_alone(self, engine_case: EngineCase):
        prompt = list(PROMPT)
        await engine_case.engine.generate(prompt, greedy(), request_id="a")
        assert prompt == PROMPT

    @pytest.mark.parametrize("budget", [1, 2, 7])
    async def test_budget_ends_with_length(self, engine_case: EngineCase, budget: int):
        completion = await engine_case.engine.generate(PROMPT, greedy(budget), request_id="a")
        assert len(completion.token_ids) == budget
        assert completion.finish_reason == FinishReason.LENGTH

    async def test_stop_token_is_kept_and_is_last(self, engine_case: EngineCase):
        engine = engine_case.engine
        free = await engine.generate(PROMPT, greedy(), request_id="a")
        stop = free.token_ids[5]
        cut = free.token_ids.index(stop) + 1
        stopped = await engine.generate(PROMPT, greedy(stop_token_ids=(stop, 1)), request_id="b")
        assert stopped.token_ids == free.token_ids[:cut]
        assert stopped.finish_reason == FinishReason.STOP
        assert len(stopped.log_probs) == cut

    async def test_stop_string_keeps_the_tokens_that_complete_it(self, engine_case: EngineCase):
        engine = engine_case.engine
        free = await engine.generate(PROMPT, greedy(), request_id="a")
        text = engine_case.decode(free.token_ids[4:7])
        stopped = await engine.generate(PROMPT, greedy(stop=("never here", text)), request_id="b")
        assert stopped.finish_reason == FinishReason.STOP
        assert free.token_ids[: len(stopped.token_ids)] == stopped.token_ids
        assert engine_case.decode(stopped.token_ids).endswith(text)

    async def test_stop_on_the_last_token_of_the_budget_is_a_stop(self, engine_case: EngineCase):
        engine = engine_case.engine
        first = (await engine.generate(PROMPT, greedy(1), request_id="a")).token_ids[0]
        stopped = await engine.generate(PROMPT, greedy(1, stop_token_ids=(first,)), request_id="b")
        assert stopped.finish_reason == FinishReason.STOP

    async def test_model_length_ends_with_length(self, engine_case: EngineCase):
        engine = engine_case.engine
        prompt = random_ids(engine.max_model_len - 3, seed=1)
        completion = await engine.generate(prompt, greedy(100), request_id="a")
        assert len(completion.token_ids) == 3
        assert completion.finish_reason == FinishReason.LENGTH

    async def test_input_that_fills_the_context_is_an_error(self, engine_case: EngineCase):
        engine = engine_case.engine
        with pytest.raises(EngineError, match=str(engine.max_model_len)):
            await engine.generate(
                random_ids(engine.max_model_len, seed=1), greedy(), request_id="a"
            )
        assert (await engine.generate(PROMPT, greedy(), request_id="b")).token_ids

    async def test_abort_of_an_unknown_request_does_nothing(self, engine_case: EngineCase):
        await engine_case.engine.abort("nobody")
        assert (await engine_case.engine.generate(PROMPT, greedy(), request_id="a")).token_ids

    async def test_calls_together_are_answered_each_in_its_place(self, engine_case: EngineCase):
        engine, calls = engine_case.engine, calls_of(7, temperature=0)
        together = await engine.generate_together(calls)
        await engine.flush_cache()
        for call, answer in zip(calls, together, strict=True):
            alone = await engine.generate(call.input_ids, call.sampling, request_id="alone")
            assert isinstance(answer, Completion)
            assert answer.token_ids == alone.token_ids
            assert answer.log_probs == pytest.approx(alone.log_probs, abs=TOLERANCE)

    async def test_no_calls_together_are_no_answers(self, engine_case: EngineCase):
        assert await engine_case.engine.generate_together([]) == []

    async def test_a_call_that_cannot_be_taken_fails_alone_among_calls_together(
        self, engine_case: EngineCase
    ):
        engine, calls = engine_case.engine, calls_of(3, temperature=0)
        calls[1] = replace(calls[1], input_ids=random_ids(engine.max_model_len, seed=1))
        first, second, third = await engine.generate_together(calls)
        assert isinstance(second, EngineError)
        assert str(engine.max_model_len) in str(second)
        await engine.flush_cache()
        again = await engine.generate_together([calls[0], calls[2]])
        assert [ids_of(first), ids_of(third)] == [ids_of(answer) for answer in again]

    async def test_a_closed_engine_takes_no_calls_together(self, engine_case: EngineCase):
        await engine_case.engine.close()
        try:
            answers = await engine_case.engine.generate_together(calls_of(2))
        except EngineError as error:
            answers = [error, error]
        assert all("closed" in str(answer) for answer in answers)
        assert all(isinstance(answer, EngineError) for answer in answers)

    async def test_version_is_recorded(self, engine_case: EngineCase):
        engine = engine_case.engine
        before = await engine.generate(PROMPT, greedy(), request_id="a")
        await engine.update_weights(engine_case.weights(), version=7)
        after = await engine.generate(PROMPT, greedy(), request_id="a")
        assert before.weight_versions == (VersionSpan(0, 0, len(before.token_ids)),)
        assert after.weight_versions == (VersionSpan(7, 0, len(after.token_ids)),)
        assert after.weight_version == 7

    async def test_sleep_and_wake_lose_nothing(self, engine_case: EngineCase):
        engine = engine_case.engine
        before = await engine.generate(PROMPT, greedy(), request_id="a")
        await engine.sleep()
        await engine.sleep()
        await engine.wake()
        await engine.wake()
        after = await engine.generate(PROMPT, greedy(), request_id="b")
        assert (after.token_ids, after.finish_reason) == (before.token_ids, before.finish_reason)
        assert after.log_probs == pytest.approx(before.log_probs, abs=TOLERANCE)

    async def test_close_may_be_called_twice_and_ends_everything(self, engine_case: EngineCase):
        engine = engine_case.engine
        await engine.generate(PROMPT, greedy(), request_id="a")
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(PROMPT, greedy(), request_id="b")


class ModelConformance(ProtocolConformance):
    """What holds for every engine that samples from a model."""

    async def test_greedy_is_the_argmax_of_a_plain_forward(self, engine_case: ModelCase):
        completion = await engine_case.engine.generate(PROMPT, greedy(), request_id="a")
        logits = plain_logits(engine_case.model, PROMPT, completion.token_ids)
        assert completion.token_ids == logits.argmax(-1).tolist()
        self.check_log_probs(engine_case, PROMPT, completion, 0)

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
    async def test_log_probs_are_those_of_a_plain_forward(
        self, engine_case: ModelCase, temperature: float
    ):
        sampling = SamplingParams(max_new_tokens=16, temperature=temperature)
        completion = await engine_case.engine.generate(PROMPT, sampling, request_id="a")
        self.check_log_probs(engine_case, PROMPT, completion, temperature)

    async def test_temperatures_side_by_side_are_each_scored_at_their_own(
        self, engine_case: ModelCase
    ):
        temperatures = [0, 1.0, 0.5, 0, 1.7, 1.0, 0.3, 3.0]
        prompts = [random_ids(10 + 3 * i, seed=i) for i in range(len(temperatures))]
        completions = await asyncio.gather(
            *(
                engine_case.engine.generate(
                    prompt, SamplingParams(max_new_tokens=12, temperature=t), request_id=f"{i}"
                )
                for i, (prompt, t) in enumerate(zip(prompts, temperatures, strict=True))
            )
        )
        for prompt, temperature, completion in zip(prompts, temperatures, completions, strict=True):
            self.check_log_probs(engine_case, prompt, completion, temperature)
            if temperature == 0:
                logits = plain_logits(engine_case.model, prompt, completion.token_ids)
                assert completion.token_ids == logits.argmax(-1).tolist()

    async def test_log_probs_are_over_the_whole_vocabulary_under_top_k_and_top_p(
        self, engine_case: ModelCase
    ):
        limits = [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.7}, {}]
        completions = await asyncio.gather(
            *(
                engine_case.engine.generate(
                    PROMPT,
                    SamplingParams(max_new_tokens=12, temperature=1.3, **limit),  # pyright: ignore
                    request_id=f"{i}",
                )
                for i, limit in enumerate(limits)
            )
        )
        for completion in completions:
            self.check_log_probs(engine_case, PROMPT, completion, 1.3)

    async def test_top_k_of_one_is_greedy(self, engine_case: ModelCase):
        engine = engine_case.engine
        sampling = SamplingParams(max_new_tokens=16, temperature=1.5, top_k=1)
        limited = await engine.generate(PROMPT, sampling, request_id="a")
        free = await engine.generate(PROMPT, greedy(), request_id="b")
        assert limited.token_ids == free.token_ids
        self.check_log_probs(engine_case, PROMPT, limited, 1.5)

    async def test_top_k_takes_nothing_outside(self, engine_case: ModelCase):
        sampling = SamplingParams(max_new_tokens=40, temperature=3.0, top_k=4)
        completion = await engine_case.engine.generate(PROMPT, sampling, request_id="a")
        logits = plain_logits(engine_case.model, PROMPT, completion.token_ids)
        ranks = (logits > logits.gather(1, torch.tensor(completion.token_ids)[:, None])).sum(-1)
        assert ranks.max() < 4
        assert ranks.unique().numel() > 1, "at temperature 3 more than one of the four is taken"

    async def test_top_p_takes_nothing_outside(self, engine_case: ModelCase):
        sampling = SamplingParams(max_new_tokens=40, temperature=2.0, top_p=0.6)
        completion = await engine_case.engine.generate(PROMPT, sampling, request_id="a")
        probs = (plain_logits(engine_case.model, PROMPT, completion.token_ids) / 2.0).softmax(-1)
        chosen = probs.gather(1, torch.tensor(completion.token_ids)[:, None])
        mass_before = (probs * (probs > chosen)).sum(-1)
        assert mass_before.max() < 0.6 + TOLERANCE

    async def test_greedy_validation_between_two_sampled_steps(self, engine_case: ModelCase):
        engine = engine_case.engine
        sampled = SamplingParams(max_new_tokens=12, temperature=1.0)
        first = await engine.generate(PROMPT, sampled, request_id="a")
        validation = await engine.generate(PROMPT, greedy(), request_id="b")
        second = await engine.generate(PROMPT, sampled, request_id="c")
        self.check_log_probs(engine_case, PROMPT, first, 1.0)
        self.check_log_probs(engine_case, PROMPT, second, 1.0)
        logits = plain_logits(engine_case.model, PROMPT, validation.token_ids)
        assert validation.token_ids == logits.argmax(-1).tolist()

    async def test_128_concurrent_requests_do_not_mix(self, engine_case: ModelCase):
        prompts = [random_ids(5 + 2 * i, seed=100 + i) for i in range(128)]
        completions = await asyncio.gather(
            *(
                engine_case.engine.generate(
                    prompt, SamplingParams(max_new_tokens=4 + i % 9), request_id=f"{i}"
                )
                for i, prompt in enumerate(prompts)
            )
        )
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            assert len(completion.token_ids) == 4 + i % 9
            self.check_log_probs(engine_case, prompt, completion, 1.0)

    async def test_later_turns_continue_their_own_history(self, engine_case: ModelCase):
        async def episode(i: int) -> None:
            ids = random_ids(40 + i, seed=i)
            for turn in range(3):
                completion = await engine_case.engine.generate(
                    ids, SamplingParams(max_new_tokens=8), request_id=f"{i}"
                )
                self.check_log_probs(engine_case, ids, completion, 1.0)
                ids = [*ids, *completion.token_ids, *random_ids(5, seed=turn)]

        async with asyncio.TaskGroup() as group:
            for i in range(12):
                group.create_task(episode(i))

    async def test_one_group_shares_a_prompt_and_differs(self, engine_case: ModelCase):
        prompt = random_ids(70, seed=3)
        completions = await asyncio.gather(
            *(
                engine_case.engine.generate(
                    prompt, SamplingParams(max_new_tokens=10, temperature=2.0), request_id=f"{i}"
                )
                for i in range(8)
            )
        )
        assert len({tuple(completion.token_ids) for completion in completions}) > 1
        for completion in completions:
            self.check_log_probs(engine_case, prompt, completion, 2.0)

    async def test_one_of_several_calls_together_may_be_aborted(self, engine_case: ModelCase):
        engine, calls = engine_case.engine, calls_of(4, max_new_tokens=40)
        endless = SamplingParams(max_new_tokens=engine.max_model_len)
        calls[2] = replace(calls[2], sampling=endless)
        task = asyncio.create_task(engine.generate_together(calls))
        await asyncio.sleep(0)
        await some_steps(engine)
        assert not task.done()
        await engine.abort("2")
        answers = [answer for answer in await task if isinstance(answer, Completion)]
        length, aborted = FinishReason.LENGTH, FinishReason.ABORT
        assert [a.finish_reason for a in answers] == [length, length, aborted, length]
        for call, answer in zip(calls, answers, strict=True):
            self.check_log_probs(engine_case, call.input_ids, answer, call.sampling.temperature)

    async def test_cancelling_calls_together_takes_all_of_them_out(self, engine_case: ModelCase):
        engine = engine_case.engine
        calls = calls_of(3, max_new_tokens=engine.max_model_len)
        task = asyncio.create_task(engine.generate_together(calls))
        await asyncio.sleep(0)
        await some_steps(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await engine.generate(PROMPT, greedy(), request_id="0")
        self.check_log_probs(engine_case, PROMPT, again, 0)

    async def test_abort_returns_what_was_sampled(self, engine_case: ModelCase):
        engine = engine_case.engine
        goes_on = await start_endless(engine, "goes")
        stay = engine.generate(PROMPT, SamplingParams(max_new_tokens=50), request_id="stays")
        staying = asyncio.create_task(stay)
        await asyncio.sleep(0)
        await engine.abort("goes")
        stays, goes = await asyncio.gather(staying, goes_on)
        assert goes.finish_reason == FinishReason.ABORT
        assert goes.token_ids
        assert covers(goes)
        assert stays.finish_reason == FinishReason.LENGTH
        for completion in (stays, goes):
            self.check_log_probs(engine_case, PROMPT, completion, 1.0)

    async def test_cancelled_call_stops_sampling_and_affects_no_other_call(
        self, engine_case: ModelCase
    ):
        engine = engine_case.engine
        goes = await start_endless(engine, "goes")
        stay = engine.generate(PROMPT, SamplingParams(max_new_tokens=50), request_id="stays")
        staying = asyncio.create_task(stay)
        await asyncio.sleep(0)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        stays = await staying
        self.check_log_probs(engine_case, PROMPT, stays, 1.0)
        again = await engine.generate(PROMPT, greedy(), request_id="goes")
        self.check_log_probs(engine_case, PROMPT, again, 0)

    async def test_no_prefix_of_old_weights_is_used(self, engine_case: ModelCase):
        prompt = random_ids(100, seed=9)
        engine = engine_case.engine
        before = await engine.generate(prompt, greedy(), request_id="a")
        self.change_weights(engine_case)
        await engine_case.sync(version=1)
        after = await engine.generate(prompt, greedy(), request_id="b")
        self.check_log_probs(engine_case, prompt, after, 0)
        assert after.log_probs != before.log_probs

    async def test_flush_cache_drops_prefixes(self, engine_case: ModelCase):
        prompt = random_ids(100, seed=9)
        engine = engine_case.engine
        await engine.generate(prompt, greedy(), request_id="a")
        await engine.flush_cache()
        completion = await engine.generate(prompt, greedy(), request_id="b")
        assert completion.cached_tokens == 0
        self.check_log_probs(engine_case, prompt, completion, 0)

    async def test_weights_that_change_under_a_call_are_recorded_by_span(
        self, engine_case: ModelCase
    ):
        engine = engine_case.engine
        task = await start_endless(engine, "a")
        await engine_case.sync(version=3)
        await some_steps(engine)
        await engine.abort("a")
        completion = await task
        assert [span.version for span in completion.weight_versions] == [0, 3]
        assert covers(completion)
        self.check_log_probs(engine_case, PROMPT, completion, 1.0)

    async def test_model_is_left_as_it_was(self, engine_case: ModelCase):
        model = engine_case.model
        model.train()
        calls = []
        handle = model.register_forward_hook(lambda *_: calls.append(1))
        before = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        attention = model.config._attn_implementation  # pyright: ignore
        completions = await asyncio.gather(
            *(engine_case.engine.generate(PROMPT, greedy(), request_id=f"{i}") for i in range(4))
        )
        await engine_case.engine.flush_cache()
        assert completions[0].token_ids
        assert model.training
        assert all(module.training for module in model.modules())
        assert not calls, "the trainer's hooks are not the engine's"
        assert model.config._attn_implementation == attention  # pyright: ignore
        for name, parameter in model.named_parameters():
            assert before[name] == (id(parameter), parameter.data_ptr(), parameter._version)
            assert parameter.requires_grad
            assert parameter.grad is None
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name])
        handle.remove()
        model.eval()

    def check_log_probs(
        self,
        engine_case: ModelCase,
        prompt: Sequence[int],
        completion: Completion,
        temperature: float,
    ) -> None:
        """Hold a completion against a plain forward pass of the same weights."""
        assert all(0 <= token_id < VOCAB_SIZE for token_id in completion.token_ids)
        expected = plain_log_probs(engine_case.model, prompt, completion, temperature)
        actual = torch.tensor(completion.log_probs)
        # Rounding errors are of the logits, which the temperature divides.
        atol = TOLERANCE / min(temperature or 1.0, 1.0)
        torch.testing.assert_close(actual, expected, atol=atol, rtol=TOLERANCE)

    @torch.no_grad()
    def change_weights(self, engine_case: ModelCase) -> None:
        """Change the weights in place, as an optimizer does."""
        generator = torch.Generator().manual_seed(1)
        for parameter in engine_case.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


class SeededConformance:
    """What holds, besides, for an engine that keeps seeds: the embedded and the scripted one."""

    async def test_seeded_tokens_depend_on_no_other_call_and_on_no_order(
        self, engine_case: EngineCase
    ):
        prompts = [random_ids(8 + 5 * i, seed=i) for i in range(6)]
        names = iter(range(1000))

        async def answer(place: int) -> list[int]:
            sampling = SamplingParams(max_new_tokens=10, temperature=1.5, seed=place)
            completion = await engine_case.engine.generate(
                prompts[place], sampling, request_id=f"{next(names)}"
            )
            return completion.token_ids

        alone = [await answer(place) for place in range(6)]
        for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3], [3, 1]):
            together = await asyncio.gather(*map(answer, order))
            assert together == [alone[place] for place in order]


class SeededModelConformance(SeededConformance):
    """What holds, besides, where such an engine samples from a model, in this process."""

    async def test_group_of_one_prompt_differs_by_seed(self, engine_case: ModelCase):
        samplings = [
            SamplingParams(max_new_tokens=10, temperature=1.5, seed=seed) for seed in (4, 9, 4)
        ]
        completions = await asyncio.gather(
            *(
                engine_case.engine.generate(PROMPT, sampling, request_id=f"{i}")
                for i, sampling in enumerate(samplings)
            )
        )
        first, other, again = [completion.token_ids for completion in completions]
        assert first == again
        assert first != other

    async def test_calls_together_give_the_same_bits_from_an_empty_cache(
        self, engine_case: ModelCase
    ):
        engine, calls = engine_case.engine, calls_of(12)
        runs: list[list[Completion | BaseException]] = []
        for _ in range(3):
            # What ran before leaves prefixes and another order of free pages.
            await asyncio.gather(*(some_steps(engine) for _ in range(3)))
            await engine.flush_cache()
            runs.append(await engine.generate_together(calls))
        assert runs[0] == runs[1] == runs[2]
