"""Rollout correction: weights, rejection and metrics against naive loops; two invariants."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.correction import (
    RolloutCorrection,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    weigh_rollout,
)
from agentrl.config.schema.correction import (
    PRESETS,
    Preset,
    RolloutCorrectionConfig,
    parse_is_threshold,
    parse_rejections,
)
from agentrl.errors import ConfigError
from tests.fakes.tensors import masks

LEVELS = ["token", "turn", "sequence"]
TESTS = [
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"{level}_{s}_{k}" for level in ("seq", "turn") for s in ("sum", "mean")
      for k in ("k1", "k2", "k3")),
    *(f"{level}_max_{k}" for level in ("seq", "turn") for k in ("k2", "k3")),
]  # fmt: skip
VERL_TESTS = [name for name in TESTS if not name.startswith("turn")]


class Batch(NamedTuple):
    old: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    turns: torch.Tensor

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.old - self.rollout


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged rows; the turn rises at some tokens; ratios of every size."""
    mask = draw(masks(max_rows=5, max_width=8))
    numbers = st.lists(
        st.floats(-3, 3, width=32), min_size=mask.numel(), max_size=mask.numel()
    ).map(lambda xs: torch.tensor(xs).view(mask.shape))
    rises = st.lists(st.integers(0, 1), min_size=mask.numel(), max_size=mask.numel())
    turns = torch.tensor(draw(rises)).view(mask.shape).cumsum(1)
    old = draw(numbers) - 3.5
    return Batch(old, old - draw(numbers) / 2, mask, turns)


def spans_of(batch: Batch, level: str) -> list[list[tuple[int, int]]]:
    """The trained tokens of each span, as places."""
    found: dict[Any, list[tuple[int, int]]] = {}
    for row in range(batch.mask.shape[0]):
        for t in range(batch.mask.shape[1]):
            if batch.mask[row, t]:
                turn = batch.turns[row, t].item()
                key = {"token": (row, t), "turn": (row, turn), "sequence": row}[level]
                found.setdefault(key, []).append((row, t))
    return list(found.values())


def naive_weights(batch: Batch, level: str, bound: Callable[[float], float]) -> torch.Tensor:
    weights = torch.zeros(batch.mask.shape)
    for span in spans_of(batch, level):
        total = sum(batch.log_ratio[place].item() for place in span)
        for place in span:
            weights[place] = bound(math.exp(max(-20.0, min(20.0, total))))
    return weights


BOUNDS: dict[str, tuple[dict[str, Any], Callable[[float], float]]] = {
    "truncated": ({"rollout_is_threshold": 1.5}, lambda w: min(w, 1.5)),
    "two-sided": ({"rollout_is_threshold": "0.7_1.5"}, lambda w: w if 0.7 <= w <= 1.5 else 0.0),
    "masked": (
        {"rollout_is_threshold": 1.5, "rollout_is_mode": "mask"},
        lambda w: w if w <= 1.5 else 0.0,
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BOUNDS)
@settings(max_examples=25, deadline=None)
@given(batch=batches())
def test_weights_are_those_of_a_loop(level: Any, kind: str, batch: Batch):
    keys, bound = BOUNDS[kind]
    config = RolloutCorrectionConfig(rollout_is=level, **keys)
    found = weigh_rollout(batch.log_ratio, batch.mask, config, batch.turns)
    expected = naive_weights(batch, level, bound)
    torch.testing.assert_close(found.weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25, deadline=None)
@given(batch=batches())
def test_normalised_weights_have_the_mean_one_over_their_spans(level: Any, batch: Batch):
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=True)
    plain = naive_weights(batch, level, lambda w: min(w, 2.0))
    first = [span[0] for span in spans_of(batch, level)]
    mean = sum(plain[place].item() for place in first) / max(len(first), 1)
    found = weigh_rollout(batch.log_ratio, batch.mask, config, batch.turns)
    torch.testing.assert_close(found.weights, plain / (mean or 1.0), rtol=1e-4, atol=1e-6)


def test_where_no_weight_survives_nothing_is_divided():
    log_ratio, mask = torch.full((2, 3), 5.0), torch.ones(2, 3)
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold="0.5_2.0", rollout_is_batch_normalize=True
    )
    found = compute_rollout_correction_and_rejection_mask(
        log_ratio, torch.zeros(2, 3), mask, config
    )
    assert found.weights is not None
    assert not found.weights.any()
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1
    assert all(math.isfinite(value) for value in found.metrics.values())


