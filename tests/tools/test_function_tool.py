"""Tools made of functions: the schema is what the signature says, and calls fit it."""

import threading
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.errors import ConfigError, ToolError
from agentrl.tools import BaseTool, ToolResponse, ToolResult, function_tool, load_function_tools
from agentrl.tools.function_tool import FunctionTool
from agentrl.tools.runtime.session import ToolSession
from tests.fakes.tools import call


class Place(BaseModel):
    """Where."""

    city: str
    zip: int | None = None


class Unit(Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@function_tool
def weather(
    place: Place,
    days: int = 3,
    unit: Unit = Unit.CELSIUS,
    mode: Literal["short", "long"] = "short",
    tags: list[str] | None = None,
    title: Annotated[str, Field(description="Described by Field.")] = "",
) -> str:
    """Forecast the weather.

    Up to ten days.

    Args:
        place: Which place.
        days: How many days.
        title: Described by the docstring.
    """
    return f"{type(place).__name__} {place.city} {days} {unit} {mode} {tags}"


async def run(function: Any, **parameters: Any) -> ToolResult:
    return await FunctionTool(function).execute("r", parameters)


def test_the_schema_is_read_from_signature_and_docstring():
    function = FunctionTool(weather).tool_schema.function
    properties = function.parameters["properties"]
    assert function.name == "weather"
    assert function.description == "Forecast the weather.\n\nUp to ten days."
    assert properties["days"] == {"type": "integer", "default": 3, "description": "How many days."}
    assert properties["mode"] == {"type": "string", "enum": ["short", "long"], "default": "short"}
    assert properties["tags"]["anyOf"] == [
        {"type": "array", "items": {"type": "string"}},
        {"type": "null"},
    ]
    assert properties["title"]["description"] == "Described by Field."
    assert properties["place"]["description"] == "Which place."
    assert function.parameters["$defs"]["Place"]["required"] == ["city"]
    assert function.parameters["required"] == ["place"]
    assert function.parameters["additionalProperties"] is False


async def test_arguments_are_converted_to_what_the_function_declares():
    result = await run(weather, place={"city": "Bern"}, unit="kelvin")
    assert result.response.text == "Place Bern 3 Unit.KELVIN short None"


async def test_arguments_that_do_not_fit_are_the_models_error():
    with pytest.raises(ToolError, match=r"argument place\.city: Field required"):
        await run(weather, place={})


def test_the_decorated_function_is_left_as_it_is():
    assert weather(Place(city="Bern")).startswith("Place Bern")


def test_it_may_be_given_a_name_or_a_schema():
    @function_tool("renamed")
    def one(x: int) -> str:
        return ""

    schema = {"type": "function", "function": {"name": "told", "parameters": {"type": "object"}}}

    @function_tool(schema=schema)
    def two(x: int) -> str:
        return ""

    assert FunctionTool(one).name == "renamed"
    assert FunctionTool(two).tool_schema.to_template() == schema


def test_parameters_may_have_any_name():
    @function_tool
    def odd(copy: int, json: int, model_config: int, _x: int, schema: int) -> str:
        return ""

    names = FunctionTool(odd).tool_schema.function.parameters["required"]
    assert names == ["copy", "json", "model_config", "_x", "schema"]


def test_a_function_without_parameters_or_docstring_is_a_tool():
    @function_tool
    def now() -> str:
        return "12:00"

    assert FunctionTool(now).tool_schema.function.parameters == {
        "type": "object",
        "properties": {},
        "required": [],
        "additionalProperties": False,
    }


def _var_args(*values: int) -> str:
    return ""


def _var_kwargs(**values: int) -> str:
    return ""


def _positional(value: int, /) -> str:
    return ""


def _no_schema(lock: threading.Lock) -> str:  # type: ignore[valid-type]
    return ""


def _unknown(value: "Nowhere") -> str:  # type: ignore[name-defined] # noqa: F821
    return ""


@pytest.mark.parametrize("function", [_var_args, _var_kwargs, _positional, _no_schema, _unknown])
def test_a_signature_without_a_schema_is_refused_by_name(function: Any):
    with pytest.raises(ConfigError, match=function.__name__):
        function_tool(function)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        ({"a": 1}, '{"a": 1}'),
        (ToolResponse(text="a"), "a"),
        (("a",), "a"),
        (("a", 1.0, {"m": 1}), "a"),
        (7, "7"),
        (0.5, "0.5"),
        (True, "true"),
        ([1, "é"], '[1, "é"]'),
        (Place(city="Bern"), '{"city":"Bern","zip":null}'),
    ],
)
async def test_a_function_returns_what_execute_may_and_any_json(value: Any, text: str):
    @function_tool
    def tool() -> Any:
        return value

    assert (await run(tool)).response.text == text


@pytest.mark.parametrize("value", [(), ("a", 0.0, {}, False), ("a", 0.0, {}, False, 1), None])
async def test_other_tuples_and_none_are_refused(value: Any):
    @function_tool
    def tool() -> Any:
        return value

    with pytest.raises(TypeError, match=r"tool 'tool' \(tool in test_function_tool\.py\) returned"):
        await run(tool)


async def test_a_plain_function_runs_off_the_loop_and_an_async_one_on_it():
    @function_tool
    def plain() -> int:
        return threading.get_ident()

    @function_tool
    async def on_loop() -> int:
        return threading.get_ident()

    here = str(threading.get_ident())
    assert (await run(plain)).response.text != here
    assert (await run(on_loop)).response.text == here


async def test_validation_errors_of_the_functions_own_are_not_the_models():
    @function_tool
    def tool() -> str:
        return Place.model_validate({}).city

    with pytest.raises(ValueError, match="city") as error:
        await run(tool)
    assert not isinstance(error.value, ToolError)


def test_function_tools_are_loaded_from_a_file_in_their_order(tmp_path: Path):
    source = tmp_path / "tools.py"
    source.write_text(
        "from agentrl.tools import function_tool\n"
        "@function_tool\ndef b() -> str: return 'b'\n"
        "@function_tool('a')\ndef anything() -> str: return 'a'\n"
        "def helper() -> str: return ''\n"
    )
    tools = load_function_tools(source)
    assert [tool.name for tool in tools] == ["b", "a"]
    assert all(isinstance(tool, BaseTool) for tool in tools)


def test_a_file_without_function_tools_is_refused(tmp_path: Path):
    source = tmp_path / "empty.py"
    source.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no function is marked"):
        load_function_tools(source)


async def test_a_function_may_configure_its_middleware():
    calls: list[int] = []

    @function_tool(config={"cache": {}})
    def square(x: int) -> str:
        calls.append(x)
        return str(x * x)

    tool = FunctionTool(square)
    session = ToolSession({"square": tool}, instance_id="r")
    outcomes = [(await session.execute([call("square", x=3)]))[0] for _ in range(2)]
    assert [outcome.response.text for outcome in outcomes] == ["9", "9"]
    assert calls == [3]


def test_an_impossible_config_of_a_function_is_refused_with_its_location():
    with pytest.raises(ConfigError, match=r"cache\.max_entries is 0"):

        @function_tool(config={"cache": {"max_entries": 0}})
        def never() -> str:
            return ""
