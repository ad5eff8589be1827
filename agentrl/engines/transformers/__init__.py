"""The embedded engine: it generates with the trainer's own module and weights."""
