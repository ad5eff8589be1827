"""Every key of a run file: its type, its default, and what it means."""
