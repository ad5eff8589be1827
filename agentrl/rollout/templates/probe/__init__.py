"""Probe a chat template once, when a run starts: what it carries, rewrites, and does to texts."""
