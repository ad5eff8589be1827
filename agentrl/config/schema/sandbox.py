"""Keys of the sandbox that runs code which a model wrote."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.schema.section import Section

SandboxProviderName = Literal["auto", "sandlock", "bubblewrap", "subprocess", "sandbox_fusion"]
_LIMITS_NOT_KEPT = {
    "subprocess": ("max_processes",),
    "sandbox_fusion": ("cpu_s", "max_processes", "max_open_files", "disk_bytes"),
}
"""Limits that a provider cannot keep: a service has its own."""


class SandboxConfig(Section):
    """The provider of the sandbox, and the limits of the code. `reward.sandbox` has these keys, and
    so has `sandbox` in the `config` of a tool or an interaction that runs code.
    """

    provider: SandboxProviderName = "auto"
    """auto: the best provider with namespaces here (sandlock, then bubblewrap), or an error.
    `sandlock` also runs without namespaces, and then blocks less: see docs/trust.md."""
    trusted: bool = False
    """Whether the code may have full access to this machine. `subprocess`, which sets limits and
    hides nothing, requires it."""
    url: str | None = None
    """The address of the service, only for `sandbox_fusion`."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall clock of one call, in seconds."""
    cpu_s: float = Field(default=60.0, gt=0)
    """CPU seconds of one process; for an interpreter, of all its calls together. Code that still
    runs after a Python call is stopped until the next call."""
    memory_bytes: int = Field(default=512 * 1024**2, ge=16 * 1024**2)
    """Bytes of address space of each process, and of memory of all processes of one sandbox."""
    max_processes: int = Field(default=16, ge=1)
    """Processes and threads at once (not `subprocess`)."""
    max_open_files: int = Field(default=64, ge=16)
    """File descriptors of one process."""
    max_output_bytes: int = Field(default=64 * 1024, ge=1)
    """Bytes of one call's output that are kept; the rest is discarded, and a process that writes
    256 times as much is killed."""
    disk_bytes: int = Field(default=64 * 1024**2, ge=1024**2)
    """Size of the private temporary folder, in bytes (`subprocess`: of one file)."""
    site_packages: bool = False
    """Let the code import the packages installed with agentrl (numpy, sympy); it can then read
    their files, and no other files."""
    num_warm: int = Field(default=2, ge=0)
    """Interpreters that are kept ready from the first call on; 0: each starts when it is needed."""

    @model_validator(mode="after")
    def _run_where_the_address_says(self) -> Self:
        """Refuse a provider and a url that name different places to run the code."""
        if self.provider == "sandbox_fusion" and not self.url:
            raise ValueError("provider sandbox_fusion needs a url, the service's address")
        if self.provider != "sandbox_fusion" and self.url is not None:
            raise ValueError(f"a url is for provider sandbox_fusion, and this is {self.provider}")
        return self

    @model_validator(mode="after")
    def _refuse_limits_that_are_not_kept(self) -> Self:
        """Refuse a limit that the provider cannot keep, unless it has its default."""
        for name in _LIMITS_NOT_KEPT.get(self.provider, ()):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {value}, and provider {self.provider} cannot keep this limit: "
                    f"remove {name}, or write sandlock or bubblewrap, which keep it"
                )
        return self

    def find_unread(self) -> dict[str, str]:
        """Return the set keys that the provider does not read, each with the reason."""
        unread: dict[str, str] = {}
        if self.provider != "subprocess":
            unread["trusted"] = f"provider is {self.provider}, and only subprocess reads it"
        if self.provider == "sandbox_fusion":
            reason = "provider is sandbox_fusion, whose service has its own limits"
            unread |= dict.fromkeys(("site_packages", "num_warm"), reason)
        for name in _LIMITS_NOT_KEPT.get(self.provider, ()):
            unread[name] = f"provider is {self.provider}, which cannot keep this limit"
        return {name: why for name, why in unread.items() if name in self.model_fields_set}


class AgentSandboxConfig(SandboxConfig):
    """The sandbox of an external agent, which is a larger program than the code of a tool."""

    provider: SandboxProviderName = "bubblewrap"
    """bubblewrap, or subprocess with `trusted: true`."""
    cpu_s: float = Field(default=3600.0, gt=0)
    """CPU seconds of one process."""
    memory_bytes: int = Field(default=4 * 1024**3, ge=16 * 1024**2)
    """Bytes of address space of each process, and of memory of all processes of one agent. Some
    runtimes reserve much more than they use."""
    max_processes: int = Field(default=64, ge=1)
    """Processes and threads at once (not `subprocess`)."""
    max_open_files: int = Field(default=256, ge=16)
    """File descriptors of one process."""
    disk_bytes: int = Field(default=256 * 1024**2, ge=1024**2)
    """Size of the private temporary folder, in bytes (`subprocess`: of one file)."""
