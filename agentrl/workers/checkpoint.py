"""Checkpoints of a run on disk or in a store (`s3://...`): complete, or absent.

    global_step_10/
        rank_0.safetensors       rank 0's slices of weights (`weight/NAME`) and moments
        rank_1.safetensors       (`exp_avg/NAME`, ...), float32, Hugging Face names; those of the
                                 critic after `critic/`
        state.json               identity of the model, counters, random streams, the data's order
        manifest.json            digests of each file above, position of each slice; written last

On disk, a checkpoint is written to a temporary folder, flushed, and made visible by one rename. It
is also removed by one rename. In a store, which has no such rename, a folder with a manifest is a
checkpoint. It contains no pickles. `checkpoint_writer` writes it; every rank writes its own file.
This module finds, verifies and reads checkpoints. A run on any number of ranks can read them. Files
are hashed in pieces, so that ranks and threads share the work.

Format 1 (`model.safetensors` and `optimizer.safetensors` with whole tensors) is still read.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from agentrl.atomic_io import move_into
from agentrl.errors import AgentRLError, CheckpointError, StoreError
from agentrl.messages import restore_numbers
from agentrl.remote_io import Location, RemotePath
from agentrl.workers.rng import RandomState
from agentrl.workers.shards import LocalSlice, Overlap, byte_view, overlap

logger = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
SUPERSEDED = "superseded"
"""Subfolder for the checkpoints that a run from an earlier step replaces."""
WEIGHT = "weight/"
"""Prefix of the weights among the tensors; moments have their own."""
CRITIC = "critic/"
"""Prefix of the critic's tensors: `critic/weight/NAME`; the actor's have none."""
_FOLDER = re.compile(r"global_step_(\d+)")
_FORMAT_1 = {"model.safetensors": WEIGHT, "optimizer.safetensors": ""}
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""Errors that a file with other content than agentrl writes can raise."""
_NUM_THREADS = 4
_READ_BYTES = 2**20
_COPY_BYTES = 2**24
"""Bytes of a slice that are read at a time, and of a file in a store."""
_HEADER_BYTES = 10**8
"""Most bytes of the header of a safetensors file, as in its definition."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights and moments, by safetensors' names."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identifies the model of a checkpoint."""

    architecture: str
    """The Hugging Face class."""
    shapes: dict[str, list[int]]
    """Shape of every trained weight."""
    base: str = ""
    """Digest of the frozen weights: with LoRA, or a frozen vision tower; empty: none is frozen."""
    scales: dict[str, float] = field(default_factory=dict[str, float])
    """With LoRA: the factor of each adapter."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run except tensors, as JSON values."""

    step: int
    """Training steps done."""
    identity: ModelIdentity
    config_digest: str = ""
    """Digest of the resolved configuration."""
    origin: str = ""
    """The initial policy of the run; empty if it was not recorded."""
    actor: dict[str, int] = field(default_factory=dict[str, int])
    """The actor's counters."""
    critic: dict[str, int] = field(default_factory=dict[str, int])
    """The critic's counters."""
    critic_identity: ModelIdentity | None = None
    """None: the run has no critic."""
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    """The run's summary so far: best validation, seconds spent, ..."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """The position in the data."""
    random: list[RandomState] = field(default_factory=list[RandomState])
    """The random streams of each rank."""
    unlogged: dict[str, float] | None = None
    """Metrics of the last step, if the run stopped before it was validated and logged."""


class Piece(NamedTuple):
    """Consecutive bytes of a file."""

    num_bytes: int
    sha256: str


class StoredSlice(NamedTuple):
    """A slice of a tensor in a file."""

    file: str
    offset: list[int]
    shape: list[int]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    files: dict[str, list[Piece]]
    """The pieces of each file, in order."""
    tensors: dict[str, list[StoredSlice]]
    """The slices of each tensor, which do not overlap."""
    format: int = FORMAT

    def digest(self) -> str:
        """Hash the manifest itself."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self) | {"sha256": self.digest()}, sort_keys=True)


