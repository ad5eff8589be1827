"""Which way new weights take to servers."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agentrl.config.schema.engine import WeightSyncConfig
from agentrl.engines.sglang.servers.factory import (
    SyncSource,
    address_towards,
    choose_transport,
    is_local,
)
from agentrl.engines.sglang.weights.disk import DiskTransport
from agentrl.engines.sglang.weights.distributed import DistributedTransport
from agentrl.engines.sglang.weights.sync import UpdateParticipants
from agentrl.engines.sglang.weights.tensor import TensorTransport
from agentrl.errors import ConfigError, EngineError
from tests.fakes.fault_runs import limit_file_size

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
        ([HERE], "cuda", DistributedTransport),
        ([HERE, FAR], "cuda", DistributedTransport),
        ([HERE, FAR], "cpu", TensorTransport),
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
        choose(tmp_path, HERE, FAR, transport="tensor", device="cuda")


def test_every_address_of_this_machine_is_local():
    own = [
        bound.address
        for found in psutil.net_if_addrs().values()
        for bound in found
        if bound.family == socket.AF_INET
    ]
    assert own
    assert all(is_local(f"http://{address}:1") for address in own)
    assert is_local(f"http://{socket.gethostname()}:1")
    assert not is_local(FAR)


def test_servers_reach_this_machine_by_the_address_that_leads_to_them():
    assert address_towards(HERE) == "127.0.0.1"


LISTENER = """
import socket, sys
bound = socket.create_server(("127.0.0.1", 0))
print(bound.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(devices: str | None, name: str = "sglang") -> Iterator[str]:
    """A process that sees these devices; gives its address."""
    variables = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    variables |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LISTENER, name],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.communicate()


@pytest.mark.parametrize(
    ("own", "seen", "expected"),
    [
        ("2,3", "2,3", TensorTransport),
        ("2,3", None, TensorTransport),
        (None, "0", DistributedTransport),
        ("2,3", "0,2", DistributedTransport),
        ("2,3", "", DistributedTransport),
        ("2,3", "GPU-a", DistributedTransport),
        ("GPU-a,GPU-b", "GPU-b", TensorTransport),
    ],
)
def test_memory_is_taken_only_to_servers_that_see_the_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    seen: str | None,
    expected: type,
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    with listening(seen) as address:
        assert isinstance(choose(tmp_path, address, device="cuda:1"), expected)


def test_memory_to_a_server_that_does_not_see_the_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with (
        listening("2") as address,
        pytest.raises(ConfigError, match="does not see the trainer's cuda:1"),
    ):
        choose(tmp_path, address, device="cuda:1", transport="tensor")


def test_memory_goes_where_nothing_is_known_if_that_is_asked_for(tmp_path: Path):
    with listening("7", name="forwarder") as address:
        assert isinstance(choose(tmp_path, address, device="cuda:1"), DistributedTransport)
        transport = choose(tmp_path, address, device="cuda:1", transport="tensor")
        assert isinstance(transport, TensorTransport)


async def test_full_disk_names_the_folder_that_is_configured(tmp_path: Path):
    async def nobody(*_: object) -> None:
        raise AssertionError("nobody is asked")

    transport = DiskTransport(tmp_path / "weights")
    with limit_file_size(1_000), pytest.raises(EngineError, match="cannot be written to") as raised:
        await transport.send(UpdateParticipants([], nobody), [("w", torch.zeros(4_000))])
    assert raised.value.key == "weight_sync.folder"
    assert not list((tmp_path / "weights").glob("*"))


async def test_rank_that_writes_nothing_removes_nothing(tmp_path: Path):
    written = tmp_path / "weights/current/model-00000.safetensors"
    written.parent.mkdir(parents=True)
    written.touch()
    await DiskTransport(tmp_path / "weights").close()
    assert written.exists()
