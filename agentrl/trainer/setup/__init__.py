"""Prepare a run: check it, load its data, tokenizer, plug-ins and engine."""
