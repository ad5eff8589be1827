"""Save actor and critic to a checkpoint, and restore them. Collectives."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from agentrl.atomic_io import restore_all_replaced
from agentrl.errors import CheckpointError
from agentrl.remote_io import Location
from agentrl.workers.actor import Actor
from agentrl.workers.checkpoint import (
    CRITIC,
    STATE,
    SUPERSEDED,
    WEIGHT,
    Checkpoint,
    ModelIdentity,
    RunState,
    newest_first,
    open_checkpoint,
    reading,
)
from agentrl.workers.checkpoint_writer import GRACE_S, CheckpointWriter, copy_to_host
from agentrl.workers.critic import Critic
from agentrl.workers.distributed import World
from agentrl.workers.model import PackedModel
from agentrl.workers.rng import capture_random_state, restore_random_state
from agentrl.workers.shards import LocalSlice, local_slice
from agentrl.workers.update import UpdateCounters, Updater

T = TypeVar("T")
logger = logging.getLogger(__name__)


def identify(policy: PackedModel) -> ModelIdentity:
    """Return the identity of a model."""
    shapes = {name: list(weight.shape) for name, weight in policy.trained_weights()}
    identity = ModelIdentity(type(policy.lm).__name__, shapes)
    if policy.adapters is None:
        return replace(identity, base=policy.tower_digest)
    return replace(identity, base=policy.adapters.base_digest, scales=policy.adapters.scales)


@dataclass(frozen=True, slots=True)
class RunningSave:
    """A checkpoint that a thread of each rank writes. Methods except `abandon` are collectives.

    Example:
        >>> save = start_save(root, actor, state)
        >>> ...  # train
        >>> save.finish()
    """

    world: World
    writer: CheckpointWriter
    written: Future[None]
    """This rank's file."""
    published: Future[Location] | None
    """On the main rank: the whole checkpoint."""

    def is_done(self) -> bool:
        """Return whether `finish` would not wait for a disk."""
        is_done = self.written.done() and (self.published is None or self.published.done())
        has_failed = self.written.done() and self.written.exception() is not None
        waits, failed = self.world.max([float(not is_done), float(has_failed)])
        return bool(failed) or not waits

    def finish(self) -> Location:
        """Wait until the checkpoint is complete; return its folder.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        try:
            on_every_rank(self.world, self.written.result)
            return on_main(self.world, lambda: cast("Future[Location]", self.published).result())
        except Exception as error:
            is_shared = error is self.world.status.shared_error
            self._end(patience_s=0.0 if is_shared else GRACE_S)
            raise

    def abandon(self) -> None:
        """End the threads of a run that ends with an error.

        A checkpoint that all ranks have written becomes visible; another one is removed.
        """
        failure = self.written.exception()
        failure = self._end(patience_s=0.0 if failure else GRACE_S) or failure
        if failure is not None:
            logger.warning("%s is not saved: %s", self.writer.folder.name, failure)

    def _end(self, *, patience_s: float) -> BaseException | None:
        self.writer.patience_s = patience_s
        return None if self.published is None else self.published.exception()


def start_save(
    root: Location,
    actor: Actor,
    state: RunState,
    *,
    critic: Critic | None = None,
    keep: int | None = None,
    best: int | None = None,
) -> RunningSave:
    """Copy the state of all ranks to host memory, and write it in the background. A collective.

    Earlier checkpoints are unchanged until it is complete.

    Args:
        root: The folder of the run's checkpoints.
        actor: Weights and moments.
        state: The trainer's state; counters, identities and the random state are added.
        critic: The critic, if the run has one.
        keep: Number of checkpoints to keep, including this one.
        best: A step; its checkpoint is kept in addition.

    Raises:
        CheckpointError: on every rank, if it cannot be written.
    """
    world = actor.world
    streams = world.gather(capture_random_state())
    state = replace(
        state, actor=asdict(actor.counters()), random=streams, identity=identify(actor.policy)
    )
    if critic is not None:
        counters = asdict(critic.updater.counters())
        state = replace(state, critic=counters, critic_identity=identify(critic.model))
    writer = CheckpointWriter(
        root, state, world.size, keep=keep, best=best, patience_s=world.status.timeout_s
    )
    slices: dict[str, LocalSlice] = {}
    with ExitStack() as in_use:
        for prefix, updater in _by_prefix(actor, critic):
            in_use.enter_context(updater.on_device())
            own = weight_slices(updater.model) | updater.optimizer.state_slices()
            slices |= {prefix + name: part for name, part in own.items()}
        host = on_every_rank(world, lambda: copy_to_host(slices, world.rank))
    draft = on_main(world, writer.begin)
    thread = ThreadPoolExecutor(1, thread_name_prefix="agentrl-checkpoint")
    written = thread.submit(writer.write_rank, draft, world.rank, host)
    published = thread.submit(writer.publish, draft) if world.is_main else None
    thread.shutdown(wait=False)
    return RunningSave(world, writer, written, published)


def save_run(
    root: Location,
    actor: Actor,
    state: RunState,
    *,
    critic: Critic | None = None,
    keep: int | None = None,
    best: int | None = None,
) -> Location:
    """Write a checkpoint and wait until it is complete; see `start_save`."""
    return start_save(root, actor, state, critic=critic, keep=keep, best=best).finish()


def find_latest(root: Location, world: World) -> Checkpoint | None:
    """Find the newest complete checkpoint, and log each damaged one that is skipped.

    Each rank verifies its share. A collective.

    Returns:
        None if there is no checkpoint.

    Raises:
        CheckpointError: if all checkpoints are damaged. The user must choose to start again.
        StoreError: if their store cannot be read.
    """

    def list_newest_first() -> list[Location]:
        if isinstance(root, Path):
            restore_all_replaced(root)
        return [path for _, path in newest_first(root)]

    paths = on_main(world, list_newest_first)
    for path in paths:
        try:
            return verify_together(path, world)
        except CheckpointError as error:
            if world.is_main:
                logger.warning("%s; trying the previous one", error)
    if paths:
        raise CheckpointError(
            f"none of the run's checkpoints can be used: {', '.join(p.name for p in paths)}",
            path=root,
            expected="a complete checkpoint; trainer.resume_mode=disable starts from the beginning "
            f"and moves these to {SUPERSEDED}/",
        )
    return None


def verify_together(path: Location, world: World) -> Checkpoint:
    """Open a checkpoint; each rank verifies its share of the bytes. A collective.

    Raises:
        CheckpointError: on every rank, if it is incomplete or damaged.
    """
    return on_every_rank(
        world, lambda: open_checkpoint(path, rank=world.rank, num_ranks=world.size)
    )


def load_run(checkpoint: Checkpoint, actor: Actor, critic: Critic | None = None) -> RunState:
    """Restore actor, critic and this rank's random state. A collective.

    Each rank reads its slices. A critic in the checkpoint of a run without one is not read.

    Raises:
        CheckpointError: on every rank, if it is of another model or another optimizer; then nothing
            is read. Also if it cannot be read.
    """
    checkpoint.check_model(identify(actor.policy), critic and identify(critic.model))
    state, targets = checkpoint.state, dict[str, LocalSlice]()
    with ExitStack() as in_use:
        for prefix, updater in _by_prefix(actor, critic):
            in_use.enter_context(updater.on_device())
            with reading(checkpoint.path, STATE):
                counters = UpdateCounters(**(state.critic if prefix else state.actor))
            own = updater.optimizer.allocate_state(
                _moments(checkpoint, prefix), counters.num_optimizer_steps
            )
            own |= weight_slices(updater.model)
            targets |= {prefix + name: part for name, part in own.items()}
            updater.num_updates = counters.num_updates
        on_every_rank(actor.world, lambda: checkpoint.read(targets))
    with actor.world.raise_on_all_ranks(), reading(checkpoint.path, STATE):
        if actor.world.rank < len(state.random):
            restore_random_state(state.random[actor.world.rank])
    return state


def _by_prefix(actor: Actor, critic: Critic | None) -> Iterator[tuple[str, Updater]]:
    """Iterate over the trained models, with the prefix of their tensors."""
    yield "", actor.updater
    if critic is not None:
        yield CRITIC, critic.updater


def _moments(checkpoint: Checkpoint, prefix: str) -> list[str]:
    """List the moments of the trained model whose tensors have a prefix, without it."""
    names = [
        name.removeprefix(prefix)
        for name in checkpoint.manifest.tensors
        if name.startswith(CRITIC) == bool(prefix)
    ]
    return [name for name in names if not name.startswith(WEIGHT)]


def weight_slices(policy: PackedModel) -> dict[str, LocalSlice]:
    """Return this rank's slices of the trained weights, named as in a checkpoint."""
    return {
        WEIGHT + name: local_slice(weight, policy.world)
        for name, weight in policy.trained_weights()
    }


def on_main(world: World, act: Callable[[], T]) -> T:
    """Call a function on the main rank; return its result, or raise its error, on every rank."""
    result: T | None = None
    failure: Exception | None = None
    if world.is_main:
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            failure = error
    result, failure = world.broadcast((result, failure))
    if failure is not None:
        world.status.shared_error = failure
        raise failure
    return cast("T", result)


def on_every_rank(world: World, act: Callable[[], T]) -> T:
    """Call a function without collectives on every rank; if it raises on one, raise on all."""
    result: T | None = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - raised again below, on every rank
        failure = error
    failures = [error for error in world.gather(failure) if error is not None]
    if failures:
        world.status.shared_error = failure = failure or failures[0]
        raise failure
    return cast("T", result)
