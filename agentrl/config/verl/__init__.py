"""verl's key tree, read into agentrl's: a table (`keys.yaml`), its readers, a report."""

from agentrl.config.verl.reading import VerlRun, read_verl_tree
from agentrl.config.verl.report import VerlReport
from agentrl.config.verl.tree import is_verl_tree, refuse_mixed

__all__ = ["VerlReport", "VerlRun", "is_verl_tree", "read_verl_tree", "refuse_mixed"]
