"""A loop around OpenAI's client: a model, a calculator, an answer. It knows nothing of agentrl."""

import ast
import json
import operator
import os
import sys

from openai import AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers, + - * / // % ** and parentheses: (3 + 4) * 2.5",
                    }
                },
                "required": ["expression"],
            },
        },
    }
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}  # fmt: skip


def calculate(expression: str) -> str:
    """Compute sums and products of numbers."""

    def value(node):
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError("only numbers, + - * / // and parentheses")

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval')):.12g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"


async def solve(messages, model="policy", max_turns=6, **client_arguments):
    """Let the model call the calculator until it answers; return the conversation."""
    async with AsyncOpenAI(**client_arguments) as client:
        for _ in range(max_turns):
            response = await client.chat.completions.create(
                model=model, messages=messages, tools=TOOLS
            )
            message = response.choices[0].message
            messages = [*messages, message.model_dump(exclude_none=True)]
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                try:
                    expression = str(json.loads(call.function.arguments)["expression"])
                    result = calculate(expression)
                except (ValueError, KeyError, TypeError) as error:
                    result = f"Error: {error!r}"
                answer = {"role": "tool", "tool_call_id": call.id, "content": result}
                messages = [*messages, answer]
    return messages


async def run(record):
    """Solve the row of a record: `rollout.agent.python` names this function."""
    await solve(record.row["prompt"], model=record.model, **record.openai)


if __name__ == "__main__":  # the same as a program: `rollout.agent.command`
    import asyncio

    with open(sys.argv[1], encoding="utf-8") as file:
        row = json.load(file)
    asyncio.run(solve(row["prompt"], model=os.environ.get("OPENAI_MODEL", "policy")))
