"""Read data files, or users' dataset classes, as prompts."""

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from omegaconf import OmegaConf

from agentrl.config.schema.run import DataConfig
from agentrl.data.files import read_rows
from agentrl.data.rows import Prompt, RowReader
from agentrl.errors import DataError
from agentrl.media.loading import digest_sources
from agentrl.plugins import load_object
from agentrl.plugins.call import accepted_keywords


class PromptDataset(Sequence[Prompt]):
    """Prompts in the order of their files.

    Example:
        >>> dataset = PromptDataset([Prompt(index=0, messages=[{"role": "user", "content": "Hi"}])])
        >>> len(dataset), dataset[0].messages[0].text
        (1, 'Hi')
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = tuple(prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "PromptDataset": ...
    def __getitem__(self, index: int | slice) -> "Prompt | PromptDataset":
        if isinstance(index, slice):
            return PromptDataset(self._prompts[index])
        return self._prompts[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the contents of all prompts, in order. It changes if the data changes."""
        digest = hashlib.sha256()
        for prompt, content in zip(self._prompts, self.row_digests, strict=True):
            digest.update(f"{prompt.index} {content}\n".encode())
        return digest.hexdigest()

    @cached_property
    def row_digests(self) -> tuple[str, ...]:
        """Hash of the content of each prompt, without its index."""
        contents = (
            json.dumps(
                prompt.model_dump(exclude={"index", "multi_modal_data"}),
                sort_keys=True,
                default=repr,
            )
            + digest_sources(prompt.multi_modal_data)
            for prompt in self._prompts
        )
        return tuple(hashlib.sha256(content.encode()).hexdigest()[:32] for content in contents)

    def select(self, indices: Iterable[int]) -> "PromptDataset":
        """Return the prompts at `indices`, in that order."""
        return PromptDataset(self._prompts[index] for index in indices)

    def tools_named(self) -> dict[str, int]:
        """Return the tools that rows name, each with the index of the first row that names it."""
        named: dict[str, int] = {}
        for prompt in self._prompts:
            for tool in (*prompt.tools_kwargs, *(prompt.tool_selection or ())):
                named.setdefault(tool, prompt.index)
        return named

    def sources(self) -> dict[str, int]:
        """Return the data sources, each with the index of the first row that has it."""
        found: dict[str, int] = {}
        for prompt in self._prompts:
            found.setdefault(prompt.data_source, prompt.index)
        return found


def load_prompts(
    files: Sequence[str | Path], config: DataConfig, *, max_samples: int | None = None
) -> PromptDataset:
    """Read data files, directly or through the user's dataset class.

    Args:
        files: Parquet, JSON or JSONL files. Rows keep the order of files and lines.
        config: Names of the columns, and `custom_cls`.
        max_samples: Use only the first rows.

    Raises:
        DataError: With file, row number (from 0) and what was expected.
        PluginError: If `custom_cls` cannot be loaded.
    """
    if config.custom_cls is not None:
        name = f"{config.custom_cls.path}:{config.custom_cls.name}"
        rows = _custom_rows(name, files, config, max_samples)
        return read_prompts(rows, config, source=name, max_samples=max_samples)
    prompts: list[Prompt] = []
    for file in files:
        num_left = None if max_samples is None else max_samples - len(prompts)
        if num_left == 0:
            break
        reader = RowReader(file, config)
        for number, row in enumerate(read_rows(file, num_left)):
            prompts.append(reader.read(row, number, len(prompts)))
    if not prompts:
        raise DataError("no data files were given", expected="at least one file")
    return PromptDataset(prompts)


def read_prompts(
    rows: Sequence[Mapping[str, Any] | Prompt],
    config: DataConfig,
    *,
    source: str,
    max_samples: int | None = None,
) -> PromptDataset:
    """Read rows that are Python objects: mappings of columns, or prompts.

    Args:
        rows: The rows.
        config: Names of the columns.
        source: Origin of the rows, for errors.
        max_samples: Use only the first rows.

    Raises:
        DataError: With the number of the row (from 0) and what was expected.
    """
    if not rows:
        raise DataError(f"{source} returned no rows", expected="at least one row")
    reader = RowReader(source, config)
    return PromptDataset(
        row if isinstance(row, Prompt) else reader.read(dict(row), number, number)
        for number, row in enumerate(rows[:max_samples])
    )


def _build_dataset(
    custom_class: Any, files: Sequence[str | Path], config: DataConfig, max_samples: int | None
) -> Any:
    """Build the user's dataset, by agentrl's signature or by verl's, which has a `tokenizer`.

    The class gets the arguments that it takes. Rows above `max_samples` are cut anyway.
    """
    if "tokenizer" not in inspect.signature(custom_class).parameters:
        options = accepted_keywords(custom_class, {"max_samples": max_samples})
        return custom_class(list(files), config, **options)
    given = {
        "data_files": [str(file) for file in files],
        "tokenizer": None,
        "config": OmegaConf.create(config.model_dump(mode="json")),
        "processor": None,
        "max_samples": -1 if max_samples is None else max_samples,
    }
    return custom_class(**accepted_keywords(custom_class, given))


def _custom_rows(
    name: str, files: Sequence[str | Path], config: DataConfig, max_samples: int | None
) -> list[Any]:
    custom_class = load_object(name)
    try:
        dataset = _build_dataset(custom_class, files, config, max_samples)
        rows = [dataset[index] for index in range(len(dataset))]
    except Exception as error:
        kind = type(error).__name__
        message = f"the dataset class {name} raised {kind}: {error}"
        wanted = (
            "a class (files, config), or verl's (data_files, tokenizer, config, processor), each "
            "with max_samples if it reads that, and with __len__ and __getitem__"
        )
        raise DataError(message, expected=wanted) from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict | Prompt):
            message = f"a row is {type(row).__name__}"
            raise DataError(
                message, file=name, row=number, expected="a dict of columns, or a Prompt"
            )
    return rows
