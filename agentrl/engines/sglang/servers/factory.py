"""Make a `SGLangServerEngine` from a configuration, and choose its transport of weights."""

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist

from agentrl.config.schema.engine import SGLangServerConfig, WeightSyncConfig
from agentrl.engines.protocol import SyncFigures
from agentrl.engines.sglang.arguments import DEVICES_VARIABLE, SGLangNeeds
from agentrl.engines.sglang.servers.directory import ServerDirectory
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.servers.pool import ServerPool
from agentrl.engines.sglang.servers.repair import WeightRepairer
from agentrl.engines.sglang.weights.buckets import ModelWeights, NamedTensor
from agentrl.engines.sglang.weights.disk import DiskTransport
from agentrl.engines.sglang.weights.distributed import DistributedTransport
from agentrl.engines.sglang.weights.sync import Transport, UpdateParticipants
from agentrl.engines.sglang.weights.tensor import TensorTransport
from agentrl.engines.stopping import decoder_of
from agentrl.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSource:
    """The trainer's side of a weight sync."""

    settings: WeightSyncConfig
    device: torch.device
    """Where the trainer has the new weights."""
    folder: Path
    """Where `disk` writes if `settings` names no folder; the run's own."""


def connect(
    settings: SGLangServerConfig,
    needs: SGLangNeeds,
    tokenizer: "PreTrainedTokenizerBase",
    source: SyncSource,
    directory: ServerDirectory | None = None,
) -> SGLangServerEngine:
    """Make the engine of a run. Its first call checks the servers.

    Args:
        settings: Addresses and timeouts.
        needs: What the run needs from SGLang.
        tokenizer: For stop strings.
        source: Of new weights.
        directory: The servers of the run's cluster; None: those of `settings`.

    Raises:
        ConfigError: The configured transport does not reach every server.
        EngineError: An address cannot be resolved.
    """
    if directory is None:
        return SGLangServerEngine(
            settings,
            decoder_of(tokenizer),
            max_model_len=needs.max_model_len,
            transport=choose_transport(settings.addresses, source),
            weights=ModelWeights.of(needs),
        )
    directory.start(needs)
    cpu = torch.device("cpu")
    return SGLangServerEngine(
        settings,
        decoder_of(tokenizer),
        max_model_len=needs.max_model_len,
        transport=ChangingTransport(source),
        weights=ModelWeights.of(needs),
        pool=ServerPool(
            settings,
            max_model_len=needs.max_model_len,
            report=logger.warning,
            directory=directory,
            needs=needs,
        ),
        repairer=WeightRepairer(
            directory,
            needs,
            settings,
            TensorTransport.to_servers(cpu, source.settings.bucket_bytes),
        ),
    )


class NoTransport:
    """The transport of a client that only generates: a rank sends the weights."""

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[NamedTensor]
    ) -> SyncFigures:
        """Refuse to send.

        Raises:
            EngineError: Always.
        """
        raise EngineError("this client of the servers only generates: a rank sends the weights")

    async def close(self) -> None:
        """Do nothing."""


def connect_client(
    settings: SGLangServerConfig,
    tokenizer: "PreTrainedTokenizerBase",
    directory: ServerDirectory | None = None,
    *,
    max_model_len: int,
) -> SGLangServerEngine:
    """Make an engine that generates on the servers of a run, and never updates them.

    Args:
        settings: Addresses and timeouts.
        tokenizer: For stop strings.
        directory: The servers of the run's cluster, which a rank has started; None: those of
            `settings`.
        max_model_len: Most tokens of a sequence.
    """
    return SGLangServerEngine(
        settings,
        decoder_of(tokenizer),
        max_model_len=max_model_len,
        transport=NoTransport(),
        pool=ServerPool(
            settings, max_model_len=max_model_len, report=logger.warning, directory=directory
        ),
    )


