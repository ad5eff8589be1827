"""Convert Geometry3K to the row format: problems with a picture, and the settings of their tool."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from agentrl.config.schema.prepare import Geometry3kConfig
from agentrl.data.files import Row, download_split, read_rows, write_parquet
from agentrl.data.prepare.manifest import content_of, make_once
from agentrl.errors import DataError

DATA_SOURCE = "hiyouga/geometry3k"
SYSTEM_PROMPT = (
    "Solve the geometry problem step by step; the image shows the figure. When you have an answer, "
    "check it with the `calc_geo3k_reward` tool, and think again if it is wrong. End with the "
    "answer in \\boxed{}."
)

_MAKER = "geometry3k/1"
_MARK = "<image>"
_SPLITS = ("train", "test")
_SOURCE = "a folder with train*.parquet and test*.parquet, as the hub has them"
_OTHERWISE = f"prepare.geometry3k.source_dir: {_SOURCE}"


class Geometry3kFiles(NamedTuple):
    """The files, and whether this call made them."""

    train: Path
    test: Path
    made: bool


def prepare_geometry3k(config: Geometry3kConfig) -> Geometry3kFiles:
    """Write train.parquet and test.parquet, unless they exist.

    Raises:
        DataError: If the source cannot be read, or `out_dir` has other files of these names.
    """
    out_dir = config.out_dir
    train, test = files = [out_dir / f"{split}.parquet" for split in _SPLITS]
    arguments = config.model_dump(mode="json", exclude={"out_dir", "source_dir"})
    if config.source_dir is not None:
        parts = [part for split in _SPLITS for part in _find_parts(config.source_dir, split)]
        arguments["of"] = [content_of(part) for part in parts]
    made = make_once(out_dir, _MAKER, arguments, files, lambda: _write(config, files))
    return Geometry3kFiles(train, test, made)


def _write(config: Geometry3kConfig, files: Iterable[Path]) -> None:
    for split, file in zip(_SPLITS, files, strict=True):
        if config.source_dir is None:
            source = f"{DATA_SOURCE}, {split}"
            raw = download_split(DATA_SOURCE, split, otherwise=_OTHERWISE)
        else:
            source = str(config.source_dir)
            raw = [row for part in _find_parts(config.source_dir, split) for row in read_rows(part)]
        chosen = raw[: config.max_samples]
        write_parquet(file, [_row(row, n, split, source) for n, row in enumerate(chosen)])


def _find_parts(folder: Path, split: str) -> list[Path]:
    """List the files of a split in their order.

    Raises:
        DataError: If there are none.
    """
    if parts := sorted(folder.glob(f"{split}*.parquet")):
        return parts
    raise DataError(f"no file {split}*.parquet", folder=folder, expected=_SOURCE)


def _row(raw: Row, index: int, split: str, source: str) -> Row:
    problem, answer, images = raw.get("problem"), raw.get("answer"), raw.get("images")
    if not isinstance(problem, str) or not isinstance(answer, str) or not images:
        raise DataError(
            f"a row of the split {split} without a problem, an answer or images",
            file=source,
            row=index,
            expected="columns `images`, `problem` and `answer`, as Geometry3K has them",
        )
    if problem.count(_MARK) != len(images):
        raise DataError(
            f"a problem of the split {split} with {problem.count(_MARK)} {_MARK} and "
            f"{len(images)} images",
            file=source,
            row=index,
            expected=f"one {_MARK} for each image",
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": problem},
        ],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "index": index,
            "split": split,
            "question": problem,
            "answer": answer,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": answer}}},
        },
    }
