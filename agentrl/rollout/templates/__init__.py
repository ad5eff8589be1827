"""Chat templates: messages to tokens and back, for any template, by construction."""

from agentrl.rollout.templates.template import ChatTemplate, EncodedDelta

__all__ = ["ChatTemplate", "EncodedDelta"]
