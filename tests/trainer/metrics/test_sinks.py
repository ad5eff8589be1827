import errno
import io
import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentrl.atomic_io import atomic_file
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import DataError, MissingExtraError
from agentrl.rollout.states import StopReason
from agentrl.trainer.metrics.console import ConsoleSink
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.metrics.sinks import JsonlSink, TensorBoardSink, read_metrics
from agentrl.workers.rank_status import open_rank_status
from tests.fakes.requests import build_request, said

STEP = {
    "rollout/reward/mean": 0.125,
    "response_length/mean": 45.25,
    "num_turns/mean": 3.5,
    "actor/ppo_kl": 0.00123,
    "actor/pg_clipfrac": 0.01,
    "actor/grad_norm": 0.532,
    "timing_s/step": 1.5,
}


def log_console(lines, *, terminal=False):
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, width=80, force_terminal=terminal))
    for step, metrics in lines:
        sink.log(step, metrics)
    return out.getvalue().splitlines()


def steps_of(path):
    return [line.step for line in read_metrics(path)]


# JSONL.


def test_one_flat_line_a_step_is_there_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(1, {"actor/pg_loss": 0.1})
    sink.log(2, {"actor/pg_loss": 0.2, "val/a/success": 1})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    sink.close()
    assert lines == [
        {"step": 1, "actor/pg_loss": 0.1},
        {"step": 2, "actor/pg_loss": 0.2, "val/a/success": 1.0},
    ]


