"""Keys of a run on a Ray cluster: its address, its pools, its environment and its time limits."""

from typing import Literal

from pydantic import Field, field_validator

from agentrl.config.schema.section import Section, UserPath

Role = Literal["train", "engine", "rollout"]
HostRole = Literal["train", "engine", "rollout", "plugin"]
"""The role of a process: a plug-in that asks for resources is in no pool of the run file."""


class PoolConfig(Section):
    """Nodes that are reserved together for some roles of a run."""

    name: str = Field(min_length=1)
    """Name of the pool in errors, in `agentrl status` and in metrics."""
    nodes: int = Field(default=1, ge=1)
    """Nodes of the pool; each is another machine."""
    devices_per_node: int = Field(default=1, ge=0)
    """Devices on each node: GPUs, or CPUs if `trainer.device` is `cpu`. 0: only CPUs, for
    rollout workers."""
    cpus_per_node: int | None = Field(default=None, ge=0)
    """CPUs that are reserved on each node in addition to the devices; null: one for each GPU and
    one for each rollout worker."""
    resources: dict[str, float] = Field(default_factory=dict[str, float])
    """Custom resources of Ray that each node must have: `{accelerator_type:H100: 0.001}`."""
    roles: list[Role] = Field(min_length=1)
    """What runs in it. train: a training rank on each device. engine: SGLang servers; with `train`
    in the same pool they share the devices (sleep and wake). rollout: rollout workers."""

    @field_validator("roles")
    @classmethod
    def _refuse_repeated(cls, roles: list[Role]) -> list[Role]:
        if len(set(roles)) < len(roles):
            raise ValueError(f"names a role twice: {', '.join(roles)}")
        return roles


class RuntimeEnvConfig(Section):
    """What every node gets from the driver's machine before anything runs there."""

    working_dir: UserPath | None = None
    """A folder that is copied to every node and is the working directory there, for relative paths
    and for modules of users. null: nodes use the driver's working directory if they have it. Ray
    refuses folders of more than 500 MiB. Models and data files that a node lacks are copied to
    `cluster.cache_dir`, and need not be in it."""
    excludes: list[str] = Field(default_factory=list[str])
    """Patterns of files in `working_dir` that are not copied, as in a `.gitignore`."""
    py_modules: list[UserPath] = Field(default_factory=list[UserPath])
    """Folders of Python packages that are copied to every node and can be imported there."""
    env_vars: list[str] = Field(default_factory=list[str])
    """Names of environment variables. Their values are taken from the driver, and are not written
    to logs."""


class ClusterConfig(Section):
    """A run on a Ray cluster. A run on one device, or under torchrun, does not read it."""

    address: str | None = None
    """The cluster: `host:6379`, `auto` (the cluster of this machine) or `local` (a new one that
    ends with the run). null: the environment variable RAY_ADDRESS; without it, `local`."""
    pools: list[PoolConfig] = Field(default_factory=list[PoolConfig])
    """The placement of the roles. Empty: one pool of `trainer.nnodes` nodes with
    `trainer.n_gpus_per_node` devices, for all roles."""
    runtime_env: RuntimeEnvConfig = RuntimeEnvConfig()
    cache_dir: UserPath | None = None
    """Folder of each node for copies of models, data files and single plug-in files that only the
    driver's machine has. Each copy has a folder named by the digest of its content, and stays.
    null: `~/.cache/agentrl/inputs`."""
    placement_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a run waits for resources which the cluster has and other runs use. Resources
    that the cluster does not have are an error at once."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds from the placement until a process has started: its environment, files that are
    copied to its node, and its imports."""
    call_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a short remote call may take (status, stop, the choice of a port)."""
    stop_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that ranks have, after Ctrl-C or SIGTERM, to save the last completed step. Then their
    processes are ended."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two heartbeats of a process."""
    heartbeat_timeout_s: float = Field(default=180.0, gt=0)
    """A process without a heartbeat for so many seconds counts as dead."""
    object_store_bytes: int | None = Field(default=None, ge=78_643_200)
    """Size of the object store of a `local` cluster; null: Ray's default, 30 % of the memory."""

    @field_validator("pools")
    @classmethod
    def _refuse_same_name(cls, pools: list[PoolConfig]) -> list[PoolConfig]:
        names = [pool.name for pool in pools]
        if len(set(names)) < len(names):
            raise ValueError(f"has two pools of one name: {', '.join(names)}")
        return pools
