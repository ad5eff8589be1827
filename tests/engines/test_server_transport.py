"""Which way new weights take to servers."""

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agentrl.config.engine_schema import WeightSyncConfig
from agentrl.engines.sglang.connecting import (
    SyncSource,
    address_towards,
    choose_transport,
    is_here,
)
from agentrl.engines.sglang.transports import (
    DiskTransport,
    DistributedTransport,
    TensorTransport,
)
from agentrl.errors import ConfigError

HERE, FAR = "http://127.0.0.1:30000", "http://192.0.2.1:30000"


def choose(tmp_path: Path, *addresses: str, device: str = "cpu", **settings: Any) -> object:
    source = SyncSource(
        settings=WeightSyncConfig(**settings), device=torch.device(device), folder=tmp_path
    )
    return choose_transport(addresses, source)


@pytest.mark.parametrize(
    ("addresses", "device", "expected"),
    [
        ([HERE, HERE], "cpu", TensorTransport),
        ([HERE], "cuda", TensorTransport),
        ([HERE, FAR], "cuda", DistributedTransport),
        ([HERE, FAR], "cpu", DiskTransport),
    ],
)
def test_auto_takes_the_fastest_way_that_reaches_everyone(
    tmp_path: Path, addresses: list[str], device: str, expected: type
):
    assert isinstance(choose(tmp_path, *addresses, device=device), expected)


def test_the_configured_way_is_taken(tmp_path: Path):
    assert isinstance(choose(tmp_path, HERE, transport="disk"), DiskTransport)
    assert isinstance(choose(tmp_path, HERE, transport="distributed"), DistributedTransport)


def test_memory_does_not_reach_another_machine(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"{FAR} is on another machine"):
        choose(tmp_path, HERE, FAR, transport="tensor")


def test_every_address_of_this_machine_is_here():
    own = [
        bound.address
        for found in psutil.net_if_addrs().values()
        for bound in found
        if bound.family == socket.AF_INET
    ]
    assert own
    assert all(is_here(f"http://{address}:1") for address in own)
    assert is_here(f"http://{socket.gethostname()}:1")
    assert not is_here(FAR)


def test_servers_reach_this_machine_by_the_address_that_leads_to_them():
    assert address_towards(HERE) == "127.0.0.1"
