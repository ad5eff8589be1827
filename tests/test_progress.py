"""The progress display: on a pseudo-terminal, and as plain lines."""

import asyncio
import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time

import pytest
from rich.console import Console

from agentrl import progress
from agentrl.progress import NO_PROGRESS, ProgressDisplay, format_duration

_ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


def read_screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after it has received some output."""
    lines, row, column = [""], 0, 0
    position = 0
    while position < len(output):
        if match := _ESCAPE.match(output, position):
            position = match.end()
            if match[2] == "A":
                row -= int(match[1] or 1)
            elif match[2] == "K":
                lines[row] = ""
            continue
        character = output[position]
        position += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row].ljust(column)[:column] + character + lines[row][column + 1 :]
            column += 1
    return lines


def run_on_terminal(program: str, *, columns: int = 100, stop_at: str = "") -> tuple[int, str]:
    """Run a Python program on a pseudo-terminal; send Ctrl-C when it has printed `stop_at`."""
    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (30, columns))
    size = {"COLUMNS": str(columns), "LINES": "30"}  # rich prefers them to the terminal's own
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=os.environ | size | {"TERM": "xterm-256color"},
        preexec_fn=make_terminal_ours,
    )
    os.close(inner)
    output = b""
    try:
        while chunk := os.read(outer, 65536):
            output += chunk
            if stop_at and stop_at.encode() in output:
                os.write(outer, b"\x03")
                stop_at = ""
    except OSError:  # Linux reports the end of the other side so
        pass
    finally:
        os.close(outer)
    return process.wait(timeout=60), output.decode()


def make_terminal_ours() -> None:
    import fcntl

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


WORK = """
import logging, sys, time, warnings
from rich.console import Console
from agentrl import progress
progress.DRAW_S = 0.02
early = logging.StreamHandler()
logging.getLogger("early").addHandler(early)
logging.getLogger("other").addHandler(logging.lastResort)
console = Console(highlight=False)
shown = progress.ProgressDisplay(console, stage=lambda: "update_actor of step 2")
with shown.bar("steps", 3, done=1, with_stage=True) as steps:
    with shown.bar("rollout train", 4) as count:
        for number in range(4):
            count(failed=number & 1, tokens=100)
            console.print(f"line {number}")
            print("from a tool", number)
            time.sleep(0.1)
    logging.getLogger("x").warning("a warning of a library")
    logging.getLogger("early").warning("from an early handler")
    warnings.warn("a Python warning")
    time.sleep(0.1)
    %s
print("the end")
"""


def test_a_terminal_shows_bars_below_the_lines_and_none_of_them_at_the_end():
    code, output = run_on_terminal(WORK % "steps()")
    assert code == 0
    for drawn in ("steps", "1/3", "rollout train", "4/4", "2 failed", "tokens/s", "left"):
        assert drawn in output
    assert "update_actor of step 2" in output
    screen = [line.rstrip() for line in read_screen(output)]
    expected = [text for n in range(4) for text in (f"line {n}", f"from a tool {n}")]
    assert screen[:8] == expected
    assert screen[8:10] == ["a warning of a library", "from an early handler"]
    assert "a Python warning" in screen[10]
    assert screen[-2:] == ["the end", ""]
    assert not any("rollout train" in line or "steps " in line for line in screen)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is visible"


def test_ctrl_c_leaves_the_terminal_clean():
    wait = "print('waiting', flush=True); time.sleep(60)"
    code, output = run_on_terminal(WORK % wait, stop_at="waiting")
    assert code != 0
    screen = [line.rstrip() for line in read_screen(output)]
    assert screen[-2] == "KeyboardInterrupt"
    assert not any("steps " in line or "update_actor" in line for line in screen)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_a_narrow_terminal_gets_lines_that_fit():
    _, output = run_on_terminal(WORK % "steps()", columns=40)
    drawn = [line for line in _ESCAPE.sub("", output).splitlines() if "rollout" in line]
    assert drawn
    assert all(len(part) <= 40 for line in drawn for part in line.split("\r"))
    assert not any("rollout" in line for line in read_screen(output))


def plain(monkeypatch: pytest.MonkeyPatch, mode: progress.ProgressMode = "auto") -> ProgressDisplay:
    monkeypatch.setattr(progress, "PLAIN_S", 0.04)
    return ProgressDisplay(Console(file=io.StringIO(), width=20), mode)


def printed(display: ProgressDisplay) -> str:
    return display._console.file.getvalue()


def test_without_a_terminal_long_work_prints_plain_lines(monkeypatch):
    display = plain(monkeypatch)
    with display.bar("rollout train", 2000) as count:
        count(900, failed=3, tokens=5000)
        time.sleep(0.2)
    lines = printed(display).splitlines()
    assert 1 <= len(lines) <= 5
    form = r"rollout train: 900/2,000, 3 failed, [\d,]+ tokens/s, 0s, \d+s left"
    assert all(re.fullmatch(form, line) for line in lines)


def test_without_a_terminal_short_work_prints_nothing():
    display = ProgressDisplay(Console(file=io.StringIO()))
    with display.bar("rollout train", 2) as count:
        count(2)
    assert printed(display) == ""


def test_without_a_terminal_the_steps_are_not_repeated_but_a_long_stage_is_printed(monkeypatch):
    display = plain(monkeypatch)
    with display.bar("steps", 3, with_stage=True):
        time.sleep(0.1)
        assert printed(display) == ""
        display.stage = lambda: "update_actor of step 1"
        time.sleep(0.3)
    assert "update_actor of step 1: 0s" in printed(display).splitlines()
    assert "steps" not in printed(display)


@pytest.mark.parametrize("mode", ["off", "plain"])
def test_neither_off_nor_plain_draws_on_a_terminal(monkeypatch, mode):
    display = plain(monkeypatch, mode)
    display._console._force_terminal = True
    with display.bar("work", 3) as count:
        count()
        time.sleep(0.2)
        assert not display.is_live
    assert "\x1b" not in printed(display)
    assert bool(printed(display)) == (mode == "plain")


def test_a_display_ends_with_its_last_task_and_can_start_again():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = ProgressDisplay(console, "live")
    before = threading.active_count()

    def work() -> None:
        with display.bar("work", 3):
            assert display.is_live
            assert threading.active_count() == before + 1
            raise ValueError("broken")

    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            work()
        assert not display.is_live
        assert threading.active_count() == before


def test_a_line_posted_by_a_signal_handler_is_printed():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = ProgressDisplay(console, "live")
    with display.bar("work", 3):
        display.post("stopping")
    assert "stopping" in printed(display)


def test_a_process_that_is_forked_while_a_display_is_drawn_writes_to_the_real_streams():
    forks = """
import os
pid = os.fork()
if pid == 0:
    print("from the child", flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    program = WORK % "".join(f"{line}\n    " for line in forks.strip().splitlines())
    code, output = run_on_terminal(program)
    assert code == 0
    assert "from the child" in output


async def test_counting_works_on_an_event_loop_and_on_threads():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = ProgressDisplay(console, "live")
    with display.bar("work", 200) as count:
        await asyncio.gather(*(asyncio.to_thread(count) for _ in range(200)))
        assert display._tasks[0].done == 200


def test_without_a_display_nothing_is_counted():
    with NO_PROGRESS.bar("work", 3) as count:
        count(2, failed=1, tokens=5)
    NO_PROGRESS.post("a line")
    assert not NO_PROGRESS.is_live


def test_durations_have_their_two_largest_units():
    assert [format_duration(s) for s in (59.6, 3599, 3600)] == ["1m00s", "59m59s", "1h00m"]
