"""Read dataset rows as prompts or conversations, measure them, and choose their order."""

from agentrl.data.rows import Prompt

__all__ = ["Prompt"]
