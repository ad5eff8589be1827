"""A language model behind an OpenAI-compatible address: judges and simulated users ask it."""