_STATE, _MANIFEST = TypeAdapter(RunState), TypeAdapter(Manifest)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are complete."""

    path: Location
    state: RunState
    manifest: Manifest

    def check_model(
        self, expected: ModelIdentity, expected_critic: ModelIdentity | None = None
    ) -> None:
        """Refuse the checkpoint of another model.

        Args:
            expected: The policy.
            expected_critic: The critic; None: the run has none.

        Raises:
            CheckpointError: naming the first difference.
        """
        state = self.state
        self._check(state.identity, expected, "model")
        if expected_critic is None:
            return
        if state.critic_identity is None:
            raise CheckpointError(
                f"{self.path.name} has no critic, and algorithm.adv_estimator reads values",
                path=self.path,
                expected="a checkpoint of a run with a critic, or an estimator without one; "
                "trainer.resume_mode=disable or another trainer.default_local_dir starts from the "
                "beginning",
            )
        self._check(state.critic_identity, expected_critic, "critic")

    def _check(self, found: ModelIdentity, expected: ModelIdentity, role: str) -> None:
        if found != expected:
            raise CheckpointError(
                f"{self.path.name} is of another {role}: {_difference(found, expected)}",
                path=self.path,
                expected=f"a {expected.architecture} of the run's own shapes; "
                "trainer.resume_mode=disable or another trainer.default_local_dir starts from the "
                "beginning",
            )

    @torch.no_grad()
    def read(self, targets: Mapping[str, LocalSlice]) -> None:
        """Copy the stored values of some slices into their memory.

        Raises:
            CheckpointError: if the checkpoint lacks a part of a slice.
            StoreError: if its store cannot be read.
        """
        left = {name: target.local.numel() for name, target in targets.items()}
        wanted: dict[str, list[tuple[str, StoredSlice]]] = {}
        for name, target in targets.items():
            for slice_ in self.manifest.tensors.get(name, []):
                if _overlap(slice_, target).num_elements:
                    wanted.setdefault(slice_.file, []).append((name, slice_))
        for file, slices in wanted.items():
            prefix = _FORMAT_1.get(file, "") if self.manifest.format == 1 else ""
            with reading(self.path, file), (self.path / file).open("rb") as stream:
                header, data_start = _read_header(stream)
                entries = [(header[name.removeprefix(prefix)], name, one) for name, one in slices]
                for entry, name, slice_ in sorted(entries, key=lambda e: e[0]["data_offsets"]):
                    start = data_start + entry["data_offsets"][0]
                    dtype = DTYPES[entry["dtype"]]
                    left[name] -= _copy(stream, start, dtype, slice_, targets[name])
        if missing := next((name for name, num in left.items() if num), None):
            raise CheckpointError(f"{self.path.name} lacks values of {missing}", path=self.path)


def open_checkpoint(path: Location, *, rank: int = 0, num_ranks: int = 1) -> Checkpoint:
    """Open a checkpoint and verify a rank's share of its bytes.

    Cheap checks come first, on each rank: the manifest, the sizes of the files, the state's bytes.

    Args:
        path: The checkpoint's folder.
        rank: The share to verify; all together are every byte.
        num_ranks: The number of shares.

    Raises:
        CheckpointError: with the file that is missing, damaged or of another format.
        StoreError: if its store cannot be read.
    """
    manifest = _read_manifest(path)
    sizes = file_sizes(path)
    required = {STATE, *(_FORMAT_1 if manifest.format == 1 else ())}
    for name in sorted(required | manifest.files.keys()):
        pieces = manifest.files.get(name, [])
        if not pieces or sizes.get(name) != sum(piece.num_bytes for piece in pieces):
            raise _damaged(path, name)
    _verify(path, manifest, [STATE], rank=0, num_ranks=1)
    others = [name for name in manifest.files if name != STATE]
    _verify(path, manifest, others, rank=rank, num_ranks=num_ranks)
    return _read_contents(path, manifest)


def file_sizes(path: Location) -> dict[str, int]:
    """Return the bytes of each file of a folder by name; empty if there is no folder."""
    if isinstance(path, RemotePath):
        return path.file_sizes()
    sizes: dict[str, int] = {}
    for file in path.iterdir() if path.is_dir() else []:
        with suppress(FileNotFoundError):  # another rank has renamed its temporary file
            if file.is_file():
                sizes[file.name] = file.stat().st_size
    return sizes


def is_step(folder: Location) -> bool:
    """Return whether a folder has the name of a checkpoint."""
    return _FOLDER.fullmatch(folder.name) is not None


def newest_first(root: Location) -> list[tuple[int, Location]]:
    """List steps and checkpoint folders, the newest first.

    Raises:
        StoreError: if their store cannot be read.
    """
    folders: Iterable[Location]
    if isinstance(root, RemotePath):
        folders = [path for path in root.folders() if (path / MANIFEST).is_file()]
    else:
        folders = root.iterdir() if root.is_dir() else []
    matches = ((_FOLDER.fullmatch(path.name), path) for path in folders)
    found = ((int(match[1]), path) for match, path in matches if match)
    return sorted(found, key=lambda pair: pair[0], reverse=True)


def set_aside_later(root: Location, step: int) -> Sequence[Location]:
    """Move checkpoints of later steps to `superseded/`, for a run that continues from this step.

    Otherwise the run would resume from them. They keep their names, with a number if the name
    exists already.

    Args:
        root: The folder of the run's checkpoints.
        step: The first step of the run; 0: it starts from the beginning.

    Returns:
        The new path of each, the newest first.

    Raises:
        CheckpointError: if they cannot be moved.
    """
    later = [path for number, path in newest_first(root) if number > step]
    try:
        if isinstance(root, RemotePath):
            return _move_in_store(later, root / SUPERSEDED)
        return move_into([path for path in later if isinstance(path, Path)], root / SUPERSEDED)
    except (OSError, StoreError) as error:
        raise CheckpointError(
            f"cannot move an earlier checkpoint to {SUPERSEDED}/: {error}", path=root
        ) from error


def _move_in_store(paths: Sequence[Location], folder: RemotePath) -> list[Location]:
    """Move checkpoints of a store into a folder, each to the first free name."""
    moved: list[Location] = []
    for path in paths:
        assert isinstance(path, RemotePath)
        names = (f"{path.name}.{number}" if number else path.name for number in count())
        target = next(folder / name for name in names if not (folder / name).is_dir())
        path.move_folder(target, MANIFEST)
        moved.append(target)
    return moved


def _read_manifest(path: Location) -> Manifest:
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        version = content["format"]
        if version == 1:
            pieces = {
                name: [Piece(entry["bytes"], entry["sha256"])]
                for name, entry in dict(content["files"]).items()
            }
            return Manifest(files=pieces, tensors={}, format=1)
        if version != FORMAT:
            raise CheckpointError(
                f"{path.name} has format {version}",
                path=path,
                expected=f"1 to {FORMAT}: a later version of agentrl wrote it",
            )
        digest = content.pop("sha256")
        manifest = _MANIFEST.validate_python(content)
        if manifest.digest() != digest:
            raise ValueError("it was changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path.name} is incomplete: it has no readable {MANIFEST}", path=path
        ) from error
    return manifest


def _verify(
    path: Location, manifest: Manifest, names: list[str], *, rank: int, num_ranks: int
) -> None:
    """Hash a rank's share of some files: consecutive pieces of about equal size."""
    work: list[tuple[str, int, Piece]] = []
    total = sum(piece.num_bytes for name in names for piece in manifest.files[name])
    done = 0
    for name in names:
        start = 0
        for piece in manifest.files[name]:
            if (2 * done + piece.num_bytes) * num_ranks // (2 * total or 1) in (rank, num_ranks):
                work.append((name, start, piece))
            start += piece.num_bytes
            done += piece.num_bytes

    def is_as_written(one: tuple[str, int, Piece]) -> bool:
        name, start, piece = one
        try:
            return _hash(path / name, start, piece.num_bytes) == piece.sha256
        except OSError:
            return False

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for (name, _, _), is_right in zip(work, threads.map(is_as_written, work), strict=True):
            if not is_right:
                raise _damaged(path, name)


