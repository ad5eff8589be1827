"""A user's function or class replaces the bundled one of its name, with a note."""

import logging
from typing import Any

import pytest

from agentrl.agent_loops import AgentLoopBase
from agentrl.agent_loops import registry as loops
from agentrl.algorithms import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from agentrl.algorithms.advantages import registry as advantages
from agentrl.algorithms.losses import registry as losses
from agentrl.errors import ConfigError
from agentrl.plugins.registry import Registry, is_bundled

TABLES = (advantages._ESTIMATORS, losses._POLICY_LOSSES)
KINDS = {
    "advantage estimator": (register_adv_est, get_adv_estimator_fn, TABLES[0]),
    "policy loss": (register_policy_loss, get_policy_loss_fn, TABLES[1]),
}


def bundled(table: Registry[Any]) -> list[str]:
    """The names of the library's own: other tests of this process may have registered theirs."""
    return [name for name in table.names if is_bundled(table.get(name))]


NAMES = [(kind, name) for kind, (_, _, table) in KINDS.items() for name in bundled(table)]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after the test what it registered."""
    for table in TABLES:
        monkeypatch.setattr(table, "_found", dict(table._found))
    for module in (advantages, losses):
        monkeypatch.setattr(module, "_FACTS", dict(module._FACTS))
    monkeypatch.setattr(loops, "_REGISTERED", dict(loops._REGISTERED))


def mine(*args: Any, scale: Any = None, **kwargs: Any) -> Any:
    raise NotImplementedError


def others(*args: Any, scale: Any = None, **kwargs: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_function_of_a_user_replaces_a_bundled_one(kind: str, name: str, caplog: Any):
    register, get, _ = KINDS[kind]
    with caplog.at_level(logging.WARNING):
        register(name)(mine)
    assert getattr(get(name), "__wrapped__", get(name)) is mine
    assert f"mine replaces the bundled {kind} {name!r}" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_function_of_a_user_is_refused(kind: str):
    register, _, table = KINDS[kind]
    name = bundled(table)[0]
    register(name)(mine)
    register(name)(mine)  # the same one, as in a notebook
    with pytest.raises(ConfigError, match="already"):
        register(name)(others)


@pytest.mark.parametrize("name", loops.BUNDLED)
def test_a_loop_of_a_user_replaces_a_bundled_agent(name: str, caplog: Any):
    class Mine(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            raise NotImplementedError

    with caplog.at_level(logging.WARNING):
        loops.register(name)(Mine)
    assert loops.registered_loops()[name].loop is Mine
    assert f"Mine replaces the bundled agent {name!r}" in caplog.text
