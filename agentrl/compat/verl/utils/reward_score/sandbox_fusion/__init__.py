"""As in verl; see `agentrl.compat.verl`."""
