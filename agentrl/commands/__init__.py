"""What each command does: from a run file to a finished run."""
