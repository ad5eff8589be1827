"""Keys of the update: optimizer, actor, reference, critic, credit."""

from typing import Literal

from pydantic import Field

from agentrl.config.section import FolderOrHubName, Section

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


class AlgorithmConfig(Section):
    """Credit."""

    adv_estimator: str = "grpo"
    """Name of a registered advantage estimator."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's centred rewards by their standard deviation; false: Dr.GRPO."""
