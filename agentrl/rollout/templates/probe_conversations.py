"""Messages of the short conversations that probe a template."""

from collections.abc import Sequence
from functools import lru_cache

from agentrl.errors import TemplateError
from agentrl.messages import (
    FunctionCall,
    Message,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolCall,
)

REASONING = "Hm."
PARALLEL_CITIES = ("Oslo", "Rome")
"""The cities of the turn with two calls."""
THOUGHT = f"<think>\n{REASONING}\n</think>\n\nI see."


def user_message(text: str = "Where is it raining?") -> Message:
    """Make a user's message."""
    return Message(role="user", content=text)


def answer_message(text: str) -> Message:
    """Make an assistant's answer."""
    return Message(role="assistant", content=text)


def call_message(
    city: str, number: int = 0, *, text: str = "", name: str = "probe_tool"
) -> Message:
    """Make an assistant's tool call, with the conversation's call number."""
    function = FunctionCall(name=name, arguments={"city": city})
    call = ToolCall(id=f"call0000{number}", function=function)
    return Message(role="assistant", content=text, tool_calls=[call])


def parallel_calls_message(*cities: str) -> Message:
    """Make an assistant's turn with a tool call for each city."""
    calls = [(call_message(city, number).tool_calls or [])[0] for number, city in enumerate(cities)]
    return Message(role="assistant", content="", tool_calls=calls)


def result_message(text: str = "It rains.", number: int = 0, name: str = "probe_tool") -> Message:
    """Make the result of a call."""
    return Message(role="tool", content=text, name=name, tool_call_id=f"call0000{number}")


# One schema, not equal ones: caches of shapes use its identity.
@lru_cache(maxsize=8)
def tool_schema(description: str = "Tell the weather.") -> OpenAIFunctionToolSchema:
    """Make the schema of the tool that the conversations call."""
    city = {"type": "string", "description": "A city."}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    schema = OpenAIFunctionSchema(name="probe_tool", description=description, parameters=parameters)
    return OpenAIFunctionToolSchema(function=schema)


def with_preface(preface: Sequence[object], messages: Sequence[Message]) -> list[Message]:
    """Add a system message to a conversation if the template requires one."""
    if not preface or messages[0].role == "system":
        return list(messages)
    return [Message(role="system", content="Be brief."), *messages]


def reason_of(error: TemplateError) -> str:
    """Return the reason of a template's refusal in one line."""
    return str(error.details.get("reason") or error.args[0])
