"""Keys of the rollout's correction, its presets, and how its thresholds are parsed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError

Level = Literal["token", "turn", "sequence"]
Statistic = Literal["each", "sum", "mean", "max"]
Estimate = Literal["k1", "k2", "k3"]
Preset = Literal[
    "disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop",
    "decoupled_seq_is_rs", "decoupled_geo_rs", "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop", "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis",
]  # fmt: skip

SECTION = "algorithm.rollout_correction"
_TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN_TIS,
    "decoupled_seq_is": _SEQ_TIS,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQ_TIS | _SEQ_RS,
    "decoupled_geo_rs": _GEO_RS,
    "decoupled_geo_rs_seq_tis": _GEO_RS | _SEQ_TIS,
    "decoupled_geo_rs_token_tis": _GEO_RS | _TOKEN_TIS,
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": _K3_RS | _SEQ_TIS,
    "decoupled_k3_rs_token_tis": _K3_RS | _TOKEN_TIS,
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": _CLIP | _GEO_RS,
    "bypass_ppo_clip_k3_rs": _CLIP | _K3_RS,
    "bypass_pg_is": _PG | _SEQ_TIS,
    "bypass_pg_token_icepop": _PG | _ICEPOP,
    "bypass_pg_geo_rs": _PG | _GEO_RS,
    "bypass_pg_geo_rs_seq_tis": _PG | _GEO_RS | _SEQ_TIS,
    "bypass_pg_geo_rs_token_tis": _PG | _GEO_RS | _TOKEN_TIS,
}
"""The settings of each preset, with verl's names and thresholds."""
TUNABLE = (
    "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs_threshold", "advantages",
)  # fmt: skip
"""Keys that may be set together with a preset: they tune its method and do not change it."""


class Bounds(NamedTuple):
    """The bounds that a threshold gives."""

    lower: float | None
    upper: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """One test; tokens that fail it are rejected."""

    name: str
    """The name in `rollout_rs`."""
    level: Level
    """The unit that is kept or rejected as a whole."""
    statistic: Statistic
    """How the estimates of its tokens become one number."""
    estimate: Estimate
    bounds: Bounds
    """For k1: bounds of ratios (engine's over trainer's probability); else of the estimate."""


class RolloutCorrectionConfig(Section):
    """Importance weights between the engine's probabilities and the trainer's, and rejection."""

    preset: Preset | None = None
    """A method by name, which sets the keys below; only thresholds may be set in addition."""
    rollout_is: Level | None = None
    """The unit of a ratio; null: no weights."""
    rollout_is_threshold: float | str = 2.0
    """Upper bound of the weights; `"lower_upper"`, as in `"0.5_5.0"`: weights outside the bounds
    are 0 (IcePop)."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """A weight above an upper bound becomes the bound (truncate) or 0 (mask)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Tests that tokens must pass, joined by commas: `token_k1`, `seq_mean_k3`, `turn_max_k2`, ...;
    null: nothing is rejected."""
    rollout_rs_threshold: float | str | None = None
    """Threshold of each test, joined by commas, or one for all; for k1 `"lower_upper"` of ratios,
    or only the upper one (the lower is its reciprocal)."""
    advantages: Literal["sampled", "kept"] = "sampled"
    """What advantages compare: all samples, or, as in verl, those that are not rejected."""
    bypass_mode: bool = False
    """Use the engine's log-probabilities as `old_log_probs`, which are then not computed."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The loss under `bypass_mode`."""

    @property
    def reads_turns(self) -> bool:
        """Whether a weight or a test needs the turns of tokens."""
        own = self.effective
        if own.rollout_is == "turn" or own.rollout_rs is None:
            return own.rollout_is == "turn"
        tests = parse_rejections(own.rollout_rs, own.rollout_rs_threshold)
        return any(test.level == "turn" for test in tests)

    @property
    def effective(self) -> "RolloutCorrectionConfig":
        """These settings, with those of the preset."""
        if self.preset is None:
            return self
        given = {name: getattr(self, name) for name in self.model_fields_set}
        merged = {**PRESETS[self.preset], **given, "preset": None}
        return RolloutCorrectionConfig.model_validate(merged)

    @property
    def is_active(self) -> bool:
        """Whether any weight is computed or anything may be rejected before the update."""
        own = self.effective
        return not own.bypass_mode and (own.rollout_is is not None or own.rollout_rs is not None)


