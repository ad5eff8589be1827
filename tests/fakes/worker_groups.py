"""A worker group in this process: each rank is an object, each call a finished future."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from agentrl.cluster import WorkerGroup


class LocalGroup(WorkerGroup):
    """Runs the calls at once. `shared` has what was stored for several ranks."""

    def __init__(self, workers: Sequence[Any]) -> None:
        super().__init__()
        self.workers = list(workers)
        self.shared: list[Any] = []
        self.bind(type(workers[0]))

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(getattr(self.workers[rank], method_name)(*args, **kwargs))
        return future

    def wait(self, futures: Sequence[Any], *, call: str, timeout_s: float) -> list[Any]:
        return [future.result(timeout_s) for future in futures]

    def share(self, value: Any) -> Any:
        self.shared.append(value)
        return value
