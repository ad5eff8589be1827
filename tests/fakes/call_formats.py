"""Formats of calls as functions that write calls, for tests that cut, nest and quote them."""

import json
from collections.abc import Sequence
from typing import Any

Made = Sequence[tuple[str, dict[str, Any]]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def hermes(made: Made) -> str:
    bodies = [_json({"name": name, "arguments": arguments}) for name, arguments in made]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen3_coder(made: Made) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = [f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in arguments.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(given)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in made)


def llama3(made: Made) -> str:
    bodies = [_json({"name": name, "parameters": arguments}) for name, arguments in made]
    return "<|python_tag|>" + "; ".join(bodies)


def pythonic(made: Made) -> str:
    bodies = [f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in made]
    return f"[{', '.join(bodies)}]"


def mistral(made: Made) -> str:
    return "[TOOL_CALLS] " + _json([{"name": name, "arguments": args} for name, args in made])


def mistral_named(made: Made) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in made)


def bare_json(made: Made) -> str:
    bodies = [{"id": "1", "name": name, "arguments": arguments} for name, arguments in made]
    return "\n".join(map(_json, bodies))


def kimi_k2(made: Made) -> str:
    bodies = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(made)
    ]
    return f"<|tool_calls_section_begin|>{''.join(bodies)}<|tool_calls_section_end|>"


def glm45(made: Made) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        ]
        return f"<tool_call>{name}\n{''.join(given)}</tool_call>"

    return "\n".join(one(*call) for call in made)


def minimax_m2(made: Made) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = [f'<parameter name="{k}">{_plain(v)}</parameter>' for k, v in arguments.items()]
        return f'<invoke name="{name}">{"".join(given)}</invoke>'

    return f"<minimax:tool_call>{''.join(one(*call) for call in made)}</minimax:tool_call>"


def gemma4(made: Made) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = [
            f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{_json(value)}"
            for key, value in arguments.items()
        ]
        return f"<|tool_call>call:{name}{{{','.join(given)}}}<tool_call|>"

    return "".join(one(*call) for call in made)


def lfm2(made: Made) -> str:
    return f"<|tool_call_start|>{pythonic(made)}<|tool_call_end|>"


def deepseekv31(made: Made) -> str:
    bodies = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in made
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(bodies)}<｜tool▁calls▁end｜>"


OWN = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3,
    "pythonic": pythonic,
    "mistral": mistral,
    "json": bare_json,
}
SGLANG = {
    "hermes": hermes,
    "qwen25": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3": llama3,
    "pythonic": pythonic,
    "mistral": mistral,
    "kimi_k2": kimi_k2,
    "glm45": glm45,
    "minimax-m2": minimax_m2,
    "gemma4": gemma4,
    "lfm2": lfm2,
    "deepseekv31": deepseekv31,
}
