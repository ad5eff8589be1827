"""`agentrl serve` as a user runs it, for the tests of a process."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.weights.tensor import TensorTransport
from tests.fakes.runs import ROOT, write_yaml

MAX_MODEL_LEN = 1024


@dataclass
class Serving:
    """Servers of a model; started when they are asked for, and again where they ended."""

    policy: Path
    num: int = 2
    supervisor: subprocess.Popen[str] | None = None
    addresses: list[str] = field(default_factory=list[str])

    def start(self) -> list[str]:
        """Have them run; gives their addresses."""
        if self.supervisor is None or self.supervisor.poll() is not None:
            lengths = {"max_prompt_length": MAX_MODEL_LEN // 2, "max_response_length": 512}
            run = {"data": {"train_files": ["none.parquet"]} | lengths}
            run_file = self.policy.parent / "serve.yaml"
            write_yaml(run_file, run | {"model": {"path": str(self.policy)}})
            command = [
                sys.executable,
                "-m",
                "agentrl",
                "serve",
                str(run_file),
                "--num",
                str(self.num),
            ]
            with (self.policy.parent / "serve.log").open("a") as log:
                self.supervisor = subprocess.Popen(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
                )
            assert self.supervisor.stdout is not None
            self.addresses = []
            while not self.addresses:
                line = self.supervisor.stdout.readline()
                assert line, f"ended before it told addresses: {self.supervisor.wait()}"
                self.addresses = re.findall(r"http://[\d.]+:\d+", line)
        return self.addresses

    def process_of(self, address: str) -> psutil.Process:
        """The server's own process."""
        assert self.supervisor is not None
        port = int(address.rsplit(":", 1)[1])
        [found] = [
            child
            for child in psutil.Process(self.supervisor.pid).children()
            for connection in child.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
        return found

    def processes(self) -> list[psutil.Process]:
        """The supervisor's, and all that it has started."""
        assert self.supervisor is not None
        own = psutil.Process(self.supervisor.pid)
        return [own, *own.children(recursive=True)]

    def end(self) -> None:
        """End them as a scheduler does."""
        if self.supervisor is None or self.supervisor.poll() is not None:
            return
        self.supervisor.send_signal(signal.SIGTERM)
        try:
            self.supervisor.communicate(timeout=60)
        finally:
            self.supervisor.kill()


def connect(
    addresses: list[str], decode: Any, *, max_model_len: int = MAX_MODEL_LEN, **settings: Any
) -> SGLangServerEngine:
    """An engine on servers."""
    return SGLangServerEngine(
        SGLangServerConfig(addresses=addresses, **settings),
        decode,
        max_model_len=max_model_len,
        transport=TensorTransport.to_servers(torch.device("cpu"), 20_000),
    )


def are_gone(processes: list[psutil.Process], *, seconds: float = 20.0) -> bool:
    """Whether processes end; one that waits to be reaped by its parent has ended."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(process: psutil.Process) -> None:
    """`kill -9`."""
    os.kill(process.pid, signal.SIGKILL)
