"""A loop around Anthropic's client: the model multiplies with a tool until it answers."""

import json
import os
import sys

from anthropic import Anthropic

NUMBER = {"type": "number"}
TOOL = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
    },
}


def multiply(arguments):
    """Return the product, or what is wrong with the arguments."""
    try:
        return str(arguments["a"] * arguments["b"])
    except (KeyError, TypeError) as error:
        return f"Error: {error!r}"


def solve(messages, max_turns=6):
    """Let the model call the tool until it answers."""
    client = Anthropic()
    system = "\n".join(m["content"] for m in messages if m["role"] == "system")
    messages = [m for m in messages if m["role"] != "system"]
    for _ in range(max_turns):
        reply = client.messages.create(
            model=os.environ["ANTHROPIC_MODEL"],
            max_tokens=1024,
            messages=messages,
            tools=[TOOL],
            **({"system": system} if system else {}),
        )
        messages = [*messages, {"role": "assistant", "content": reply.content}]
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": multiply(call.input)}
            for call in calls
        ]
        messages = [*messages, {"role": "user", "content": results}]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        solve(json.load(file)["prompt"])
