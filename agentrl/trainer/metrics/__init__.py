"""Metrics of a step: aggregated, logged, drawn."""
