"""Keys of the training: optimizer, actor, reference, advantages, KL, choice of groups."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config.schema.correction import RolloutCorrectionConfig
from agentrl.config.schema.section import FolderOrHubName, Section

LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]  # fmt: skip
SegmentCredit = Literal["trajectory", "final"]
KlLossType = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl",
    "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+",
]  # fmt: skip


class OptimConfig(Section):
    """An optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices, AdamW for everything else."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate; under `muon`, of everything but the matrices."""
    muon_lr: float = Field(default=0.01, gt=0)
    """Learning rate of the matrices under `muon`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_warmup_steps_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the run's optimizer steps that is warm-up, rounded down; read if `lr_warmup_steps`
    is 0."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    """The schedule after the warm-up; cosine and linear end at `min_lr_ratio`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left after the last step."""


class FsdpConfig(Section):
    """How the weights are sharded (FSDP2, `fully_shard`)."""

    reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward pass."""
    offload_policy: bool = False
    """Keep shards in host memory between uses."""
    param_offload: bool = False
    """Keep the weights, also those of the reference, in host memory during the rollout."""
    optimizer_offload: bool = False
    """Keep the optimizer's moments in host memory outside of the update."""
    fsdp_size: int = Field(default=-1, ge=-1)
    """Ranks that shard one copy of the weights, for example those of a node; a divisor of the
    number of ranks. Each further group of so many ranks has a copy of its own. -1: all ranks."""


class PolicyLossConfig(Section):
    """The policy loss, and the settings of some losses. A bare name means `loss_mode`."""

    loss_mode: str = "vanilla"
    """Name of a registered policy loss."""
    clip_cov_ratio: float = Field(default=2e-4, gt=0, le=1)
    """`clip_cov`: share of the tokens that are clipped."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: smallest covariance of a token that may be clipped."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: largest covariance of a token that may be clipped."""
    kl_cov_ratio: float = Field(default=2e-4, gt=0, le=1)
    """`kl_cov`: share of the tokens that get the penalty."""
    ppo_kl_coef: float = Field(default=0.1, ge=0)
    """`kl_cov`: weight of the penalty."""
    dro_beta: float | None = Field(default=None, gt=0)
    """`dro`: weight of the squared log-ratio; `dro` needs it."""
    vespo_k_pos: float = Field(default=2.0, ge=0)
    """`vespo`: power of the kernel if the advantage is not negative."""
    vespo_lambda_pos: float = Field(default=3.0, gt=0)
    """`vespo`: decay of the kernel if the advantage is not negative."""
    vespo_k_neg: float = Field(default=3.0, ge=0)
    """`vespo`: power of the kernel if the advantage is negative."""
    vespo_lambda_neg: float = Field(default=2.0, gt=0)
    """`vespo`: decay of the kernel if the advantage is negative."""

    rollout_correction: RolloutCorrectionConfig = Field(
        default=RolloutCorrectionConfig(), exclude=True
    )
    """No key of the run file: under `bypass_mode` the run copies `algorithm.rollout_correction` to
    this field, because the loss gets no other section."""

    @model_validator(mode="after")
    def _check_required(self) -> Self:
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise ValueError("the loss dro needs dro_beta, a positive number")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError("clip_cov_lb must be less than clip_cov_ub")
        return self


def _named_loss(given: Any) -> Any:
    return {"loss_mode": given} if isinstance(given, str) else given


class UpdateConfig(Section):
    """The update of a model: mini-batches, micro-batches, optimizer, sharding."""

    ppo_mini_batch_size: int | None = Field(default=None, ge=1)
    """Prompts (not samples) of one optimizer step, over all ranks; null: the whole batch."""
    ppo_max_token_len_per_gpu: int | None = Field(default=None, ge=1)
    """Tokens of one packed micro-batch on each rank that computes it; those of a shared prefix
    count once. null: 2,048 on a CPU, 4,096 there if rows share prefixes, else 16,384, and the
    longest row if that is more."""
    share_prefixes: bool = True
    """Compute the tokens with which several rows begin (the prompt of a group, and more) once, in
    each pass; not in rows longer than a sliding window, and not with dropout."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How the losses of tokens become one number (docs/algorithms/policy_losses.md)."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    shuffle: bool = False
    """Draw mini-batches in random order (seeded), not in the order of the batch."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that compute each sequence together, a part of its tokens each, for sequences that are
    longer than one device can hold; a divisor of the number of ranks and of attention heads."""
    max_skipped_updates: int | None = Field(default=5, ge=1)
    """End the run after this many updates in a row without an optimizer step, because no loss or
    gradient was finite; null: continue."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()


