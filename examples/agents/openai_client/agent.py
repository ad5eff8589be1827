"""A loop around OpenAI's client: a model, a calculator, an answer. It knows nothing of agentrl."""

import json
import re
import sys

from openai import AsyncOpenAI

EXPRESSION = {
    "type": "string",
    "description": "Numbers, + - * / // % ** and parentheses: (3 + 4) * 2.5",
}
CALCULATOR = {
    "name": "calculator",
    "description": "Compute an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": EXPRESSION},
        "required": ["expression"],
    },
}


def calculate(arguments: str) -> str:
    """Compute with floats: large powers overflow at once, instead of taking hours."""
    try:
        expression = re.fullmatch(r"[\d\s.+*/%()-]+", json.loads(arguments)["expression"])[0]
        floats = re.sub(r"[\d.]+", r"float('\g<0>')", expression)
        return f"{eval(floats):.12g}"
    except Exception as error:  # noqa: BLE001 - the model can write anything
        return f"Error: {error!r}"


async def solve(messages, model="policy", max_turns=6, **client_arguments):
    """Let the model call the calculator until it answers."""
    async with AsyncOpenAI(**client_arguments) as client:
        for _ in range(max_turns):
            response = await client.chat.completions.create(
                model=model,
                messages=messages,
                tools=[{"type": "function", "function": CALCULATOR}],
            )
            message = response.choices[0].message
            messages = [*messages, message.model_dump(exclude_none=True)]
            for call in message.tool_calls or ():
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break


async def run(record):
    """Solve the row of a record: `rollout.agent.python` names this function."""
    await solve(record.row["prompt"], model=record.model, **record.openai)


if __name__ == "__main__":  # the same as a program: `rollout.agent.command`
    import asyncio

    with open(sys.argv[1], encoding="utf-8") as file:
        asyncio.run(solve(json.load(file)["prompt"]))
