"""What only the embedded engine promises: its thread, its cache, its failures."""

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from transformers import Qwen2ForCausalLM

from agentrl.engines import FinishReason, SamplingParams
from agentrl.engines.protocol import Completion, EngineCall
from agentrl.engines.transformers.cache_size import TransformersEngineSettings
from agentrl.engines.transformers.engine import TransformersEngine, choose_attention
from agentrl.engines.transformers.paged_attention import ATTENTION_NAME
from agentrl.engines.transformers.requests import TrackedState
from agentrl.errors import EngineError
from tests.fakes.engines import LetterTokenizer, plain_log_probs, random_ids, tiny_model

PROMPT = random_ids(20, seed=0)
ENDLESS = SamplingParams(max_new_tokens=5000)
SHORT = SamplingParams(max_new_tokens=6)
SMALL_PAGES = TransformersEngineSettings(page_size=4, seed=0)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "agentrl-engine"]


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    return tiny_model().eval()


@pytest.fixture
async def engine(model: Qwen2ForCausalLM) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine.from_model(model, settings=SMALL_PAGES)
    yield engine
    await engine.close()
    assert not engine_threads()


def check(
    model: Qwen2ForCausalLM, prompt: Sequence[int], completion: Completion, temperature: float = 1.0
) -> None:
    expected = plain_log_probs(model, prompt, completion, temperature)
    actual = torch.tensor(completion.log_probs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def sampled(engine: TransformersEngine) -> list[list[int]]:
    return [call.token_ids for call in engine._worker._running.values()]


async def num_sampled(engine: TransformersEngine, more_than: int) -> None:
    """Wait until the running calls have sampled more than so many tokens."""
    while sum(map(len, sampled(engine))) <= more_than:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.001)


async def start(engine: TransformersEngine) -> asyncio.Task[Completion]:
    """A call, named "endless", that only the engine's length would end."""
    task = asyncio.create_task(engine.generate(PROMPT, ENDLESS, request_id="endless"))
    await num_sampled(engine, 3)
    return task


async def finish(engine: TransformersEngine, task: asyncio.Task[Completion]) -> Completion:
    """Let it sample some more, and end it."""
    await num_sampled(engine, sum(map(len, sampled(engine))) + 3)
    await engine.abort("endless")
    return await task


async def test_close_ends_running_calls_and_leaves_no_thread(engine: TransformersEngine):
    task = await start(engine)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    assert not engine_threads()


async def test_engine_that_is_forgotten_leaves_no_thread(model: Qwen2ForCausalLM):
    engine = TransformersEngine.from_model(model)
    await engine.generate(PROMPT, SHORT, request_id="a")
    assert engine_threads()
    del engine
    gc.collect()
    assert not engine_threads()


async def test_no_thread_runs_before_the_first_call(model: Qwen2ForCausalLM):
    engine = TransformersEngine.from_model(model)
    await engine.update_weights(model.named_parameters(), version=1)
    await engine.flush_cache()
    assert not engine_threads()
    await engine.close()


def test_engine_outlives_its_event_loop(model: Qwen2ForCausalLM):
    engine = TransformersEngine.from_model(model)
    for _ in range(2):
        completion = asyncio.run(engine.generate(PROMPT, SHORT, request_id="a"))
        check(model, PROMPT, completion)
    asyncio.run(engine.close())


async def test_failure_in_the_thread_ends_running_and_later_calls(
    engine: TransformersEngine, model: Qwen2ForCausalLM
):
    task = await start(engine)

    def explode(*_: object) -> None:
        raise RuntimeError("no memory left")

    handle = engine._weights.module.model.register_forward_pre_hook(explode)
    with pytest.raises(EngineError, match="no memory left"):
        await task
    with pytest.raises(EngineError, match="has failed before"):
        await engine.generate(PROMPT, ENDLESS, request_id="b")
    with pytest.raises(EngineError, match="has failed before"):
        await engine.update_weights(model.named_parameters(), version=1)
    await engine.abort("b")
    handle.remove()


async def test_diverged_weights_fail_their_calls_and_no_later_one(
    engine: TransformersEngine, model: Qwen2ForCausalLM
):
    values = model.get_parameter("model.layers.0.self_attn.v_proj.bias")
    saved = values.detach().clone()
    with torch.no_grad():
        values.fill_(torch.nan)
    calls = [engine.generate(PROMPT, ENDLESS, request_id=f"{i}") for i in range(3)]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "not finite" in str(result)
    with torch.no_grad():
        values.copy_(saved)
    await engine.update_weights(model.named_parameters(), version=1)
    completion = await engine.generate(PROMPT, SHORT, request_id="b")
    check(model, PROMPT, completion)


