"""The tokens at which a model's own configuration ends a generation."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GenerationConfig

from agentrl.config import parse_config
from agentrl.engines.sglang.calls import sampling_fields
from agentrl.engines.stopping import StopCheck
from agentrl.rollout.runner import run_request
from agentrl.rollout.templates import ChatTemplate
from agentrl.trainer.setup.plugins import load_plugins
from agentrl.trainer.setup.rollout_setup import probe_model
from tests.fakes.plugins import (
    decode,
    encode,
    make_context,
    make_engine,
    make_manager,
    make_request,
    tiny_tokenizer,
)

END, OTHER_END = encode("<|im_end|><|endoftext|>")
PLAIN = encode("a")[0]


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny_tokenizer().save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[OTHER_END, END, PLAIN]).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def template(model: str) -> ChatTemplate:
    config = parse_config({"data": {"train_files": ["rows.jsonl"]}, "model": {"path": model}})
    return probe_model(config, load_plugins(config)).template


def test_the_stops_of_the_generation_config_are_stops_and_no_plain_token_is(
    template: ChatTemplate,
):
    assert template.stop_token_ids == (END, OTHER_END)


def test_a_folder_without_generation_config_stops_where_tokenizer_and_template_do(model: str):
    (Path(model) / "generation_config.json").unlink()
    config = parse_config({"data": {"train_files": ["rows.jsonl"]}, "model": {"path": model}})
    assert probe_model(config, load_plugins(config)).template.stop_token_ids == (END,)


def test_both_engines_are_asked_to_stop_there(template: ChatTemplate):
    context = replace(make_context(make_engine("Yes.")), template=template)
    sampling = make_manager(context).train_plan().sampling
    assert StopCheck.of(sampling, decode).first_end([*encode("It is 4."), OTHER_END, 5]) == 9
    assert OTHER_END in sampling_fields(sampling)["stop_token_ids"]


async def test_such_a_token_is_trained_and_no_part_of_the_message(template: ChatTemplate):
    engine = make_engine([*encode("It is 4."), OTHER_END])
    context = replace(make_context(engine), template=template)
    request = await run_request(make_request(), context)
    assert request.messages[-1].content == "It is 4."
    assert request.response_ids == [*encode("It is 4."), OTHER_END]
    assert request.loss_mask[-1] == 1
