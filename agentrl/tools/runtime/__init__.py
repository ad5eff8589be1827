"""Run the tools of a request: sessions, executors and the middleware around each call."""
