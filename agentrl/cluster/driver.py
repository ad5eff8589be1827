"""The driver of a run on Ray: it places processes, supervises them, and ends them. No tensors.

A rank that dies, or sends no heartbeat, ends its group; the group is started again from the last
checkpoint as often as `trainer.max_restarts` allows. Ray replaces rollout workers and servers by
itself; the driver reports it. Ctrl-C and SIGTERM ask the ranks to stop, which they do as under
torchrun: tools are released and the last completed step is saved. All actors belong to the driver's
job, so Ray ends them when the driver ends, also after kill -9.
"""

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.cluster.connection import connected, forwarded_variables, list_nodes
from agentrl.cluster.handles import ClusterHandles, PluginHost, RemoteHost
from agentrl.cluster.host import LAST_LOG_S, HostInfo, HostSpec
from agentrl.cluster.inputs import Shipment
from agentrl.cluster.logs import RunLogs
from agentrl.cluster.monitor import Monitor, Silence, Snapshot
from agentrl.cluster.placement import PlacedPool, place
from agentrl.cluster.pools import (
    check_pools,
    describe_nodes,
    device_kind,
    make_plugin_pools,
    make_pools,
    num_local_cpus,
)
from agentrl.cluster.ranks import RankEnd, RankFailedError, RankPlace
from agentrl.cluster.run_status import STATUS_FILE, StatusWriter
from agentrl.cluster.shipping import ship_inputs
from agentrl.config.schema.cluster import HostRole
from agentrl.config.schema.run import RunConfig
from agentrl.errors import ClusterError
from agentrl.plugins.remote import PlacedPlugin

MONITOR = "agentrl:"
"""Start of the name of a run's monitor; the run's id follows."""
GRACE_S = 20.0
"""Seconds that the other ranks have to end after one was lost, so that the cause is found."""
PLUGIN_CLOSE_S = 15.0
"""Seconds that tools and scorers in processes of their own have to shut down."""
_POLL_S = 0.5


class ProcessLostError(ClusterError):
    """A process of the run died; another one may do its work."""