def parse_is_threshold(threshold: float | str) -> Bounds:
    """Read the threshold of importance weights.

    Raises:
        ConfigError: if it is neither a positive number nor two increasing ones, or if a single one
            is below 1, which would cut the weights of equal policies.
    """
    key = f"{SECTION}.rollout_is_threshold"
    bounds = _parse_bounds(str(threshold), key)
    if bounds.lower is None and bounds.upper < 1:
        raise ConfigError(
            f"{threshold} is one bound, and it is below 1, the weight of equal policies",
            key=key,
            expected='1 or more; two bounds in quotes, as "0.5_5.0" (YAML reads 0.5_5 as 0.55)',
        )
    return bounds


def parse_rejections(rollout_rs: str, threshold: float | str | None) -> tuple[Rejection, ...]:
    """Read the tests of rejection with their thresholds; a repeated test counts once.

    Raises:
        ConfigError: for an unknown test, or thresholds that do not fit.
    """
    names = list(dict.fromkeys(name.strip() for name in rollout_rs.split(",") if name.strip()))
    parts = [part.strip() for part in str(threshold or "").split(",") if part.strip()]
    if not names:
        raise ConfigError("names no test", key=f"{SECTION}.rollout_rs", expected=_known_tests())
    if len(parts) not in (1, len(names)):
        raise ConfigError(
            f"{len(parts)} thresholds for {len(names)} tests",
            key=f"{SECTION}.rollout_rs_threshold",
            expected="one for each test of rollout_rs, or one for all, joined by commas",
        )
    parts = parts * len(names) if len(parts) == 1 else parts
    return tuple(_parse_rejection(name, part) for name, part in zip(names, parts, strict=True))


def _parse_rejection(name: str, threshold: str) -> Rejection:
    found = _TESTS.get(name)
    if found is None:
        raise ConfigError(
            f"unknown test {name!r}", key=f"{SECTION}.rollout_rs", expected=_known_tests()
        )
    level, statistic, estimate = found
    key = f"{SECTION}.rollout_rs_threshold"
    bounds = _parse_bounds(threshold, key)
    if estimate != "k1" and bounds.lower is not None:
        raise ConfigError(
            f"{threshold!r} has two bounds, and {name} is never negative",
            key=key,
            expected="an upper bound",
        )
    if estimate == "k1" and statistic != "max" and bounds.lower is None:
        bounds = _rising(1 / bounds.upper, bounds.upper, threshold, key)
    return Rejection(name, level, statistic, estimate, bounds)


def _parse_bounds(text: str, key: str) -> Bounds:
    numbers = [_positive(part, text, key) for part in text.strip().split("_", 1)]
    if len(numbers) == 1:
        return Bounds(None, numbers[0])
    return _rising(numbers[0], numbers[1], text, key)


def _rising(lower: float, upper: float, text: str, key: str) -> Bounds:
    if lower > upper:
        raise ConfigError(
            f"{text!r}: the lower bound, {lower:g}, is above the upper one, {upper:g}",
            key=key,
            expected="lower_upper, such as 0.5_2.0",
        )
    return Bounds(lower, upper)


def _positive(part: str, text: str, key: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"{text!r} is no threshold", key=key, expected="a positive number, or lower_upper"
        )
    return value


def _tests() -> dict[str, tuple[Level, Statistic, Estimate]]:
    found: dict[str, tuple[Level, Statistic, Estimate]] = {}
    estimates: tuple[Estimate, ...] = ("k1", "k2", "k3")
    statistics: tuple[Statistic, ...] = ("sum", "mean", "max")
    levels: tuple[tuple[str, Level], ...] = (("seq", "sequence"), ("turn", "turn"))
    for estimate in estimates:
        found[f"token_{estimate}"] = ("token", "each", estimate)
        for prefix, level in levels:
            for statistic in statistics:
                found[f"{prefix}_{statistic}_{estimate}"] = (level, statistic, estimate)
    return found


_TESTS = _tests()


def _known_tests() -> str:
    return f"names among {', '.join(_TESTS)}"
