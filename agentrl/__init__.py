"""Multi-turn agentic reinforcement learning on SGLang."""
