"""Every key of a run file: its type, its default, and what it means.

Leaf names are the field's. Models refuse unknown keys and are frozen: what was checked stays true.
Checks across keys live in `agentrl.config.checks`; reading files in `agentrl.config.load`.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EngineName = Literal["auto", "transformers", "scripted"]
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]  # fmt: skip
Seed = int


class Section(BaseModel):
    """A section of the run file: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CustomClassConfig(Section):
    """Where a class of the user's own stands."""

    path: str
    """`package.module` or `path/to/file.py`."""
    name: str
    """The class in it."""


class DataConfig(Section):
    """Which rows, in which order, how long."""

    train_files: list[Path] = Field(default_factory=list[Path])
    """Parquet, JSON or JSONL files."""
    val_files: dict[str, Path] = Field(default_factory=dict[str, Path])
    """Validation sets by name; the first is the one that `best` checkpoints look at. A list or a
    single path is read as well (named by file stem)."""
    train_batch_size: int = Field(default=256, ge=1)
    """Prompts (groups) of one training step, over all ranks."""
    val_batch_size: int | None = Field(default=None, ge=1)
    """Prompts validated at once; null: all of them."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Tokens of the rendered prompt, at most."""
    max_response_length: int = Field(default=4096, ge=1)
    """Tokens of the whole response: sampled and observed, over all turns."""
    filter_overlong_prompts: bool = True
    """Drop rows whose prompt is longer (the number dropped is told)."""
    filter_num_workers: int | None = Field(default=None, ge=1)
    """Processes of the length filter; null: one for each core."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with an overlong prompt that was not filtered: the side that is cut away."""
    prompt_key: str = "prompt"
    """Column of the messages."""
    reward_fn_key: str = "data_source"
    """Column by which the scorer chooses its rule."""
    shuffle: bool = True
    """Shuffle the rows anew for each epoch (a function of seed and epoch)."""
    seed: Seed = 0
    """Seed of the data's order."""
    train_max_samples: int | None = Field(default=None, ge=1)
    """Use only so many training rows."""
    val_max_samples: int | None = Field(default=None, ge=1)
    """Use only so many rows of each validation set."""
    custom_cls: CustomClassConfig | None = None
    """A dataset class of the user's own: `(files, config, *, max_samples) -> Sequence[dict]`."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Extra variables of the chat template, such as `enable_thinking`."""
    cache_dir: Path | None = None
    """Where measured prompt lengths are cached; null: `~/.cache/agentrl`."""


class ModelConfig(Section):
    """The policy."""

    path: str
    """A Hugging Face folder (or hub name)."""
    tokenizer_path: str | None = None
    """The tokenizer, where it is not beside the model."""
    custom_chat_template: str | None = None
    """A template's text, or a path to a `.jinja` file; replaces the tokenizer's own."""
    on_rewritten_history: Literal["error", "keep"] = "error"
    """What to do with a template that rewrites older turns: refuse to start, or go on with the
    tokens as they were sampled."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; the master weights stay in float32. auto: bfloat16 on an accelerator, float32
    on a CPU."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    override_config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keys of the Hugging Face configuration to replace."""


class TransformersEngineConfig(Section):
    """The embedded engine: continuous batching on the trainer's own weights."""

    page_size: int | None = Field(default=None, ge=1)
    """Tokens of one cache page; null: by device."""
    num_pages: int | None = Field(default=None, ge=1)
    """Pages of the cache; null: what the configured budgets need, or what memory allows."""
    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass at most; null: by device."""


class ScriptedEngineConfig(Section):
    """An engine that reads its answers from a list, to debug tools without a model."""

    answers: list[str] = Field(default_factory=list[str])
    """The answers of each request's turns, in order; the last is repeated."""


class EngineConfig(Section):
    """Who generates."""

    name: EngineName = "auto"
    """auto: the best engine that is installed and has its hardware; the choice is printed."""
    transformers: TransformersEngineConfig = TransformersEngineConfig()
    scripted: ScriptedEngineConfig = ScriptedEngineConfig()


