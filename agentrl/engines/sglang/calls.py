"""One engine call in SGLang's words: what it asks for, and what came back."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.engines.protocol import (
    Completion,
    EngineCall,
    FinishReason,
    SamplingParams,
    VersionSpan,
)
from agentrl.engines.sglang.backend import JsonFields, Sampler
from agentrl.engines.stopping import Decode, StopCheck
from agentrl.errors import EngineError

FIRST_VERSION = "default"
"""What SGLang calls the weights that it was started with, where nobody names them."""
NOTHING_SAMPLED: JsonFields = {
    "output_ids": [],
    "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []},
}
"""The answer to a call that is aborted before SGLang has begun it."""
_TINY_TOP_P = 1e-6


@dataclass(slots=True)
class Answer:
    """What one call has sampled so far, over one request to SGLang or several."""

    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    cached_tokens: int = 0

    def append(self, output: JsonFields) -> None:
        """Take what SGLang sampled.

        Raises:
            EngineError: for an answer that is not whole.
        """
        ids, meta = list(output["output_ids"]), output["meta_info"]
        sampled = [(log_prob, token_id) for log_prob, token_id, *_ in _log_probs(meta)]
        if [token_id for _, token_id in sampled] != ids:
            raise EngineError(
                f"SGLang returned {len(sampled)} log-probabilities of other tokens",
                expected=f"one for each of {len(ids)} sampled tokens",
            )
        if not self.token_ids:
            self.cached_tokens = meta.get("cached_tokens", 0)
        self.spans += _spans(meta, len(ids), offset=len(self.token_ids))
        self.token_ids += ids
        self.log_probs += [_finite(log_prob) for log_prob, _ in sampled]

    def completion(self, reason: FinishReason) -> Completion:
        """What the caller gets."""
        return Completion(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            weight_versions=tuple(_joined(self.spans)),
            cached_tokens=self.cached_tokens,
        )


async def complete(
    backend: Sampler, call: EngineCall, *, key: str, max_model_len: int, decode: Decode
) -> Completion:
    """Sample until something ends the call that the call asked for.

    SGLang also stops behind the end-of-sequence tokens that the model's own files name; where the
    call does not name them, it is asked to go on from there.

    Args:
        backend: Who samples.
        call: What is asked.
        key: Names the call inside SGLang; no other running call's name begins with it.
        max_model_len: Most tokens of a sequence, input and output together.
        decode: Token ids to text, for stop strings.

    Raises:
        EngineError: The input leaves no room for a token, or SGLang fails.
    """
    sampling, stop = call.sampling, StopCheck.of(call.sampling, decode)
    room = min(sampling.max_new_tokens, max_model_len - len(call.input_ids))
    if room < 1:
        raise EngineError(
            f"the input has {len(call.input_ids)} tokens, the engine's limit is {max_model_len}",
            request_id=call.request_id,
        )
    answer = Answer()
    while True:
        asked = replace(sampling, max_new_tokens=room - len(answer.token_ids))
        output = await backend.generate(
            generate_fields([*call.input_ids, *answer.token_ids], asked, key)
        )
        answer.append(output)
        reason = _reason(output, answer.token_ids, stop, room)
        if reason is not None:
            return answer.completion(reason)


def generate_fields(input_ids: Sequence[int], sampling: SamplingParams, key: str) -> dict[str, Any]:
    """Put a call into the fields of SGLang's `GenerateReqInput`."""
    return {
        "rid": key,
        "input_ids": list(input_ids),
        "sampling_params": sampling_fields(sampling),
        "return_logprob": True,
    }


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Put sampling parameters into SGLang's."""
    fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.top_k == 1 and sampling.temperature > 0:
        # SGLang scores `top_k = 1` as a greedy call, at temperature 1: this takes the same token.
        fields |= {"top_k": -1, "top_p": _TINY_TOP_P}
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    return fields


def _reason(
    output: JsonFields, token_ids: Sequence[int], stop: StopCheck, room: int
) -> FinishReason | None:
    """Why the call has ended; None: it has not, SGLang stopped by a rule of its own."""
    ended: JsonFields = output["meta_info"]["finish_reason"]
    if ended["type"] == "abort":
        if ended.get("status_code"):
            raise EngineError(f"SGLang ended the call: {ended.get('message')}")
        return FinishReason.ABORT
    if stop.is_met(token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) >= room else None


def _log_probs(meta: JsonFields) -> list[Sequence[Any]]:
    found = meta.get("output_token_logprobs")
    if found is None:
        raise EngineError("SGLang returned no log-probabilities", expected="return_logprob")
    return found


def _finite(log_prob: float | None) -> float:
    if log_prob is None or not math.isfinite(log_prob):
        raise EngineError(
            f"SGLang sampled a token of log-probability {log_prob}: its weights have diverged"
        )
    return log_prob


def _spans(meta: JsonFields, num_tokens: int, *, offset: int) -> list[VersionSpan]:
    """Which weights sampled which token, behind what was sampled before."""
    whole = {"version": meta.get("weight_version", FIRST_VERSION), "start": 0, "end": num_tokens}
    return [
        VersionSpan(_version(span["version"]), offset + span["start"], offset + span["end"])
        for span in meta.get("weight_versions") or [whole]
        if span["start"] < span["end"]
    ]


def _version(name: str) -> int:
    if name == FIRST_VERSION:
        return 0
    try:
        return int(name)
    except ValueError:
        raise EngineError(
            f"SGLang serves weights of version {name!r}", expected="a policy version"
        ) from None


def _joined(spans: Iterable[VersionSpan]) -> Iterable[VersionSpan]:
    """Join spans of the same weights that follow each other."""
    last: VersionSpan | None = None
    for span in spans:
        if last is not None and last.version == span.version:
            last = VersionSpan(last.version, last.start, span.end)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
