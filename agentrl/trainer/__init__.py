"""The loop, and what a user sees of it: figures, curves, transcripts, summaries."""
