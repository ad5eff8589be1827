"""Keys of the update: optimizer, actor, reference, critic."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config.schema.correction import RolloutCorrectionConfig
from agentrl.config.schema.section import FolderOrHubName, Section

LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]  # fmt: skip
KlLossType = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl",
    "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+",
]  # fmt: skip


class OptimConfig(Section):
    """An optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon on the matrices, AdamW on everything else."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate; under `muon` of everything but the matrices."""
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
    """What follows the warm-up; cosine and linear fall to `min_lr_ratio` at the last step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left at the last step."""


class FsdpConfig(Section):
    """How the weights are sharded (FSDP2, `fully_shard`)."""

    reshard_after_forward: bool = True
    """Free the gathered weights of a block behind its forward pass."""
    offload_policy: bool = False
    """Keep shards in host memory between uses."""


class PolicyLossConfig(Section):
    """Which policy loss, and what some of them read. A bare name stands for `loss_mode`."""

    loss_mode: str = "vanilla"
    """Name of a registered policy loss."""
    clip_cov_ratio: float = Field(default=2e-4, gt=0, le=1)
    """`clip_cov`: share of the tokens that is clipped."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: least covariance of a token that may be clipped."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: largest covariance of a token that may be clipped."""
    kl_cov_ratio: float = Field(default=2e-4, gt=0, le=1)
    """`kl_cov`: share of the tokens that get the penalty."""
    ppo_kl_coef: float = Field(default=0.1, ge=0)
    """`kl_cov`: weight of the penalty."""
    dro_beta: float | None = Field(default=None, gt=0)
    """`dro`: weight of the squared log-ratio; it must be given there."""
    vespo_k_pos: float = Field(default=2.0, ge=0)
    """`vespo`: power of the kernel where the advantage is not negative."""
    vespo_lambda_pos: float = Field(default=3.0, gt=0)
    """`vespo`: decay of the kernel where the advantage is not negative."""
    vespo_k_neg: float = Field(default=3.0, ge=0)
    """`vespo`: power of the kernel where the advantage is negative."""
    vespo_lambda_neg: float = Field(default=2.0, gt=0)
    """`vespo`: decay of the kernel where the advantage is negative."""

    rollout_correction: RolloutCorrectionConfig = Field(
        default=RolloutCorrectionConfig(), exclude=True
    )
    """No key of the run file: under `bypass_mode` the run puts `algorithm.rollout_correction` here,
    for the loss, which sees no other section."""

    @model_validator(mode="after")
    def _check_required(self) -> Self:
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise ValueError("the loss dro needs dro_beta, a positive number")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError("clip_cov_lb must be less than clip_cov_ub")
        return self


def _named_loss(given: Any) -> Any:
    return {"loss_mode": given} if isinstance(given, str) else given


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
    """Distance below 1 at which the ratio is clipped; null: `clip_ratio`."""
    clip_ratio_high: float | None = Field(default=None, gt=0)
    """Distance above 1 at which the ratio is clipped; null: `clip_ratio`."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Lower bound of the loss for negative advantages (dual clip)."""
    policy_loss: Annotated[PolicyLossConfig, BeforeValidator(_named_loss)] = PolicyLossConfig()
    """The policy loss: a name, or a section with a name and its settings."""
    tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: temperature of the gate where the advantage is positive."""
    tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: temperature of the gate elsewhere."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How the losses of the tokens become one number (docs/algorithms/policy_losses.md)."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add a KL term to a frozen reference."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL to the reference in the loss; read under `use_kl_loss`."""
    kl_loss_type: KlLossType = "k3"
    """Estimate of the KL; `<name>+` has the value of `<name>` and the gradient of k2."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    max_skipped_updates: int | None = Field(default=5, ge=1)
    """End the run where so many updates in a row took no optimizer step, because no loss or
    gradient was finite; null: go on."""
    shuffle: bool = False
    """Draw the mini-batches in random order (seeded) instead of the batch's."""
    logits_block_bytes: int | None = Field(default=None, ge=1)
    """Bytes of one block of logits (trained positions times vocabulary); null: 2 MiB on a CPU,
    where a block should stay in the cache, 256 MiB elsewhere."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()


class RefConfig(Section):
    """The frozen reference of the KL term."""

    path: FolderOrHubName | None = None
    """A model folder; null: the policy as it was at the start of the run."""


class CriticConfig(Section):
    """Reserved for PPO with a critic."""


class KlCtrlConfig(Section):
    """The weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: raised where the KL is above its target, lowered where it is below."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The weight, or the first one."""
    target_kl: float = Field(default=0.1, gt=0)
    """`adaptive`: the KL that is aimed at, a mean over the tokens of a sequence."""
    horizon: int = Field(default=10000, ge=1)
    """`adaptive`: sequences over which the weight moves."""


class FilterGroupsConfig(Section):
    """Dynamic sampling: groups without signal are dropped and others sampled in their place."""

    enable: bool = False
    """Drop groups without a signal and sample others in their place."""
    metric: str = "score"
    """What must differ within a group: the reward (`score`, `reward`, `seq_reward` and
    `seq_final_reward` all mean the combined one), or a key of the scorer's dict, such as `acc`."""
    max_num_gen_batches: int = Field(default=0, ge=0)
    """Batches of prompts that are rolled out at most for one step; 0: one epoch's. Where groups are
    missing then, those that there are are trained."""


class AlgorithmConfig(Section):
    """Credit."""

    adv_estimator: str = "grpo"
    """Name of a registered advantage estimator."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of later rewards, per token or per turn, as the estimator counts."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's centred rewards by their standard deviation; false: Dr.GRPO."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """`gdpo`: the rewards that are normalised apart, as the scorer's dict names them."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """`gdpo`: weights of these rewards; empty: 1 each."""
    step_advantage_w: float = Field(default=1.0, ge=0)
    """`gigpo`: weight of the advantage among steps that began in the same state."""
    use_kl_in_reward: bool = False
    """Take the KL to the reference off the rewards of tokens, but not in groups that train on
    nothing without it: those whose scores are equal or, by turn, whose returns are."""
    kl_penalty: KlLossType = "k1"
    """Estimate of the KL in the reward; only its value counts."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