def _hash(file: Location, start: int, num_bytes: int) -> str:
    digest = hashlib.sha256()
    read_bytes = _READ_BYTES if isinstance(file, Path) else _COPY_BYTES
    with file.open("rb") as stream:
        stream.seek(start)
        while num_bytes and (data := stream.read(min(num_bytes, read_bytes))):
            digest.update(data)
            num_bytes -= len(data)
    return digest.hexdigest()


def _damaged(path: Location, name: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is damaged: {name} is missing or was changed", path=path)


@contextmanager
def reading(path: Location, file: str) -> Iterator[None]:
    """Turn any error of reading a file of a checkpoint into one that names the file.

    Raises:
        CheckpointError: if the file was written or changed by something else than agentrl.
    """
    try:
        yield
    except (AgentRLError, torch.OutOfMemoryError):
        raise
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path.name} is damaged: {file} cannot be read: {type(error).__name__}: {error}",
            path=path,
            expected="the file as agentrl wrote it, or an earlier checkpoint "
            "(trainer.resume_mode=resume_path)",
        ) from error


def _read_contents(path: Location, manifest: Manifest) -> Checkpoint:
    """Read the state and the headers: undamaged files may still be of another format."""
    name, tensors = STATE, manifest.tensors
    try:
        state = _STATE.validate_json(restore_numbers((path / name).read_bytes()))
        for name in manifest.files:
            if name == STATE:
                continue
            with (path / name).open("rb") as stream:
                header, _ = _read_header(stream)
            if manifest.format == 1:
                tensors |= {
                    _FORMAT_1[name] + key: [StoredSlice(name, [0] * len(shape), shape)]
                    for key, entry in header.items()
                    if key != "__metadata__"
                    for shape in [entry["shape"]]
                }
    except _UNREADABLE as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(
            f"{path.name} is of another format: {name}: {text}", path=path
        ) from error
    return Checkpoint(path, state, manifest)


