"""The reward model: scores finished conversations between the rollout and the update.

    render       conversations          -> token ids of the reward model (`rewards/rendering.py`)
    share        token ids of all ranks -> each distinct conversation once
    score        token ids              -> scores: on the training devices, or by SGLang
    set          scores                 -> `rm_score` of each request; a bad score fails its request

Equal conversations get the same score, to the last bit: they are scored once, over all ranks (equal
rewards train nothing). The score of a conversation does not depend on those that are computed with
it, nor on the number of ranks, beyond floating-point tolerance (layout is invisible).
"""

import math
from collections.abc import Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from agentrl.clients.classify import ClassifyClient
from agentrl.config.schema.reward import RewardModelConfig
from agentrl.config.schema.run import ModelConfig
from agentrl.engines.model_config import find_length_border, read_attribute
from agentrl.engines.vision import has_vision
from agentrl.errors import AgentRLError, ConfigError, Fault, RewardError, ServiceError
from agentrl.messages import Message
from agentrl.rewards.rendering import (
    NUM_CUT_TOKENS,
    NUM_TOKENS,
    ConversationEncoder,
    ScoredTokens,
)
from agentrl.rewards.scoring import check_number
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from agentrl.rollout.templates import ChatTemplate
from agentrl.workers.batches import CPU_MICRO_BATCH_TOKENS, DEVICE_MICRO_BATCH_TOKENS
from agentrl.workers.distributed import World
from agentrl.workers.load import load_hf_config, resolve_dtype
from agentrl.workers.memory import explain_out_of_memory_in_scores
from agentrl.workers.model import make_mesh
from agentrl.workers.offload import OffloadedMemory
from agentrl.workers.row_exchange import plan_exchange
from agentrl.workers.shards import local_tensor
from agentrl.workers.tokenizer import check_tokenizer, load_tokenizer
from agentrl.workers.weight_files import WeightFiles, allocate, init_buffers

T = TypeVar("T")

EXAMPLE = [Message(role="user", content="Hi"), Message(role="assistant", content="Hello.")]
"""The conversation that is scored before the first step."""
_MAX_DIFFERENCE = 0.05
"""Relative difference of two servers' scores that rounding in bfloat16 explains."""


