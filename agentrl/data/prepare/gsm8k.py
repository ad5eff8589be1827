"""Convert GSM8K to the row format, with the settings of its tool and simulated user."""

from agentrl.answers import extract_gsm8k_answer
from agentrl.config.schema.prepare import Gsm8kConfig
from agentrl.data.files import Row, download_split, read_rows
from agentrl.data.prepare.manifest import SPLITS, SplitFiles, convert_splits
from agentrl.errors import DataError

DATA_SOURCE = "openai/gsm8k"
SYSTEM_PROMPT = (
    "Solve the problem step by step. When you have an answer, check it with the "
    "`calc_gsm8k_reward` tool, and think again if it is wrong. End with `#### ` and the number."
)

_MAKER = "gsm8k/1"
_OTHERWISE = "prepare.gsm8k.source_dir: a folder with train.jsonl and test.jsonl"


def prepare_gsm8k(config: Gsm8kConfig) -> SplitFiles:
    """Write train.parquet and test.parquet, unless they exist.

    Raises:
        DataError: If the source cannot be read, or `out_dir` has other files of these names.
    """
    folder = config.source_dir
    return convert_splits(
        config,
        _MAKER,
        [] if folder is None else [folder / f"{split}.jsonl" for split in SPLITS],
        lambda split: _read_split(config, split),
        _row,
    )


def _read_split(config: Gsm8kConfig, split: str) -> tuple[list[Row], str]:
    """Read the rows of a split, and name their source."""
    if config.source_dir is None:
        rows = download_split(DATA_SOURCE, split, subset="main", otherwise=_OTHERWISE)
        return rows, f"{DATA_SOURCE}, {split}"
    source = str(config.source_dir / f"{split}.jsonl")
    return read_rows(source), source


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
