"""Make data sets: from a seed, or from what others have published."""

from agentrl.data.prepare.arithmetic import ArithmeticFiles, prepare_arithmetic
from agentrl.data.prepare.gsm8k import Gsm8kFiles, prepare_gsm8k

__all__ = ["ArithmeticFiles", "Gsm8kFiles", "prepare_arithmetic", "prepare_gsm8k"]
