"""An agent of the OpenAI Agents SDK with one tool. The SDK calls the responses API."""

import json
import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return f"{a * b:g}"


if __name__ == "__main__":
    set_tracing_disabled(True)  # traces go to OpenAI's servers
    with open(sys.argv[1], encoding="utf-8") as file:
        prompt = json.load(file)["prompt"]
    agent = Agent(name="solver", model=os.environ["OPENAI_MODEL"], tools=[multiply])
    Runner.run_sync(agent, prompt, max_turns=6)
