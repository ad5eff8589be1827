"""The scripted engine: the protocol, and what makes it pleasant to debug with."""

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.engines import (
    FinishReason,
    SamplingParams,
    ScriptedAnswer,
    ScriptedEngine,
    VersionSpan,
)
from agentrl.errors import EngineError
from tests.engines.conformance import EngineCase, ProtocolConformance, SeededConformance
from tests.fakes.engines import LetterTokenizer

LETTERS = LetterTokenizer()
SAMPLING = SamplingParams(max_new_tokens=50)


@pytest.fixture
def engine_case() -> EngineCase:
    script = [10 + 7 * n % 80 for n in range(120)]
    engine = ScriptedEngine([script], tokenizer=LETTERS, max_model_len=128)
    return EngineCase(engine=engine, decode=LETTERS.decode)


class TestScriptedEngine(ProtocolConformance, SeededConformance):
    pass


async def test_each_request_gets_the_answers_from_the_first_on_and_the_last_repeats():
    engine = ScriptedEngine(["one", "two"], tokenizer=LETTERS)

    async def turns(request_id: str) -> list[str]:
        done = [await engine.generate([1], SAMPLING, request_id=request_id) for _ in range(3)]
        return [LETTERS.decode(completion.token_ids) for completion in done]

    assert await asyncio.gather(turns("a"), turns("b")) == [["one", "two", "two"]] * 2


async def test_text_without_a_stop_is_ended_by_the_first_stop_token():
    engine = ScriptedEngine(["hi", "a5b"], tokenizer=LETTERS)
    stop = LETTERS.encode("5Z")
    sampling = SamplingParams(max_new_tokens=50, stop_token_ids=tuple(stop))
    first = await engine.generate([1], sampling, request_id="a")
    second = await engine.generate([1], sampling, request_id="a")
    assert LETTERS.decode(first.token_ids) == "hi5"
    assert LETTERS.decode(second.token_ids) == "a5"
    assert first.finish_reason == second.finish_reason == FinishReason.STOP


async def test_text_that_fills_the_budget_is_cut_before_its_stop():
    engine = ScriptedEngine(["abcd"], tokenizer=LETTERS)
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(9,))
    completion = await engine.generate([1], sampling, request_id="a")
    assert LETTERS.decode(completion.token_ids) == "abcd"
    assert completion.finish_reason == FinishReason.LENGTH


async def test_token_ids_are_returned_as_they_are():
    engine = ScriptedEngine([[4, 5, 6]])
    completion = await engine.generate(
        [1], SamplingParams(max_new_tokens=9, stop_token_ids=(7,)), request_id="a"
    )
    assert completion.token_ids == [4, 5, 6]
    assert completion.log_probs == [-1.0] * 3
    assert completion.finish_reason == FinishReason.STOP


async def test_empty_answer_samples_nothing():
    completion = await ScriptedEngine([[]]).generate([1], SAMPLING, request_id="a")
    assert completion.token_ids == []
    assert completion.weight_version is None


async def test_log_probs_may_be_given():
    engine = ScriptedEngine([ScriptedAnswer([4, 5], log_probs=[-0.25, -0.5])])
    completion = await engine.generate([1], SamplingParams(max_new_tokens=1), request_id="a")
    assert completion.log_probs == [-0.25]


async def test_exception_of_the_script_is_raised():
    engine = ScriptedEngine([[1], EngineError("gone")])
    await engine.generate([1], SAMPLING, request_id="a")
    with pytest.raises(EngineError, match="gone"):
        await engine.generate([1], SAMPLING, request_id="a")


async def test_function_decides_by_input_and_turn():
    async def script(
        input_ids: Sequence[int], sampling: SamplingParams, request_id: str, turn: int
    ):
        return [input_ids[-1] + turn, sampling.max_new_tokens, len(request_id)]

    engine = ScriptedEngine(script)
    first = await engine.generate([8], SAMPLING, request_id="xy")
    second = await engine.generate([8], SAMPLING, request_id="xy")
    assert first.token_ids == [8, 50, 2]
    assert second.token_ids == [9, 50, 2]


async def test_calls_are_recorded_in_order():
    engine = ScriptedEngine([[1]])
    await engine.generate((3, 4), SAMPLING, request_id="a")
    await engine.generate([3, 4, 1, 9], SAMPLING, request_id="a")
    assert engine.calls == [[3, 4], [3, 4, 1, 9]]
    assert [(record.request_id, record.turn) for record in engine.records] == [("a", 0), ("a", 1)]


async def test_abort_ends_a_delayed_answer_of_that_request_only():
    engine = ScriptedEngine(
        lambda ids, sampling, request_id, turn: ScriptedAnswer(
            [7], delay_s=60.0 if request_id == "slow" else 0.01
        )
    )
    tasks = [
        asyncio.create_task(engine.generate([1], SAMPLING, request_id=name))
        for name in ("slow", "quick")
    ]
    await asyncio.sleep(0)
    await engine.abort("slow")
    slow, quick = await asyncio.gather(*tasks)
    assert (slow.token_ids, slow.finish_reason) == ([], FinishReason.ABORT)
    assert quick.token_ids == [7]


async def test_close_ends_delayed_answers_with_an_error():
    engine = ScriptedEngine([ScriptedAnswer([7], delay_s=60.0)])
    task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
    await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task


async def test_sleep_holds_answers_back():
    engine = ScriptedEngine([[7]])
    await engine.sleep()
    task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
    await asyncio.sleep(0.01)
    assert not task.done()
    await engine.update_weights(iter([]), version=4)
    await engine.wake()
    assert (await task).weight_versions == (VersionSpan(4, 0, 1),)


async def test_text_without_tokenizer_says_so():
    with pytest.raises(EngineError, match="tokenizer"):
        await ScriptedEngine(["hello"]).generate([1], SAMPLING, request_id="a")
    with pytest.raises(EngineError, match="tokenizer"):
        await ScriptedEngine([[1]]).generate(
            [1], SamplingParams(max_new_tokens=4, stop=("x",)), request_id="a"
        )


def test_empty_script_is_an_error():
    with pytest.raises(EngineError, match="at least one"):
        ScriptedEngine([])
