"""What is said of rows' `tools_kwargs` before the first rollout."""

from typing import Any

import pytest

from agentrl.errors import ConfigError, DataError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools import BaseTool, function_tool, initialize_tools_from_config
from agentrl.tools.function_tool import FunctionTool
from agentrl.tools.row_kwargs import RowKwargs
from tests.fakes.runs import write_yaml
from tests.fakes.tools import schema


class Sql(BaseTool):
    """Takes what its signature names."""

    async def create(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, instance_id: str | None = None, *, tables: str, rows: int = 0
    ) -> tuple[str, ToolResponse]:
        return "1", ToolResponse()


class Loose(BaseTool):
    """Takes anything, and reads one key."""

    async def create(
        self, instance_id: str | None = None, tables: str = "", **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        return "1", ToolResponse()


class Whole(BaseTool):
    """Is given the mapping whole, as verl's agent loops give it."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return str(kwargs.get("create_kwargs")), ToolResponse()


def kwargs_of(**create_kwargs: Any) -> dict[str, Any]:
    return {"sql": {"create_kwargs": create_kwargs}}


def checked(tool: type[BaseTool], tools_kwargs: dict[str, Any]) -> list[str]:
    checks = RowKwargs([tool({}, schema("sql"))])
    checks.check(tools_kwargs)
    return checks.notes


def refused(tool: type[BaseTool], tools_kwargs: dict[str, Any]) -> DataError:
    with pytest.raises(DataError) as caught:
        checked(tool, tools_kwargs)
    return caught.value


def test_an_unknown_key_of_an_entry_is_found():
    error = refused(Sql, {"sql": {"creat_kwargs": {}}})
    assert "did you mean 'create_kwargs'?" in str(error)
    assert error.details["key"] == "extra_info.tools_kwargs.sql.creat_kwargs"


def test_a_keyword_that_the_tool_cannot_take_is_found():
    error = refused(Sql, kwargs_of(tables="t", row=3))
    assert "create of the tool 'sql' takes no 'row'; did you mean 'rows'?" in str(error)
    assert error.details["expected"] == "one of tables, rows"


def test_a_keyword_that_the_tool_needs_is_missed():
    error = refused(Sql, kwargs_of(rows=3))
    assert error.details["key"] == "extra_info.tools_kwargs.sql.create_kwargs.tables"


def test_a_slip_that_a_tool_swallows_is_a_note_once():
    (note,) = checked(Loose, kwargs_of(tabels="t"))
    assert note.endswith("takes it by **kwargs; did you mean 'tables'?")
    checks = RowKwargs([Loose({}, schema("sql"))])
    for _ in range(3):
        checks.check(kwargs_of(tabels="t"))
    assert len(checks.notes) == 1


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        (Sql, kwargs_of(tables="t")),
        (Sql, {"sql": {"create_kwargs": {"tables": "t"}, "execute_kwargs": None}}),
        (Loose, kwargs_of(tables="t", colour="red")),
        (Whole, kwargs_of(anything=1)),
        (BaseTool, kwargs_of(anything=1)),
        (Sql, {"other": {"create_kwargs": {"x": 1}}}),
    ],
)
def test_what_can_be_meant_is_taken(tool: type[BaseTool], given: dict[str, Any]):
    assert checked(tool, given) == []


def test_keywords_of_a_function_tool_are_its_parameters():
    @function_tool
    def look(place: str, seed: int = 0) -> str:
        """Look."""
        return place

    checks = RowKwargs([FunctionTool(look)])
    checks.check({"look": {"execute_kwargs": {"seed": 1}}})
    with pytest.raises(DataError, match="takes no 'sed'"):
        checks.check({"look": {"execute_kwargs": {"sed": 1}}})


def test_a_required_parameter_that_is_no_property_is_refused(tmp_path: Any):
    tool_schema = schema("sql", query={"type": "string"}).model_dump()
    tool_schema["function"]["parameters"]["required"] = ["sql"]
    entry = {"class_name": "tests.tools.test_signatures.Answering", "tool_schema": tool_schema}
    file = write_yaml(tmp_path / "tools.yaml", {"tools": [entry]})
    with pytest.raises(ConfigError, match="requires 'sql', which is not one") as caught:
        initialize_tools_from_config(file)
    assert caught.value.details["expected"] == "some of query"


def test_required_parameters_that_are_declared_elsewhere_are_taken():
    tool_schema = schema("sql").model_dump()
    tool_schema["function"]["parameters"] |= {
        "required": ["x"],
        "allOf": [{"properties": {"x": {}}}],
    }
    assert OpenAIFunctionToolSchema.model_validate(tool_schema).undeclared_required() == []
