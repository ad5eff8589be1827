"""Convert GSM8K to the row format, with the settings of its tool and simulated user."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from agentrl.answers import extract_gsm8k_answer
from agentrl.config.schema.prepare import Gsm8kConfig
from agentrl.data.files import Row, download_split, read_rows, write_parquet
from agentrl.data.prepare.manifest import content_of, make_once
from agentrl.errors import DataError

DATA_SOURCE = "openai/gsm8k"
SYSTEM_PROMPT = (
    "Solve the problem step by step. When you have an answer, check it with the "
    "`calc_gsm8k_reward` tool, and think again if it is wrong. End with `#### ` and the number."
)

_MAKER = "gsm8k/1"
_SPLITS = ("train", "test")
_OTHERWISE = "prepare.gsm8k.source_dir: a folder with train.jsonl and test.jsonl"


class Gsm8kFiles(NamedTuple):
    """The files, and whether this call made them."""

    train: Path
    test: Path
    made: bool


def prepare_gsm8k(config: Gsm8kConfig) -> Gsm8kFiles:
    """Write train.parquet and test.parquet, unless they exist.

    Raises:
        DataError: If the source cannot be read, or `out_dir` has other files of these names.
    """
    out_dir = config.out_dir
    train, test = files = [out_dir / f"{split}.parquet" for split in _SPLITS]
    arguments = config.model_dump(mode="json", exclude={"out_dir", "source_dir"})
    if config.source_dir is not None:
        arguments["of"] = [content_of(config.source_dir / f"{split}.jsonl") for split in _SPLITS]
    made = make_once(out_dir, _MAKER, arguments, files, lambda: _write(config, files))
    return Gsm8kFiles(train, test, made)


def _write(config: Gsm8kConfig, files: Iterable[Path]) -> None:
    for split, file in zip(_SPLITS, files, strict=True):
        if config.source_dir is None:
            source = f"{DATA_SOURCE}, {split}"
            raw = download_split(DATA_SOURCE, split, subset="main", otherwise=_OTHERWISE)
        else:
            source = str(config.source_dir / f"{split}.jsonl")
            raw = read_rows(source)
        chosen = raw[: config.max_samples]
        write_parquet(file, [_row(row, n, split, source) for n, row in enumerate(chosen)])


def _row(raw: Row, index: int, split: str, source: str) -> Row:
    question, answer = raw.get("question"), raw.get("answer")
    truth = extract_gsm8k_answer(answer) if isinstance(answer, str) else None
    if not isinstance(question, str) or truth is None:
        raise DataError(
            "a row without a question or without an answer that ends with `#### number`",
            file=source,
            row=index,
            expected="columns `question` and `answer`, as GSM8K has them",
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "index": index,
            "split": split,
            "question": question,
            "answer": answer,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
            "interaction_kwargs": {"name": "gsm8k", "query": question, "ground_truth": truth},
        },
    }
