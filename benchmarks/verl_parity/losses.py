"""The policy losses, the aggregation and the value loss beside verl's, with their gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig as VerlActorConfig
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig

from agentrl.algorithms import LossScale, agg_loss, compute_value_loss, get_policy_loss_fn
from agentrl.config.schema.training import ActorConfig, LossAggMode
from benchmarks.verl_parity.batches import make_batch
from benchmarks.verl_parity.comparison import Comparison, compare

MODES = get_args(LossAggMode)
BUDGET = 64
CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
DPPO = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vanilla": ({}, {}),
    "dppo_tv": (DPPO, {}),
    "dppo_kl": (DPPO | {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}, {}),
    "gspo": ({"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}, {}),
    "sapo": ({}, {}),
    "gpg": ({}, {}),
    "clip_cov": ({}, {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 2.0}),
    "kl_cov": ({}, {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.3}),
    "geo_mean": ({"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, {}),
    "dro": ({}, {"dro_beta": 0.5}),
    "cispo": ({}, {}),
}
"""Settings of the actor and of its policy loss, under which every branch is met."""

DEAF = "the reference is deaf to loss_agg_mode"
WHOLE = "covariances are those of old_log_probs, known for the whole mini-batch"
ROWS = "the reference counts rows that train on nothing"
GEOMETRIC = (
    "importance weights multiply each token's loss; the reference takes their geometric mean"
)
NAN = "an all-masked batch has loss 0; the reference divides by zero"
EMPTY = "nothing is trained"


class Tensors(NamedTuple):
    """`[B, T]` each, float32."""

    old: torch.Tensor
    new: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor


def check() -> list[Comparison]:
    """Make the lines of the table."""
    lines: list[Comparison] = []
    for name in SETTINGS:
        for mode in MODES:
            lines += _both(name, mode, make_tensors(0), reason=_why(name, mode))
    for name in ("sapo", "geo_mean", "kl_cov", "clip_cov"):
        lines += _both(f"{name}_verl", "token-mean", make_tensors(0), theirs=name)
    for name in ("clip_cov", "kl_cov"):
        lines += _both(name, "token-mean", _on_policy(make_tensors(1)), where=", on policy")
    return lines + _weighted() + _empty() + _bypass() + _value() + _aggregation() + _draw()


def make_tensors(seed: int) -> Tensors:
    """Log-probabilities that moved by about 0.3; every row trains on something."""
    mask = make_batch(seed).mask
    generator = torch.Generator().manual_seed(100 + seed)
    old, moved, advantages, weights = torch.randn(4, *mask.shape, generator=generator)
    old = -old.abs() - 0.05
    new = (old + 0.3 * moved).clamp(max=-0.01)
    return Tensors(old, new, advantages, (0.3 * weights).exp(), mask)


def _why(name: str, mode: str) -> str:
    if name in ("sapo", "geo_mean") and mode != "seq-mean-token-mean":
        return DEAF
    return WHOLE if name in ("clip_cov", "kl_cov") else ""


def _on_policy(batch: Tensors) -> Tensors:
    return batch._replace(new=batch.old.clone())


def _both(
    name: str,
    mode: str,
    batch: Tensors,
    *,
    theirs: str = "",
    where: str = "",
    reason: str = "",
    is_weighted: bool = False,
    own: dict[str, Any] | None = None,
) -> list[Comparison]:
    """The loss and its gradient, with the settings of the table or `own` ones of the loss."""
    settings, tabled = SETTINGS.get(theirs or name, ({}, {}))
    own = own or tabled
    config = ActorConfig.model_validate(CLIPS | settings | {"policy_loss": own})
    function, reference = get_policy_loss_fn(name), core_algos.get_policy_loss_fn(theirs or name)
    weights = batch.weights if is_weighted else None
    scale = None if "cov" in name else LossScale.of(batch.mask, loss_scale_factor=BUDGET)
    mask, title = batch.mask, f"{name}, {mode}{where}"
    if "cov" in name and mode == "seq-mean-token-sum-norm":
        return []  # without a scale there is no response budget; the other modes cover it
    ours = _with_gradient(
        lambda new: function(
            batch.old, new, batch.advantages, mask, mode, config, weights, scale=scale
        )[0],
        batch.new,
    )
    expected = _with_gradient(
        lambda new: reference(
            batch.old, new, batch.advantages.clone(), mask, mode,
            verl_config(settings, own, mask), weights,
        )[0],
        batch.new,
    )  # fmt: skip
    return [
        compare(title, ours[0], expected[0], by_design=reason),
        compare(f"{title}, gradient", ours[1], expected[1], by_design=reason),
    ]


def verl_config(
    settings: dict[str, Any], own: dict[str, Any], mask: torch.Tensor
) -> VerlActorConfig:
    """The reference's settings; it reads the denominators from them."""
    config = VerlActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=VerlPolicyLossConfig(**own),
        **{**CLIPS, **settings},
    )
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(mask.sum()),
        global_batch_size=int(mask.any(dim=-1).sum()),
        loss_scale_factor=BUDGET,
    )
    return config


