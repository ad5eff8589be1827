"""A configuration -> an engine on its servers, and the way that new weights take to them."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist

from agentrl.config.schema.engine import SGLangServerConfig, WeightSyncConfig
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.weights.buckets import ModelWeights
from agentrl.engines.sglang.weights.disk import DiskTransport
from agentrl.engines.sglang.weights.distributed import DistributedTransport
from agentrl.engines.sglang.weights.sync import Transport
from agentrl.engines.sglang.weights.tensor import TensorTransport
from agentrl.engines.stopping import decoder_of
from agentrl.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSource:
    """Where new weights come from."""

    settings: WeightSyncConfig
    device: torch.device
    """Where the trainer has them."""
    folder: Path
    """Where `disk` writes unless `settings` names a folder; the run's own."""


def connect(
    settings: SGLangServerConfig,
    needs: SGLangNeeds,
    tokenizer: "PreTrainedTokenizerBase",
    source: SyncSource,
) -> SGLangServerEngine:
    """Make the engine of a run; the servers are looked at by its first call.

    Args:
        settings: Addresses, and how long what may take.
        needs: What the run needs of SGLang.
        tokenizer: For stop strings.
        source: Of new weights.

    Raises:
        ConfigError: for a transport that does not reach every server.
        EngineError: for an address that leads nowhere.
    """
    return SGLangServerEngine(
        settings,
        decoder_of(tokenizer),
        max_model_len=needs.max_model_len,
        transport=choose_transport(settings.addresses, source),
        weights=ModelWeights.of(
            needs.model_path,
            trust_remote_code=needs.trust_remote_code,
            overrides=needs.override_config,
        ),
    )


def choose_transport(addresses: Sequence[str], source: SyncSource) -> Transport:
    """Choose the way of new weights: the configured one, or the fastest that reaches everyone.

    Raises:
        ConfigError: for `tensor` where a server is on another machine, or is known not to see the
            trainer's device.
        EngineError: for an address that leads nowhere.
    """
    settings, device = source.settings, source.device
    name = settings.transport
    far = [address for address in addresses if not is_here(address)]
    if name == "auto":
        name = _fastest(addresses, far, device)
    if name == "tensor" and far:
        raise ConfigError(
            f"the server at {far[0]} is on another machine: memory does not reach it",
            key="weight_sync.transport",
            expected="distributed or disk",
        )
    if name == "tensor" and _sends():
        _refuse_blind(addresses, device)
    match name:
        case "tensor":
            return TensorTransport.to_servers(device, settings.bucket_bytes)
        case "distributed":
            backend = "gloo" if device.type == "cpu" else "nccl"
            return DistributedTransport(
                address_towards(addresses[0]),
                backend=backend,
                device=device,
                bucket_bytes=settings.bucket_bytes,
            )
        case _:
            return DiskTransport(settings.folder or source.folder, settings.bucket_bytes)


def _fastest(addresses: Sequence[str], far: Sequence[str], device: torch.device) -> str:
    if device.type == "cpu":
        return "disk" if far else "tensor"
    # A server that cannot open the memory of the trainer's device dies of the attempt.
    is_open = not far and all(sees_device(address, device) for address in addresses)
    return "tensor" if is_open else "distributed"


def _refuse_blind(addresses: Sequence[str], device: torch.device) -> None:
    for address in addresses:
        if device.type != "cpu" and sees_device(address, device) is False:
            raise ConfigError(
                f"the server at {address} does not see the trainer's {device} (its "
                "CUDA_VISIBLE_DEVICES): it cannot open the memory there",
                key="weight_sync.transport",
                expected="distributed or disk",
            )


def _sends() -> bool:
    """Whether this is the rank that sends: the others' devices matter to no server."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_here(address: str) -> bool:
    """Whether a server's address is one of this machine."""
    host = urlsplit(address).hostname or ""
    if host in (*_THIS_MACHINE, socket.gethostname()):
        return True
    own = {bound.address for found in psutil.net_if_addrs().values() for bound in found}
    return host in own


def address_towards(address: str) -> str:
    """The address of this machine as a server reaches it.

    Raises:
        EngineError: where the server's name leads nowhere.
    """
    parts = urlsplit(address)
    try:
        # Nothing is sent: the kernel only says which of its addresses it would use.
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"{address} leads nowhere: {error}") from error


_DEVICES = "CUDA_VISIBLE_DEVICES"


def sees_device(address: str, device: torch.device) -> bool | None:
    """Whether a server of this machine sees a GPU of this process: then it can open its memory.

    The server's process says so by the variables that it was started with.

    Args:
        address: The server's.
        device: As this process counts it.

    Returns:
        None where it cannot be told: the process is another user's or is none of SGLang's, or the
        two name GPUs in different ways.
    """
    theirs = _environment_at(urlsplit(address).port)
    if theirs is None or device.type != "cuda":
        return None
    seen = theirs.get(_DEVICES)
    own = _own_name(device)
    if seen is None or own is None:
        return True if seen is None else None
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if own in names:
        return True
    is_same_kind = all(name.isdecimal() == own.isdecimal() for name in names)
    return False if is_same_kind else None


def _own_name(device: torch.device) -> str | None:
    """What the driver calls a GPU of this process."""
    place = device.index or 0
    given = os.environ.get(_DEVICES)
    if given is None:
        return f"{place}"
    names = [name.strip() for name in given.split(",")]
    return names[place] if place < len(names) else None


def _environment_at(port: int | None) -> Mapping[str, str] | None:
    """The variables of the SGLang that listens at a port of this machine; None: not to be had."""
    try:
        for bound in psutil.net_connections(kind="tcp"):
            is_there = bound.status == psutil.CONN_LISTEN and bound.laddr[1:] == (port,)
            if not is_there or bound.pid is None:
                continue
            process = psutil.Process(bound.pid)
            # What only forwards to a server, as into a container, sees other devices than that.
            if any("sglang" in part for part in process.cmdline()):
                return process.environ()
    except (psutil.Error, OSError):
        pass
    return None
