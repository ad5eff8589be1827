"""The logs of a run's processes in the run folder, one file each, and the driver's view of them."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from agentrl.cluster.host import LOG_MARK

TAIL_LINES = 20
_TAIL_BYTES = 65_536
_POLL_S = 0.2


class RunLogs:
    """The folder of the logs. Writes the parts that nodes without this folder send.

    Args:
        folder: The folder; it is made.
        run_id: Written to a file by which nodes recognize the folder.
        take: Returns parts of logs that were sent, as (name, bytes).
    """

    def __init__(
        self, folder: Path, run_id: str, take: Callable[[], list[tuple[str, bytes]]]
    ) -> None:
        self.folder = folder
        self._take = take
        self._ended = threading.Event()
        self._echoed: tuple[str, int] | None = None
        self._thread: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG_MARK).write_text(run_id, encoding="utf-8")

    def start(self, echo: str) -> None:
        """Collect logs in the background, and print one of them.

        Args:
            echo: The process with the log that is printed, from its present end.
        """
        path = self.path(echo)
        self._echoed = (echo, path.stat().st_size if path.exists() else 0)
        self._thread = threading.Thread(target=self._run, name="agentrl-logs", daemon=True)
        self._thread.start()

    def path(self, name: str) -> Path:
        """Return the file of a process."""
        return self.folder / f"{name}.log"

    def tail(self, name: str) -> str:
        """Return the last lines of a process's log."""
        self.collect()
        with suppress(OSError), self.path(name).open("rb") as file:
            file.seek(max(0, self.path(name).stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        return ""

    def collect(self) -> None:
        """Write what arrived since the last call."""
        with suppress(Exception):  # the monitor is away: its parts come later, or are lost
            for name, part in self._take():
                with self.path(name).open("ab") as file:
                    file.write(part)

    def close(self) -> None:
        """Write and print what is left; may be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(OSError):
            (self.folder / LOG_MARK).unlink()

    def _run(self) -> None:
        while True:
            is_last = self._ended.wait(_POLL_S)
            self.collect()
            self._echo()
            if is_last:
                return

    def _echo(self) -> None:
        assert self._echoed is not None
        name, offset = self._echoed
        with suppress(OSError), self.path(name).open("rb") as file:
            file.seek(offset)
            self._echoed = (name, offset + _print_lines(file))


def _print_lines(file: IO[bytes]) -> int:
    """Print the complete lines; return their bytes."""
    text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        if not line.startswith("--- "):
            print(line)
    sys.stdout.flush()
    return len(whole)
