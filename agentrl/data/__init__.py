"""A row of a dataset -> Prompt: reading, measuring, ordering."""

from agentrl.data.dataset import PromptDataset, load_prompts
from agentrl.data.lengths import EncodePrompt, FilteredPrompts, drop_overlong, measure_prompts
from agentrl.data.order import DataOrder, epoch_order
from agentrl.data.rows import Conversation, Prompt, load_conversations
from agentrl.rollout.fitting import Truncation, fit_prompt

__all__ = [
    "Conversation",
    "DataOrder",
    "EncodePrompt",
    "FilteredPrompts",
    "Prompt",
    "PromptDataset",
    "Truncation",
    "drop_overlong",
    "epoch_order",
    "fit_prompt",
    "load_conversations",
    "load_prompts",
    "measure_prompts",
]
