"""The thread in which the embedded engine samples, and its interface to the event loop."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from transformers import PreTrainedModel

from agentrl.engines.protocol import Completion, FinishReason
from agentrl.engines.transformers.continuous_batching import Batcher, BatchLimits
from agentrl.engines.transformers.requests import Call
from agentrl.errors import EngineError, is_out_of_memory

Result = Completion | EngineError


class BatchWorker:
    """Runs a `Batcher` on its own thread, which waits without polling while it has no work.

    `submit` takes calls; the result of a call is set on its future, on the loop of the caller. An
    error in the thread ends every running call, and every later one, with an `EngineError`.
    """

    def __init__(self, model: PreTrainedModel, limits: BatchLimits) -> None:
        self._model = model
        self._limits = limits
        self._batcher: Batcher | None = None
        self._changed = threading.Condition()
        self._arrived: list[Call] = []
        self._aborted: set[str] = set()
        self._running: dict[str, Call] = {}
        self._results: list[tuple[Call, Result]] = []
        self._num_pauses = 0
        self._is_stepping = False
        self._is_stopping = False
        self._failure: EngineError | None = None
        self._thread: threading.Thread | None = None

    def submit(self, calls: Sequence[Call]) -> None:
        """Start calls; the future of each gets a `Completion` or an `EngineError`.

        They start in the same step, in their order.

        Raises:
            EngineError: The worker has failed or was stopped.
        """
        with self._changed:
            self._raise_if_ended()
            if self._thread is None:
                # A daemon: an engine that was not closed must not keep the interpreter alive.
                self._thread = threading.Thread(
                    target=self._run, name="agentrl-engine", daemon=True
                )
                self._thread.start()
            self._arrived += calls
            self._changed.notify_all()

    def abort(self, matches: Callable[[Call], bool]) -> None:
        """End the calls that match; each returns what it has sampled. Does not wait for them."""
        with self._changed:
            calls = [*self._arrived, *self._running.values()]
            self._aborted.update(call.key for call in calls if matches(call))
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the thread between two steps, so that weights and cache can be changed."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Wait for the end of the running step, and start none until `resume`."""
        with self._changed:
            self._raise_if_ended()
            self._num_pauses += 1
            self._changed.wait_for(lambda: not self._is_stepping)

    def resume(self) -> None:
        """Undo one `pause`."""
        with self._changed:
            self._num_pauses -= 1
            self._changed.notify_all()

    def note_version(self, version: int) -> None:
        """Record that running calls sample with new weights from now on. Only while paused."""
        for call in self._calls():
            call.note_version(version)

    def forget_prefixes(self) -> None:
        """Drop the cache; running calls continue after their tokens. Only while paused."""
        if self._batcher is not None:
            self._batcher.forget_prefixes(list(self._running.values()))

    def give_up(self, error: EngineError) -> None:
        """End every running call with an error. Only while paused."""
        if self._batcher is not None:
            for call in self._running.values():
                self._batcher.drop(call)
        self._fail_calls(error)

    def release_cache(self) -> None:
        """Free the cache's memory; running calls start again when resumed. Only while paused."""
        self._batcher = None
        self._arrived = self._calls()
        self._running = {}

    def stop(self) -> None:
        """End the thread; running calls get an `EngineError`. May be called twice."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._fail_calls(EngineError("the engine was closed"))

    def finished(self, calls: Sequence[tuple[Call, FinishReason]]) -> None:
        """Take calls that ended normally (see `CallSink`)."""
        for call, reason in calls:
            self._running.pop(call.key, None)
            self._results.append((call, call.result(reason)))

    def failed(self, call: Call, reason: str) -> None:
        """Take a call that the library dropped (see `CallSink`)."""
        self._running.pop(call.key, None)
        self._results.append((call, EngineError(reason, request_id=call.request_id)))

    def _calls(self) -> list[Call]:
        return [*self._running.values(), *self._arrived]

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            raise EngineError(
                "the engine has failed before and takes no more calls", cause=self._failure
            )
        if self._is_stopping:
            raise EngineError("the engine was closed")

    def _run(self) -> None:
        try:
            if self._model.device.type == "cuda":
                # A new thread's current device is the first one: kernels outside torch and the
                # library's memory check use it.
                torch.cuda.set_device(self._model.device)
            with torch.inference_mode():
                while self._begin_step():
                    self._step()
                    self._end_step()
        # An error of any kind ends the calls too, so that no caller waits forever.
        except BaseException as error:  # noqa: BLE001
            failure = EngineError(_reason(error))
            failure.__cause__ = error
            with self._changed:
                self._failure = failure
            self._fail_calls(failure)
        finally:
            self._batcher = None
            with self._changed:
                self._is_stepping = False
                self._changed.notify_all()

    def _begin_step(self) -> bool:
        """Wait for work; return False to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_stopping
                    or (self._num_pauses == 0 and (self._arrived or self._running))
                )
            )
            self._is_stepping = not self._is_stopping
            return self._is_stepping

    def _step(self) -> None:
        batcher = self._batcher or Batcher.build(self._model, self._limits, self)
        self._batcher = batcher
        self._start_calls(batcher)
        if self._running and not batcher.step():
            raise RuntimeError("calls are waiting, but none could be scheduled")
        if not all(call.is_finite for call, _ in self._results):
            batcher.forget_prefixes(list(self._running.values()))
            batcher.erase()
        if not self._running:
            batcher.free_decode_cache()

    def _end_step(self) -> None:
        with self._changed:
            self._is_stepping = False
            self._changed.notify_all()
            results, self._results = self._results, []
        _set_results(results)

    def _start_calls(self, batcher: Batcher) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, set()
            self._running.update((call.key, call) for call in arrived)
        for call in arrived:
            batcher.add(call)
        for call in [self._running[key] for key in aborted if key in self._running]:
            batcher.drop(call)
            self.finished([(call, FinishReason.ABORT)])

    def _fail_calls(self, error: EngineError) -> None:
        with self._changed:
            calls = self._calls()
            self._arrived, self._running = [], {}
            results, self._results = self._results, []
        _set_results([*results, *((call, error) for call in calls)])


def _reason(error: BaseException) -> str:
    message = f"the engine has failed: {type(error).__name__}: {error}"
    if not is_out_of_memory(error):
        return message
    return (
        "the engine's memory ran out (rollout.engine.transformers.num_pages, its max_batch_tokens "
        f"and rollout.max_concurrent_requests can be smaller): {message}"
    )


def _set_results(results: Sequence[tuple[Call, Result]]) -> None:
    """Resolve futures on their own loops, with one callback for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Result]]] = defaultdict(list)
    for call, result in results:
        by_loop[call.future.get_loop()].append((call, result))
    for loop, own in by_loop.items():
        # A closed loop has no waiting caller.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(results: Sequence[tuple[Call, Result]]) -> None:
    for call, result in results:
        if call.future.done():
            continue
        if isinstance(result, EngineError):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)