def _with_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = new.clone().requires_grad_()
    loss = function(leaf)
    return loss.detach()[None], torch.autograd.grad(loss, leaf)[0]


def _weighted() -> list[Comparison]:
    mode: LossAggMode = "seq-mean-token-mean"
    return [
        line
        for name in SETTINGS
        if "cov" not in name
        for line in _both(
            name, mode, make_tensors(2), where=", weighted", is_weighted=True,
            reason=GEOMETRIC if name == "geo_mean" else "",
        )
    ] + _both(
        "geo_mean_verl", mode, make_tensors(2), theirs="geo_mean", where=", weighted",
        is_weighted=True,
    )  # fmt: skip


def _empty() -> list[Comparison]:
    batch = make_tensors(3)
    nothing = batch._replace(mask=torch.zeros_like(batch.mask))
    one = batch.mask.clone()
    one[3] = 0
    return [
        *_both("vanilla", "token-mean", nothing, where=", nothing trained", reason=NAN)[:1],
        *_both("vanilla", "seq-mean-token-mean", batch._replace(mask=one), where=", a masked row"),
        *_both(
            "geo_mean", "seq-mean-token-mean", batch._replace(mask=one), where=", a masked row",
            reason=ROWS,
        ),
    ]  # fmt: skip


def _bypass() -> list[Comparison]:
    cases: dict[str, dict[str, Any]] = {
        "ppo_clip": {"loss_type": "ppo_clip"},
        "reinforce": {"loss_type": "reinforce"},
        "reinforce, token": {"loss_type": "reinforce", "rollout_is": "token"},
        "reinforce, sequence": {"loss_type": "reinforce", "rollout_is": "sequence"},
        "reinforce, rejection": {
            "loss_type": "reinforce", "rollout_is": "token",
            "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4",
        },
    }  # fmt: skip
    return [
        line
        for where, rules in cases.items()
        for mode in ("token-mean", "seq-mean-token-mean")
        for line in _both(
            "bypass_mode", mode, make_tensors(4), where=f", {where}",
            own={"rollout_correction": rules},
        )
    ]  # fmt: skip


def _value() -> list[Comparison]:
    batch, lines = make_tensors(5), []
    counts = {
        "batch_num_tokens": int(batch.mask.sum()),
        "global_batch_size": len(batch.mask),
        "loss_scale_factor": BUDGET,
    }
    scale = LossScale.of(batch.mask, loss_scale_factor=BUDGET)
    for mode in MODES:
        args = (batch.new, batch.advantages, batch.old, batch.mask, 0.2, mode)
        ours, theirs = compute_value_loss(*args, scale=scale), core_algos.compute_value_loss(
            *args, **counts
        )  # fmt: skip
        for what, one, other in zip(("", ", clipfrac"), ours, theirs, strict=True):
            lines.append(compare(f"value loss, {mode}{what}", one[None], other[None]))
    return lines


def _aggregation() -> list[Comparison]:
    batch = make_tensors(6)
    counts = {"dp_size": 2, "batch_num_tokens": 999, "global_batch_size": 77}
    return [
        compare(
            f"agg_loss, {mode}",
            agg_loss(batch.old, batch.mask, mode, **counts, loss_scale_factor=BUDGET)[None],
            core_algos.agg_loss(batch.old, batch.mask, mode, **counts, loss_scale_factor=BUDGET)[
                None
            ],
        )
        for mode in MODES
    ]


def _draw() -> list[Comparison]:
    """Clip-Cov with fewer tokens to draw than lie between the bounds, from the same generator."""
    own = {"clip_cov_ratio": 0.01, "clip_cov_lb": 0.5, "clip_cov_ub": 2.0}
    batch = make_tensors(7)
    args = (batch.old, batch.new, batch.advantages, batch.mask, "token-mean")
    ours = ActorConfig.model_validate(CLIPS | {"policy_loss": own})
    found: list[torch.Tensor] = []
    for function, config in (
        (get_policy_loss_fn("clip_cov_verl"), ours),
        (core_algos.get_policy_loss_fn("clip_cov"), verl_config({}, own, batch.mask)),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(function(*args, config)[0][None])
    return [compare("clip_cov_verl, drawn", *found)]
