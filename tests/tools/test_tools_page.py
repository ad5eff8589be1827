"""What docs/tools.md shows works as it stands there, and what it lists is what there is."""

import asyncio
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel

from agentrl.messages import CallOutcome
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.tools import BaseTool
from agentrl.tools.registry import load_all_tools
from agentrl.tools.runtime.settings import ToolSettings
from agentrl.trainer.metrics.rollout import rollout_metrics
from tests.fakes.plugins import calling, make_context, make_engine, make_manager, make_prompts
from tests.fakes.tools import schema

PAGE = (Path(__file__).resolve().parents[2] / "docs/tools.md").read_text(encoding="utf-8")

NOT_FOR_YAML = {
    "agentrl.tools.function_tool.FunctionTool",
    "agentrl.tools.sandbox_tool.SandboxTool",
}
"""Classes that others are made of."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def cells(heading: str) -> list[list[str]]:
    """Return the rows of the first table behind a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1]
    rows = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert rows is not None
    lines = rows[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_every_bundled_tool_is_listed_and_no_other():
    folder = Path(import_module("agentrl.tools").__path__[0])
    modules = [import_module(f"agentrl.tools.{file.stem}") for file in folder.glob("*_tool.py")]
    bundled = {
        f"{kind.__module__}.{kind.__name__}"
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, BaseTool)
        if kind.__module__ == module.__name__
    }
    named_in_yaml = bundled - NOT_FOR_YAML
    assert {name for name, *_ in cells("Bundled tools")} == named_in_yaml


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncRolloutRequest:
    library, function, _ = blocks("python")
    (tmp_path / "my_library.py").write_text(library, encoding="utf-8")
    (tmp_path / "my_functions.py").write_text(function, encoding="utf-8")
    (tmp_path / "tools.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    tools = load_all_tools(tmp_path / "tools.yaml", str(tmp_path / "my_functions.py"))
    engine = make_engine(
        calling("library", title="Emma") + calling("library", title="Dune"),
        calling("is_leap", year=1900) + calling("is_leap", year=1900),
        "Done.",
    )
    manager = make_manager(make_context(engine, tools=tools), n=1)
    prompts = make_prompts(1, tools_kwargs=json.loads(blocks("json")[0]))
    requests = manager.make_requests(prompts, manager.train_plan())
    return asyncio.run(manager.rollout(requests))[0]


def test_the_tools_of_the_page_work(finished: AsyncRolloutRequest):
    assert finished.error is None
    texts = [message.text for message in finished.messages if message.role == "tool"]
    assert texts == ["lent Emma", "there is no 'Dune'; there are Emma, Ulysses", "False", "False"]
    calls = [call for turn in finished.turns for call in turn.calls]
    assert [call.outcome for call in calls] == ["ok", "tool_error", "ok", "ok"]
    assert [call.is_cached for call in calls] == [False, False, False, True]
    assert finished.tool_rewards["library"] == 1.0


async def test_tools_of_a_request_share_what_they_keep_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_shop.py").write_text(blocks("python")[2], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    shop = import_module("my_shop")
    tools = [shop.Add({}, schema("add", item={})), shop.Count({}, schema("count"))]
    engine = make_engine(calling("add", item="pen"), calling("count"), "Done.")
    manager = make_manager(make_context(engine, tools=tools), n=1)
    requests = manager.make_requests(make_prompts(1), manager.train_plan())
    (request,) = await manager.rollout(requests)
    texts = [message.text for message in request.messages if message.role == "tool"]
    assert texts == ["added", "1"]
    assert shop.CARTS == {}


def test_the_tool_of_the_page_is_short():
    assert all(len(block.splitlines()) < 30 for block in blocks("python"))


def test_every_key_is_in_the_table_with_its_default():
    def keys(model: type[BaseModel], parent: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for name, field in model.model_fields.items():
            default = "" if field.is_required() else str(field.default)
            found[parent + name] = "null" if default == "None" else default
            inner = [
                part
                for part in getattr(field.annotation, "__args__", ())
                if isinstance(part, type) and issubclass(part, BaseModel)
            ]
            for section in inner:
                found |= keys(section, f"{name}.")
        return found

    table = {row[0]: row[1] for row in cells("Limits, retries and caching")}
    assert table == keys(ToolSettings)


def test_every_outcome_is_in_the_table():
    assert sorted(row[0] for row in cells("What the model sees")) == sorted(CallOutcome)


def test_every_metric_of_the_table_is_logged(finished: AsyncRolloutRequest):
    logged = set(rollout_metrics([finished]))
    for name, _ in cells("What is recorded"):
        pattern = re.escape(name).replace("<name>", "library").replace(r"/\*", "/.*")
        pattern = pattern.replace("<outcome>", "ok")
        assert any(re.fullmatch(pattern, metric) for metric in logged), name


def test_every_bundled_tool_of_the_table_is_there():
    for path, _ in cells("Bundled tools"):
        module, name = path.rsplit(".", 1)
        assert issubclass(getattr(import_module(module), name), BaseTool)