class Run(Protocol):
    """Runs a coroutine to its end."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T:
        """Return what the coroutine returns."""
        ...


class Classifier(Protocol):
    """Scores rows of token ids."""

    def score(self, rows: Sequence[list[int]], run: Run) -> list[float | Exception]:
        """Score this rank's rows. A collective; an exception for a row that has no score."""
        ...

    def check(self, row: list[int], run: Run) -> None:
        """Score one row, to find out before the first step if that fails. A collective.

        Raises:
            ConfigError: if there is no finite score.
        """
        ...


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Scores the finished requests of a step."""

    encoder: ConversationEncoder
    classifier: Classifier
    world: World

    def score(self, requests: Sequence[AsyncRolloutRequest], run: Run) -> None:
        """Set `rm_score` of each completed request, in place. A collective.

        A request whose conversation cannot be rendered or scored fails, with `Fault.REWARD`; no
        other one is affected. Requests that failed before get no score.

        Args:
            requests: This rank's.
            run: Runs coroutines; used if the scores come from servers.
        """
        completed = [one for one in requests if one.state is RequestState.COMPLETED]
        encoded = dict(zip(map(id, completed), self.encoder.encode(completed), strict=True))
        tokens = [one.ids for one in encoded.values() if isinstance(one, ScoredTokens)]
        rows = {_digest(ids): ids for ids in tokens}
        scores = self._score_each_once(rows, run)
        for request in completed:
            found = encoded[id(request)]
            if isinstance(found, ScoredTokens):
                request.metrics[NUM_TOKENS] = float(len(found.ids))
                request.metrics[NUM_CUT_TOKENS] = float(found.num_cut)
                _set_score(request, scores[_digest(found.ids)])
            else:
                _fail(request, found)

    def check(self, run: Run) -> None:
        """Score a short conversation, to find out before the first step if that fails.

        Raises:
            ConfigError: if there is no finite score.
        """
        [found] = self.encoder.encode([AsyncRolloutRequest(messages=EXAMPLE)])
        if not isinstance(found, ScoredTokens):
            raise _no_score(found.args[0]) from found
        # Each rank has its own way to the servers.
        with self.world.raise_on_all_ranks():
            self.classifier.check(found.ids, run)

    def _score_each_once(
        self, rows: dict[bytes, list[int]], run: Run
    ) -> dict[bytes, float | Exception]:
        """Score distinct rows; a row that several ranks have is computed by the first of them."""
        owners: dict[bytes, int] = {}
        for rank, digests in enumerate(self.world.gather(list(rows))):
            for digest in digests:
                owners.setdefault(digest, rank)
        own = [digest for digest in rows if owners[digest] == self.world.rank]
        scores = self.classifier.score([rows[digest] for digest in own], run)
        return dict(self.world.gather_flat(zip(own, scores, strict=True)))


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=16).digest()


def _set_score(request: AsyncRolloutRequest, score: float | Exception) -> None:
    try:
        if isinstance(score, Exception):
            raise score
        request.rm_score = check_number(score, "the score of the reward model")
    except AgentRLError as error:
        _fail(request, error)


def _fail(request: AsyncRolloutRequest, error: Exception) -> None:
    if not isinstance(error, RewardError):
        error = RewardError(f"the reward model: {type(error).__name__}: {error.args[0]}")
    request.fail_scoring(describe_failure(error, Fault.REWARD, turn=len(request.turns)))


@dataclass(frozen=True, slots=True)
class ServedClassifier:
    """A reward model at SGLang's servers."""

    client: ClassifyClient

    def score(self, rows: Sequence[list[int]], run: Run) -> list[float | Exception]:
        """Score this rank's rows; the servers balance them."""
        return run(self.client.classify(rows))

    def check(self, row: list[int], run: Run) -> None:
        """Score a row at every server, and compare the scores."""
        try:
            scores = run(self.client.check(row))
        except ServiceError as error:
            raise _no_score(error.args[0]) from error
        low, high = min(scores.values()), max(scores.values())
        if not math.isfinite(low + high):
            raise _no_score(scores)
        if high - low > _MAX_DIFFERENCE * max(1.0, abs(high)):
            raise ConfigError(
                f"the servers of the reward model give one conversation different scores: {scores}",
                key="reward.model.addresses",
                expected="servers of the same weights; if the head has a bias that the model's "
                "files lack, each server draws its own (docs/rewards.md)",
            )


def _no_score(reason: object) -> ConfigError:
    return ConfigError(
        f"the reward model gives no score: {reason}",
        key="reward.model",
        expected="a finite number for each conversation",
    )


