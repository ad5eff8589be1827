"""Write the pages with their data as files that a browser opens from disk, without a server.

    DIR/index.html, *.js, style.css, icon.svg         the same page
    DIR/data.js                                       lists, curves and steps
    DIR/trajectories/00000.js                         a trajectory and its tokens, read when opened
    DIR/pictures/0/                                   thumbnails of images and videos of run 0

A page that is opened from disk may not read other files, but it may run scripts. So the data are
scripts that assign the server's answers to the page.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from agentrl.errors import ConfigError
from agentrl.viewer.index import Entry, FileIndex, picture_names, texts_of
from agentrl.viewer.queries import to_json
from agentrl.viewer.runs import RunReader
from agentrl.viewer.server import STATIC, STATIC_FILES, answer
from agentrl.viewer.trajectories import (
    MAX_TOKENS,
    PROMPT,
    RESPONSE,
    SavedSequence,
    read_sequences,
    tokens_of,
)

_POLICY = (
    "default-src 'none'; script-src file: 'self'; style-src file: 'self'; img-src file: 'self'"
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has."""

    num_trajectories: int
    num_left_out: int
    """Trajectories of the chosen files beyond the limit."""


def export_runs(
    runs: Sequence[RunReader], folder: Path, *, steps: Sequence[int] = (), limit: int = 1000
) -> Exported:
    """Write the pages of runs to a folder.

    Args:
        runs: The runs.
        folder: A new or empty folder.
        steps: Steps whose files are exported; none: the last one of each run.
        limit: Trajectories of each file, in its order.

    Raises:
        ConfigError: If the folder has files, or a run has no file of one of the steps.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", expected="a new folder for --export")
    (folder / "trajectories").mkdir(parents=True)
    return _Export(runs, folder, steps, limit).write()


class _Export:
    def __init__(
        self, runs: Sequence[RunReader], folder: Path, steps: Sequence[int], limit: int
    ) -> None:
        self._runs = runs
        self._folder = folder
        self._steps = steps
        self._limit = limit
        self._answers: dict[str, object] = {}
        self._files: dict[str, str] = {}
        self._lists: dict[str, list[dict[str, object]]] = {}
        self._left_out = 0

    def write(self) -> Exported:
        chosen = [self._choose(run) for run in self._runs]
        for number, labels in enumerate(chosen):
            self._add_run(number, labels)
        overview = json.loads(answer(self._runs, "runs", {}))
        for row, labels in zip(overview["runs"], chosen, strict=True):
            row["files"] = [one for one in row["files"] if one["label"] in labels]
        self._answers["runs?"] = overview
        data = {"answers": self._answers, "files": self._files, "lists": self._lists}
        _write_script(self._folder / "data.js", f"window.AGENTRL_EXPORT = {to_json(data)};\n")
        self._write_page()
        return Exported(len(self._files), self._left_out)

    def _choose(self, run: RunReader) -> list[str]:
        """Return the labels of the files to export."""
        labels = list(run.find_files())
        by_step = {label: int(label.rpartition("_")[2]) for label in labels}
        wanted = set(self._steps or list(by_step.values())[:1])
        if self._steps and labels and (missing := wanted - set(by_step.values())):
            raise ConfigError(
                f"{run.folder} has no rollouts of step {min(missing)}",
                expected=f"one of {', '.join(map(str, sorted(set(by_step.values()))))}",
            )
        return [label for label in labels if by_step[label] in wanted]

    def _add_run(self, number: int, labels: Sequence[str]) -> None:
        run = self._runs[number]
        for label in labels:
            run.index(label)
        names = sorted({name for line in run.metrics() for name in line} - {"step"})
        self._add("axes", run=number)
        for name in names:
            self._add("curve", run=number, name=name)
        self._add("choices", run=number)
        rows = self._lists[str(number)] = []
        for label in labels:
            self._add("step", run=number, file=label)
            self._add("choices", run=number, file=label)
            index = run.index(label)
            self._left_out += max(0, len(index.entries) - self._limit)
            for entry in index.entries[: self._limit]:
                rows.append(_row_of(index, entry))
                self._write_trajectory(number, index, entry)

    def _add(self, query_name: str, /, **parameters: str | int) -> None:
        key, text = self._ask(query_name, **parameters)
        self._answers[key] = json.loads(text)

    def _ask(self, query_name: str, /, **parameters: str | int) -> tuple[str, str]:
        """Return the key of a query and the answer."""
        query = {key: str(value) for key, value in parameters.items()}
        return _key(query_name, **parameters), answer(self._runs, query_name, query)

    def _write_trajectory(self, number: int, index: FileIndex, entry: Entry) -> None:
        answers = [self._ask("trajectory", run=number, id=entry.id)]
        self._copy_pictures(number, index, entry)
        for position, sequence in enumerate(read_sequences(index, entry)):
            which = {"run": number, "id": entry.id, "sequence": position}
            answers += self._tokens(number, sequence, RESPONSE, which)
            answers += self._tokens(number, sequence, PROMPT, {**which, "part": PROMPT})
        name = f"trajectories/{len(self._files):05d}.js"
        self._files[f"{number}/{entry.id}"] = name
        lines = (
            f"window.AGENTRL_EXPORT.answers[{json.dumps(key)}] = {text};\n" for key, text in answers
        )
        _write_script(self._folder / name, "".join(lines))

    def _tokens(
        self, number: int, sequence: SavedSequence, part: str, which: Mapping[str, str | int]
    ) -> Iterator[tuple[str, str]]:
        """Yield the key and the answer of each page of tokens."""
        for start in range(0, max(len(sequence.request[f"{part}_ids"]), 1), MAX_TOKENS):
            page = tokens_of(self._runs[number], sequence, start, part)
            yield _key("tokens", **which, start=start), to_json(page)

    def _copy_pictures(self, number: int, index: FileIndex, entry: Entry) -> None:
        folder = self._folder / "pictures" / str(number)
        for name in picture_names(index.read(entry)["request"]):
            target = folder / Path(name).name
            if name.endswith("_small.png") and not target.exists() and index.has_picture(name):
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(index.picture(name), target)

    def _write_page(self) -> None:
        for name, _ in STATIC_FILES.values():
            shutil.copyfile(STATIC / name, self._folder / name)
        page = (STATIC / "index.html").read_text(encoding="utf-8")
        policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        data = '<script src="data.js" defer></script>\n'
        page = page.replace("<title>", f"{policy}<title>")
        page = page.replace("<script ", f"{data}<script ", 1)
        (self._folder / "index.html").write_text(page, encoding="utf-8")


def _key(query_name: str, /, **parameters: str | int) -> str:
    """Return the key of a query, as the page writes it."""
    return f"{query_name}?{urlencode(sorted(parameters.items()), safe='*')}"


def _row_of(index: FileIndex, entry: Entry) -> dict[str, object]:
    text = entry.text
    if text is None:
        text = "\n".join(texts_of(index.read(entry)["request"])).lower()
    advantage = index.advantages.get(entry.request_id)
    calls = [(tool, outcome, worked) for tool, outcome, _, worked in entry.calls]
    return {**entry.shown(), "advantage": advantage, "all_calls": calls, "text": text}


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
