"""Chat templates: messages to tokens and back, for any template, by construction."""

from agentrl.rollout.templates.check import CheckMode, check_ledger, check_request
from agentrl.rollout.templates.conversation import EncodedConversation
from agentrl.rollout.templates.observed import EncodedDelta
from agentrl.rollout.templates.probe.capabilities import probe_template
from agentrl.rollout.templates.probe.report import (
    Capability,
    History,
    TemplateNeeds,
    TemplateReport,
    TextReport,
    Treatment,
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
    "Treatment",
    "check_ledger",
    "check_request",
    "probe_template",
    "require",
]
