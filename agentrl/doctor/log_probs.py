"""Compare the engine's log-probabilities with the trainer's, token by token.

Shape key: B samples, P longest prompt, T longest response.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.utils.rnn import pad_sequence

from agentrl.config.schema.run import RunConfig
from agentrl.doctor.report import Checked, SkipCheckError
from agentrl.engines import Completion
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.setup.engine_factory import choose_engine
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.packing import PaddedRows
from agentrl.workers.scoring import score_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sequence with the engine's log-probabilities of its sampled tokens."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]
    """1 on sampled tokens of the response."""
    log_probs: Sequence[float]
    """The engine's, one for each token of the response."""

    @classmethod
    def of_request(cls, request: AsyncRolloutRequest) -> Self:
        """Make a sample of a whole conversation."""
        return cls(
            prompt_ids=request.prompt_ids,
            response_ids=request.response_ids,
            mask=request.loss_mask,
            log_probs=request.rollout_log_probs,
        )

    @classmethod
    def of_completion(cls, prompt_ids: Sequence[int], completion: Completion) -> Self:
        """Make a sample of one engine call."""
        return cls(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            mask=[1] * len(completion.token_ids),
            log_probs=completion.log_probs,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Absolute difference of two log-probabilities of the same tokens, in nats."""

    mean: float
    largest: float
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens: mean {self.mean:.1e}, largest {self.largest:.1e} nats"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Accepted differences between engine and trainer, in nats."""

    doubtful: float
    """Mean difference above which the row warns."""
    wrong: float
    """Mean difference above which the engine samples from another distribution."""


TOLERANCES = {
    torch.float32: Tolerance(doubtful=1e-4, wrong=1e-2),
    torch.bfloat16: Tolerance(doubtful=3e-2, wrong=1.5e-1),
}
"""By the trainer's dtype. In float32 the two differ only by rounding, about 1e-6; in bfloat16 each
kernel rounds differently, about 1e-2."""


def check_log_probs(
    config: RunConfig, policy: PolicyModel, requests: Sequence[AsyncRolloutRequest]
) -> Checked[Difference]:
    """Compare the engine's log-probabilities of whole conversations with the trainer's.

    Raises:
        SkipCheckError: for an engine without log-probabilities of its own.
    """
    skip_scripted(config)
    samples = [Sample.of_request(request) for request in requests]
    return judge(config, policy, compare(config, policy, samples))


def skip_scripted(config: RunConfig) -> None:
    """Skip a check that has no meaning for scripted answers.

    Raises:
        SkipCheckError: for a scripted engine.
    """
    if choose_engine(config) == "scripted":
        raise SkipCheckError("the scripted engine has no log-probabilities")


def compare(config: RunConfig, policy: PolicyModel, samples: Sequence[Sample]) -> Difference:
    """Score samples with the policy, and compare the engine's log-probabilities.

    Raises:
        SkipCheckError: if nothing was sampled.
    """
    rows, theirs = lay_out([sample for sample in samples if any(sample.mask)])
    scores = score_rows(
        policy,
        rows,
        ScoringParams(
            temperature=config.rollout.temperature,
            logits_block_bytes=config.actor.logits_block_bytes,
        ),
        budget=config.actor.ppo_max_token_len_per_gpu,
    )
    apart = (scores.log_probs - theirs).abs()[rows.response_mask.bool()]
    return Difference(apart.mean().item(), apart.max().item(), len(apart))


def lay_out(samples: Sequence[Sample]) -> tuple[PaddedRows, torch.Tensor]:
    """Pad samples to `[B, P + T]`, and the engine's log-probabilities to `[B, T]`.

    Raises:
        SkipCheckError: if there are no samples.
    """
    if not samples:
        raise SkipCheckError("because no token was sampled")

    def pad(rows: list[Sequence[float]], side: str, dtype: torch.dtype) -> torch.Tensor:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_side=side)

    def join(parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> torch.Tensor:
        prompts = pad([prompt for prompt, _ in parts], "left", torch.int64)
        responses = pad([response for _, response in parts], "right", torch.int64)
        return torch.cat([prompts, responses], dim=-1)

    ids = [(sample.prompt_ids, sample.response_ids) for sample in samples]
    rows = PaddedRows(
        input_ids=join(ids),
        attention_mask=join([([1] * len(p), [1] * len(r)) for p, r in ids]),
        response_mask=pad([sample.mask for sample in samples], "right", torch.int64),
    )
    return rows, pad([sample.log_probs for sample in samples], "right", torch.float32)


def judge(config: RunConfig, policy: PolicyModel, apart: Difference) -> Checked[Difference]:
    """Judge a difference by the tolerance of the trainer's dtype."""
    tolerance = TOLERANCES[policy.compute_dtype]
    found = f"{apart} (in {policy.compute_dtype}: up to {tolerance.doubtful:g} is rounding)"
    if apart.mean <= tolerance.doubtful:
        return Checked(apart, found)
    causes = "usual causes: " + "; ".join(usual_causes(config, policy))
    if apart.mean <= tolerance.wrong:
        return Checked(apart, found, doubts=(causes,))
    what = "the engine samples from another distribution than the trainer trains; "
    return Checked(apart, found, faults=(what + causes,))


def usual_causes(config: RunConfig, policy: PolicyModel) -> Iterator[str]:
    """List the usual causes of a difference, with the settings of this run."""
    rollout, given = config.rollout, config.rollout.engine.sglang.server_arguments
    dtype = given.get("dtype", "the same, unless its server was started with another")
    yield f"dtype (the trainer computes in {policy.compute_dtype}, the engine in: {dtype})"
    for name in ("quantization", "kv_cache_dtype"):
        if name in given:
            yield f"rollout.engine.sglang.{name}={given[name]}"
    backend = given.get("attention_backend", "by device")
    yield f"another attention kernel (rollout.engine.sglang.attention_backend: {backend})"
    yield "stale weights: the engine was started from another checkpoint, or missed a sync"
    yield f"a tokenizer, chat template or model other than that of {config.model.path}"
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.temperature != 1:
        yield (
            "log-probabilities after temperature, top-p or top-k were applied (rollout.temperature="
            f"{rollout.temperature:g}, top_p={rollout.top_p:g}, top_k={rollout.top_k})"
        )
