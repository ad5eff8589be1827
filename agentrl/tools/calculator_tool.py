"""A calculator that is safe to expose to a policy: no names, bounded numbers, bounded time.

Numbers are decimals of 100 digits, so `0.1 + 0.2` is `0.3`. A number with more than 100 digits
before the point is refused. An expression has at most 300 characters, and each operation on bounded
numbers takes bounded time.
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

from agentrl.errors import ToolError
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import BundledTool, function_schema, string_parameter

MAX_CHARACTERS = 300
MAX_DIGITS = 100
_SHOWN_DIGITS = 12
_ROUNDING = Decimal("1e-40")
"""Relative error below which a result counts as a whole number, for `1 / 3 * 3`."""


class CalculatorTool(BundledTool):
    """Compute arithmetic. If an expression cannot be computed, the error says what to change.

    `config` has the keys of every tool, and none of its own. A subclass that has keys names them by
    its `keys_class`.
    """

    default_schema = function_schema(
        "calculator",
        "Compute an arithmetic expression.",
        expression=string_parameter("Numbers, + - * / // % ** and parentheses: (3 + 4) * 2.5"),
    )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Compute `parameters["expression"]`.

        Raises:
            ToolError: if the expression is not arithmetic.
        """
        expression = str(parameters.get("expression", ""))
        return ToolResult.of(calculate(expression), tool=self.name)


def calculate(expression: str) -> str:
    """Compute an expression.

    Returns:
        A plain number: no exponent, no `.0`, at most 12 significant digits after the point.

    Raises:
        ToolError: if the expression is not arithmetic, too long, or too large.

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
            raise ToolError(_explain(node))


def _literal(value: float) -> str:
    """Write a number as text; a number that is too long to write is an error."""
    if value == float("inf") or (isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS):
        raise ToolError(f"Error: a number has more than {MAX_DIGITS} digits.")
    return repr(value)


def _explain(node: ast.expr) -> str:
    """Return what is wrong with an expression, for the model."""
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
    """Write a value without an exponent, rounded to the digits that are shown."""
    whole = value.to_integral_value(context=context)
    off = context.abs(context.subtract(value, whole))
    if off <= context.multiply(_ROUNDING, context.max_mag(Decimal(1), value).copy_abs()):
        return f"{context.plus(whole):f}"
    digits = max(_SHOWN_DIGITS, value.adjusted() + 1 + _SHOWN_DIGITS)
    rounded = Context(prec=min(digits, MAX_DIGITS), Emin=context.Emin).plus(value)
    plain = f"{rounded:f}"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
