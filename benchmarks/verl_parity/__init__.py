"""Numbers of agentrl beside those of verl 0.9.1, on the same tensors. See `__main__`."""
