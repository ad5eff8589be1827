"""`verl.utils.dataset`: the dataset class that users subclass."""

from agentrl.compat.verl.utils.dataset.rl_dataset import RLHFDataset

__all__ = ["RLHFDataset"]
