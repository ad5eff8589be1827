"""Digests of the files of saved rollouts, and of the policy's weights, in a chain.

    rollouts/digests.jsonl
    {"file": "step_000010.jsonl.zst", "step": 10, "digest": "5d...", "chain": "a1..."}
    {"file": "weights_000010", "step": 10, "digest": "90...", "chain": "7c..."}

`weights_000010` is no file: its digest is that of the policy's trained weights after step 10
(`digest_weights` with `sum_placed_bits`). In other lines `digest` is that of the file's content.
`chain` is the digest of the line before it with the name and the digest: a file that was changed,
left out or moved is found, also if its own line was changed.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from agentrl.atomic_io import atomic_file
from agentrl.errors import DataError
from agentrl.trainer.rollouts.line_files import COMPRESSED

DIGESTS_FILE = "digests.jsonl"
_WEIGHTS = "weights_"
_SIZE = 16
_FIRST = "0" * 2 * _SIZE
_BLOCK_BYTES = 1 << 20


class FileDigest(NamedTuple):
    """A line of `digests.jsonl`."""

    file: str
    step: int
    digest: str
    chain: str

    @property
    def is_of_weights(self) -> bool:
        """Whether the line is of weights, and not of a file."""
        return self.file.startswith(_WEIGHTS)


def add_digest(path: Path, step: int) -> None:
    """Add a line for a file of rollouts. Lines of later steps, and of the same file, are dropped.

    A resumed run repeats a step and writes its files again, one after the other.

    Raises:
        OSError: If a file cannot be read or written.
        DataError: If the lines cannot be read.
    """
    _add(path.parent, FileDigest(path.name, step, digest_file(path), ""))


def add_weight_digest(folder: Path, step: int, digest: str) -> None:
    """Add a line for the weights after a step, as `add_digest` does; if it is there, keep it.

    A resumed run has the weights of its checkpoint, whose line it has written before.

    Raises:
        OSError: If the lines cannot be read or written.
        DataError: If the lines cannot be read.
    """
    added = FileDigest(f"{_WEIGHTS}{step:06d}", step, digest, "")
    folder.mkdir(parents=True, exist_ok=True)
    if not any(one[:3] == added[:3] for one in _read(folder)):
        _add(folder, added)


def _add(folder: Path, added: FileDigest) -> None:
    lines, is_cut = _read_lines(folder)
    must_write_all = is_cut
    for line in reversed(lines):  # only the last lines can be of this step or a later one
        one = _parse(line, folder)
        must_write_all |= one.step > added.step or _is_same(one, added)
        if one.step < added.step:
            break
    if must_write_all:
        _write(folder, _without([_parse(line, folder) for line in lines], added))
        return
    before = _parse(lines[-1], folder).chain if lines else _FIRST
    added = added._replace(chain=_continue(before, added))
    with (folder / DIGESTS_FILE).open("a", encoding="utf-8") as file:
        file.write(_as_line(added))


def _without(lines: list[FileDigest], added: FileDigest) -> list[FileDigest]:
    """Return lines that are still valid, and a new one; after a dropped line the chain is new."""
    kept, has_dropped = list[FileDigest](), False
    for one in lines:
        if one.step > added.step or _is_same(one, added):
            has_dropped = True
        else:
            kept.append(one._replace(chain="") if has_dropped else one)
    return [*kept, added]


def _is_same(one: FileDigest, other: FileDigest) -> bool:
    """Return whether a file replaces another one: a resumed run may compress its files."""
    return one.file.removesuffix(COMPRESSED) == other.file.removesuffix(COMPRESSED)


def drop_digests(folder: Path, *, after: int) -> None:
    """Drop the lines of the steps later than `after`: their files were moved aside.

    Damaged lines stay as they are; an audit reports them.

    Raises:
        OSError: If the lines cannot be written.
    """
    try:
        lines = _read(folder)
    except DataError:
        return
    kept = [one for one in lines if one.step <= after]
    if len(kept) < len(lines):
        _write(folder, kept)


def read_digests(folder: Path) -> list[FileDigest]:
    """Read the lines of a folder of rollouts, and check their chain.

    Raises:
        DataError: If there are none, or a line does not continue the chain.
    """
    path = folder / DIGESTS_FILE
    if not path.is_file():
        raise DataError("the rollouts have no digests", file=path)
    chain, lines = _FIRST, _read(folder)
    for number, one in enumerate(lines, start=1):
        chain = _continue(chain, one)
        if one.chain != chain:
            raise DataError(
                f"the line of {one.file} does not continue the chain of digests",
                file=path,
                line=number,
                expected=f"chain {chain}",
            )
    return lines


def digest_file(path: Path) -> str:
    """Return the digest of a file's content."""
    digest = blake2b(digest_size=_SIZE)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read(folder: Path) -> list[FileDigest]:
    return [_parse(line, folder) for line in _read_lines(folder)[0]]


def _read_lines(folder: Path) -> tuple[list[str], bool]:
    """Return the complete lines, and whether a run was killed while it wrote another one."""
    path = folder / DIGESTS_FILE
    if not path.is_file():
        return [], False
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return lines, bool(rest)


def _parse(line: str, folder: Path) -> FileDigest:
    try:
        return FileDigest(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise DataError("a damaged line of digests", file=folder / DIGESTS_FILE) from error


def _write(folder: Path, lines: list[FileDigest]) -> None:
    """Write all lines; the chain is continued where it is missing."""
    chain, texts = _FIRST, list[str]()
    for one in lines:
        chain = one.chain or _continue(chain, one)
        texts.append(_as_line(one._replace(chain=chain)))
    with atomic_file(folder / DIGESTS_FILE) as draft:
        draft.write_text("".join(texts), encoding="utf-8")


def _as_line(one: FileDigest) -> str:
    return json.dumps(one._asdict()) + "\n"


def _continue(chain: str, one: FileDigest) -> str:
    text = json.dumps([chain, one.file, one.step, one.digest])
    return blake2b(text.encode(), digest_size=_SIZE).hexdigest()