def _read_header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file; return it, and the position of the first tensor.

    Raises:
        ValueError: if the file is not a safetensors file.
    """
    num_bytes = int.from_bytes(stream.read(8), "little")
    if num_bytes > _HEADER_BYTES:
        raise ValueError("its header is too large")
    header = json.loads(stream.read(num_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    return cast("dict[str, Any]", header), 8 + num_bytes


def _difference(found: ModelIdentity, expected: ModelIdentity) -> str:
    if found.architecture != expected.architecture:
        return f"{found.architecture}, not {expected.architecture}"
    for name in sorted(found.shapes.keys() | expected.shapes.keys()):
        theirs, ours = found.shapes.get(name), expected.shapes.get(name)
        if theirs != ours:
            return f"{name} is {theirs or 'absent'}, not {ours or 'absent'}"
    if found.base != expected.base:
        return "its weights were trained next to other frozen weights"
    if found.scales != expected.scales:
        return "model.lora_alpha was another"
    return "no difference"


def _overlap(slice_: StoredSlice, target: LocalSlice) -> Overlap:
    """Return the part that a stored slice and a target have in common; see `shards.overlap`."""
    if not slice_.shape:  # a number
        return overlap(([0], [1]), ([0], [1]))
    return overlap((slice_.offset, slice_.shape), (target.offset, target.local.shape))


def _copy(
    stream: BinaryIO, start: int, dtype: torch.dtype, slice_: StoredSlice, target: LocalSlice
) -> int:
    """Read the overlap of a stored slice and a target; return its number of elements.

    The file is read and not mapped: mapped pages would count as memory of the process.
    """
    shape = slice_.shape or [1]
    local = target.local if slice_.shape else target.local.reshape(1)
    theirs, ours, num = _overlap(slice_, target)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    step = max(1, _COPY_BYTES // (row_bytes or 1))
    for first in range(theirs[0].start, theirs[0].stop if num else 0, step):
        num_rows = min(step, theirs[0].stop - first)
        rows = torch.empty([num_rows, *shape[1:]], dtype=dtype)
        stream.seek(start + first * row_bytes)
        content = byte_view(rows).numpy().data
        if stream.readinto(content) != rows.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
            return 0
        to = ours[0].start + first - theirs[0].start
        local[(slice(to, to + num_rows), *ours[1:])].copy_(rows[(slice(None), *theirs[1:])])
    return num
