import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from agentrl.config.schema import FsdpConfig
from agentrl.errors import ConfigError
from agentrl.training.batches import read_padded_rows
from agentrl.training.distributed import World
from agentrl.training.log_probs import HeadTransform, score_tokens
from agentrl.training.model import PolicyModel, ScoringParams, probe_head
from agentrl.training.packing import pack_rows
from agentrl.training.scoring import score_rows
from tests.fakes_engines import VOCAB_SIZE, tiny_model
from tests.fakes_training import Layout, make_batch, make_policy, plain_scores, random_rows

HIDDEN = 32


class LargestLogits(TorchDispatchMode):
    """Notes the most rows of any `[rows, V]` tensor (the head's transposed weight aside)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocab_size,):
                rows = tensor.numel() // self.vocab_size
                self.rows = max(self.rows, rows if rows != HIDDEN else 0)
        return out


@pytest.mark.parametrize(
    "transform", [HeadTransform(), HeadTransform(0.5, None), HeadTransform(2.0, 3.0)]
)
@pytest.mark.parametrize("chunk", [2, 100])
def test_gradients_are_those_of_finite_differences(transform: HeadTransform, chunk: int):
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 2, 1])

    def scores(*tensors: torch.Tensor):
        return score_tokens(
            *tensors, targets, temperature=0.7, transform=transform, chunk=chunk
        )  # fmt: skip

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


def test_scores_equal_those_of_the_model_row_by_row(world: World):
    policy, plain = make_policy(world), tiny_model(initializer_range=0.1)
    rows = random_rows(9)
    padded = read_padded_rows(make_batch(rows, Layout(pad_left=2, pad_right=3)))
    found = score_rows(policy, padded, ScoringParams(temperature=0.7), budget=20)
    for place, row in enumerate(rows):
        log_probs, entropy = plain_scores(plain, row, temperature=0.7)
        mask = torch.tensor(row.mask)
        width = len(row.mask)
        assert torch.allclose(found.log_probs[place, :width], log_probs * mask, atol=1e-5)
        assert torch.allclose(found.entropy[place, :width], entropy * mask, atol=1e-5)
        assert not found.log_probs[place, width:].any()


@pytest.mark.parametrize("tied", [True, False])
def test_full_logits_of_a_micro_batch_never_exist(world: World, tied: bool):
    policy = make_policy(world, vocab_size=VOCAB_SIZE + 7, tie_word_embeddings=tied)
    rows = random_rows(16)
    padded = read_padded_rows(make_batch(rows))
    trained = [place for place, row in enumerate(rows) if any(row.mask)]
    packed = pack_rows(padded, trained, world.device)
    assert len(packed.targets) > HIDDEN
    with LargestLogits(VOCAB_SIZE + 7) as largest:
        scores = policy(packed, ScoringParams(temperature=1.0, logits_chunk_tokens=4))
        (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert 0 < largest.rows <= 4


def test_head_runs_on_trained_positions_alone(world: World):
    policy = make_policy(world, vocab_size=VOCAB_SIZE + 7)
    padded = read_padded_rows(make_batch(random_rows(12)))
    packed = pack_rows(padded, [0, 1], world.device)
    with LargestLogits(VOCAB_SIZE + 7) as largest:
        policy(packed, ScoringParams(temperature=1.0, logits_chunk_tokens=1000))
    assert largest.rows == len(packed.targets) < packed.input_ids.shape[1]


def small(config_class: type, **extra: object):
    return config_class(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **extra,
    )  # fmt: skip


def test_scale_and_cap_behind_the_head_are_the_models_own(world: World):
    torch.manual_seed(0)
    assert probe_head(CohereForCausalLM(small(CohereConfig, logit_scale=0.25))).scale == 0.25
    gemma = Gemma2ForCausalLM(small(Gemma2Config, final_logit_softcapping=2.0))
    assert probe_head(gemma).cap == 2.0


def test_capped_attention_scores_are_refused(world: World):
    gemma = Gemma2ForCausalLM(small(Gemma2Config, attn_logit_softcapping=50.0))
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        PolicyModel(gemma, world, torch.float32, FsdpConfig())


def test_unknown_treatment_of_logits_is_refused(world: World):
    model = tiny_model()
    forward = model.forward
    model.forward = lambda **inputs: scaled(forward(**inputs))

    def scaled(output):
        output.logits = output.logits * 3
        return output

    with pytest.raises(ConfigError, match="does something to its logits"):
        probe_head(model)
