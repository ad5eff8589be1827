"""Traces of requests and training steps, their exporters, and the profiler."""
