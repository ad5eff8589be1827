"""Servers of the Model Context Protocol: named, connected to, asked for their tools, called.

Absolute imports keep this package and the client library `mcp`, which it uses, apart.
"""