class ChangingTransport:
    """A transport that is chosen again when the servers have changed.

    Args:
        source: Of new weights.
    """

    def __init__(self, source: SyncSource) -> None:
        self._source = source
        self._addresses: frozenset[str] = frozenset()
        self._chosen: Transport | None = None

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[NamedTensor]
    ) -> SyncFigures:
        """Send the weights to all participants (see `Transport.send`)."""
        addresses = [target.backend.name for target in participants.targets]
        if self._chosen is None or self._addresses != frozenset(addresses):
            await self.close()
            self._chosen = choose_transport(addresses, self._source)
            self._addresses = frozenset(addresses)
        return await self._chosen.send(participants, named_tensors)

    async def close(self) -> None:
        """Release what is kept between two updates."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            await chosen.close()


def choose_transport(addresses: Sequence[str], source: SyncSource) -> Transport:
    """Return the configured transport of weights, or the fastest one that reaches every server.

    Raises:
        ConfigError: The configuration asks for `tensor`, and a server is on another machine or
            does not see the trainer's device.
        EngineError: An address cannot be resolved.
    """
    settings, device = source.settings, source.device
    remote = [address for address in addresses if not is_local(address)]
    name = settings.transport
    if name == "auto":
        name = _fastest(addresses, remote, device)
    if name == "tensor":
        _check_memory_is_shared(addresses, remote, device)
        return TensorTransport.to_servers(device, settings.bucket_bytes)
    if name == "distributed":
        return DistributedTransport(
            address_towards(addresses[0]),
            backend="gloo" if device.type == "cpu" else "nccl",
            device=device,
            bucket_bytes=settings.bucket_bytes,
        )
    return DiskTransport(settings.folder or source.folder, settings.bucket_bytes)


def _fastest(addresses: Sequence[str], remote: Sequence[str], device: torch.device) -> str:
    if device.type == "cpu":
        return "tensor"  # the bytes themselves are sent, to any machine
    # A server that does not see the trainer's device dies when it opens that device's memory.
    is_shared = not remote and all(sees_device(address, device) for address in addresses)
    return "tensor" if is_shared else "distributed"


def _check_memory_is_shared(
    addresses: Sequence[str], remote: Sequence[str], device: torch.device
) -> None:
    if remote and device.type != "cpu":
        raise ConfigError(
            f"the server at {remote[0]} is on another machine: the transport tensor needs one "
            "machine",
            key="weight_sync.transport",
            expected="distributed or disk",
        )
    is_sender = not dist.is_initialized() or dist.get_rank() == 0
    if device.type == "cpu" or not is_sender:
        return
    for address in addresses:
        if sees_device(address, device) is False:
            raise ConfigError(
                f"the server at {address} does not see the trainer's {device} (its "
                f"{DEVICES_VARIABLE}): it cannot open the memory there",
                key="weight_sync.transport",
                expected="distributed or disk",
            )


def is_local(address: str) -> bool:
    """Return whether a server's address is one of this machine."""
    host = urlsplit(address).hostname or ""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    return host in {bound.address for found in psutil.net_if_addrs().values() for bound in found}


def address_towards(address: str) -> str:
    """Return this machine's address as a server reaches it.

    Raises:
        EngineError: The server's name cannot be resolved.
    """
    parts = urlsplit(address)
    try:
        # Nothing is sent: the kernel only chooses the address that it would use.
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"{address} cannot be resolved: {error}") from error


def sees_device(address: str, device: torch.device) -> bool | None:
    """Return whether a server of this machine sees a GPU of this process.

    Only then it can open the GPU's memory. The environment of the server's process is the source.

    Args:
        address: The server's.
        device: As this process counts it.

    Returns:
        None if it is unknown: the process belongs to another user or is not SGLang's, or the two
        processes name GPUs in different ways.
    """
    environment = _environment_at(urlsplit(address).port)
    if environment is None or device.type != "cuda":
        return None
    visible = environment.get(DEVICES_VARIABLE)
    own = _own_name(device)
    if visible is None or own is None:
        return True if visible is None else None
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if own in names:
        return True
    is_same_kind = all(name.isdecimal() == own.isdecimal() for name in names)
    return False if is_same_kind else None


def _own_name(device: torch.device) -> str | None:
    """Return the driver's name of a GPU of this process; None if it is unknown."""
    index = device.index or 0
    visible = os.environ.get(DEVICES_VARIABLE)
    if visible is None:
        return f"{index}"
    names = [name.strip() for name in visible.split(",")]
    return names[index] if index < len(names) else None


def _environment_at(port: int | None) -> Mapping[str, str] | None:
    """Return the environment of the SGLang that listens at a local port; None if unknown."""
    try:
        for bound in psutil.net_connections(kind="tcp"):
            is_listener = bound.status == psutil.CONN_LISTEN and bound.laddr[1:] == (port,)
            if not is_listener or bound.pid is None:
                continue
            process = psutil.Process(bound.pid)
            # A process that only forwards to a server, such as into a container, sees other GPUs.
            if any("sglang" in part for part in process.cmdline()):
                return process.environ()
    except (psutil.Error, OSError):
        pass
    return None
