"""The state of a run on disk: checkpoints to resume from, summary, archive, run folder."""
