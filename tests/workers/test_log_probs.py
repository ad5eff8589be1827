import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from agentrl.config.schema.training import FsdpConfig
from agentrl.errors import ConfigError
from agentrl.workers.batches import read_padded_rows
from agentrl.workers.distributed import World
from agentrl.workers.log_probs import CPU_BLOCK_BYTES, HeadTransform, score_tokens
from agentrl.workers.model import PolicyModel, ScoringParams, probe_head
from agentrl.workers.packing import pack_rows
from agentrl.workers.scoring import score_rows
from tests.fakes.engines import VOCAB_SIZE, tiny_model
from tests.fakes.training import (
    Layout,
    make_actor,
    make_batch,
    make_policy,
    plain_scores,
    random_rows,
)

HIDDEN = 32


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that is made, the head's weight and its like aside."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.weight = vocab_size * HIDDEN
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() != self.weight:
                self.numel = max(self.numel, tensor.numel())
        return out


class MostBytes(TorchDispatchMode):
    """Notes how many bytes of new tensors live at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.known:
            return
        self.known.add(place)
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self.drop, place, size)

    def drop(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.held -= size


@pytest.mark.parametrize(
    "transform", [HeadTransform(), HeadTransform(0.5, None), HeadTransform(2.0, 3.0)]
)
@pytest.mark.parametrize("cells", [1, 6, 10, 30])
def test_gradients_are_those_of_finite_differences(transform: HeadTransform, cells: int):
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 2, 1])

    def scores(*tensors: torch.Tensor):
        return score_tokens(
            *tensors, targets, temperature=0.7, transform=transform, block_bytes=8 * cells
        )[:2]  # fmt: skip

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


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(200, 8001), (400, 8001), (200, 16001)])
@pytest.mark.parametrize("tied", [True, False])
def test_memory_does_not_grow_with_batch_times_vocabulary(
    world: World, tied: bool, num_rows: int, vocab_size: int
):
    policy = make_policy(world, vocab_size=vocab_size, tie_word_embeddings=tied)
    actor = make_actor(policy, logits_block_bytes=None, ppo_max_token_len_per_gpu=16384)
    batch = make_batch(random_rows(num_rows))
    two_blocks = 2 * CPU_BLOCK_BYTES // 4
    assert int(batch.batch["response_mask"].sum()) * vocab_size > 2 * two_blocks
    with LargestTensor(vocab_size) as largest:
        batch.batch["old_log_probs"] = actor.compute_log_probs(batch, temperature=0.7).log_probs
        actor.update_policy(batch, temperature=0.7)
    assert 0.99 * two_blocks < largest.numel <= two_blocks


@pytest.mark.parametrize(
    ("cells", "block"), [(300, 17 * 17), (3000, 50 * 60), (10**6, 50 * 96)],
    ids=["square", "all rows", "everything"],
)  # fmt: skip
def test_no_more_than_two_blocks_of_logits_exist(cells: int, block: int):
    hidden, weight = torch.randn(50, 2), torch.randn(96, 2)
    with LargestTensor(96) as largest:
        score_tokens(
            hidden, weight, None, torch.zeros(50, dtype=torch.int64),
            temperature=1.0, transform=HeadTransform(), block_bytes=4 * cells,
        )  # fmt: skip
    assert largest.numel == 2 * block


@pytest.mark.parametrize(
    ("cap", "dtype", "blocks"),
    [
        (None, torch.float32, 2), (None, torch.bfloat16, 2.5),
        (3.0, torch.float32, 3), (3.0, torch.bfloat16, 3.5),
    ],
)  # fmt: skip
def test_backward_pass_holds_as_many_blocks_as_it_says(
    cap: float | None, dtype: torch.dtype, blocks: float
):
    num_rows, block_bytes = 256, 4 * 2**16
    hidden = torch.randn(num_rows, 2, dtype=dtype, requires_grad=True)
    weight = torch.randn(1024, 2, dtype=dtype, requires_grad=True)
    scores = score_tokens(
        hidden, weight, None, torch.zeros(num_rows, dtype=torch.int64),
        temperature=1.0, transform=HeadTransform(1.0, cap), block_bytes=block_bytes,
    )  # fmt: skip
    loss = scores.log_probs.sum() + scores.entropy.sum()
    with MostBytes() as held:
        loss.backward()
    assert held.most / block_bytes == pytest.approx(blocks, abs=0.2)


@pytest.mark.parametrize("transform", [HeadTransform(), HeadTransform(0.5, 3.0)])
def test_gradients_in_bfloat16_are_those_of_plain_autograd(transform: HeadTransform):
    torch.manual_seed(0)
    targets = torch.randint(0, 50, (20,))
    values = [torch.randn(20, 8), torch.randn(50, 8) / 3, torch.randn(50) / 3]
    ours, plain = ([v.bfloat16().requires_grad_() for v in values] for _ in range(2))
    found = score_tokens(
        *ours, targets, temperature=0.7, transform=transform, block_bytes=4 * 36
    )  # fmt: skip
    logits = torch.nn.functional.linear(*plain).float() * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    log_p = torch.log_softmax(logits / 0.7, dim=-1)
    log_probs, entropy = log_p.gather(1, targets[:, None]), -(log_p.exp() * log_p).sum(dim=-1)
    assert torch.allclose(found.log_probs, log_probs.squeeze(1), atol=0.03)
    (found.log_probs.sum() + found.entropy.sum()).backward()
    (log_probs.sum() + entropy.sum()).backward()
    for one, other in zip(ours, plain, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == torch.bfloat16
        assert (one.grad - other.grad).float().norm() < 0.02 * other.grad.float().norm()


def test_head_runs_on_trained_positions_alone(world: World):
    policy = make_policy(world, vocab_size=1000)
    packed = pack_rows(read_padded_rows(make_batch(random_rows(12))), [0, 1], world.device)
    with LargestTensor(1000) as largest:
        policy(packed, ScoringParams(temperature=1.0))
    assert largest.numel == 2 * len(packed.targets) * 1000
    assert len(packed.targets) < packed.input_ids.shape[1]


def small(config_class: type, **extra: object):
    return config_class(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **extra,
    )  # fmt: skip


def test_scale_and_cap_after_the_head_are_the_models_own(world: World):
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

    with pytest.raises(ConfigError, match="transforms its logits"):
        probe_head(model)


@pytest.mark.parametrize("transform", [HeadTransform(), HeadTransform(0.5, 3.0)])
@pytest.mark.parametrize("cells", [1, 6, 36, 10**4])
def test_squared_probabilities_sum_to_those_of_a_plain_softmax(
    transform: HeadTransform, cells: int
):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(20, 8) * 3, torch.randn(50, 8), torch.randn(50)
    targets = torch.randint(0, 50, (20,))
    found = score_tokens(
        hidden, weight, bias, targets, temperature=0.7, transform=transform,
        block_bytes=4 * cells, with_sum_pi_squared=True,
    )  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias).double() * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    expected = torch.softmax(logits / 0.7, dim=-1).square().sum(-1)
    assert torch.allclose(found.sum_pi_squared.double(), expected, rtol=1e-5)


def test_squared_probabilities_are_on_trained_tokens_and_only_on_request(world: World):
    policy, plain = make_policy(world), tiny_model(initializer_range=0.1)
    actor, rows = make_actor(policy, Layout(budget=20)), random_rows(9)
    batch = make_batch(rows, Layout(pad_left=2, pad_right=3))
    found = actor.compute_log_probs(batch, temperature=0.7, with_sum_pi_squared=True)
    for place, row in enumerate(rows):
        ids = torch.tensor([row.prompt + row.response])
        logits = plain(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1] / 0.7
        expected = logits.float().softmax(-1).square().sum(-1) * torch.tensor(row.mask)
        assert torch.allclose(found.sum_pi_squared[place, : len(row.mask)], expected, atol=1e-6)
        assert not found.sum_pi_squared[place, len(row.mask) :].any()
    unasked = actor.compute_log_probs(batch, temperature=0.7)
    assert unasked.sum_pi_squared is None
    assert torch.equal(unasked.log_probs, found.log_probs)
    assert torch.equal(unasked.entropy, found.entropy)


def test_squared_probabilities_change_no_gradient():
    torch.manual_seed(0)
    values = torch.randn(5, 4), torch.randn(6, 4)
    gradients = []
    for asked in (False, True):
        hidden, weight = (value.clone().requires_grad_() for value in values)
        scores = score_tokens(
            hidden, weight, None, torch.tensor([0, 5, 2, 2, 1]), temperature=0.7,
            transform=HeadTransform(), block_bytes=48, with_sum_pi_squared=asked,
        )  # fmt: skip
        (scores.log_probs.sum() + scores.entropy.sum()).backward()
        gradients.append((hidden.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
