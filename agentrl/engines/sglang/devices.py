"""Which GPUs the servers of this machine see."""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import psutil
import torch

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
