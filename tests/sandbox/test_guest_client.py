"""The trainer's side of a guest leaves no open connection, whenever its start is cancelled."""

import asyncio
import gc
import socket
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.sandbox.guest_client import GuestClient


class SilentSpawner:
    """Starts sandboxes that never send anything."""

    provider = "silent"

    def __init__(self) -> None:
        self.far_ends: list[socket.socket] = []

    def start_sandbox(self) -> Any:
        near = [self._connect(), self._connect()]
        return SimpleNamespace(guest=near[0], control=near[1])

    def _connect(self) -> socket.socket:
        near, far = socket.socketpair()
        self.far_ends.append(far)
        return near

    def close(self) -> None:
        for end in self.far_ends:
            end.close()


@pytest.mark.parametrize("num_opened", [0, 1, 2])
def test_a_start_that_is_cancelled_closes_its_connections(
    monkeypatch: pytest.MonkeyPatch, num_opened: int
):
    open_connection, opened, waits = asyncio.open_unix_connection, [], asyncio.Event()

    async def open_some(**keywords: Any) -> Any:
        if len(opened) == num_opened:
            waits.set()
            await asyncio.Event().wait()
        opened.append(1)
        if len(opened) == 2:
            waits.set()
        return await open_connection(**keywords)

    async def cancel_start(spawner: SilentSpawner) -> None:
        start = asyncio.create_task(GuestClient.start(cast(Any, spawner)))
        await waits.wait()
        await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    monkeypatch.setattr(asyncio, "open_unix_connection", open_some)
    spawner = SilentSpawner()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(cancel_start(spawner))
        assert all(end.recv(1) == b"" for end in spawner.far_ends)
        gc.collect()
    spawner.close()
    assert [str(warning.message) for warning in caught] == []