class MultiTurnConfig(Section):
    """Tools, simulated users and the budgets of a conversation."""

    tool_config_path: Path | None = None
    """YAML of tools."""
    function_tool_path: str | None = None
    """Python file or module with `@function_tool` functions."""
    interaction_config_path: Path | None = None
    """YAML of interactions."""
    format: str | None = None
    """Tool-call format; null: the one that fits the chat template (its probe says which)."""
    on_malformed_call: Literal["observe", "stop", "mask"] = "observe"
    """A malformed call: its error goes back to the model; or the request ends; or it goes back
    and that turn is left out of the loss."""
    max_assistant_turns: int | None = Field(default=None, ge=1)
    """Completions of the policy; null: no limit of its own."""
    max_user_turns: int | None = Field(default=None, ge=0)
    """Replies of the interaction; null: no limit of its own."""
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Calls of all tools together; null: no limit of its own."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Calls of one turn that run at once; the others queue."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """Sampled tokens of one turn; null: what is left of the response."""
    max_tool_response_length: int = Field(default=1024, ge=1)
    """Tokens of one observation; what is longer is cut, and the cut recorded."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which end is kept, as verl names it: left keeps the beginning, right the end, middle both."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds of one tool call; then its time-out becomes the observation."""
    interaction_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one reply of the interaction."""
    interaction_interval: int = Field(default=1, ge=1)
    """Ask the interaction where the policy's turns so far, those with tool calls included, are a
    multiple of this; an answer that it is not asked about ends the request."""
    interaction_prob: float = Field(default=1.0, ge=0, le=1)
    """Chance that an answer is put to the interaction at all (drawn from the request's seed)."""
    tokenization_sanity_check_mode: Literal["disable", "strict", "ignore_strippable"] = (
        "ignore_strippable"
    )
    """Hold each finished ledger against the rendering of its conversation."""


class ValKwargsConfig(Section):
    """How validation samples."""

    n: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1


class FailureConfig(Section):
    """What becomes of a request that failed for reasons of the infrastructure."""

    policy: Literal["mask", "retry", "drop_group", "raise"] = "mask"
    """mask: keep its row with a zero mask, out of the group's baseline; retry: try again up to
    `max_retries`, then mask; drop_group: mask its whole group; raise: end the run."""
    max_retries: int = Field(default=1, ge=0)
    """New attempts of one request under `retry`."""
    max_failed_frac: float = Field(default=0.5, ge=0, le=1)
    """End the run where more than this share of a batch failed: then it is no accident."""


class RolloutConfig(Section):
    """Generation: how many, how hot, how long."""

    engine: EngineConfig = EngineConfig()
    n: int = Field(default=8, ge=1)
    """Samples of one prompt (the group)."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    stop: list[str] = Field(default_factory=list[str])
    """Stop strings beside the template's own end of turn; kept in the output."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and response; null: what the model's configuration allows."""
    max_concurrent_requests: int = Field(default=256, ge=1)
    """Requests in flight on one rank."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Wall clock of one request; null: none."""
    seed: Seed = 0
    """Seed of the engine's sampling and of the requests' own draws."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    failure: FailureConfig = FailureConfig()


class OptimConfig(Section):
    """An optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon on the matrices, AdamW on everything else."""
    lr: float = Field(default=1e-6, gt=0)
    muon_lr: float = Field(default=0.01, gt=0)
    """Learning rate of the matrices under `muon`."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.01, ge=0)
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up; cosine and linear fall to `min_lr_ratio` at the last step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)


class FsdpConfig(Section):
    """How the weights are sharded (FSDP2, `fully_shard`)."""

    reshard_after_forward: bool = True
    """Free the gathered weights of a block behind its forward pass."""
    offload_policy: bool = False
    """Keep shards in host memory between uses."""


class ActorConfig(Section):
    """The update of the policy."""

    ppo_mini_batch_size: int | None = Field(default=None, ge=1)
    """Prompts (not samples) of one optimizer step, over all ranks; null: the whole batch."""
    ppo_max_token_len_per_gpu: int = Field(default=16384, ge=1)
    """Tokens of one packed micro-batch."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    clip_ratio: float = Field(default=0.2, gt=0)
    """Symmetric clip, where the two below are null."""
    clip_ratio_low: float | None = Field(default=None, gt=0)
    clip_ratio_high: float | None = Field(default=None, gt=0)
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Lower bound of the loss for negative advantages (dual clip)."""
    policy_loss: str = "vanilla"
    """Name of a registered policy loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    """Add a KL term to a frozen reference."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "kl", "mse", "low_var_kl", "abs"] = "k3"
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    shuffle: bool = False
    """Draw the mini-batches in random order (seeded) instead of the batch's."""
    logits_chunk_tokens: int = Field(default=1024, ge=1)
    """Trained positions for which full-vocabulary logits exist at once."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()


class RefConfig(Section):
    """The frozen reference of the KL term."""

    path: str | None = None
    """A model folder; null: the policy as it was at the start of the run."""


class CriticConfig(Section):
    """Reserved for PPO with a critic."""


class CustomRewardConfig(Section):
    """A scorer of the user's own."""

    path: str
    """`package.module` or `path/to/file.py`."""
    name: str = "compute_score"
    """The function in it."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed to every call."""


