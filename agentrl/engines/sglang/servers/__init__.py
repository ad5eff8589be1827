"""SGLang servers: local or remote, reached over HTTP."""
