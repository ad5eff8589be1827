"""Commands that make datasets and indices: `prepare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.app import OutDir, prepare_app


@prepare_app.command("arithmetic")
def prepare_arithmetic(
    out_dir: OutDir,
    seed: Annotated[int, typer.Option(help="Other seeds make other problems.")] = 0,
    num_train: Annotated[int, typer.Option(help="Training problems.", min=1)] = 2048,
    num_val: Annotated[int, typer.Option(help="Problems of each validation set.", min=1)] = 256,
    num_demos: Annotated[int, typer.Option(help="Conversations for a warm-up.", min=0)] = 16000,
) -> None:
    """Make word problems of one to three steps in the format of GSM8K, and demonstrations."""
    from agentrl.config.schema.run import ArithmeticConfig
    from agentrl.quickstart.arithmetic import prepare_arithmetic as prepare

    files = prepare(
        ArithmeticConfig(
            out_dir=out_dir, seed=seed, num_train=num_train, num_val=num_val, num_demos=num_demos
        )
    )
    _list_files([files.train, files.val, files.val_unseen, files.demos], made=files.made)


@prepare_app.command("gsm8k")
def prepare_gsm8k(
    out_dir: OutDir,
    source_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with train.jsonl and test.jsonl; without it they are downloaded.",
            show_default=False,
        ),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(help="Only so many rows of each.", min=1, show_default=False)
    ] = None,
) -> None:
    """Turn the real GSM8K into rows with tools and an interaction."""
    from agentrl.config.schema.run import Gsm8kConfig
    from agentrl.data.prepare.gsm8k import prepare_gsm8k as prepare

    files = prepare(Gsm8kConfig(out_dir=out_dir, source_dir=source_dir, max_samples=max_samples))
    _list_files([files.train, files.test], made=files.made)


def _list_files(files: Sequence[Path], *, made: bool) -> None:
    for file in files:
        typer.echo(f"{'made' if made else 'there already'}: {file}")


@prepare_app.command("search-index")
def prepare_search_index(
    out_dir: OutDir,
    corpus: Annotated[
        Path,
        typer.Option(help="JSON lines of {id, contents} or {id, title, text}.", show_default=False),
    ],
    stopwords: Annotated[str, typer.Option(help="Language of the words left out, or none.")] = "en",
    k1: Annotated[float, typer.Option(help="How much further occurrences of a word count.")] = 1.5,
    b: Annotated[float, typer.Option(help="How much a long document counts for less.")] = 0.75,
) -> None:
    """Index a corpus for SearchTool with `retriever: bm25` (extra `search`)."""
    from agentrl.config.schema.prepare import SearchIndexConfig
    from agentrl.data.prepare.search_index import prepare_search_index as prepare
    from agentrl.plugins.keys import read_keys

    given = {"out_dir": out_dir, "corpus": corpus, "stopwords": stopwords, "k1": k1, "b": b}
    config = read_keys(SearchIndexConfig, given, key="prepare search-index")
    files = prepare(config)
    _list_files([files.index_dir], made=files.made)
    typer.echo(f"{files.num_documents:,} documents")
