"""What loops that were written for verl read: its configuration tree, its tokenizer, its tools."""

import copy
import inspect
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agentrl.config.schema.run import RunConfig
from agentrl.plugins.call import call_method
from agentrl.rollout.tool_parsers import ToolParser, get_tool_parser, tool_parser_names
from agentrl.tools.base import BaseTool, ToolResult


def config_view(config: RunConfig, *, parser: ToolParser) -> DictConfig:
    """Return the configuration as a loop reads it: verl's tree and agentrl's, in one.

    `config.actor_rollout_ref.rollout.response_length` and `config.data.max_response_length` are
    the same number. agentrl's sections are also at the root.

    Args:
        config: The run.
        parser: Reads the tool calls of the run; it may be derived from the template.
    """
    tree: dict[str, Any] = config.model_dump(mode="json")
    rollout, data = copy.deepcopy(tree["rollout"]), tree["data"]
    turns = rollout["multi_turn"]
    turns["enable"] = bool(turns["tool_config_path"] or turns["interaction_config_path"])
    turns["format"] = turns["format"] or _format_of(parser)
    longest = data["max_prompt_length"] + data["max_response_length"]
    rollout |= {
        "name": rollout["engine"]["name"],
        "mode": "async",
        "prompt_length": data["max_prompt_length"],
        "response_length": data["max_response_length"],
        "max_model_len": rollout["max_model_len"] or longest,
        "calculate_log_probs": True,
        "full_determinism": False,
        "trace": {},
    }
    tree["actor_rollout_ref"] = {
        "model": tree["model"],
        "actor": tree["actor"],
        "ref": tree["ref"],
        "rollout": rollout,
    }
    return OmegaConf.create(tree)


def _format_of(parser: ToolParser) -> str | None:
    """Return the name of a parser's format."""
    names = (name for name in tool_parser_names() if type(get_tool_parser(name)) is type(parser))
    return next(names, None)


def tokenizer_view(tokenizer: Any, *, chat_template: str | None = None) -> Any:
    """Return a copy of a tokenizer whose `apply_chat_template` returns ids as a plain list.

    transformers 5 returns a mapping, and loops of verl expect a list.

    Args:
        tokenizer: The policy's tokenizer; it is not changed.
        chat_template: Replaces its template (`model.custom_chat_template`).
    """
    view = copy.copy(tokenizer)
    if chat_template is not None:
        view.chat_template = chat_template
    apply = type(tokenizer).apply_chat_template

    def apply_chat_template(conversation: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tokenize", True):
            kwargs.setdefault("return_dict", False)
        return apply(view, conversation, *args, **kwargs)

    view.apply_chat_template = apply_chat_template
    return view


def tool_view(tool: BaseTool) -> BaseTool:
    """Return a tool whose `execute` returns `(response, reward, metrics)`, as loops of verl expect.

    It has the class and the attributes of the tool, and shares its state.
    """
    kind: Any = type(tool)
    parameters_of = inspect.signature(tool.execute).parameters.values()
    takes_data = any(p.name == "agent_data" or p.kind is p.VAR_KEYWORD for p in parameters_of)

    async def execute(
        self: BaseTool, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        if not takes_data:  # verl 0.9.1 passes its state to every tool
            kwargs.pop("agent_data", None)
        returned = await call_method(tool.execute, instance_id, parameters, **kwargs)
        result = ToolResult.of(returned, tool=tool.name)
        return result.response, result.reward or 0.0, result.metrics or {}

    view = object.__new__(type(kind.__name__, (kind,), {"execute": execute}))
    view.__dict__ = tool.__dict__
    return view
