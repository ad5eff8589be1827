import subprocess
import sys

import pytest
from matplotlib.image import imread

from agentrl.errors import DataError
from agentrl.trainer.metrics.curve import (
    Series,
    draw_curves,
    mean_series,
    plot_curve,
    read_curves,
    running_mean,
)
from agentrl.trainer.metrics.sinks import JsonlSink


def write_run(path, *, steps=20, gain=0.03, sets=("arithmetic", "unseen")):
    sink = JsonlSink(path)
    for step in range(steps + 1):
        metrics = {"critic/rewards/mean": 0.2 + gain * step} if step else {}
        if step % 10 == 0:
            metrics |= {f"val/{name}/success": 0.1 + gain * step for name in sets}
        sink.log(step, metrics)
    sink.close()
    return path


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_curves_are_read_by_name(tmp_path):
    curves = read_curves(write_run(tmp_path / "m.jsonl"))
    assert curves.reward.steps == tuple(range(1, 21))
    assert curves.success["unseen"] == Series((0, 10, 20), pytest.approx((0.1, 0.4, 0.7)))


def test_what_is_not_finite_is_not_drawn(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"step": 1, "critic/rewards/mean": null}\n{"step": 2, "critic/score/mean": 1}\n'
    )
    assert read_curves(path).reward == Series((2,), (1.0,))


def test_picture_of_one_run(tmp_path):
    out = tmp_path / "pictures" / "curve.png"
    plot_curve(write_run(tmp_path / "m.jsonl"), out, title="$x_{ is no formula$", dpi=100)
    pixels = imread(out)
    assert pixels.shape[:2] == (360, 900)
    assert pixels.std() > 0.05, "something is drawn"
    assert [p.name for p in out.parent.iterdir()] == ["curve.png"]


def test_axes_have_units_and_the_legend_says_before_and_after(tmp_path):
    figure = draw_curves([read_curves(write_run(tmp_path / "m.jsonl"))])
    reward, success = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["training step"] * 2
    assert reward.get_ylabel() == "mean reward of a trajectory"
    assert success.get_ylabel() == "success"
    assert legend(reward) == ["each step", "running mean"]
    assert legend(success) == ["arithmetic: 10.0% → 70.0%", "unseen: 10.0% → 70.0%"]


def test_seeds_lie_over_each_other_with_their_mean(tmp_path):
    paths = [write_run(tmp_path / f"{n}.jsonl", gain=0.01 * n, sets=("a",)) for n in (1, 2, 3)]
    reward, success = draw_curves([read_curves(path) for path in paths]).axes
    assert legend(reward) == ["each of 3 seeds", "their mean"]
    assert len(reward.lines) == 4
    assert legend(success) == ["a: 10.0% → 50.0%"]
    plot_curve(paths, tmp_path / "three.png", dpi=50)
    assert (tmp_path / "three.png").stat().st_size > 2000


def test_a_run_without_validation_or_without_training_is_drawn_all_the_same(tmp_path):
    only_reward = read_curves(write_run(tmp_path / "a.jsonl", sets=()))
    only_val = read_curves(write_run(tmp_path / "b.jsonl", steps=0))
    for curves in (only_reward, only_val):
        texts = [text.get_text() for axes in draw_curves([curves]).axes for text in axes.texts]
        assert texts == ["not measured"]


def test_seeds_without_a_common_step_are_drawn_without_a_mean():
    runs = [Series((0.0,), (0.1,)), Series((5.0,), (0.3,))]
    empty = Series((), ())
    assert mean_series(runs) == empty
    figure = draw_curves([read_as(run) for run in runs])
    figure.canvas.draw()


def read_as(series):
    from agentrl.trainer.metrics.curve import Curves

    return Curves(reward=series, success={"a": series})


def test_a_file_with_nothing_to_draw_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "timing_s/step": 2.0}\n')
    with pytest.raises(DataError, match=r"m\.jsonl"):
        plot_curve(path, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_running_mean_keeps_constants_and_smooths():
    flat = Series(tuple(range(9)), (2.0,) * 9)
    assert running_mean(flat) == flat
    assert running_mean(Series((0, 1, 2), (0.0, 3.0, 0.0))).values == (1.5, 1.0, 1.5)
    assert running_mean(Series((), ())).values == ()


def test_drawing_leaves_pyplot_alone():
    code = (
        "import sys; from agentrl.trainer.metrics.curve import draw_curves, Curves, Series;"
        "draw_curves([Curves(Series((1,), (1.0,)), {})]).canvas.draw();"
        "assert 'matplotlib.pyplot' not in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
