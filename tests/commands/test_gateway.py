"""`agentrl gateway`: sessions over HTTP, and the rollouts that they leave."""

import json
import os
import queue
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentrl.commands.gateway import GatewayOptions, check_address, gateway_from_file
from agentrl.commands.run_file import read_run_file
from agentrl.config import Purpose
from agentrl.errors import ConfigError
from agentrl.trainer.rollouts.files import read_trajectories
from tests.fakes.runs import scripted, tiny_run, write_yaml


def send(method: str, url: str, key: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_agents_started_by_hand_leave_rollouts(tiny_home: Path, tmp_path: Path):
    engine = scripted("Hello.", "Bye.")
    run_file = write_yaml(
        tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run", rollout__engine=engine)
    )
    said: queue.Queue[str] = queue.Queue()
    seen: dict[str, Any] = {}

    def use_it() -> None:
        lines = [said.get(timeout=60) for _ in range(5)]
        try:
            url, _, key, admin, _ = [line.split(": ", 1)[1] for line in lines]
            root = url.removesuffix("/v1")
            history = [{"role": "user", "content": "Hi"}]
            body = {"model": "m", "messages": history}
            status, reply = send("POST", f"{url}/chat/completions", key, body)
            assert status == 200
            history += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            assert send("POST", f"{url}/chat/completions", key, body)[0] == 200
            assert send("POST", f"{root}/reward", key, {"reward": 0.5})[0] == 200
            seen["refused"] = [
                send("POST", f"{root}/sessions", key)[0],
                send("DELETE", f"{root}/sessions/{key}", key)[0],
                send("DELETE", f"{root}/sessions/other", admin)[0],
            ]
            status, opened = send("POST", f"{root}/sessions", admin)
            assert status == 201
            unused = send("POST", f"{root}/sessions", admin)[1]
            seen["ended"] = send("DELETE", f"{root}/sessions/{key}", admin)
            seen["after"] = send("POST", f"{url}/chat/completions", key, body)[0]
            assert unused["key"] != opened["key"]
            fresh = {"model": "m", "messages": history[:1]}
            assert send("POST", f"{url}/chat/completions", opened["key"], fresh)[0] == 200
            seen["is_complete"] = True
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    out = tmp_path / "run" / "sessions.jsonl"
    file = read_run_file(run_file, [], Purpose.ROLLOUT)
    agent = threading.Thread(target=use_it)
    agent.start()
    gateway_from_file(file, GatewayOptions(), say=said.put)
    agent.join()
    assert seen.pop("is_complete")
    assert seen.pop("ended") == (
        200,
        {"request_id": "gateway-0", "stop_reason": "answered", "reward": 0.5, "num_sequences": 1},
    )
    assert seen == {"refused": [401, 401, 404], "after": 410}
    first, second = (saved.request for saved in read_trajectories(out))
    roles = ["user", "assistant", "user", "assistant"]
    assert [message.role for message in first.messages] == roles
    assert (first.reward, first.branches) == (0.5, [])
    assert [turn.role for turn in second.turns] == ["assistant"]
    assert second.reward is None
    assert said.get() == f"saved 2 sessions to {out}"


def test_port_in_use_is_refused_before_anything_is_prepared(tiny_home: Path, tmp_path: Path):
    config = tiny_run(tiny_home, tmp_path / "run", rollout__engine=scripted("Hello."))
    file = read_run_file(write_yaml(tmp_path / "run.yaml", config), [], Purpose.ROLLOUT)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            gateway_from_file(file, GatewayOptions(port=port), say=print)
    assert caught.value.details["key"] == "--port"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_address_of_another_machine_is_refused(host: str):
    with pytest.raises(ConfigError, match="cannot listen on") as caught:
        check_address(GatewayOptions(host=host))
    assert caught.value.details["key"] == "--host"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_free_address_is_accepted(host: str):
    check_address(GatewayOptions(host=host))
