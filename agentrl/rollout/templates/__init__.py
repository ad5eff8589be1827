"""Chat templates: messages to tokens and back, for any template, by construction."""

from agentrl.rollout.templates.assistant_turn import EncodedConversation, encode_conversation
from agentrl.rollout.templates.check import CheckMode, check_ledger, check_request
from agentrl.rollout.templates.delta import EncodedDelta
from agentrl.rollout.templates.probe.capabilities import probe_template
from agentrl.rollout.templates.probe.report import (
    Capability,
    History,
    TemplateNeeds,
    TemplateReport,
    TextReport,
    TextTransform,
    require,
)
from agentrl.rollout.templates.template import ChatTemplate

__all__ = [
    "Capability",
    "ChatTemplate",
    "CheckMode",
    "EncodedConversation",
    "EncodedDelta",
    "History",
    "TemplateNeeds",
    "TemplateReport",
    "TextReport",
    "TextTransform",
    "check_ledger",
    "check_request",
    "encode_conversation",
    "probe_template",
    "require",
]
