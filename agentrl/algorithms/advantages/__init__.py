"""Advantage estimators. `agentrl.algorithms` registers the bundled ones."""
