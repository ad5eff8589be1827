"""A loop around LiteLLM: the model multiplies with a tool until it answers."""

import json
import os
import sys

import litellm

NUMBER = {"type": "number"}
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
        },
    },
}


def multiply(arguments):
    """Return the product, or what is wrong with the arguments."""
    try:
        given = json.loads(arguments)
        return str(given["a"] * given["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error!r}"


def solve(messages, max_turns=6):
    """Let the model call the tool until it answers."""
    for _ in range(max_turns):
        response = litellm.completion(
            model=f"openai/{os.environ['OPENAI_MODEL']}", messages=messages, tools=[TOOL]
        )
        message = response.choices[0].message
        messages = [*messages, message.model_dump()]
        for call in message.tool_calls or []:
            result = multiply(call.function.arguments)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": result}]
        if not message.tool_calls:
            break


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        solve(json.load(file)["prompt"])