class RewardWeightsConfig(Section):
    """How rewards of several sources become one."""

    trajectory: float = 1.0
    """Weight of the scorer's number for the finished request."""
    turn: float = 0.0
    """Weight of the interaction's and tools' rewards for single turns, on their own turns."""
    tool: float = 0.0
    """Weight of `calc_reward` of the tools."""


class RewardConfig(Section):
    """Scoring."""

    manager: str = "naive"
    """Name of a registered reward manager."""
    custom_reward_function: CustomRewardConfig | None = None
    """null: the bundled scorer of the row's `data_source`."""
    weights: RewardWeightsConfig = RewardWeightsConfig()
    placement: Literal["last", "spread"] = "last"
    """On which trained tokens a reward lands: the last of its turn or trajectory, or all of them
    in equal parts."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one score."""


class AlgorithmConfig(Section):
    """Credit."""

    adv_estimator: str = "grpo"
    """Name of a registered advantage estimator."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's centred rewards by their standard deviation; false: Dr.GRPO."""


class ArithmeticConfig(Section):
    """Word problems of one to three steps in the format of GSM8K, made from a seed."""

    out_dir: Path
    seed: Seed = 0
    num_train: int = Field(default=2048, ge=1)
    num_val: int = Field(default=256, ge=1)
    num_demos: int = Field(default=16000, ge=0)
    """Demonstrations for the supervised warm-up, rough on purpose."""


class Gsm8kConfig(Section):
    """The real GSM8K, from the hub or from local files."""

    out_dir: Path
    source_dir: Path | None = None
    """Folder with `train.jsonl` and `test.jsonl`; null: the hub."""
    max_samples: int | None = Field(default=None, ge=1)


class TinyPolicyConfig(Section):
    """A small Qwen2-architecture model of random weights with a tokenizer of its own."""

    out_dir: Path
    corpus: Path
    """Conversations (JSONL or parquet with `messages`) that the tokenizer is trained on."""
    vocab_size: int = Field(default=600, ge=300)
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 192
    max_position_embeddings: int = 2048
    seed: Seed = 0


class SftConfig(Section):
    """A short supervised training on conversations, with the masks of the rollout."""

    model_path: str
    train_file: Path
    """Rows with `messages` and, where tools are used, `tools` (or the run's tool YAML)."""
    out_dir: Path
    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=16, ge=1)
    """Conversations of one optimizer step."""
    max_length: int = Field(default=1024, ge=2)
    """Tokens; longer conversations are dropped and counted."""
    observed_loss_weight: float = Field(default=0.0, ge=0)
    """Loss weight of user and tool tokens beside 1 on the assistant's (0 on the system prompt)."""
    grad_clip: float = Field(default=1.0, gt=0)
    optim: OptimConfig = OptimConfig(lr=1e-5, lr_scheduler="cosine")
    tool_config_path: Path | None = None
    seed: Seed = 0


class PrepareConfig(Section):
    """What `agentrl train` makes first, where it is missing, in this order."""

    arithmetic: ArithmeticConfig | None = None
    gsm8k: Gsm8kConfig | None = None
    tiny_policy: TinyPolicyConfig | None = None
    sft: SftConfig | None = None


class TrainerConfig(Section):
    """The loop, what it writes, and when."""

    project_name: str = "agentrl"
    experiment_name: str = "run"
    default_local_dir: Path = Path("runs/run")
    """Everything that a run writes lies under this folder."""
    total_training_steps: int | None = Field(default=None, ge=0)
    """null: `total_epochs` over the data."""
    total_epochs: int = Field(default=1, ge=1)
    logger: list[Literal["console", "jsonl", "tensorboard"]] = Field(
        default_factory=lambda: ["console", "jsonl"]
    )
    test_freq: int = Field(default=-1, ge=-1)
    """Validate every so many steps; -1: only before and after."""
    save_freq: int = Field(default=-1, ge=-1)
    """Checkpoint every so many steps; -1: only at the end."""
    max_ckpt_to_keep: int | None = Field(default=3, ge=1)
    val_before_train: bool = True
    val_only: bool = False
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: go on from the last complete checkpoint of the run's folder, if there is one."""
    resume_from_path: Path | None = None
    rollout_data_dir: Path | None = None
    """Save every training rollout as JSONL here."""
    validation_data_dir: Path | None = None
    """Save every validation rollout as JSONL here."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Seed = 0
    """Seed of everything that has no seed of its own."""
    plot: bool = True
    """Draw `curve.png` at the end."""


class RunConfig(Section):
    """A whole run file."""

    data: DataConfig
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    prepare: PrepareConfig = PrepareConfig()
