"""Agents that drive a request: the state machine, agent loops of users, external programs."""
