"""Finished requests on disk and as transcripts."""