@given(st.dictionaries(st.text(min_size=1).filter(lambda k: k != "step"), st.floats(), max_size=4))
def test_every_line_is_valid_json_and_reads_back(tmp_path_factory, metrics):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(3, metrics)
    sink.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (line,) = read_metrics(path)
    for name, value in metrics.items():
        same = (
            line.metrics[name] == value if math.isfinite(value) else math.isnan(line.metrics[name])
        )
        assert same


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 0, "a": 0.1}\n{"step": 1, "a": null}\n{"step": 2, "a": 0.30000000000000004}\n'
    path.write_text(whole + '{"step": 3, "a": 4}\n{"step": 4, "a"')
    sink = JsonlSink(path, resumed_step=2)
    assert path.read_text() == whole, "what is kept is kept verbatim"
    sink.log(3, {"a": 5.0})
    sink.close()
    assert steps_of(path) == [0, 1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_without_a_file_begins_one(tmp_path):
    JsonlSink(tmp_path / "metrics.jsonl", resumed_step=5).close()
    assert steps_of(tmp_path / "metrics.jsonl") == []


def test_a_fresh_run_moves_earlier_metrics_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        sink = JsonlSink(path)
        sink.log(step, {})
        sink.close()
    kept = [steps_of(tmp_path / name) for name in ("metrics.1.jsonl", "metrics.2.jsonl")]
    assert kept == [[1], [2]]
    assert steps_of(path) == [3]


@pytest.mark.parametrize("line", ["{]", "[1]", '{"a": 1}', '{"step": 1, "a": "x"}', "\udcff"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(DataError) as caught:
        list(read_metrics(path))
    assert (caught.value.file, caught.value.line) == (path, 2)


def test_a_full_disk_names_the_file(tmp_path):
    class FullDisk(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.close()
    sink._file = FullDisk()
    with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl") as caught:
        sink.log(1, {})
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="run"):
        JsonlSink(tmp_path / "run" / "metrics.jsonl")


# Files that are whole or absent.


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a" / "x"
    with atomic_file(path) as draft:
        draft.write_text("first")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as draft:
        draft.write_text(f"sec{1 // 0}" if draft.write_text("sec") else "")
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


# The console.


def test_console_shows_what_matters_within_eighty_columns():
    lines = log_console([(0, {"val/unseen/success": 0.25}), (12, STEP | {"val/a/success": 0.5})])
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(lines[0].split()) == (
        "step reward val length turns kl grad tools scorer seconds left"
    )
    assert lines[1].split() == ["0", "-", "0.250", *"-" * 8]
    assert " ".join(lines[2].split()) == "12 0.125 0.500 45.2 3.50 1.2e-03 0.532 - - 1.5 0s"


def test_console_shows_the_steps_of_the_run_and_the_time_that_is_left():
    out = io.StringIO()
    clock = iter([100.0, 110.0, 140.0, 7340.0])
    sink = ConsoleSink(Console(file=out, width=80), total_steps=24, clock=lambda: next(clock))
    for step in (0, 1, 2, 3):
        sink.log(step, STEP | {"rollout/tool_calls/failed_frac": 0.25})
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert [row[0] for row in rows] == ["step", "0/24", "1/24", "2/24", "3/24"]
    assert [row[-1] for row in rows] == ["left", "-", "3m50s", "7m20s", "14h04m"]
    assert rows[1][7] == "25%"


def test_console_columns_are_under_their_titles():
    header, line = log_console([(1, STEP | {"val/a/success": 0.5})])
    ends = [len(header[: header.index(title)]) + len(title) for title in header.split()]
    assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for end in ends)


def test_console_names_every_validation_set_where_there_are_several():
    lines = log_console([(1, {"val/[a]/success": 0.5, "val/b/c/success": 0.25})])
    assert lines[2].strip() == "validation: [a] 0.500, b/c 0.250"


def test_console_says_once_in_a_row_of_steps_that_there_is_nothing_to_learn():
    frac = "algorithm/zero_signal_groups_frac"
    shares = (1.0, 1.0, 0.5, 1.0)
    lines = log_console([(i, STEP | {frac: share}) for i, share in enumerate(shares, start=1)])
    message = "no group had a learning signal: every advantage is 0"
    assert [line.split()[0] for line in lines] == ["step", "1", "no", "2", "3", "a", "4", "no"]
    assert lines[2].strip() == lines[7].strip() == message
    assert lines[5].strip() == "a learning signal after 2 steps without one"
    assert all(len(line) <= 80 for line in lines)


def test_console_says_that_most_calls_were_refused_if_there_is_nothing_to_learn():
    calls = {"mean": 1.5, "ok": 0.25, "malformed": 1.25}
    step = STEP | {f"rollout/tool_calls/{name}": value for name, value in calls.items()}
    frac = "algorithm/zero_signal_groups_frac"
    lines = log_console([(1, step | {frac: 1.0})])
    assert lines[3].strip() == "tool calls: 83% malformed, 0% with a ToolError"
    summarized = step | {"rollout/tool_calls/mean": 1.0}  # without the calls of earlier contexts
    assert "tool calls: 83% malformed" in log_console([(1, summarized | {frac: 1.0})])[3]
    answered = {"rollout/tool_calls/ok": 1.5, "rollout/tool_calls/malformed": 0.0}
    assert len(log_console([(1, step | answered | {frac: 1.0})])) == 3
    assert len(log_console([(1, STEP | {frac: 1.0})])) == 3


def test_console_repeats_its_heading_and_shows_nan():
    lines = log_console([(step, STEP | {"actor/grad_norm": math.nan}) for step in range(26)])
    assert sum(line.split()[0] == "step" for line in lines) == 2
    assert lines[1].split()[6] == "nan"


def test_a_log_file_gets_no_escape_codes_and_a_terminal_does():
    assert not any("\x1b" in line for line in log_console([(1, STEP)]))
    assert any("\x1b" in line for line in log_console([(1, STEP)], terminal=True))


@pytest.mark.parametrize(("mode", "is_main"), [("live", True), ("live", False), ("auto", True)])
def test_progress_is_drawn_on_the_main_rank_on_terminals(mode, is_main, tmp_path):
    out = io.StringIO()
    is_drawn = mode == "live" and is_main
    console = Console(file=out, width=80, force_terminal=is_drawn)
    config = TrainerConfig(default_local_dir=tmp_path, progress=mode)
    run_logger = RunLogger(config, is_main=is_main, console=console)
    requests = [build_request(said(2)), build_request(stop_reason=StopReason.FAILED)]
    status = open_rank_status(None, rank=0, size=1, timeout_s=60.0)
    run_logger.show_stages(status)
    with run_logger.requests_bar("rollout train", len(requests)) as count:
        for request in requests:
            count(request)
        status.enter("update_actor of step 1")
        with status.count(8) as advance:
            advance(2)
            ConsoleSink(console).log(1, STEP)
            assert run_logger.progress.is_live == is_drawn
            if is_drawn:
                run_logger.progress._live.refresh()
    run_logger.close()
    for text in ("2/2", "1 failed", "update_actor of step 1", "2/8"):
        assert (text in out.getvalue()) == is_drawn
    assert "0.125" in out.getvalue()


# Sinks together.


def test_each_step_goes_to_the_sinks_that_the_run_file_names(tmp_path):
    out = io.StringIO()
    config = TrainerConfig(default_local_dir=tmp_path, logger=["console", "jsonl", "jsonl"])
    run_logger = RunLogger(config, console=Console(file=out))
    run_logger.open(start=tmp_path, resumed_step=None)
    run_logger.track(1, STEP)
    run_logger.close()
    assert "0.125" in out.getvalue()
    assert steps_of(tmp_path / "metrics.jsonl") == [1]


def test_the_file_of_metrics_needs_no_name(tmp_path):
    run_logger = RunLogger(TrainerConfig(default_local_dir=tmp_path, logger=[]))
    run_logger.open(start=tmp_path, resumed_step=None)
    run_logger.track(1, STEP)
    run_logger.close()
    assert steps_of(tmp_path / "metrics.jsonl") == [1]


@pytest.mark.parametrize("logger", [["console"], ["console", "jsonl"]])
def test_resumed_run_repeats_no_warning_of_the_steps_before(tmp_path, logger):
    lines = [{"step": step, "rollout/failed_frac": 0.5} for step in (1, 2)]
    lines += [{"step": 3, "rollout/failed_frac": 0.0}]  # after the checkpoint
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    out = io.StringIO()
    config = TrainerConfig(default_local_dir=tmp_path, logger=logger)
    run_logger = RunLogger(config, console=Console(file=out))
    run_logger.open(start=tmp_path, resumed_step=2)
    run_logger.track(3, STEP | {"rollout/failed_frac": 0.5})
    run_logger.close()
    assert "warning" not in out.getvalue()


def test_tensorboard_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install .tensorboard"):
        TensorBoardSink(tmp_path)


def test_tensorboard_gets_scalars_and_forgets_later_steps_on_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, resumed in ((1, None), (3, 2)):
        sink = TensorBoardSink(tmp_path, resumed_step=resumed)
        for step in range(start, start + 3):
            sink.log(step, {"critic/rewards/mean": step + start / 10})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(e.step, round(e.value, 3)) for e in events.Scalars("critic/rewards/mean")]
    assert scalars == [(1, 1.1), (2, 2.1), (3, 3.3), (4, 4.3), (5, 5.3)]


def test_the_console_shows_the_reward_that_is_trained():
    combined = STEP | {"rollout/combined_reward/mean": 0.875}
    lines = log_console([(1, combined), (2, STEP)])
    assert lines[0].split()[1] == "reward"
    assert [line.split()[1] for line in lines[1:]] == ["0.875", "0.125"]


def test_a_file_that_is_deleted_under_a_run_is_made_again(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"a": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    sink.log(2, {"a": 2.0})
    sink.close()
    assert [line.step for line in read_metrics(tmp_path / "metrics.jsonl")] == [2]
    assert "was deleted" in caplog.text