async def test_call_that_diverges_alone_disturbs_no_other():
    model = tiny_model(tie_word_embeddings=False).eval()
    engine = TransformersEngine.from_model(model, settings=SMALL_PAGES)
    greedy = SamplingParams(max_new_tokens=60, temperature=0)
    calm = await engine.generate(PROMPT, greedy, request_id="calm")
    poison = next(n for n in range(96) if n not in {*PROMPT, *calm.token_ids})
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[poison] = torch.nan
    results = await asyncio.gather(
        engine.generate(PROMPT, greedy, request_id="calm"),
        engine.generate([*PROMPT, poison], greedy, request_id="poisoned"),
        return_exceptions=True,
    )
    assert isinstance(results[1], EngineError)
    assert isinstance(results[0], Completion)
    assert results[0].token_ids == calm.token_ids
    check(model, PROMPT, results[0])
    await engine.close()


async def test_cancelled_call_leaves_the_engine(engine: TransformersEngine):
    task = await start(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.generate(PROMPT, SHORT, request_id="b")
    assert not sampled(engine)


@pytest.mark.parametrize(
    ("input_ids", "sampling", "message"),
    [
        ([], ENDLESS, "empty"),
        ([1, 2, 96], ENDLESS, "vocabulary of 96"),
        ([1, -1], ENDLESS, "vocabulary"),
        ([1], SamplingParams(max_new_tokens=0), "max_new_tokens is 0"),
        ([1], SamplingParams(max_new_tokens=4, stop=("x",)), "tokenizer"),
    ],
)
async def test_bad_call_is_an_error_of_its_own(
    engine: TransformersEngine, input_ids: list[int], sampling: SamplingParams, message: str
):
    task = await start(engine)
    with pytest.raises(EngineError, match=message):
        await engine.generate(input_ids, sampling, request_id="bad")
    assert (await finish(engine, task)).token_ids


async def test_second_turn_finds_its_prefix_in_the_cache(
    engine: TransformersEngine, model: Qwen2ForCausalLM
):
    first = await engine.generate(PROMPT, SamplingParams(max_new_tokens=9), request_id="a")
    longer = [*PROMPT, *first.token_ids, 1, 2, 3]
    second = await engine.generate(longer, SamplingParams(max_new_tokens=9), request_id="a")
    assert first.cached_tokens == 0
    assert second.cached_tokens >= 24, "all whole pages of what was computed before"
    check(model, longer, second)


async def test_full_cache_restarts_calls_and_loses_nothing(model: Qwen2ForCausalLM):
    settings = TransformersEngineSettings(page_size=4, num_pages=40, max_model_len=100)
    engine = TransformersEngine.from_model(model, settings=settings)
    prompts = [random_ids(10 + i, seed=i) for i in range(10)]
    completions = await asyncio.gather(
        *(
            engine.generate(prompt, SamplingParams(max_new_tokens=60), request_id=f"{i}")
            for i, prompt in enumerate(prompts)
        )
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == 60
        check(model, prompt, completion)
    await engine.close()


async def test_calls_put_off_by_a_full_cache_go_on_when_those_that_run_are_aborted(
    model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
):
    put_off: list[TrackedState] = []
    begin_again = TrackedState.create_equivalent_initial_request
    monkeypatch.setattr(
        TrackedState,
        "create_equivalent_initial_request",
        lambda state: put_off.append(state) or begin_again(state),
    )
    settings = TransformersEngineSettings(page_size=4, num_pages=60, max_model_len=200)
    engine = TransformersEngine.from_model(model, settings=settings)
    prompts = {f"{i}": random_ids(60, seed=i) for i in range(3)}
    sampling = SamplingParams(max_new_tokens=130)
    tasks = {
        name: asyncio.create_task(engine.generate(prompt, sampling, request_id=name))
        for name, prompt in prompts.items()
    }
    while not put_off:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.001)
    late = put_off[0].call.request_id
    for name in prompts.keys() - {late}:
        await engine.abort(name)
    completion = await tasks[late]
    assert completion.finish_reason == FinishReason.LENGTH
    check(model, prompts[late], completion)
    await engine.close()


async def test_cancelled_calls_that_began_together_leave_the_engine(engine: TransformersEngine):
    calls = [EngineCall(input_ids=PROMPT, sampling=ENDLESS, request_id=f"{i}") for i in range(3)]
    task = asyncio.create_task(engine.generate_together(calls))
    await num_sampled(engine, 6)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.generate(PROMPT, SHORT, request_id="b")
    assert not sampled(engine)


async def test_sequence_may_fill_the_whole_cache(model: Qwen2ForCausalLM):
    settings = TransformersEngineSettings(page_size=4, num_pages=10, max_model_len=36)
    engine = TransformersEngine.from_model(model, settings=settings)
    assert engine.max_model_len == 36
    completion = await engine.generate(PROMPT, ENDLESS, request_id="a")
    assert len(completion.token_ids) == 16
    assert completion.finish_reason == FinishReason.LENGTH
    await engine.close()


async def test_one_call_at_a_time_still_has_the_whole_length(model: Qwen2ForCausalLM):
    settings = TransformersEngineSettings(page_size=4, max_batch_size=1, max_model_len=36)
    engine = TransformersEngine.from_model(model, settings=settings)
    completion = await engine.generate(PROMPT, ENDLESS, request_id="a")
    assert len(completion.token_ids) == 16
    await engine.close()


def test_cache_that_cannot_hold_one_sequence_is_refused_by_its_key(model: Qwen2ForCausalLM):
    settings = TransformersEngineSettings(page_size=4, num_pages=10, max_model_len=37)
    with pytest.raises(EngineError, match=r"10 pages of 4 tokens.* 37 tokens needs 11") as caught:
        TransformersEngine.from_model(model, settings=settings)
    assert caught.value.details["key"] == "rollout.engine.transformers.num_pages"
    assert "11" in str(caught.value.details["expected"])


async def test_weights_that_change_under_a_call_score_what_follows(
    engine: TransformersEngine, model: Qwen2ForCausalLM
):
    task = await start(engine)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    with engine._worker.paused():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        await engine.update_weights(model.named_parameters(), version=1)
    completion = await finish(engine, task)
    before, after = completion.weight_versions
    assert (before.version, after.version) == (0, 1)
    new_scores = plain_log_probs(model, PROMPT, completion, 1.0)[after.start :]
    model.load_state_dict(old, strict=False)
    old_scores = plain_log_probs(model, PROMPT, completion, 1.0)[: before.end]
    expected = torch.cat([old_scores, new_scores])
    actual = torch.tensor(completion.log_probs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


async def test_incomplete_weights_end_running_calls_and_refuse_later_ones(
    engine: TransformersEngine, model: Qwen2ForCausalLM
):
    task = await start(engine)
    with pytest.raises(EngineError, match="not those of the model"):
        await engine.update_weights([("nonsense", torch.zeros(1))], version=1)
    with pytest.raises(EngineError, match="incomplete"):
        await task
    with pytest.raises(EngineError, match="call update_weights"):
        await engine.generate(PROMPT, ENDLESS, request_id="b")
    await engine.update_weights(model.named_parameters(), version=2)
    completion = await engine.generate(PROMPT, SHORT, request_id="b")
    assert completion.weight_version == 2
    check(model, PROMPT, completion)


async def test_running_call_survives_sleep(engine: TransformersEngine, model: Qwen2ForCausalLM):
    task = await start(engine)
    await engine.sleep()
    await asyncio.sleep(0.02)
    assert not task.done()
    assert engine._worker._batcher is None, "the cache's memory was given back"
    await engine.wake()
    completion = await finish(engine, task)
    check(model, PROMPT, completion)


async def test_same_seed_gives_the_same_tokens_in_any_company(engine: TransformersEngine):
    def call(seed: int, name: str) -> "asyncio.Task[Completion]":
        sampling = SamplingParams(max_new_tokens=20, temperature=1.5, seed=seed)
        return asyncio.create_task(engine.generate(PROMPT, sampling, request_id=name))

    alone = await call(3, "alone")
    crowd = [call(seed, f"{seed}") for seed in range(6)]
    completions = await asyncio.gather(*crowd)
    assert completions[3].token_ids == alone.token_ids
    assert len({tuple(completion.token_ids) for completion in completions}) == 6


async def test_random_streams_of_the_process_are_left_alone(model: Qwen2ForCausalLM):
    before = (torch.get_rng_state(), random.getstate())
    engine = TransformersEngine.from_model(model)
    await engine.generate(PROMPT, SHORT, request_id="a")
    await engine.close()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


async def test_nothing_is_printed(model: Qwen2ForCausalLM, capfd: pytest.CaptureFixture[str]):
    engine = TransformersEngine.from_model(model, settings=SMALL_PAGES)
    task = await start(engine)
    engine._weights.module.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(EngineError):
        await task
    await engine.close()
    assert capfd.readouterr() == ("", "")


async def test_stop_string_over_several_tokens_of_a_long_completion(model: Qwen2ForCausalLM):
    letters = LetterTokenizer()
    engine = TransformersEngine.from_model(model, tokenizer=letters)  # pyright: ignore
    free = await engine.generate(PROMPT, SamplingParams(max_new_tokens=60, seed=1), request_id="a")
    text = letters.decode(free.token_ids[40:52])
    stopped = await engine.generate(
        PROMPT, SamplingParams(max_new_tokens=60, seed=1, stop=(text,)), request_id="b"
    )
    assert stopped.token_ids == free.token_ids[:52]
    assert stopped.finish_reason == FinishReason.STOP
    await engine.close()


async def test_model_with_a_sliding_window_takes_the_librarys_attention():
    model = tiny_model(
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    ).eval()
    settings = TransformersEngineSettings(
        page_size=4, num_pages=300, max_batch_tokens=64, max_model_len=1000
    )
    assert choose_attention(model, settings) == "sdpa"
    engine = TransformersEngine.from_model(model, settings=settings)
    sampling = SamplingParams(max_new_tokens=20)
    completions = await asyncio.gather(
        *(engine.generate(PROMPT, sampling, request_id=f"{i}") for i in range(3))
    )
    for completion in completions:
        check(model, PROMPT, completion)
    await engine.close()


def test_full_attention_takes_ours(model: Qwen2ForCausalLM):
    assert choose_attention(model, TransformersEngineSettings()) == ATTENTION_NAME


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_may_be_chosen(model: Qwen2ForCausalLM, attention: str):
    settings = TransformersEngineSettings(attention=attention)
    assert choose_attention(model, settings) == attention
