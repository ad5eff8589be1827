"""A domain with the shape of tau-bench's retail: two tools, a transfer, one database, two tasks."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


def describe(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": f"{name}.", "parameters": parameters}
    return {"type": "function", "function": function}


class GetOrder:
    get_info = staticmethod(lambda: describe("get_order", "order_id"))

    @staticmethod
    def invoke(data: dict[str, Any], order_id: str) -> str:
        return str(data["orders"][order_id])


class CancelOrder:
    get_info = staticmethod(lambda: describe("cancel_order", "order_id"))

    @staticmethod
    def invoke(data: dict[str, Any], order_id: str) -> str:
        data["orders"][order_id] = "canceled"
        return "canceled"


class Transfer:
    get_info = staticmethod(lambda: describe("transfer_to_human_agents", "summary"))

    @staticmethod
    def invoke(data: dict[str, Any], summary: str) -> str:
        return "Transfer successful"


def action(name: str, **kwargs: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, kwargs=kwargs)


TASKS = [
    SimpleNamespace(
        instruction="Cancel order A. How many orders are left?",
        actions=[action("get_order", order_id="A"), action("cancel_order", order_id="A")],
        outputs=["1000"],
    ),
    SimpleNamespace(
        instruction="Cancel order B and let me talk to a person.",
        actions=[
            action("cancel_order", order_id="B"),
            action("transfer_to_human_agents", summary="wants a person"),
        ],
        outputs=[],
    ),
]


def install(monkeypatch: Any) -> None:
    """Put the domain where `tau_bench` would be."""
    domain = "tau_bench.envs.retail"
    contents: dict[str, dict[str, Any]] = {
        "tau_bench": {},
        "tau_bench.envs": {},
        domain: {},
        f"{domain}.data": {"load_data": lambda: {"orders": {"A": "pending", "B": "pending"}}},
        f"{domain}.tasks_test": {"TASKS_TEST": TASKS},
        f"{domain}.tools": {"ALL_TOOLS": [GetOrder, CancelOrder, Transfer]},
        f"{domain}.wiki": {"WIKI": "You help customers."},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
