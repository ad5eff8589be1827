"""Keys of credit: advantages, KL in the reward, correction of the rollout, choice of groups."""

from typing import Literal

from pydantic import Field

from agentrl.config.schema.correction import RolloutCorrectionConfig
from agentrl.config.schema.section import Section
from agentrl.config.schema.update import KlLossType


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
