"""Keys of the engine that generates, and of the transport of new weights to it."""

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
    """Most tokens of one forward pass; null: by device."""


class ScriptedEngineConfig(Section):
    """An engine that takes its answers from a list, to debug tools without a model."""

    answers: list[str] = Field(default_factory=list[str])
    """The answers of each request's turns, in order; the last is repeated."""


class SGLangConfig(Section):
    """SGLang in the trainer's process. Every further key is passed to the installed version as a
    server argument.
    """

    model_config = ConfigDict(extra="allow")

    tp_size: int = Field(default=1, ge=1)
    """Devices that share one copy of the model."""
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    """Share of the free memory at its start for weights and KV cache; null: 0.5 if the trainer has
    the same device, else SGLang's choice."""
    attention_backend: str | None = None
    """null: by device; `torch_native` without an accelerator."""

    @property
    def server_arguments(self) -> dict[str, Any]:
        """The keys that the user set, by SGLang's names."""
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
        raise ValueError("an address is listed twice")
    return addresses


Address = Annotated[str, AfterValidator(_read_address)]
"""Scheme, host and port of a server."""


class SGLangServerConfig(Section):
    """SGLang servers at addresses; `agentrl serve` starts them with the keys of `sglang`."""

    addresses: Annotated[list[Address], AfterValidator(_each_once)] = Field(
        default_factory=list[str]
    )
    """Addresses of running servers, such as `http://127.0.0.1:30000`; empty: the run's cluster
    starts the servers, in the pools with the role `engine`."""
    api_key: str | None = Field(default=None, repr=False)
    """Key of the servers at `addresses` (SGLang's `--api-key`); `agentrl serve` starts servers with
    it. null: they take requests of everybody. Servers that the run's cluster starts have a random
    key each."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds until a server that the cluster starts, or starts again, must answer. Calls wait so
    long if no other server is available."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds of one completion, or of one step of a weight update. A late completion is requested
    from another server; if the late server has answered no other request since, it counts as
    failing."""
    health_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between two health checks of a server; a failing server is checked less often."""
    health_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds that a health check may take; SGLang itself takes one or two."""
    max_retries: int = Field(default=3, ge=0)
    """How often one completion is repeated, on another server if there is one; and how often all
    servers are checked again, with growing waits, if none is healthy."""


class EngineConfig(Section):
    """The engine that generates."""

    name: EngineName = "auto"
    """auto: the best engine that is installed and has its hardware; the choice is printed."""
    transformers: TransformersEngineConfig = TransformersEngineConfig()
    sglang: SGLangConfig = SGLangConfig()
    sglang_server: SGLangServerConfig = SGLangServerConfig()
    scripted: ScriptedEngineConfig = ScriptedEngineConfig()


class WeightSyncConfig(Section):
    """New weights for an engine with its own copy, that is for SGLang."""

    bucket_bytes: int = Field(default=512 * 1024**2, ge=1)
    """Most bytes in transit at one time; a larger tensor is sent alone."""
    transport: WeightTransport = "auto"
    """tensor: in memory, on one machine; distributed: a process group of the main rank and the
    servers; disk: a folder that both can read. auto: tensor on CPUs (its bytes are sent, to any
    machine); on accelerators tensor if every server is on this machine and is known to see the
    trainer's device, else distributed."""
    folder: UserPath | None = None
    """The folder of `disk`; null: `weights` in the run's folder."""
    max_attempts: int = Field(default=2, ge=1)
    """How often a whole sync is tried before it counts as failed."""
