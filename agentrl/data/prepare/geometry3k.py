"""Convert Geometry3K to the row format: problems with a picture, and the settings of their tool."""

from pathlib import Path

from agentrl.config.schema.prepare import Geometry3kConfig
from agentrl.data.files import Row, download_split, read_rows
from agentrl.data.prepare.manifest import SPLITS, SplitFiles, convert_splits
from agentrl.errors import DataError

DATA_SOURCE = "hiyouga/geometry3k"
SYSTEM_PROMPT = (
    "Solve the geometry problem step by step; the image shows the figure. When you have an answer, "
    "check it with the `calc_geo3k_reward` tool, and think again if it is wrong. End with the "
    "answer in \\boxed{}."
)

_MAKER = "geometry3k/1"
_MARK = "<image>"
_SOURCE = "a folder with train*.parquet and test*.parquet, as the hub has them"
_OTHERWISE = f"prepare.geometry3k.source_dir: {_SOURCE}"


def prepare_geometry3k(config: Geometry3kConfig) -> SplitFiles:
    """Write train.parquet and test.parquet, unless they exist.

    Raises:
        DataError: If the source cannot be read, or `out_dir` has other files of these names.
    """
    folder = config.source_dir
    return convert_splits(
        config,
        _MAKER,
        [] if folder is None else [part for split in SPLITS for part in _find_parts(folder, split)],
        lambda split: _read_split(config, split),
        _row,
    )


def _read_split(config: Geometry3kConfig, split: str) -> tuple[list[Row], str]:
    """Read the rows of a split, and name their source."""
    if config.source_dir is None:
        rows = download_split(DATA_SOURCE, split, otherwise=_OTHERWISE)
        return rows, f"{DATA_SOURCE}, {split}"
    parts = _find_parts(config.source_dir, split)
    return [row for part in parts for row in read_rows(part)], str(config.source_dir)


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
