"""What only SGLang in this process's keep promises: what it leaves alone, names, odd ends."""

import asyncio
import logging
import multiprocessing
import os
import signal

import psutil
import pytest

from agentrl.engines.protocol import FinishReason, SamplingParams
from agentrl.engines.sglang.arguments import UNSYNCED, SGLangNeeds, server_arguments
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.errors import ConfigError, EngineError
from agentrl.media.positions import place_runs
from tests.engines.conformance import PROMPT, greedy
from tests.fakes.engines import plain_log_probs, tiny_model
from tests.fakes.vision_models import (
    encode_with_media,
    load_picture,
    make_processor,
    random_picture,
)

pytestmark = pytest.mark.sglang


async def test_sampling_continues_after_an_end_of_sequence_that_is_not_requested(
    running: SGLangEngine,
):
    # The model's own files name token 5; with the others far away, it comes at every other step.
    model = tiny_model().eval()
    with_bias = model.lm_head.weight.detach().clone()
    with_bias[5] *= 40
    weights = dict(model.named_parameters()) | {"model.embed_tokens.weight": with_bias}
    await running.update_weights(weights.items(), version=1)
    sampling = SamplingParams(max_new_tokens=40, temperature=2.0)
    completion = await running.generate(PROMPT, sampling, request_id="a")
    assert completion.token_ids.count(5) > 1
    assert len(completion.token_ids) == 40
    assert completion.finish_reason == FinishReason.LENGTH
    model.get_input_embeddings().weight.data.copy_(with_bias)
    expected = plain_log_probs(model, PROMPT, completion, 2.0)
    assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
    stopped = await running.generate(
        PROMPT,
        SamplingParams(max_new_tokens=40, temperature=2.0, stop_token_ids=(5,)),
        request_id="b",
    )
    assert stopped.finish_reason == FinishReason.STOP
    assert stopped.token_ids.index(5) == len(stopped.token_ids) - 1


async def test_weights_of_another_model_in_between_are_gone(running: SGLangEngine):
    model = tiny_model().eval()
    await running.update_weights(model.named_parameters(), version=2)
    completion = await running.generate(PROMPT, greedy(), request_id="a")
    expected = plain_log_probs(model, PROMPT, completion, 0)
    assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-5)


async def test_picture_for_a_model_without_a_tower_is_refused(running: SGLangEngine):
    processor = make_processor("qwen2_vl")
    _, runs = encode_with_media(processor, [load_picture(random_picture(0))])
    media = place_runs([], runs)
    with pytest.raises(EngineError, match="has a model without a vision tower"):
        await running.generate(PROMPT, greedy(), request_id="a", media=media)


async def test_request_with_an_id_that_is_a_prefix_of_another_is_aborted_alone(
    running: SGLangEngine,
):
    endless = SamplingParams(max_new_tokens=900)
    calls = [
        asyncio.create_task(running.generate(PROMPT, endless, request_id=name))
        for name in ("1", "10", "1/0")
    ]
    await running.generate(PROMPT, greedy(6), request_id="clock")
    await running.abort("1")
    reasons = [(await call).finish_reason for call in calls]
    assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]


def test_start_leaves_the_process_as_it_was(running: SGLangEngine):
    assert "uvloop" not in type(asyncio.get_event_loop_policy()).__module__
    assert "SGLANG_PLATFORM" not in os.environ
    assert multiprocessing.get_start_method() == "fork"
    assert not any("sglang" in type(h).__module__ for h in logging.getLogger().handlers)
    # Ray, of other tests in this process, sets a handler too.
    assert "sglang" not in getattr(signal.getsignal(signal.SIGTERM), "__module__", "")


def test_idle_engine_leaves_the_cores_alone(running: SGLangEngine):
    processes = [psutil.Process(pid) for pid in running._host.pids]
    assert len(processes) >= 2

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    asyncio.run(asyncio.sleep(4))
    assert used() - before < 1.0, "an engine that spins uses all of four seconds"


def test_server_argument_that_the_installed_version_lacks_is_refused_with_a_near_one():
    needs = SGLangNeeds(
        model_path="m", max_model_len=8, max_requests=1, given={"mem_fraction_statik": 0.5}
    )
    with pytest.raises(ConfigError, match=r"did you mean .mem_fraction_static"):
        server_arguments(needs, on_cpu=False)


@pytest.mark.parametrize("name", UNSYNCED)
def test_server_argument_under_which_no_weights_are_taken_is_refused(name: str):
    needs = SGLangNeeds(model_path="m", max_model_len=8, max_requests=1, given={name: 2})
    with pytest.raises(ConfigError, match=f"(?s)takes no new weights with .*{name} 2.*tp_size"):
        server_arguments(needs, on_cpu=False)


@pytest.mark.parametrize("gives_memory", [True, False])
def test_engine_on_the_trainers_device_leaves_half_of_the_memory(gives_memory: bool):
    needs = SGLangNeeds(model_path="m", max_model_len=8, max_requests=1, gives_memory=gives_memory)
    chosen = server_arguments(needs, on_cpu=False)
    assert chosen.get("enable_memory_saver", False) == gives_memory
    assert chosen.get("mem_fraction_static") == (0.5 if gives_memory else None)