def naive_kept(batch: Batch, name: str, lower: float, upper: float) -> torch.Tensor:
    *head, estimate = name.split("_")
    level = {"token": "token", "seq": "sequence", "turn": "turn"}[head[0]]
    statistic = head[1] if len(head) > 1 else "sum"
    kept = torch.zeros(batch.mask.shape, dtype=torch.bool)
    for span in spans_of(batch, level):
        ds = [-batch.log_ratio[place].item() for place in span]
        values = {"k1": ds, "k2": [d * d / 2 for d in ds],
                  "k3": [math.exp(-d) + d - 1 for d in ds]}[estimate]  # fmt: skip
        value = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[
            statistic
        ]
        bounds = (math.log(lower), math.log(upper)) if estimate == "k1" else (-math.inf, upper)
        for place in span:
            kept[place] = bounds[0] <= value <= bounds[1]
    return kept


@pytest.mark.parametrize("name", TESTS)
@settings(max_examples=15, deadline=None)
@given(batch=batches())
def test_rejection_is_that_of_a_loop(name: str, batch: Batch):
    lower, upper = (0.713, 1.377) if name.endswith("k1") else (0.0, 0.0917)
    threshold = f"{lower}_{upper}" if name.endswith("k1") else upper
    kept, _ = compute_rollout_rejection_mask(
        batch.log_ratio, batch.mask, name, threshold, turn_ids=batch.turns
    )
    assert kept.dtype == batch.mask.dtype
    assert torch.equal(kept.bool(), naive_kept(batch, name, lower, upper))


@pytest.mark.parametrize("name", TESTS)
def test_a_log_probability_that_is_nan_is_not_rejected(name: str):
    """Rejected, it would break no update, and nobody would hear of it."""
    log_ratio = torch.tensor([[math.nan, 3.0], [3.0, 3.0]])
    threshold = "0.9_1.1" if name.endswith("k1") else 0.1
    kept, _ = compute_rollout_rejection_mask(
        log_ratio, torch.ones(2, 2), name, threshold, turn_ids=torch.zeros(2, 2, dtype=torch.long)
    )
    assert kept[0, 0]
    assert not kept[1].any()


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_weight_that_is_nan_stays_so(kind: str):
    config = RolloutCorrectionConfig(rollout_is="token", **BOUNDS[kind][0])
    found = weigh_rollout(torch.tensor([[math.nan, 3.0]]), torch.ones(1, 2), config)
    assert found.weights.isnan().tolist() == [[True, False]]


@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_several_tests_must_all_be_passed(batch: Batch):
    both, _ = compute_rollout_rejection_mask(
        batch.log_ratio, batch.mask, "token_k1, seq_mean_k2,token_k1", "0.7_1.4,0.1"
    )
    first = naive_kept(batch, "token_k1", 0.7, 1.4)
    second = naive_kept(batch, "seq_mean_k2", 0.0, 0.1)
    assert torch.equal(both.bool(), first & second)


