"""What a policy may send to the world: arguments that JSON can hold."""

import json
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ToolError


def refuse_unsendable(arguments: Mapping[str, Any]) -> None:
    r"""Check arguments before they leave: a policy can write what no service can be sent.

    Lone surrogates (`"\ud800"`), NaN and infinities are legal to Python's JSON reader and to no
    other. A client library may break its connection over them, and with it the calls of others.

    Raises:
        ToolError: where they cannot be sent.
    """
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise ToolError(
            "Error: the arguments hold what is no JSON: NaN, Infinity, or half a character"
        ) from None
