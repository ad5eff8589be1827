"""verl's key tree, read into ours: one table, one reading, one report."""

from agentrl.config.verl.reading import VerlRun, read_verl_tree
from agentrl.config.verl.report import LeftKey, TakenKey, VerlReport, naming_their_keys
from agentrl.config.verl.tree import is_verl_tree

__all__ = [
    "LeftKey",
    "TakenKey",
    "VerlReport",
    "VerlRun",
    "is_verl_tree",
    "naming_their_keys",
    "read_verl_tree",
]
