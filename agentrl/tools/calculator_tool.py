"""A calculator that a policy cannot harm: no names, bounded numbers, bounded time.

Numbers are decimals of 100 digits, so `0.1 + 0.2` is `0.3`, and nothing grows: what would need more
than 100 digits before the point is refused. An expression has at most 300 characters, and each
operation on bounded numbers takes bounded time.
"""

import ast
import warnings
from collections.abc import Callable
from decimal import (
    ROUND_FLOOR,
    Context,
    Decimal,
    DecimalException,
    DivisionByZero,
    InvalidOperation,
    Overflow,
)
from typing import Any

from agentrl.config.schema.section import Section
from agentrl.errors import ToolError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.plugins.keys import read_keys
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.runtime.settings import SHARED_KEYS

MAX_CHARACTERS = 300
MAX_DIGITS = 100
_SHOWN_DIGITS = 12
_ROUNDING = Decimal("1e-40")
"""Share of a value by which `1 / 3 * 3` and the like may miss a whole number."""

_SCHEMA = OpenAIFunctionToolSchema.model_validate(
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
)


class _NoKeys(Section):
    """What a calculator reads of its `config` itself: nothing."""


class CalculatorTool(BaseTool):
    """Compute arithmetic; what cannot be computed is said in words that help to do better.

    Args:
        config: The keys of every tool, and none of its own; a subclass that has some names them by
            its `keys_class`.
        tool_schema: What the model is told; None: the bundled schema.
    """

    keys_class: type[Section] = _NoKeys

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        read_keys(self.keys_class, config, key="config", also_known=SHARED_KEYS)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Give the schema that a YAML need not repeat."""
        return self.tool_schema or _SCHEMA

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Compute `parameters["expression"]`.

        Raises:
            ToolError: for what is no arithmetic.
        """
        return ToolResult.of(calculate(str(parameters.get("expression", ""))), tool=self.name)


def calculate(expression: str) -> str:
    """Compute an expression.

    Returns:
        A plain number: no exponent, no `.0`, at most 12 significant digits behind the point.

    Raises:
        ToolError: for what is no arithmetic, too long, or too large.

    Example:
        >>> calculate("0.1 + 0.2"), calculate("7 / 2 * 2")
        ('0.3', '7')
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"Error: the expression is longer than {MAX_CHARACTERS} characters.")
    context = Context(
        prec=MAX_DIGITS,
        Emax=MAX_DIGITS - 1,
        Emin=1 - MAX_DIGITS,
        traps=[DivisionByZero, InvalidOperation, Overflow],
    )
    try:
        return _plain(_evaluate(_parse(expression), context), context)
    except DivisionByZero:
        raise ToolError("Error: division by zero.") from None
    except Overflow:
        raise ToolError(f"Error: a number has more than {MAX_DIGITS} digits.") from None
    except (DecimalException, RecursionError):
        raise ToolError("Error: the expression has no value that can be computed.") from None


def _parse(expression: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(
            f"Error: cannot read {expression!r}. Write numbers, + - * / // % ** and parentheses."
        ) from None


def _evaluate(node: ast.expr, context: Context) -> Decimal:
    match node:
        case ast.Constant(value=bool()):
            raise ToolError(f"Error: {node.value} is not a number.")
        case ast.Constant(value=int() | float() as value):
            return context.create_decimal(_literal(value))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](context, _evaluate(operand, context))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](context, _evaluate(left, context), _evaluate(right, context))
        case _:
            raise ToolError(_complaint(node))


def _literal(value: float) -> str:
    """Write a literal for the decimals; an integer too long to write has too many digits."""
    if value == float("inf") or (isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS):
        raise ToolError(f"Error: a number has more than {MAX_DIGITS} digits.")
    return repr(value)


def _complaint(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return f"Error: {name!r} is a name; write numbers only."
        case ast.Tuple():
            return "Error: write numbers without commas: 1000, not 1,000."
        case ast.BinOp(op=ast.BitXor()):
            return "Error: write powers with **, not with ^."
        case _:
            return "Error: only numbers, + - * / // % ** and parentheses are understood."


def _floor_divide(context: Context, left: Decimal, right: Decimal) -> Decimal:
    quotient = context.divide(left, right)
    return quotient.to_integral_value(ROUND_FLOOR, context)


def _modulo(context: Context, left: Decimal, right: Decimal) -> Decimal:
    """Compute what Python's `%` does: the result has the divisor's sign."""
    rest = context.remainder(left, right)
    return context.add(rest, right) if rest and (rest < 0) != (right < 0) else rest


def _power(context: Context, base: Decimal, exponent: Decimal) -> Decimal:
    return Decimal(1) if not exponent else context.power(base, exponent)


_UNARY: dict[type[ast.unaryop], Callable[[Context, Decimal], Decimal]] = {
    ast.UAdd: Context.plus,
    ast.USub: Context.minus,
}
_BINARY: dict[type[ast.operator], Callable[[Context, Decimal, Decimal], Decimal]] = {
    ast.Add: Context.add,
    ast.Sub: Context.subtract,
    ast.Mult: Context.multiply,
    ast.Div: Context.divide,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _modulo,
    ast.Pow: _power,
}


def _plain(value: Decimal, context: Context) -> str:
    whole = value.to_integral_value(context=context)
    off = context.abs(context.subtract(value, whole))
    if off <= context.multiply(_ROUNDING, context.max_mag(Decimal(1), value).copy_abs()):
        return f"{context.plus(whole):f}"
    digits = max(_SHOWN_DIGITS, value.adjusted() + 1 + _SHOWN_DIGITS)
    rounded = Context(prec=min(digits, MAX_DIGITS), Emin=context.Emin).plus(value)
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
