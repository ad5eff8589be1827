"""HTTP clients: web services of tools, and chat models that judge or simulate users."""
