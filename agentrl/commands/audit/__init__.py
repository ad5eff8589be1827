"""`agentrl audit`: compute a run's account again from what it saved, and compare."""
