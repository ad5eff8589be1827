"""Keys of who generates, and of how new weights come to it."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field

from agentrl.config.schema.section import Section, UserPath

EngineName = Literal["auto", "transformers", "sglang", "sglang_server", "scripted"]
WeightTransport = Literal["auto", "tensor", "distributed", "disk"]


class TransformersEngineConfig(Section):
    """The embedded engine: continuous batching on the trainer's own weights."""

    page_size: int | None = Field(default=None, ge=1)
    """Tokens of one cache page; null: by device."""
    num_pages: int | None = Field(default=None, ge=1)
    """Pages of the cache; null: what the configured budgets need, or what memory allows."""
    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass at most; null: by device."""


class ScriptedEngineConfig(Section):
    """An engine that reads its answers from a list, to debug tools without a model."""

    answers: list[str] = Field(default_factory=list[str])
    """The answers of each request's turns, in order; the last is repeated."""


class SGLangConfig(Section):
    """SGLang in this process's keep; every further key is a server argument of the installed
    version, passed on as it stands.
    """

    model_config = ConfigDict(extra="allow")

    tp_size: int = Field(default=1, ge=1)
    """Devices that hold one copy of the model between them."""
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    """Share of the memory that is free at its start for weights and KV cache; null: 0.5 where
    the trainer has the same device, else SGLang's choice."""
    attention_backend: str | None = None
    """null: by device; `torch_native` without an accelerator."""

    @property
    def server_arguments(self) -> dict[str, Any]:
        """What the user has set, under SGLang's names."""
        return self.model_dump(exclude_unset=True)


def _read_address(address: str) -> str:
    parts = urlsplit(address if "//" in address else f"http://{address}")
    try:
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:  # a port that is no number
        is_whole = False
    if not is_whole or parts.query or parts.fragment or any(map(str.isspace, address)):
        raise ValueError(f"{address!r} is no address such as http://127.0.0.1:30000")
    return parts.geturl().rstrip("/")


def _each_once(addresses: list[str]) -> list[str]:
    if len(set(addresses)) < len(addresses):
        raise ValueError("an address stands there twice")
    return addresses


Address = Annotated[str, AfterValidator(_read_address)]
"""Scheme, host and port of a server."""


class SGLangServerConfig(Section):
    """SGLang servers behind addresses; `agentrl serve` starts them by the keys of `sglang`."""

    addresses: Annotated[list[Address], AfterValidator(_each_once)] = Field(
        default_factory=list[str]
    )
    """Of running servers, such as `http://127.0.0.1:30000`."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds of one completion, or of one step of a weight update. A completion that is late is
    asked of another server; and its own counts as failing where it has answered no other since."""
    health_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks at each server; at one that fails they become fewer."""
    health_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds that a server may take to say that it is well; SGLang itself takes one or two."""
    max_retries: int = Field(default=3, ge=0)
    """How often one completion is asked anew, of another server where there is one; and how often
    all servers are looked at again, with growing waits, where none is well."""


class EngineConfig(Section):
    """Who generates."""

    name: EngineName = "auto"
    """auto: the best engine that is installed and has its hardware; the choice is printed."""
    transformers: TransformersEngineConfig = TransformersEngineConfig()
    sglang: SGLangConfig = SGLangConfig()
    sglang_server: SGLangServerConfig = SGLangServerConfig()
    scripted: ScriptedEngineConfig = ScriptedEngineConfig()


class WeightSyncConfig(Section):
    """New weights to an engine that keeps its own copy: the SGLang ones."""

    bucket_bytes: int = Field(default=512 * 1024**2, ge=1)
    """Most bytes that are on their way at one time; a larger tensor goes alone."""
    transport: WeightTransport = "auto"
    """tensor: handed over in memory, on one machine; distributed: a process group between the main
    rank and the servers; disk: a folder that both can read. auto: tensor where every server is on
    this machine and, on accelerators, is known to see the trainer's device; else distributed on
    accelerators, else disk."""
    folder: UserPath | None = None
    """Where `disk` writes; null: `weights` in the run's folder."""
    max_attempts: int = Field(default=2, ge=1)
    """How often one sync is tried, whole, before it counts as failed."""