class ActorConfig(UpdateConfig):
    """The update of the policy."""

    clip_ratio: float = Field(default=0.2, gt=0)
    """Symmetric clip, if the two keys below are null."""
    clip_ratio_low: float | None = Field(default=None, gt=0)
    """Distance below 1 at which the ratio is clipped; null: `clip_ratio`."""
    clip_ratio_high: float | None = Field(default=None, gt=0)
    """Distance above 1 at which the ratio is clipped; null: `clip_ratio`."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Lower bound of the loss for negative advantages (dual clip)."""
    policy_loss: Annotated[PolicyLossConfig, BeforeValidator(_named_loss)] = PolicyLossConfig()
    """The policy loss: a name, or a section with a name and its settings."""
    tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: temperature of the gate if the advantage is positive."""
    tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: temperature of the gate if it is not."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add a KL term to a frozen reference."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL to the reference in the loss; read under `use_kl_loss`."""
    kl_loss_type: KlLossType = "k3"
    """Estimate of the KL; `<name>+` has the value of `<name>` and the gradient of k2."""
    logits_block_bytes: int | None = Field(default=None, ge=1)
    """Bytes of one block of logits (trained positions times vocabulary); null: 2 MiB on a CPU,
    so that a block fits into the cache, else 256 MiB."""


class CriticModelConfig(Section):
    """The critic's model: the body of a causal LM with a scalar head."""

    path: FolderOrHubName | None = None
    """A model folder; null: the policy's. A scalar head in it (`score.weight`, as in the token or
    sequence classifiers of transformers with one label) is used; else the head starts at 0."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    enable_activation_offload: bool = False
    """Keep activations in host memory between the forward and the backward pass."""
    trust_remote_code: bool = False
    """Run code that is part of the model's folder."""
    override_config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Replacements for keys of the Hugging Face configuration."""


class CriticOptimConfig(OptimConfig):
    """The critic's optimizer and its schedule."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate; under `muon`, of everything but the matrices."""


class CriticConfig(UpdateConfig):
    """The critic and its update; read if `algorithm.adv_estimator` reads values."""

    model: CriticModelConfig = CriticModelConfig()
    cliprange_value: float = Field(default=0.5, gt=0)
    """Most that a value may move from the one before the update toward its return and still have a
    gradient."""
    optim: CriticOptimConfig = CriticOptimConfig()  # pyright: ignore[reportIncompatibleVariableOverride] - sections are frozen


class RefConfig(Section):
    """The frozen reference of the KL term."""

    path: FolderOrHubName | None = None
    """A model folder; null: the policy at the start of the run."""


class KlCtrlConfig(Section):
    """The weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: raised if the KL is above its target, lowered if it is below."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The weight; under `adaptive`, the first one."""
    target_kl: float = Field(default=0.1, gt=0)
    """`adaptive`: the target of the KL, a mean over the tokens of a sequence."""
    horizon: int = Field(default=10000, ge=1)
    """`adaptive`: sequences over which the weight changes."""


class FilterGroupsConfig(Section):
    """Dynamic sampling: drop groups without a signal and sample others instead."""

    enable: bool = False
    """Drop groups without a signal and sample others instead."""
    metric: str = "score"
    """What must differ within a group: the reward (`score`, `reward`, `seq_reward` and
    `seq_final_reward` all mean the combined one), or a key of the scorer's dict, such as `acc`."""
    max_num_gen_batches: int = Field(default=0, ge=0)
    """Most batches of prompts that are rolled out for one step; 0: one epoch's. If groups are still
    missing then, the step trains on the existing ones."""


class AlgorithmConfig(Section):
    """Advantages, KL in the reward, correction of the rollout, choice of groups."""

    adv_estimator: str = "grpo"
    """Name of a registered advantage estimator."""
    segment_credit: SegmentCredit = "trajectory"
    """Credit of a trajectory with several sequences (compaction, sub-agents, rewritten history).
    `trajectory`: the estimator reads all of them, one after the other, as one response; `final`:
    only the sequence in which the trajectory ended is trained."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of later rewards, per token or per turn, as the estimator counts."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE."""
    whiten_rewards: bool = False
    """Divide the rewards of tokens, with their KL, by their standard deviation over the trained
    tokens of the batch. Their mean is not moved."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's centered rewards by their standard deviation; false: Dr.GRPO."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """`gdpo`: the rewards that are normalized one by one, by their keys in the scorer's dict."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """`gdpo`: weights of these rewards; empty: 1 each."""
    step_advantage_w: float = Field(default=1.0, ge=0)
    """`gigpo`: weight of the advantage among steps with the same first state."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the rewards of tokens; not in groups that train on
    nothing without it, because their scores or, by turn, their returns are equal."""
    kl_penalty: KlLossType = "k1"
    """Estimate of the KL in the reward; only its value counts."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
