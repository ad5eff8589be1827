"""`agentrl audit --resample`: compute log-probabilities of sampled turns again, and compare.

The turns' weights are those of checkpoints, or of the model that the run began with. They compute
the log-probabilities of the saved tokens after the saved context. No token is sampled again: an
engine that serves other calls, or another device, rounds differently, so the same seed may give
another token, and that would prove nothing.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from agentrl.commands.audit.saved_run import SavedRun
from agentrl.config import RunConfig
from agentrl.errors import DataError
from agentrl.media.loading import load_media
from agentrl.media.positions import Run, place_runs
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import MediaKind, MediaSpan
from agentrl.remote_io import Location
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.workers.checkpoint import open_checkpoint
from agentrl.workers.distributed import start_world
from agentrl.workers.load import load_policy
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.packing import PaddedRows
from agentrl.workers.scoring import score_rows
from agentrl.workers.snapshot import weight_slices
from agentrl.workers.tokenizer import load_processor, load_tokenizer
from agentrl.workers.weight_files import digest_weights, sum_placed_bits


class Limits(NamedTuple):
    """Largest differences of log-probabilities that rounding may cause, in nats."""

    token: float
    """Of one token."""
    mean: float
    """Mean over the tokens of the same weights. It finds weights of an earlier step: these change
    many tokens a little, and one token less than rounding in bfloat16 may."""

    def raised_to(self, metrics: Mapping[str, float]) -> "Limits":
        """Allow twice the difference of engine and trainer that the run itself logged in a step."""
        return Limits(
            max(self.token, 2 * metrics.get("training/rollout_log_probs_diff_max", 0.0)),
            max(self.mean, 2 * metrics.get("training/rollout_log_probs_diff_mean", 0.0)),
        )


LIMITS = {torch.float32: Limits(1e-3, 1e-4), torch.bfloat16: Limits(0.25, 0.01)}
"""By the dtype of the policy's layers. docs/runs.md has the measurements."""


@dataclass(frozen=True)
class SampledTokens:
    """Consecutive tokens of a turn that the same weights sampled."""

    file: Path
    request: AsyncRolloutRequest
    sequence: AsyncRolloutRequest
    """The sequence of the request that has them."""
    turn: int
    version: int
    start: int
    """Index in the response."""
    end: int


