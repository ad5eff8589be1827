"""Where `SearchTool` finds documents: a service, or an index on this machine."""
