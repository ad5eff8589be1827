"""Keys of the sandbox in which code runs that a model wrote."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.schema.section import Section

SandboxProviderName = Literal["auto", "sandlock", "bubblewrap", "subprocess", "sandbox_fusion"]
UNREAD_BY_FUSION = (
    "cpu_s", "max_processes", "max_open_files", "disk_bytes", "site_packages", "num_warm",
)  # fmt: skip
"""Keys of which a service is told nothing: it has limits of its own."""


class SandboxConfig(Section):
    """Who keeps the code in, and what it may use. The same keys stand under `reward.sandbox` and,
    as `sandbox`, in the `config` of a tool or an interaction that runs code.
    """

    provider: SandboxProviderName = "auto"
    """auto: the best one that has namespaces here (sandlock, then bubblewrap); none is an error.
    `sandlock` runs without namespaces too, and then stops less: see docs/trust.md."""
    trusted: bool = False
    """Whether the code may be trusted with this machine. `subprocess`, which sets limits and keeps
    nothing secret, refuses to start without it."""
    url: str | None = None
    """Of `sandbox_fusion`, and of it alone: the service's address."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall clock of one call, in seconds."""
    cpu_s: float = Field(default=60.0, gt=0)
    """CPU seconds of one process: of an interpreter, over all its calls. What a Python call leaves
    running is stopped until the next call."""
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

    @model_validator(mode="after")
    def _run_where_the_address_says(self) -> Self:
        """Refuse what would run code elsewhere than its user thinks."""
        if self.provider == "sandbox_fusion" and not self.url:
            raise ValueError("provider sandbox_fusion needs a url, the service's address")
        if self.provider != "sandbox_fusion" and self.url is not None:
            raise ValueError(f"a url is for provider sandbox_fusion, and this is {self.provider}")
        return self

    def find_unread(self) -> dict[str, str]:
        """Find the keys that were set and that the provider does not read, each with the reason."""
        unread: dict[str, str] = {}
        if self.provider != "subprocess":
            unread["trusted"] = f"provider is {self.provider}, and subprocess alone asks"
        if self.provider == "sandbox_fusion":
            told = "provider is sandbox_fusion, whose service has limits of its own"
            unread |= dict.fromkeys(UNREAD_BY_FUSION, told)
        return {name: told for name, told in unread.items() if name in self.model_fields_set}
