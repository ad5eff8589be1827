"""Policy losses. `agentrl.algorithms` registers the bundled ones."""
