"""Keys of the sandbox in which code runs that a model wrote."""

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section

SandboxProviderName = Literal["auto", "sandlock", "bubblewrap", "subprocess", "sandbox_fusion"]


class SandboxConfig(Section):
    """Who keeps the code in, and what it may use. The same keys stand under `reward.sandbox` and,
    as `sandbox`, in the `config` of a tool or an interaction that runs code.
    """

    provider: SandboxProviderName = "auto"
    """auto: the best one that is present (sandlock, then bubblewrap); none present is an error."""
    trusted: bool = False
    """Whether the code may be trusted with this machine. `subprocess`, which sets limits and keeps
    nothing secret, refuses to start without it."""
    url: str | None = None
    """Of `sandbox_fusion`: the service's address."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall clock of one call, in seconds."""
    cpu_s: float = Field(default=60.0, gt=0)
    """CPU seconds of one process: of an interpreter, over all its calls."""
    memory_bytes: int = Field(default=512 * 1024**2, ge=16 * 1024**2)
    """Bytes of address space of each process, and of memory of all that runs in one sandbox."""
    max_processes: int = Field(default=16, ge=1)
    """Processes and threads at once."""
    max_open_files: int = Field(default=64, ge=16)
    """File descriptors of one process."""
    max_output_bytes: int = Field(default=64 * 1024, ge=1)
    """What is kept of one call's output, in bytes; the rest is read and thrown away, and what
    writes 256 times as much is killed."""
    disk_bytes: int = Field(default=64 * 1024**2, ge=1024**2)
    """Size of the private temporary folder, in bytes (`subprocess`: of one file)."""
    site_packages: bool = False
    """Let the code import what is installed beside agentrl (numpy, sympy); those files can then
    be read, and nothing else more."""
    num_warm: int = Field(default=2, ge=0)
    """Interpreters kept ready, from the first call on; 0 starts each when it is asked for."""