class LocalClassifier:
    """A sequence-classification model on the training devices.

    Args:
        lm: The model with its weights, sharded or whole.
        world: The ranks.
        budget: Tokens of one forward pass with padding; None: a default for the device.
        offload: Whether the weights are in host memory between uses.
    """

    def __init__(
        self, lm: PreTrainedModel, world: World, *, budget: int | None, offload: bool = False
    ) -> None:
        self.lm = lm.eval().requires_grad_(False)
        self._world = world
        on_cpu = world.device.type == "cpu"
        self._budget = budget or (CPU_MICRO_BATCH_TOKENS if on_cpu else DEVICE_MICRO_BATCH_TOKENS)
        self._offload: OffloadedMemory | None = None
        # A padding token of the model's own is not read as the end of a conversation.
        self._pad_token_id: int | None = getattr(lm.config, "pad_token_id", None)
        lm.config.use_cache = False
        if offload and not on_cpu:
            self._offload = OffloadedMemory(
                lambda: [local_tensor(weight.detach()) for weight in self.lm.parameters()]
            )
            with self._on_device():  # the first use ends here
                pass

    @torch.no_grad()
    def score(self, rows: Sequence[list[int]], run: Run) -> list[float | Exception]:
        """Score rows; the ranks exchange them to compute equal numbers of tokens. A collective."""
        lengths = [len(row) for row in rows]
        exchange = plan_exchange(self._world, lengths, range(len(rows)))
        width = int(self._world.max([max(lengths, default=1)])[0])
        table = torch.full((len(rows), width + 1), -1, dtype=torch.int64)
        for index, row in enumerate(rows):
            table[index, 0], table[index, 1 : len(row) + 1] = len(row), torch.tensor(row)
        computed = exchange.send(table)
        sizes = computed[:, 0].tolist()
        batches = split_by_length(sizes, self._budget)
        scores = torch.zeros(len(sizes), dtype=torch.float64)
        num_batches = int(self._world.max([len(batches)])[0])
        # Sharded weights are gathered together: a rank without a batch computes one token.
        batches += [[] for _ in range(num_batches - len(batches))]
        with self._on_device():
            for batch in batches:
                scores[batch] = self._compute(
                    [computed[row, 1 : sizes[row] + 1] for row in batch]
                ).double()
        return list(exchange.send_back(scores).tolist())

    def check(self, row: list[int], run: Run) -> None:
        """Score a row."""
        [score] = self.score([row], run)
        if isinstance(score, Exception) or not math.isfinite(score):
            raise _no_score(score)

    def _compute(self, rows: Sequence[Tensor]) -> Tensor:
        """Compute the scores of one padded batch, `[len(rows)]` float32 on the CPU."""
        padded = list(rows) or [torch.zeros(1, dtype=torch.int64)]
        pad = self._pad_token_id
        if pad is None:  # a token of the vocabulary that no row has
            used = {int(token) for row in padded for token in row}
            pad = next(token for token in range(len(used) + 1) if token not in used)
            self.lm.config.pad_token_id = pad
        ids = nn.utils.rnn.pad_sequence(padded, batch_first=True, padding_value=pad)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(padded):
            mask[index, : len(row)] = 1
        device = self._world.device
        with explain_out_of_memory_in_scores(ids.shape):
            logits = self.lm(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits[: len(rows), 0].float().cpu()

    @contextmanager
    def _on_device(self) -> Generator[None]:
        context: AbstractContextManager[None] = (
            nullcontext() if self._offload is None else self._offload.in_use()
        )
        with context:
            try:
                yield
            finally:
                for module in self.lm.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()


def split_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows of similar lengths into batches of at most `budget` tokens with padding.

    A longer row is alone.

    Example:
        >>> split_by_length([3, 9, 2, 8], 18)
        [[1, 3], [0, 2]]
    """
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return batches


# Loading.


def make_encoder(config: RewardModelConfig) -> ConversationEncoder:
    """Load the tokenizer and the template of a reward model.

    Raises:
        ConfigError: for a model or a tokenizer that cannot be used.
        TemplateError: for a template that cannot be used.
    """
    model = as_model_config(config)
    with _naming_reward():
        hf_config = load_hf_config(model)
        _check_is_reward_model(hf_config, config.path)
        tokenizer = load_tokenizer(model)
        check_tokenizer(tokenizer, hf_config)
        template = ChatTemplate(tokenizer, custom_template=config.custom_chat_template)
    allowed = read_attribute(hf_config, "max_position_embeddings", None)
    limits = (config.max_length, allowed, find_length_border(hf_config))
    limits = [limit for limit in limits if limit is not None]
    return ConversationEncoder(template, min(limits, default=None), config)


def make_classifier(config: RewardModelConfig, world: World) -> Classifier:
    """Load a reward model's weights, or connect to its servers. A collective.

    Raises:
        ConfigError: for a model that cannot be used.
    """
    if config.engine == "sglang":
        client = ClassifyClient(
            config.addresses,
            timeout_s=config.request_timeout_s,
            max_concurrency=config.max_concurrent_requests,
        )
        return ServedClassifier(client)
    with _naming_reward():
        lm = load_classifier(config, world)
    return LocalClassifier(
        lm, world, budget=config.max_token_len_per_gpu, offload=config.fsdp_config.param_offload
    )


def load_classifier(config: RewardModelConfig, world: World) -> PreTrainedModel:
    """Load a sequence-classification model with one label, sharded as configured. A collective.

    Each rank reads its slices of safetensors files. If transformers converts the weights, or the
    files have another format, every rank reads the whole model and keeps its shard.

    Raises:
        ConfigError: if there is no such model, or its weights are incomplete.
    """
    model = as_model_config(config)
    hf_config, dtype = load_hf_config(model), resolve_dtype(model, world.device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    try:
        with torch.device("meta"):
            lm: PreTrainedModel = AutoModelForSequenceClassification.from_config(
                hf_config, **options
            )
        if (files := WeightFiles.find(config.path, lm)) is None:
            lm = _load_whole(config.path, hf_config, options)
        else:
            init_buffers(lm, world.device)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"no reward model can be loaded from {config.path!r}: {error}",
            key="model.path",
            expected="a folder or hub name of a sequence-classification model with one label",
        ) from error
    _place(lm, config, world)
    if files is not None:
        with world.raise_on_all_ranks():
            on_host = config.fsdp_config.offload_policy
            allocate(lm, torch.device("cpu") if on_host else world.device)
            files.fill(lm)
    return lm


def _load_whole(path: str, hf_config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        path, config=hf_config, output_loading_info=True, **options
    )
    lm, info = loaded
    missing = sorted(map(str, [*info["missing_keys"], *info.get("mismatched_keys", ())]))
    if missing:
        raise ConfigError(
            f"{path!r} lacks weights, which would be random: {', '.join(missing[:5])}",
            key="model.path",
            expected="a complete sequence-classification model (its head is often named `score`)",
        )
    return cast("PreTrainedModel", lm)


def _place(lm: PreTrainedModel, config: RewardModelConfig, world: World) -> None:
    """Shard the weights over the ranks, or move a whole copy to the device."""
    fsdp = config.fsdp_config
    is_whole = world.is_alone or fsdp.fsdp_size == 1
    if is_whole and not fsdp.offload_policy:
        if lm.device.type != "meta":
            nn.Module.to(lm, world.device)
        return
    shared: dict[str, Any] = {"mesh": make_mesh(world, fsdp.fsdp_size)}
    if fsdp.offload_policy:
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    layer_types = set(lm._no_split_modules or [])
    for module in list(lm.modules()):
        if type(module).__name__ in layer_types:
            fully_shard(module, **shared)
    fully_shard(lm, **shared)


def _check_is_reward_model(hf_config: PretrainedConfig, path: str) -> None:
    if has_vision(hf_config):
        raise ConfigError(
            f"the model at {path} is a {hf_config.model_type}; reward models read text only",
            key="model.path",
            expected="a sequence-classification model of text",
        )
    if hf_config.num_labels != 1:
        raise ConfigError(
            f"the model at {path} has {hf_config.num_labels} labels, so it is no reward model",
            key="model.path",
            expected="a sequence-classification model with one label (num_labels: 1)",
        )


def as_model_config(config: RewardModelConfig) -> ModelConfig:
    """Return the settings with which a reward model's files are loaded."""
    return ModelConfig(
        path=config.path,
        tokenizer_path=config.tokenizer_path,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )


@contextmanager
def _naming_reward() -> Generator[None]:
    """Name keys of the section `model` in errors as those of `reward.model`."""
    try:
        yield
    except AgentRLError as error:
        for name in ("key", "expected"):
            if isinstance(text := error.details.get(name), str):
                for leaf in ("path", "tokenizer_path", "custom_chat_template"):
                    text = text.replace(f"model.{leaf}", f"reward.model.{leaf}")
                error.details[name] = text.replace("reward.reward.", "reward.")
        raise
