"""Count the tokens of prompts, in parallel and with a cache, and drop prompts that are too long."""

import hashlib
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.atomic_io import atomic_file
from agentrl.data.dataset import PromptDataset
from agentrl.data.rows import Prompt
from agentrl.errors import DataError
from agentrl.plugins.environment import num_cores

logger = logging.getLogger(__name__)

EncodePrompt = Callable[[Prompt], Sequence[int]]
"""Renders a prompt with its tools through the chat template."""

DEFAULT_CACHE_DIR = Path("~/.cache/agentrl").expanduser()
WORTH_FORKING_S = 2.0
"""Processes are started only if the remaining work takes more seconds."""
_SAMPLE = 64
_CHUNK = 256


@dataclass(frozen=True)
class FilteredPrompts:
    """Result of the length filter."""

    dataset: PromptDataset
    num_dropped: int
    longest: int
    """Tokens of the longest prompt, including dropped ones."""
    max_length: int

    def __str__(self) -> str:
        total = len(self.dataset) + self.num_dropped
        return (
            f"{self.num_dropped} of {total} prompts were dropped: longer than {self.max_length} "
            f"tokens (the longest has {self.longest})"
        )


def measure_prompts(
    dataset: PromptDataset,
    encode: EncodePrompt,
    *,
    fingerprint: str,
    cache_dir: Path | None = None,
    num_workers: int | None = None,
) -> list[int]:
    """Count the tokens of each prompt.

    A few prompts are measured first. Processes are forked only if the rest would take seconds. The
    counts are cached by the content of the data and `fingerprint`.

    Args:
        dataset: The prompts.
        encode: Returns the tokens of a prompt. It is not pickled: the processes are forked.
        fingerprint: Identifies what else the counts depend on: tokenizer, template, tools.
        cache_dir: Folder of the cache; None: `~/.cache/agentrl`.
        num_workers: Number of processes; None: one per core.

    Raises:
        DataError: If a prompt cannot be encoded (detail: `row`).
    """
    key = hashlib.sha256(f"{dataset.fingerprint}\n{fingerprint}".encode()).hexdigest()
    cache = (cache_dir or DEFAULT_CACHE_DIR) / "prompt_lengths" / f"{key[:32]}.npy"
    cached = _load(cache)
    if cached is not None and len(cached) == len(dataset):
        return cached
    lengths = _measure(dataset, encode, num_workers or num_cores())
    _save(cache, lengths)
    return lengths


def drop_overlong(
    dataset: PromptDataset, lengths: Sequence[int], max_length: int
) -> FilteredPrompts:
    """Keep the prompts of at most `max_length` tokens, in order.

    Raises:
        DataError: If none is left.
    """
    kept = [index for index, length in enumerate(lengths) if length <= max_length]
    longest = max(lengths, default=0)
    if not kept:
        raise DataError(
            f"every prompt is longer than data.max_prompt_length, {max_length} tokens",
            expected=f"at least {min(lengths, default=0)} (the longest prompt has {longest})",
        )
    filtered = dataset if len(kept) == len(dataset) else dataset.select(kept)
    return FilteredPrompts(filtered, len(dataset) - len(kept), longest, max_length)


def _measure(dataset: PromptDataset, encode: EncodePrompt, num_workers: int) -> list[int]:
    started = time.monotonic()
    lengths = [_length(encode, prompt) for prompt in dataset[:_SAMPLE]]
    rest = dataset[_SAMPLE:]
    seconds_left = (time.monotonic() - started) * len(rest) / max(1, len(lengths))
    # A daemonic process (a Ray or multiprocessing worker) must not have children.
    is_daemon = multiprocessing.current_process().daemon
    can_fork = "fork" in multiprocessing.get_all_start_methods() and not is_daemon
    if num_workers == 1 or seconds_left < WORTH_FORKING_S or not can_fork:
        return lengths + [_length(encode, prompt) for prompt in rest]
    return lengths + _measure_in_processes(rest, encode, num_workers)


def _length(encode: EncodePrompt, prompt: Prompt) -> int:
    try:
        return len(encode(prompt))
    except Exception as error:
        message = f"the prompt cannot be encoded: {type(error).__name__}: {error}"
        raise DataError(message, row=prompt.index) from error


def _measure_in_processes(
    dataset: PromptDataset, encode: EncodePrompt, num_workers: int
) -> list[int]:
    starts = range(0, len(dataset), _CHUNK)
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_work.append,
        initargs=((dataset, encode),),
    )
    try:
        with _quiet_fork(), pool:
            return [length for chunk in pool.map(_measure_chunk, starts) for length in chunk]
    except BrokenProcessPool:
        message = "a process that measured prompts died (out of memory?)"
        raise DataError(message, expected="a smaller data.filter_num_workers") from None


_work: list[tuple[PromptDataset, EncodePrompt]] = []
"""Set only in forked processes. Forking shares the work without pickling."""


def _measure_chunk(start: int) -> list[int]:
    dataset, encode = _work[-1]
    return [_length(encode, prompt) for prompt in dataset[start : start + _CHUNK]]


@contextmanager
def _quiet_fork() -> Generator[None, None, None]:
    """Fork without the warnings of tokenizers and Python. The children use one thread."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _load(cache: Path) -> list[int] | None:
    try:
        return np.load(cache, allow_pickle=False).tolist()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        logger.warning(
            "prompt lengths in %s are not readable and are measured again: %s", cache, error
        )
        return None


def _save(cache: Path, lengths: Sequence[int]) -> None:
    try:
        with atomic_file(cache) as partial, partial.open("wb") as stream:
            np.save(stream, np.asarray(lengths, dtype=np.int32), allow_pickle=False)
    except OSError as error:
        logger.warning("prompt lengths cannot be cached in %s: %s", cache, error)
