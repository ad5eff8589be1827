"""A run file: read, checked against itself, and explained.

The classes of its sections are in `agentrl.config.schema`.
"""

from agentrl.config.checks import (
    Bias,
    check_config,
    check_model_length,
    check_tools,
    find_biases,
    find_idle_ranks,
    find_idle_tools,
)
from agentrl.config.conflicts import Purpose, find_conflicts
from agentrl.config.dead_keys import DeadKey, KeyNote, find_dead_keys
from agentrl.config.explain import comment, describe, to_short_yaml, to_yaml
from agentrl.config.load import ReadConfig, load_config, naming_origin, parse_config, read_config
from agentrl.config.problems import Problem
from agentrl.config.schema.run import RunConfig
from agentrl.config.verl import VerlReport

__all__ = [
    "Bias",
    "DeadKey",
    "KeyNote",
    "Problem",
    "Purpose",
    "ReadConfig",
    "RunConfig",
    "VerlReport",
    "check_config",
    "check_model_length",
    "check_tools",
    "comment",
    "describe",
    "find_biases",
    "find_conflicts",
    "find_dead_keys",
    "find_idle_ranks",
    "find_idle_tools",
    "load_config",
    "naming_origin",
    "parse_config",
    "read_config",
    "to_short_yaml",
    "to_yaml",
]
