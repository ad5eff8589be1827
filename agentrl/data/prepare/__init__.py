"""Make datasets (GSM8K) and search indices on disk, once."""
