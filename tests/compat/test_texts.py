"""Classes under verl's names show the policy verl's texts; under our names they keep ours."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.interactions import initialize_interactions_from_config
from agentrl.tools import BaseTool, initialize_tools_from_config
from agentrl.tools.retrieval import Document

SCHEMA = "{type: function, function: {name: t, parameters: {type: object, properties: {}}}}"


def load(folder: Path, path: str, config: str = "{type: native}") -> Any:
    file = folder / "tools.yaml"
    entry = f"class_name: {path}, config: {config}, tool_schema: {SCHEMA}"
    file.write_text(f"tools: [{{{entry}}}]\n", encoding="utf-8")
    return initialize_tools_from_config(file)[0]


async def ask(tool: BaseTool, *calls: dict[str, Any], **create: Any) -> list[Any]:
    instance_id, _ = await tool.create("1", **create)
    results: list[Any] = [await tool.execute(instance_id, call) for call in calls]
    return [*((r.response.text, r.reward) for r in results), await tool.calc_reward(instance_id)]


async def test_the_gsm8k_tool(tmp_path: Path):
    calls = [{"answer": "71"}, {"answer": 72}, {"answer": "#### 72"}, {"answer": "no idea"}]
    tool = load(tmp_path, "verl.tools.gsm8k_tool.Gsm8kTool")
    assert await ask(tool, *calls, ground_truth="72") == [
        ("Current parsed answer='71' reward=0.0", -0.05),
        ("Current parsed answer='72' reward=1.0", 0.0),
        ("Current parsed answer='#### 72' reward=1.0", -0.05),
        ("Current parsed answer='no idea' reward=0", -0.05),
        0.0,
    ]
    own = load(tmp_path, "agentrl.tools.gsm8k_tool.Gsm8kTool", "{}")
    assert (await ask(own, calls[1], ground_truth="72"))[0][0] == "The answer 72 is scored 1.0."


async def test_the_geo3k_tool(tmp_path: Path):
    tool = load(tmp_path, "verl.tools.geo3k_tool.Geo3kTool")
    answer = r"\frac{1}{2}"
    assert await ask(tool, {"answer": answer}, ground_truth=answer) == [
        (f"Current parsed {answer=} reward=1.0", 0.0),
        1.0,
    ]


class Shelf:
    async def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        contents = ['"Ada Lovelace"\nShe wrote programs.', '"Ada"\nA language.']
        return [[Document.of(one, score=1.0) for one in contents]] * len(queries)


async def test_the_search_tool(tmp_path: Path):
    config = "{type: native, retrieval_service_url: 'http://here', topk: 2, rate_limit: 120}"
    tool = load(tmp_path, "verl.tools.search_tool.SearchTool", config)
    tool._retriever = Shelf()
    page = 'Doc 1 (Title: "Ada Lovelace")\nShe wrote programs.\n\nDoc 2 (Title: "Ada")\nA language.'
    none = "Error: 'query_list' is missing, empty, or not a list in parameters."
    found, lacking, _ = await ask(tool, {"query_list": ["a", "b"]}, {"query": "a"})
    assert json.loads(found[0]) == {"result": f"{page}\n---\n{page}"}
    assert (json.loads(lacking[0]), lacking[1]) == ({"result": none}, 0.0)
    assert (tool.topk, tool.retrieval_service_url) == (2, "http://here")


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("mcp_base_tool.MCPBaseTool", ["a", "b"], "a b"),
        (
            "mcp_search_tool.MCPSearchTool",
            ["{'query': 'x', 'results': [{'title': 'y'}], 'took': 1}"],
            '[{"title": "y"}]',
        ),
    ],
)
async def test_the_tools_of_mcp_servers(name: str, content: list[str], shown: str):
    from agentrl.plugins import load_class
    from agentrl.tools.mcp_tool import MCPTool
    from tests.fakes.tools import schema

    tool = load_class(f"agentrl.compat.verl.tools.{name}", MCPTool)({}, schema("t"))
    parts = [SimpleNamespace(type="text", text=text) for text in content]

    async def answer(instance_id: str, parameters: dict[str, Any]) -> Any:
        return SimpleNamespace(content=[*parts, SimpleNamespace(type="image")])

    tool.ask = answer
    result: Any = await tool.execute("1", {})
    assert (result.response.text, result.reward) == (shown, 0.0)


def replies(folder: Path, path: str, *messages: tuple[str, str], **kwargs: Any) -> list[Any]:
    file = folder / "users.yaml"
    file.write_text(f"interaction: [{{class_name: {path}, config: {{}}}}]\n", encoding="utf-8")
    [interaction] = initialize_interactions_from_config(file).values()

    async def talk() -> list[Any]:
        said, results = list[dict[str, Any]](), list[Any]()
        instance_id: Any = await interaction.start_interaction("1", **kwargs)
        for role, content in messages:
            said.append({"role": role, "content": content})
            if role == "assistant":
                results.append(tuple(await interaction.generate_response(instance_id, said))[:3])
        return results

    return asyncio.run(talk())


def test_the_gsm8k_interaction(tmp_path: Path):
    answers = (("assistant", "It is 72."), ("assistant", "#### 72"))
    again = "Your response is incorrect! You need to reflect on your answer and try again."
    path = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    assert replies(tmp_path, path, *answers, ground_truth="72") == [
        (False, again, 0.0),
        (True, "Your response is correct!", 1.0),
    ]


def test_the_weather_interaction_and_the_base_class(tmp_path: Path):
    weather = "verl.interactions.weather_interaction.WeatherInteraction"
    asked = "Please use the weather tool to get the weather information."
    assert replies(tmp_path, weather, ("assistant", "Sunny.")) == [(True, asked, 0.0)]
    tool = (("tool", "sunny"), ("assistant", "Sunny."))
    thanks = "Thank you for your weather query!"
    assert replies(tmp_path, weather, *tool) == [(True, thanks, 1.0)]
    base = "verl.interactions.base.BaseInteraction"
    fine = "Your current result seems acceptable."
    assert replies(tmp_path, base, ("assistant", "Hi.")) == [(False, fine, 0.8)]
