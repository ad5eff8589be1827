"""Every family of decoders: trained, sampled, resumed and exported, or refused before it is loaded.

The rows are in `tests/fakes/families.py`.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines import SamplingParams
from agentrl.engines.protocol import EngineCall
from agentrl.engines.transformers.cache_size import TransformersEngineSettings
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.engines.transformers.support import check_embedded
from agentrl.errors import ConfigError
from agentrl.workers.checkpoint import RunState, open_checkpoint
from agentrl.workers.distributed import World
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_policy
from agentrl.workers.model import PolicyModel
from agentrl.workers.snapshot import identify, load_run, save_run
from tests.fakes.engines import plain_log_probs, random_ids
from tests.fakes.families import FAMILIES, Family
from tests.fakes.plugins import tiny_tokenizer
from tests.fakes.training import make_actor, make_batch, plain_scores, random_rows, weights

TRAINED = [name for name, family in FAMILIES.items() if not family.refused]
SAMPLED = [name for name in TRAINED if not FAMILIES[name].not_sampled]
BATCHES = [make_batch(random_rows(4, seed=seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def save(family: Family, folder: Path) -> PreTrainedModel:
    """Write a model of the family, and return it as transformers reads it."""
    family.model().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder: Path, world: World) -> PolicyModel:
    return load_policy(ModelConfig(path=str(folder)), world, FsdpConfig())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_family_is_trained_resumed_and_exported(
    world: World, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str
):
    plain = save(FAMILIES[name], tmp_path / "model")
    actor, again = (make_actor(load(tmp_path / "model", world)) for _ in range(2))
    rows = random_rows(4, seed=0)
    found = actor.compute_log_probs(make_batch(rows), temperature=0.7).log_probs
    for row, own in zip(rows, found, strict=True):
        mask = torch.tensor(row.mask).bool()
        expected = plain_scores(plain, row, 0.7)[0].detach()
        torch.testing.assert_close(own[: len(mask)][mask], expected[mask], atol=2e-5, rtol=0)

    assert actor.update_policy(BATCHES[0], temperature=1.0).metrics["actor/grad_norm"] > 0
    path = save_run(tmp_path / "run", actor, RunState(1, identify(actor.policy)))
    load_run(open_checkpoint(path), again)
    for one in (actor, again):
        one.update_policy(BATCHES[1], temperature=1.0)
    trained = weights(actor.policy)
    for weight, other in weights(again.policy).items():
        assert torch.equal(other, trained[weight]), weight
    assert any(not torch.equal(value, plain.get_parameter(n)) for n, value in trained.items())

    export_hf(actor.policy, tokenizer, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for weight, value in trained.items():
        assert torch.equal(exported.get_parameter(weight), value), weight


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
async def test_embedded_engine_samples_what_the_trainer_scores(
    world: World, tmp_path: Path, name: str
):
    check_embedded(FAMILIES[name].config())
    plain = save(FAMILIES[name], tmp_path)
    settings = TransformersEngineSettings(page_size=4, num_pages=128, seed=0, max_model_len=64)
    engine = TransformersEngine.from_model(load(tmp_path, world).lm, settings=settings)
    prompts = [random_ids(length, seed=length) for length in (3, 11, 20)]
    calls = [
        EngineCall(
            input_ids=prompt, sampling=SamplingParams(max_new_tokens=12), request_id=f"{number}"
        )
        for number, prompt in enumerate(prompts)
    ]
    try:
        completions = await engine.generate_together(calls)
    finally:
        await engine.close()
    for prompt, completion in zip(prompts, completions, strict=True):
        assert not isinstance(completion, BaseException)
        expected = plain_log_probs(plain, prompt, completion, 1.0)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].refused])
def test_family_that_cannot_be_trained_is_refused(world: World, tmp_path: Path, name: str):
    FAMILIES[name].model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=FAMILIES[name].refused) as caught:
        load(tmp_path, world)
    assert caught.value.key == "model.path"


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].not_sampled])
def test_family_that_the_embedded_engine_cannot_run_is_refused_from_its_configuration(name: str):
    with pytest.raises(ConfigError, match=FAMILIES[name].not_sampled) as caught:
        check_embedded(FAMILIES[name].config())
    assert caught.value.key == "model.path"
    assert "rollout.engine.name=sglang" in str(caught.value.expected)
