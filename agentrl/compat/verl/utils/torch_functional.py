"""`verl.utils.torch_functional`: means over masks."""

from agentrl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten

__all__ = ["masked_mean", "masked_sum", "masked_var", "masked_whiten"]