def test_metrics_by_hand():
    log_ratio = torch.tensor([[math.log(2.0), 0.0, 9.0], [math.log(0.5), 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    old = torch.full((2, 3), -1.0)
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=1.5,
        rollout_rs="token_k1", rollout_rs_threshold="0.4_1.5",
    )  # fmt: skip
    found = compute_rollout_correction_and_rejection_mask(old, old - log_ratio, mask, config)
    assert found.weights is not None
    torch.testing.assert_close(found.weights, torch.tensor([[1.5, 1.0, 0.0], [0.5, 0.0, 0.0]]))
    assert found.kept.tolist() == [[True, True, False], [False, False, False]]
    expected = {
        "kl": 0.0, "ratio_mean": 3.5 / 3, "ratio_max": 2.0,
        "chi2_token": (4 + 1 + 0.25) / 3 - 1, "chi2_seq": (4 + 0.25) / 2 - 1,
        "k3_kl": 3.5 / 3 - 1,
        "rollout_is_mean": 1.0, "rollout_is_max": 1.5, "rollout_is_min": 0.5,
        "rollout_is_eff_sample_size": 9 / (3 * 3.5),
        "rollout_is_ratio_fraction_high": 1 / 3, "rollout_is_ratio_fraction_low": 1 / 3,
        "rollout_is_seq_mean": (1.25 + 0.5) / 2, "rollout_is_oob_ratio": 0.0,
        "rollout_rs_masked_fraction": 1 / 3, "rollout_rs_seq_masked_fraction": 1 / 2,
        "rollout_rs_rejected_sequences": 1.0,
        "rollout_rs_token_k1_fraction_high": 1 / 3, "rollout_rs_token_k1_fraction_low": 0.0,
        "training_log_ppl": 1.0, "training_ppl": math.e,
    }  # fmt: skip
    for name, value in expected.items():
        assert found.metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=1e-6), name


# Invariants.


def configs() -> st.SearchStrategy[RolloutCorrectionConfig]:
    thresholds = {"k1": "0.7_1.4"}
    return st.builds(
        lambda level, threshold, mode, normal, test: RolloutCorrectionConfig(
            rollout_is=level,
            rollout_is_threshold=threshold,
            rollout_is_mode=mode,
            rollout_is_batch_normalize=normal,
            rollout_rs=test,
            rollout_rs_threshold=thresholds.get(test[-2:], 0.3) if test else None,
        ),
        st.sampled_from([None, *LEVELS]),
        st.sampled_from([1.5, "0.7_1.5"]),
        st.sampled_from(["truncate", "mask"]),
        st.booleans(),
        st.sampled_from([None, *TESTS]),
    )


def correct(batch: Batch, config: RolloutCorrectionConfig) -> RolloutCorrection:
    return compute_rollout_correction_and_rejection_mask(
        batch.old, batch.rollout, batch.mask, config, batch.turns
    )


def assert_same(one: RolloutCorrection, two: RolloutCorrection) -> None:
    assert two.metrics == pytest.approx(one.metrics, rel=1e-6, abs=1e-9)
    assert torch.equal(two.kept, one.kept)
    assert (one.weights is None) == (two.weights is None)
    if one.weights is not None:
        torch.testing.assert_close(two.weights, one.weights, rtol=1e-6, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(batch=batches(), config=configs(), data=st.data())
def test_observations_are_invisible_masked_tokens_change_nothing_at_any_position(
    batch: Batch, config: RolloutCorrectionConfig, data: st.DataObject
):
    width = batch.mask.shape[1]
    order = data.draw(st.permutations(range(width + 3)))
    places = torch.tensor(sorted(order[:width]))

    def widen(tensor: torch.Tensor, spoiled: float) -> torch.Tensor:
        wide = torch.full((len(tensor), width + 3), spoiled, dtype=tensor.dtype)
        wide[:, places] = tensor.masked_fill(batch.mask == 0, spoiled) if spoiled else tensor
        return wide

    spoiled = Batch(
        widen(batch.old, math.nan),
        widen(batch.rollout, math.inf),
        widen(batch.mask, 0),
        widen(batch.turns, -1),
    )
    plain, found = correct(batch, config), correct(spoiled, config)
    weights = None if found.weights is None else found.weights[:, places]
    assert_same(plain, RolloutCorrection(weights, found.kept[:, places], found.metrics))
    assert not found.kept[spoiled.mask == 0].any()
    assert found.weights is None or not found.weights[spoiled.mask == 0].any()


@settings(max_examples=60, deadline=None)
@given(batch=batches(), config=configs(), data=st.data())
def test_layout_is_invisible_neither_the_order_of_rows_nor_empty_ones_change_anything(
    batch: Batch, config: RolloutCorrectionConfig, data: st.DataObject
):
    order = torch.tensor(data.draw(st.permutations(range(len(batch.mask)))))
    moved = Batch(*(torch.cat([x[order], torch.zeros_like(x[:2])]) for x in batch))
    plain, found = correct(batch, config), correct(moved, config)
    weights = None if found.weights is None else found.weights[: len(order)]
    kept = found.kept[: len(order)]
    back = torch.argsort(order)
    weights = None if weights is None else weights[back]
    assert_same(plain, RolloutCorrection(weights, kept[back], found.metrics))


@given(batch=batches())
@settings(max_examples=20, deadline=None)
def test_equal_policies_have_no_distance_and_weights_of_one(batch: Batch):
    same = batch._replace(rollout=batch.old)
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"
    )
    found = correct(same, config)
    assert found.weights is not None
    assert torch.equal(found.weights, batch.mask.float())
    assert torch.equal(found.kept, batch.mask.bool())
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_abs_diff"):
        assert found.metrics.get(f"rollout_corr/{name}", 0.0) == 0.0


def test_nothing_trained_has_no_metrics_and_no_weight():
    config = RolloutCorrectionConfig(
        rollout_is="turn", rollout_is_batch_normalize=True,
        rollout_rs="seq_max_k3", rollout_rs_threshold=1.0,
    )  # fmt: skip
    nothing = torch.zeros(2, 3)
    found = compute_rollout_correction_and_rejection_mask(
        nothing * torch.nan, nothing, nothing, config, nothing.long() - 1
    )
    assert found.metrics == {}
    assert found.weights is not None
    assert not found.weights.any()
    assert not found.kept.any()
    assert compute_offpolicy_metrics(nothing, nothing, nothing) == {}


def test_distances_beyond_every_number_stay_finite():
    old, rollout = torch.tensor([[-1e4, -1.0]]), torch.tensor([[-1.0, -1e4]])
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True)
    found = compute_rollout_correction_and_rejection_mask(old, rollout, torch.ones(1, 2), config)
    assert found.weights is not None
    assert found.weights.isfinite().all()
    assert all(math.isfinite(x) for name, x in found.metrics.items() if "ppl" not in name)


# Presets and thresholds.


