"""SGLang inside this process."""
