import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.workers import load as load_module
from agentrl.workers.distributed import World
from agentrl.workers.load import load_causal_lm, load_policy, make_empty_lm
from agentrl.workers.shards import LocalSlice
from agentrl.workers.weight_files import (
    StoredTensor,
    WeightFiles,
    digest_weights,
    stand_in_weights,
    sum_placed_bits,
)
from tests.fakes.engines import tiny_model
from tests.fakes.torchrun import ranks_of
from tests.fakes.training import weights

CPU = torch.device("cpu")


def tiny_mixtral() -> MixtralForCausalLM:
    """A model whose experts transformers stores one by one, and computes as one tensor."""
    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def find(folder: Path) -> WeightFiles | None:
    config = ModelConfig(path=str(folder))
    return WeightFiles.find(str(folder), make_empty_lm(config, CPU))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_buffers_are_those_that_transformers_loads(
    world: World, tmp_path: Path, tied: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    lm = tiny_model(tie_word_embeddings=tied)
    torch.nn.Module.to(lm, dtype)
    lm.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = ModelConfig(path=str(tmp_path))
    whole = load_causal_lm(config)
    monkeypatch.setattr(load_module, "load_causal_lm", None)  # not used
    monkeypatch.setattr("agentrl.workers.weight_files.PIECE_BYTES", 1000)
    policy = load_policy(config, world, FsdpConfig())
    assert policy.stored_dtype == dtype
    found = weights(policy)
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, weight in found.items():
        assert torch.equal(weight, whole.get_parameter(name)), name
    buffers = dict(policy.lm.named_buffers())
    assert buffers
    for name, buffer in buffers.items():
        assert torch.equal(buffer, whole.get_buffer(name)), name


def test_weights_that_transformers_converts_are_loaded_by_it(world: World, tmp_path: Path):
    lm = tiny_mixtral()
    lm.save_pretrained(tmp_path)
    assert find(tmp_path) is None
    policy = load_policy(ModelConfig(path=str(tmp_path)), world, FsdpConfig())
    assert all(torch.equal(w, lm.get_parameter(name)) for name, w in weights(policy).items())


def test_files_with_other_weights_than_the_model_are_left_to_transformers(tmp_path: Path):
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    assert find(tmp_path) is not None
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    embedding = stored["model.embed_tokens.weight"]
    save_file(stored | {"model.embed_tokens.weight": embedding[:-1]}, file)
    assert find(tmp_path) is None
    del stored["model.embed_tokens.weight"]
    save_file(stored, file)
    assert find(tmp_path) is None
    file.unlink()
    assert find(tmp_path) is None


def test_file_that_was_cut_is_reported(tmp_path: Path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(100))
    stored = StoredTensor(file, torch.float32, (4, 8), 0)
    stored.read_rows(1, torch.empty(2, 8))
    with pytest.raises(OSError, match="shorter than its header says"):
        stored.read_rows(1, torch.empty(3, 8))


@pytest.mark.slow
def test_ranks_read_their_slices_of_the_same_model(tmp_path: Path):
    folder = tmp_path / "models"
    tiny_model(num_hidden_layers=1).save_pretrained(folder / "tied", max_shard_size="20KB")
    tiny_model(tie_word_embeddings=False).bfloat16().save_pretrained(folder / "untied")
    tiny_mixtral().save_pretrained(folder / "converted")
    tiny_model().save_pretrained(folder / "damaged")
    stored = load_file(folder / "damaged/model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, folder / "damaged/model.safetensors", metadata={"format": "pt"})
    with ranks_of("tests.fakes.loading_ranks", str(folder), size=3) as ranks:
        ended = [rank.wait() for rank in ranks]
    assert not any(rank.code for rank in ended), "\n".join(rank.err for rank in ended)
    assert all("lacks weights" in rank.out for rank in ended)
    for name, dtype in (("tied", "float32"), ("untied", "bfloat16"), ("converted", "float32")):
        assert (
            json.loads((tmp_path / "exported" / name / "config.json").read_text())["dtype"] == dtype
        )
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / "exported" / name)
        before = AutoModelForCausalLM.from_pretrained(folder / name)
        change = [
            (a - b).abs().max()
            for a, b in zip(trained.parameters(), before.parameters(), strict=True)
        ]
        assert 0 < max(change) < 0.1, name


def test_stand_in_weights_share_one_memory_and_are_taken_back(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    lm = make_empty_lm(ModelConfig(path=str(tmp_path)), CPU)
    own = dict(lm.named_parameters())
    with stand_in_weights(lm, CPU, torch.bfloat16):
        standing = dict(lm.named_parameters())
        assert standing.keys() == own.keys()
        assert {weight.dtype for weight in standing.values()} == {torch.bfloat16}
        matrices = [weight for weight in standing.values() if weight.ndim > 1]
        assert len({weight.untyped_storage().data_ptr() for weight in matrices}) == 1
        assert lm(input_ids=torch.tensor([[0, 1]])).logits.isfinite().all()
    assert all(weight is own[name] for name, weight in lm.named_parameters())


def test_digest_of_weights_is_that_of_their_slices(world: World):
    weight = torch.randn(6, 4, 5)
    halves = [
        LocalSlice(part, (6, 4, 5), offset)
        for part, offset in (
            (weight[:2], (0, 0, 0)),
            (weight[2:, :3], (2, 0, 0)),
            (weight[2:, 3:], (2, 3, 0)),
        )
    ]
    sums = [sum_placed_bits(one) for one in halves]
    whole = sum_placed_bits(LocalSlice(weight, (6, 4, 5), (0, 0, 0)))
    assert (sum(sums) - whole) % 2**64 == 0
    digest = digest_weights([("w", weight)], world, sum_placed_bits)
    assert digest == digest_weights([("w", weight)], None, sum_placed_bits)
    for changed in (weight.flip(0), weight.flip(2), weight.roll(1, 1), weight + 1e-6):
        assert digest != digest_weights([("w", changed)], None, sum_placed_bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_of_any_dtype_and_shape_have_a_digest(dtype: torch.dtype):
    weights = [torch.tensor(2.0), torch.ones(3), torch.ones(2, 3)]
    named = [(str(n), one.to(dtype)) for n, one in enumerate(weights)]
    assert len(digest_weights(named, None, sum_placed_bits)) == 64
