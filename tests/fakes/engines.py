"""Small models, a tokenizer, a plain scorer and a plain kernel for the tests of engines."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.engines.protocol import Completion

VOCAB_SIZE = 96


def tiny_model(*, seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    """A Qwen2 of two layers with random weights, large enough that its choices are distinct."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "eos_token_id": 5,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(sizes | overrides)))


def random_ids(length: int, *, seed: int) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.no_grad()
def plain_logits(model: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] from which each of `ids` was taken: one forward pass, no cache."""
    device = next(model.parameters()).device
    tokens = torch.tensor([[*prompt, *ids]], device=device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().cpu()


def plain_log_probs(
    model: torch.nn.Module, prompt: Sequence[int], completion: Completion, temperature: float
) -> torch.Tensor:
    """Log-probabilities [n] that a completion should carry; `temperature` 0 is scored at 1."""
    logits = plain_logits(model, prompt, completion.token_ids) / (temperature or 1.0)
    chosen = torch.tensor(completion.token_ids)[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0]


def read_pages(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None, max_q: int, max_k: int, *, scale: float | None,
    window_size: tuple[int, int], enable_gqa: bool, seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Do in a plain loop what the documentation of `varlen_attn` says."""
    assert window_size == (-1, 0)
    assert {x.dtype for x in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    parts: list[torch.Tensor] = []
    for i, length in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[i : i + 2].tolist()
        assert last - first <= max_q
        assert length <= max_k
        k, v = (x[block_table[i]].flatten(0, 1)[:length].transpose(0, 1) for x in (key, value))
        mask = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
        own = scaled_dot_product_attention(
            query[first:last].transpose(0, 1)[None], k[None], v[None], attn_mask=mask,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        parts.append(own[0].transpose(0, 1))
    return torch.cat(parts)


class LetterTokenizer:
    """Token id n is one printable character; enough to decode for stop strings."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """One character an id."""
        return "".join(chr(32 + i) for i in ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """One id a character."""
        return [ord(character) - 32 for character in text]
