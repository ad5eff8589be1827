"""Who keeps in the code that a model writes."""

from collections.abc import Mapping
from itertools import chain
from typing import Protocol, runtime_checkable

from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.doctor.report import Checked, Result
from agentrl.errors import AgentRLError
from agentrl.rewards.managers import runs_code
from agentrl.sandbox.factory import ISOLATING_PROVIDERS, check_sandbox, unavailable_reason
from agentrl.trainer.setup.datasets import RunData
from agentrl.trainer.setup.plugins import Plugins


@runtime_checkable
class RunsCode(Protocol):
    """A plug-in that runs code in a sandbox of these keys, and says so."""

    @property
    def sandbox_config(self) -> SandboxConfig:
        """The keys."""
        ...


def check_sandboxes(config: RunConfig, plugins: Plugins, data: Result[RunData]) -> Checked[None]:
    """Say which provider keeps code in on this machine, for whom, and why not the others."""
    asked = find_sandboxes(config, plugins, data)
    faults: list[str] = []
    for name, keys in asked.items():
        try:
            check_sandbox(keys, key=f"sandbox of {name}")
        except AgentRLError as error:
            faults.append(str(error))
    users = [f"{name} ({keys.provider})" for name, keys in asked.items()]
    told = [f"asked for by {', '.join(users)}" if users else "nothing in the run asks for one"]
    return Checked(None, "\n".join([*told, *describe_providers()]), faults=tuple(faults))


def describe_providers() -> list[str]:
    """Say of each provider of this machine whether it keeps code in; the first is `auto`."""
    reasons = {provider: unavailable_reason(provider) for provider in ISOLATING_PROVIDERS}
    return [f"{provider}: {reason or 'keeps code in'}" for provider, reason in reasons.items()]


def find_sandboxes(
    config: RunConfig, plugins: Plugins, data: Result[RunData]
) -> Mapping[str, SandboxConfig]:
    """Find what in a run lets a model's code run, and where: the keys of its sandbox, by name.

    Args:
        config: Of the run.
        plugins: Its tools and interactions.
        data: Its rows; where they could not be read, their sources name no scorer.
    """
    users = [(tool.name, tool) for tool in plugins.tools]
    named = chain(users, plugins.interactions.items())
    asked = {name: one.sandbox_config for name, one in named if isinstance(one, RunsCode)}
    if runs_code(config.reward, _sources(data)):
        asked["reward"] = config.reward.sandbox
    return asked


def _sources(data: Result[RunData]) -> set[str]:
    if not data.is_there:
        return set()
    rows = data.need()
    return set(chain(rows.train.sources(), *(one.sources() for one in rows.val.values())))