class StopRequest:
    """SIGINT and SIGTERM of the driver. The first one asks the ranks to stop; while no rank works,
    and for the second Ctrl-C, it raises `KeyboardInterrupt`.
    """

    def __init__(self) -> None:
        self.is_made = False
        self.is_waited_for = False
        """Whether ranks work, which the request stops."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals during the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        ]
        before = [(number, signal.signal(number, self._on_signal)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.is_waited_for or (self.is_made and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.is_made = True


@dataclass(slots=True)
class ClusterRun:
    """A run with its pools reserved."""

    config: RunConfig
    run_id: str
    pools: Mapping[str, PlacedPool]
    monitor: Any
    logs: RunLogs
    stop: StopRequest
    say: Callable[[str], None]
    environment: Mapping[str, str]
    directory: str | None
    shipment: Shipment
    facts: dict[str, Any]
    """What the monitor knows of the run."""
    seen: dict[str, HostInfo] = field(default_factory=dict[str, HostInfo])
    """The last known process of each name."""
    silence: Silence = field(default_factory=Silence)
    """Of the ranks."""

    def start_workers(
        self, factory: str, arguments: Callable[[int], tuple[Any, ...]]
    ) -> list[RemoteHost]:
        """Start the rollout workers, spread over the nodes with the role. Returns at once.

        Args:
            factory: The class, `module:name`.
            arguments: Returns the arguments of the worker with an index. They are used again if
                Ray replaces the worker.
        """
        hosts: list[RemoteHost] = []
        for placed in self._with_role("rollout"):
            for node, count in enumerate(placed.pool.workers):
                for _ in range(count):
                    index = len(hosts)
                    spec = self._spec("rollout", index, placed, factory, arguments(index))
                    host = placed.start(spec, self.monitor, node=node, num_cpus=1, max_restarts=-1)
                    hosts.append(host)
        return hosts

    def start_servers(
        self,
        factory: str,
        arguments: Callable[[int], tuple[Any, ...]],
        *,
        devices_per_server: int,
    ) -> list[RemoteHost]:
        """Start engine servers in the pools with the role. Returns at once.

        In a pool that also trains, a server reserves no device: it shares those of the ranks.

        Args:
            factory: The class, `module:name`.
            arguments: Returns the arguments of the server with an index.
            devices_per_server: Devices of one server (`tp_size`).
        """
        hosts: list[RemoteHost] = []
        for placed in self._with_role("engine"):
            num_devices = 0 if "train" in placed.pool.roles else devices_per_server
            for node in range(placed.pool.nodes):
                for _ in range(placed.pool.devices_per_node // devices_per_server):
                    index = len(hosts)
                    spec = self._spec("engine", index, placed, factory, arguments(index))
                    host = placed.start(
                        spec, self.monitor, node=node, num_devices=num_devices, max_restarts=-1
                    )
                    hosts.append(host)
        return hosts

    def start_plugins(self, plugins: Sequence[PlacedPlugin]) -> list[PluginHost]:
        """Start the tools and scorers that ask for resources, and wait until they are ready.

        Args:
            plugins: Those that the pools were reserved for.

        Raises:
            ClusterError: naming the one that did not start, with the last lines of its log.
        """
        hosts: list[PluginHost] = []
        for index, plugin in enumerate(plugins):
            placed = self.pools[plugin.key]
            spec = self._spec("plugin", index, placed, plugin.factory, plugin.arguments)
            host = placed.start(
                spec,
                self.monitor,
                node=0,
                num_devices=placed.pool.bundle.get("GPU", 0),
                num_cpus=placed.pool.bundle.get("CPU", 0),
                max_restarts=-1,
            )
            hosts.append(PluginHost(plugin.key, host))
        self.await_started([one.host for one in hosts])
        return hosts

    def close_plugins(self, plugins: Sequence[PluginHost]) -> None:
        """Shut tools and scorers down, at the end of a run; at most `PLUGIN_CLOSE_S` seconds."""
        ends = [one.host.actor.close.remote() for one in plugins]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=PLUGIN_CLOSE_S)

    def await_started(self, hosts: Sequence[RemoteHost]) -> list[HostInfo]:
        """Wait until processes have made their objects.

        Raises:
            ProcessLostError: naming the process that died, with the last lines of its log.
            ClusterError: naming a process that did not start in time, with the last lines of its
                log; or the shortfall if a node has left the cluster.
        """
        limit = self.config.cluster.start_timeout_s
        end = time.monotonic() + limit
        waiting = {host.actor.describe.remote(): host for host in hosts}
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=_POLL_S)
            for reference in ready:
                host = waiting.pop(reference)
                try:
                    self.seen[host.name] = ray.get(reference)
                except RayError as error:
                    raise self._lost(host, error) from error
            if not ready:
                check_pools([one.pool for one in self.pools.values()], list_nodes())
            if waiting and time.monotonic() > end:
                host = next(iter(waiting.values()))
                raise ClusterError(
                    f"{host.name} did not start within {limit:g} s",
                    key="cluster.start_timeout_s",
                    last_lines=self._tail(host.name),
                )
        return [self.seen[host.name] for host in hosts]

    def train(self, factory: str, arguments: tuple[Any, ...], handles: ClusterHandles) -> RankEnd:
        """Run all ranks to their end, and start them again if some are lost and that is allowed.

        Args:
            factory: The class, `module:name`, with `free_port()`, `run(place, handles) -> RankEnd`
                and `stop()`.
            arguments: Its arguments.
            handles: The other processes of the run.

        Returns:
            The end of the main rank.

        Raises:
            ClusterError: if a rank is lost once too often, or the cluster has too little left.
            AgentRLError: the error of a rank.
            KeyboardInterrupt: if the run was asked to stop.
        """
        restarts = self.config.trainer.max_restarts
        attempt = 0
        while True:
            try:
                return self._train_once(factory, arguments, handles)
            except ProcessLostError as error:
                if attempt == restarts:
                    error.details["restarts"] = f"{attempt} of trainer.max_restarts={restarts}"
                    raise
                attempt += 1
                self.say(f"{error}\nrestart {attempt} of {restarts} from the last checkpoint")
                try:
                    self._await_nodes()
                except ClusterError as shortage:
                    shortage.details["after"] = error.args[0]
                    raise shortage from error

    def _train_once(
        self, factory: str, arguments: tuple[Any, ...], handles: ClusterHandles
    ) -> RankEnd:
        hosts = self._start_ranks(factory, arguments)
        try:
            self.await_started(hosts)
            ends = self._run_ranks(hosts, handles)
        finally:
            self._end(hosts)
        lost = [(host, end) for host, end in zip(hosts, ends, strict=True) if _is_lost(end)]
        if self.stop.is_made:
            raise KeyboardInterrupt(*([ends[0].text] if ends[0].text else []))
        failed = [end for end in ends if end.kind == "failed"]
        if failed:
            raise RankFailedError(failed[0])
        if lost:
            raise self._describe_lost(lost)
        return ends[0]

    def _await_nodes(self) -> None:
        """Wait until ranks can start again after one was lost.

        Ray notices only after some seconds that a node has died, and until then would start ranks
        there. So every node of the ranks must answer, or be reported as dead and be replaced.

        Raises:
            ClusterError: naming the shortfall, or what is still missing after
                `cluster.placement_timeout_s`.
        """
        limit = self.config.cluster.placement_timeout_s
        end = time.monotonic() + limit
        placed = list(self._with_role("train"))
        answered: set[str] = set()
        probes: dict[Any, str] = {}
        while True:
            nodes = list_nodes()
            check_pools([one.pool for one in self.pools.values()], nodes)
            alive = {node.node_id: node for node in nodes}
            used = {node for one in placed for node in one.node_ids() if node in alive}
            for node in used - answered - set(probes.values()):
                probes[_probe(node)] = node
            ready, _ = ray.wait(list(probes), timeout=_POLL_S) if probes else ([], [])
            for reference in ready:
                node = probes.pop(reference)
                with suppress(RayError):
                    ray.get(reference)
                    answered.add(node)
            silent = used - answered
            is_placed = not silent and all(one.group.wait(_POLL_S) for one in placed)
            if is_placed and all(one.node_ids() <= answered for one in placed):
                return
            if time.monotonic() > end:
                raise ClusterError(
                    f"the ranks cannot start again: their nodes are not ready after {limit:g} s",
                    silent=", ".join(sorted(alive[node].address for node in silent)) or "none",
                    cluster=describe_nodes(nodes),
                    key="cluster.placement_timeout_s",
                    expected="free resources for the lost nodes' part of the run",
                )
            time.sleep(_POLL_S)

    def _start_ranks(self, factory: str, arguments: tuple[Any, ...]) -> list[RemoteHost]:
        hosts: list[RemoteHost] = []
        for placed in self._with_role("train"):
            on_gpu = placed.pool.device_kind == "GPU"
            for node in range(placed.pool.nodes):
                for _ in range(placed.pool.devices_per_node):
                    spec = self._spec("train", len(hosts), placed, factory, arguments)
                    host = placed.start(
                        spec, self.monitor, node=node, num_devices=1, num_cpus=int(on_gpu)
                    )
                    hosts.append(host)
        return hosts

    def _run_ranks(self, hosts: Sequence[RemoteHost], handles: ClusterHandles) -> list[RankEnd]:
        call_timeout_s = self.config.cluster.call_timeout_s
        try:
            port = hosts[0].call_and_wait("free_port", timeout_s=call_timeout_s)
        except ClusterError as error:
            if isinstance(error.__cause__, RayActorError):
                raise self._lost(hosts[0], error.__cause__) from error
            raise
        address = self.seen[hosts[0].name].address
        handles = replace(handles, ranks=tuple(hosts), call_timeout_s=call_timeout_s)
        running: dict[Any, int] = {}
        for rank, host in enumerate(hosts):
            place = RankPlace(
                rank=rank, world_size=len(hosts), local_rank=0, address=address, port=port
            )
            running[host.actor.call.remote("run", place, handles)] = rank
        self.facts["state"] = "training"
        self.monitor.announce.remote(self.facts)
        self.silence = Silence()
        self.stop.is_waited_for = True
        try:
            return self._supervise(hosts, running)
        finally:
            self.stop.is_waited_for = False

    def _supervise(self, hosts: Sequence[RemoteHost], running: dict[Any, int]) -> list[RankEnd]:
        """Wait for the end of all ranks; end those that cannot go on."""
        ends: list[RankEnd | None] = [None] * len(hosts)
        limit: float | None = None
        is_asked = False
        watched = time.monotonic()
        while running:
            ready, _ = ray.wait(list(running), timeout=_POLL_S)
            for reference in ready:
                rank = running.pop(reference)
                ends[rank] = end = _end_of(reference)
                if end.kind in ("failed", "lost"):
                    # The others learn of it from the end of the process, as under torchrun.
                    self._end([hosts[rank]])
                    wait_s = GRACE_S if end.kind == "lost" else self.config.cluster.stop_timeout_s
                    limit = min(limit or float("inf"), time.monotonic() + wait_s)
            if self.stop.is_made and not is_asked:
                is_asked = True
                for host in hosts:
                    host.actor.control.remote("stop")
                stop_s = self.config.cluster.stop_timeout_s
                limit = min(limit or float("inf"), time.monotonic() + stop_s)
            if time.monotonic() - watched > self.config.cluster.heartbeat_s:
                watched = time.monotonic()
                self._watch({hosts[rank].name: hosts[rank] for rank in running.values()})
            if limit is not None and time.monotonic() > limit:
                for rank in running.values():
                    _kill(hosts[rank])
                    ends[rank] = RankEnd("lost", "did not end in time", 1, is_cause=False)
                break
        return [end or RankEnd("lost", "was ended", 1, is_cause=False) for end in ends]

    def _watch(self, ranks: Mapping[str, RemoteHost]) -> None:
        """Report replaced processes, and end ranks that send no heartbeat any more."""
        snapshot = _snapshot_of(self.monitor)
        silent_s = self.silence.measure(snapshot, ranks)
        if snapshot is None:
            return
        if snapshot.run != self.facts:  # the monitor was started again
            self.monitor.announce.remote(self.facts)
        for name, beat in snapshot.beats.items():
            before = self.seen.get(name)
            if before is not None and before.process != beat.info.process:
                self.say(f"{before} was lost and replaced: {beat.info}\n{self._tail(name)}")
            self.seen[name] = beat.info
        for name, seconds in silent_s.items():
            if seconds > self.config.cluster.heartbeat_timeout_s:
                who = self.seen.get(name, name)
                self.say(f"{who} has sent no heartbeat for {seconds:.0f} s: it is ended")
                _kill(ranks[name])

    def _with_role(self, role: HostRole) -> Iterator[PlacedPool]:
        return (placed for placed in self.pools.values() if role in placed.pool.roles)

    def _spec(
        self,
        role: HostRole,
        index: int,
        placed: PlacedPool,
        factory: str,
        arguments: tuple[Any, ...],
    ) -> HostSpec:
        prefix = {"train": "rank", "rollout": "rollout", "engine": "server", "plugin": "plugin"}[
            role
        ]
        return HostSpec(
            name=f"{prefix}_{index}",
            role=role,
            pool=placed.pool.name,
            factory=factory,
            arguments=arguments,
            environment=self.environment,
            directory=self.directory,
            shipment=self.shipment,
            fetch_timeout_s=self.config.cluster.call_timeout_s,
            log_folder=str(self.logs.folder),
            run_id=self.run_id,
            heartbeat_s=self.config.cluster.heartbeat_s,
        )

    def _end(self, hosts: Sequence[RemoteHost]) -> None:
        """End processes; those that answer first send the end of their logs."""
        closed = [host.actor.close.remote() for host in hosts]
        ray.wait(closed, num_returns=len(closed), timeout=LAST_LOG_S)
        for host in hosts:
            _kill(host)

    def _tail(self, name: str) -> str:
        return self.logs.tail(name)

    def _lost(self, host: RemoteHost, error: RayError) -> ClusterError:
        """Describe a process that died; one whose constructor raised would fail again."""
        has_failed = isinstance(error, RayActorError) and error.actor_init_failed
        kind = ClusterError if has_failed else ProcessLostError
        return kind(
            f"{self.seen.get(host.name, host.name)} {'did not start' if has_failed else 'died'}",
            reason=_reason(error),
            log=self.logs.path(host.name),
            last_lines="\n" + self._tail(host.name),
        )

    def _describe_lost(self, lost: Sequence[tuple[RemoteHost, RankEnd]]) -> ProcessLostError:
        causes = [pair for pair in lost if pair[1].is_cause] or list(lost)
        host, end = causes[0]
        self.monitor.forget.remote(host.name, end.text)
        more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
        return ProcessLostError(
            f"training rank {self.seen.get(host.name, host.name)} was lost{more}",
            reason=end.text,
            log=self.logs.path(host.name),
            last_lines="\n" + self._tail(host.name),
        )


@contextmanager
def open_cluster(
    config: RunConfig, *, say: Callable[[str], None], plugins: Sequence[PlacedPlugin] = ()
) -> Iterator[ClusterRun]:
    """Connect to the cluster and reserve the pools of a run; everything ends with the block.

    Args:
        config: The run's configuration.
        say: Prints a line for the user.
        plugins: Tools and scorers that ask for resources; each gets a pool of its own.

    Raises:
        ClusterError: if there is no cluster, or it has too little for the run.
        ConfigError: for a wrong key of `cluster`.
    """
    environment = forwarded_variables(config.cluster.runtime_env.env_vars)
    run_id = f"{config.trainer.experiment_name}-{uuid.uuid4().hex[:8]}"
    stop = StopRequest()
    with (
        stop.listening(),
        connected(config.cluster, min_cpus=num_local_cpus(config)) as cluster,
        stop.listening(),  # again: ray.init replaces the handler of SIGTERM
    ):
        say(cluster)
        pools = make_pools(config, device_kind(config, list_nodes())) + make_plugin_pools(plugins)
        actor_class: Any = ray.remote(Monitor)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 1}
        monitor = actor_class.options(name=MONITOR + run_id, **options).remote()
        limit = config.cluster.call_timeout_s
        folder = config.trainer.default_local_dir.absolute()
        facts = {
            "run_id": run_id,
            "folder": str(folder),
            "pools": [str(pool) for pool in pools],
            "started": time.time(),
            "state": "starting",
        }
        ray.get(monitor.announce.remote(facts), timeout=limit)
        logs = RunLogs(
            folder / "logs", run_id, lambda: ray.get(monitor.take_logs.remote(), timeout=limit)
        )
        status = StatusWriter(
            path=logs.folder / STATUS_FILE,
            run_id=run_id,
            folder=folder,
            pools=pools,
            total_steps=config.trainer.total_training_steps,
            heartbeat_s=config.cluster.heartbeat_s,
            snapshot=lambda: _snapshot_of(monitor),
            list_nodes=list_nodes,
        )
        with closing(logs), status.writing():
            placed = place(pools, timeout_s=config.cluster.placement_timeout_s, say=say)
            for pool in pools:
                say(f"pool {pool}")
            logs.start(echo="rank_0")
            directory = None if config.cluster.runtime_env.working_dir else str(Path.cwd())
            try:
                config, shipment = ship_inputs(config, placed.values(), say)
                yield ClusterRun(
                    config, run_id, placed, monitor, logs, stop, say, environment, directory,
                    shipment, facts,
                )  # fmt: skip
            finally:
                for one in placed.values():
                    with suppress(Exception):
                        one.release()


def _probe(node_id: str) -> Any:
    """Start a task without work on a node; it ends soon if the node lives."""
    remote: Any = ray.remote
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = remote(num_cpus=0, max_retries=0)(_answer)
    return task.options(scheduling_strategy=affinity).remote()


def _answer() -> bool:
    return True


def _end_of(reference: Any) -> RankEnd:
    try:
        return ray.get(reference)
    except RayError as error:
        if isinstance(error, RayActorError):
            return RankEnd("lost", _reason(error), 1)
        return RankEnd("failed", _reason(error), 1)


def _snapshot_of(monitor: Any) -> Snapshot | None:
    with suppress(RayError):
        return ray.get(monitor.snapshot.remote(), timeout=_POLL_S * 4)
    return None


def _is_lost(end: RankEnd) -> bool:
    return end.kind == "lost"


def _kill(host: RemoteHost) -> None:
    with suppress(RayError):
        ray.kill(host.actor, no_restart=True)


def _reason(error: BaseException) -> str:
    """Return Ray's text in one line; of a constructor's traceback, the last line."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    has_traceback = isinstance(error, RayActorError) and error.actor_init_failed
    return " ".join(lines[-1:] if has_traceback else lines)[:600]