@dataclass
class TurnChoice:
    """Chooses turns at random, each with the same chance, of steps that are offered in order."""

    num: int
    versions: Mapping[int, Location | None]
    """Versions whose weights exist, and their checkpoints; None: the model before training."""
    random: random.Random
    chosen: list[SampledTokens] = field(default_factory=list[SampledTokens])
    left_out: Counter[int] = field(default_factory=Counter[int])
    """Number of turns of each version whose weights do not exist."""
    _num_seen: int = 0

    def offer(self, file: Path, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Offer the training samples of a step."""
        for request in requests:
            for one in _find_tokens(file, request):
                if one.version not in self.versions:
                    self.left_out[one.version] += 1
                    continue
                self._num_seen += 1
                if len(self.chosen) < self.num:
                    self.chosen.append(one)
                elif (index := self.random.randrange(self._num_seen)) < self.num:
                    self.chosen[index] = one


def _find_tokens(file: Path, request: AsyncRolloutRequest) -> Iterator[SampledTokens]:
    """Find the trained tokens of a request."""
    for sequence in request.sequences:
        for turn in sequence.turns:
            for version, first, last in turn.weight_versions:
                start, end = turn.start + first, turn.start + last
                if any(sequence.loss_mask[start:end]):
                    yield SampledTokens(file, request, sequence, turn.index, version, start, end)


@dataclass
class Resampled:
    """The result of comparing."""

    num_tokens: int = 0
    largest: float = 0.0
    """Largest difference that was found, in nats."""
    largest_mean: float = 0.0
    """Largest mean of the tokens of the same weights, in nats."""
    differences: list[DataError] = field(default_factory=list[DataError])


def resample(run: SavedRun, choice: TurnChoice, digests: Mapping[int, str]) -> Resampled:
    """Compute the log-probabilities of the chosen turns with their weights, and compare them.

    Args:
        run: The run.
        choice: The turns.
        digests: Of the run's weights, by version, as far as they were recorded.

    Raises:
        AgentRLError: If the model or a checkpoint cannot be loaded.
        DataError: If an image of a turn is missing.
    """
    config = run.config
    world = start_world(config.trainer.device, timeout_s=config.trainer.collective_timeout_s)
    fsdp, seed = config.actor.fsdp_config, config.trainer.seed
    kwargs = config.data.mm_processor_kwargs
    processor = load_processor(config.model, load_tokenizer(config.model), kwargs=kwargs)
    policy = load_policy(config.model, world, fsdp, seed=seed, processor=processor)
    result, limits = Resampled(), LIMITS.get(policy.compute_dtype, LIMITS[torch.bfloat16])
    for version in sorted({one.version for one in choice.chosen}):
        chosen = [one for one in choice.chosen if one.version == version]
        with policy.on_device():
            _load_weights(policy, choice.versions[version])
            found = digest_weights(policy.trained_weights(), world, sum_placed_bits)
            if found != digests.get(version, found):
                result.differences.append(
                    DataError(
                        f"the weights of version {version} are not those that the run had",
                        file=choice.versions[version] or config.model.path,
                        saved=digests[version],
                        found=found,
                    )
                )
                continue
            raised = limits.raised_to(run.logged.get(version + 1, {}))
            compute = partial(_compute_log_probs, policy, processor, config)
            _compare_all(result, chosen, compute, raised)
    return result


def _load_weights(policy: PolicyModel, path: Location | None) -> None:
    """Load a checkpoint's weights; None: the policy has those of the start."""
    if path is not None:
        checkpoint = open_checkpoint(path)
        with torch.no_grad():
            checkpoint.read(weight_slices(policy))


def _read_media(
    tokens: SampledTokens, processor: MediaProcessor | None
) -> tuple[MediaSpan, ...] | None:
    """Process the saved images and videos of a turn's context again; None: the model reads none."""
    request, runs = tokens.sequence, list[Run]()
    last = request.num_prompt_tokens + tokens.end
    for run in request.media_runs:
        shown = request.multi_modal_data.get(run.kind, [])
        data = None if run.index is None else shown[run.index]
        if processor is None or data is None or isinstance(data, dict):
            raise DataError(
                f"the {run.kind} that a turn was sampled after cannot be read",
                file=tokens.file,
                request=request.request_id,
                expected="the folder media next to the file, and model.path with its processor",
            )
        if run.start < last:
            item = processor.process(load_media(MediaKind(run.kind), data))
            runs.append((run.start, run.end, item, run.offset))
    return None if processor is None else tuple(place_runs([], runs))


@torch.no_grad()
def _compute_log_probs(
    policy: PolicyModel,
    processor: MediaProcessor | None,
    config: RunConfig,
    tokens: SampledTokens,
) -> np.ndarray:
    """Compute the log-probabilities of the tokens after the saved tokens before them."""
    request, media = tokens.sequence, _read_media(tokens, processor)
    ids = [*request.prompt_ids, *request.response_ids[: tokens.end]]
    mask = torch.zeros((1, tokens.end), dtype=torch.int64)
    mask[0, tokens.start :] = 1
    input_ids = torch.tensor([ids])
    rows = PaddedRows(
        input_ids, torch.ones_like(input_ids), mask, None if media is None else (media,)
    )
    params = ScoringParams(temperature=request.sampling.temperature)
    budget = config.actor.ppo_max_token_len_per_gpu
    scores = score_rows(policy, rows, params, budget=budget)
    return scores.log_probs[0, tokens.start :].float().numpy()


def _compare_all(
    result: Resampled,
    chosen: Sequence[SampledTokens],
    compute: Callable[[SampledTokens], np.ndarray],
    limits: Limits,
) -> None:
    """Compare tokens of the same weights: each, and if none differs their mean."""
    num = len(result.differences)
    apart = [_compare(result, one, compute(one), limits) for one in chosen]
    mean = float(np.concatenate(apart).mean())
    result.largest_mean = max(result.largest_mean, mean)
    if mean > limits.mean and len(result.differences) == num:
        result.differences.append(
            DataError(
                "the weights give tokens other log-probabilities than those at sampling, on "
                "average",
                version=chosen[0].version,
                found=f"{mean:.2g} nats apart",
                expected=f"at most {limits.mean:.2g}",
            )
        )


def _compare(
    result: Resampled, tokens: SampledTokens, found: np.ndarray, limits: Limits
) -> np.ndarray:
    """Return how far the saved log-probability of each token is from the one that was found."""
    request = tokens.sequence
    saved = np.asarray(request.rollout_log_probs[tokens.start : tokens.end], np.float32)
    apart = np.abs(saved - found)
    result.num_tokens += len(apart)
    result.largest = max(result.largest, float(apart.max()))
    wrong = np.flatnonzero(~(apart <= limits.token))  # also what is not a number
    if len(wrong):
        at = int(wrong[0])
        result.differences.append(
            DataError(
                "the weights give a token another log-probability than the one at sampling",
                file=tokens.file, request=request.request_id, turn=tokens.turn,
                token=tokens.start + at, version=tokens.version, saved=float(saved[at]),
                expected=f"{found[at]} within {limits.token:.2g}",
            )
        )  # fmt: skip
    return apart