ICEPOP = "0.5_5.0"
SEQ_BAND = ("seq_sum_k1", "0.5_2.0")
GEO_BAND = ("seq_mean_k1", "0.999_1.001")
K3_BAND = ("seq_mean_k3", 0.01)
NO_TEST = (None, None)
OF_VERL: dict[str, tuple[str | None, float | str, tuple[str | None, float | str | None]]] = {
    "disabled": (None, 2.0, NO_TEST),
    "decoupled_token_is": ("token", 2.0, NO_TEST),
    "decoupled_seq_is": ("sequence", 2.0, NO_TEST),
    "decoupled_token_icepop": ("token", ICEPOP, NO_TEST),
    "decoupled_seq_is_rs": ("sequence", 2.0, SEQ_BAND),
    "decoupled_geo_rs": (None, 2.0, GEO_BAND),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, GEO_BAND),
    "decoupled_geo_rs_token_tis": ("token", 2.0, GEO_BAND),
    "decoupled_k3_rs": (None, 2.0, K3_BAND),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, K3_BAND),
    "decoupled_k3_rs_token_tis": ("token", 2.0, K3_BAND),
    "bypass_ppo_clip": (None, 2.0, NO_TEST),
    "bypass_ppo_clip_geo_rs": (None, 2.0, GEO_BAND),
    "bypass_ppo_clip_k3_rs": (None, 2.0, K3_BAND),
    "bypass_pg_is": ("sequence", 2.0, NO_TEST),
    "bypass_pg_token_icepop": ("token", ICEPOP, NO_TEST),
    "bypass_pg_geo_rs": (None, 2.0, GEO_BAND),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, GEO_BAND),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, GEO_BAND),
}
"""Weights, their threshold, and the test with its own, of each preset of verl 0.9.1."""


def test_every_preset_has_the_values_of_verl():
    assert set(PRESETS) == set(get_args(Preset)) == set(OF_VERL)
    for name in get_args(Preset):
        own = RolloutCorrectionConfig(preset=name).effective
        tests = (own.rollout_rs, own.rollout_rs_threshold)
        assert (own.rollout_is, own.rollout_is_threshold, tests) == OF_VERL[name]
        assert own.bypass_mode == name.startswith("bypass")
        assert own.loss_type == ("reinforce" if name.startswith("bypass_pg") else "ppo_clip")
        assert own.rollout_is_mode == "truncate"
        assert not own.rollout_is_batch_normalize
        assert own.preset is None
        parse_is_threshold(own.rollout_is_threshold)
        if own.rollout_rs:
            parse_rejections(own.rollout_rs, own.rollout_rs_threshold)


def test_thresholds_override_a_preset():
    config = RolloutCorrectionConfig(preset="decoupled_seq_is_rs", rollout_rs_threshold="0.1_10")
    own = config.effective
    assert (own.rollout_is, own.rollout_rs, own.rollout_rs_threshold) == (
        "sequence", "seq_sum_k1", "0.1_10"
    )  # fmt: skip
    assert config.is_active
    assert not RolloutCorrectionConfig(preset="disabled").is_active
    assert not RolloutCorrectionConfig(preset="bypass_pg_is").is_active


def test_one_threshold_of_k1_is_the_upper_one():
    assert parse_rejections("token_k1", 2.0)[0].bounds == (0.5, 2.0)
    with pytest.raises(ConfigError, match="above the upper"):
        parse_rejections("token_k1", "0.8")


def test_one_token_that_the_trainer_finds_unlikely_vetoes_its_sequence():
    old = torch.tensor([[-1.0, -9.0], [-9.0, -1.0], [-1.0, -1.0], [-1.0, -9.0]])
    rollout = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -9.0], [-1.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    kept, _ = compute_rollout_rejection_mask(old - rollout, mask, "seq_max_k1", 1e3)
    assert kept.tolist() == [[0, 0], [0, 0], [1, 1], [1, 0]]


def test_a_text_of_two_bounds_is_no_number():
    assert RolloutCorrectionConfig(rollout_is_threshold="1_5").rollout_is_threshold == "1_5"
    assert parse_is_threshold("1_5") == (1.0, 5.0)


@pytest.mark.parametrize("threshold", ["", "a", "0_2", "nan", "inf", "2_1", -1.0, 0.0, 0.55, "0.5"])
def test_a_threshold_that_is_none_is_refused(threshold: Any):
    with pytest.raises(ConfigError) as caught:
        compute_rollout_correction_weights(torch.zeros(1, 1), torch.ones(1, 1), "token", threshold)
    assert caught.value.key == "algorithm.rollout_correction.rollout_is_threshold"


def test_turns_without_turn_ids_are_refused():
    with pytest.raises(ConfigError, match="turn_ids"):
        compute_rollout_correction_weights(torch.zeros(1, 1), torch.ones(1, 1), "turn")
