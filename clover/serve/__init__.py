"""The HTTP server: the APIs that clients already speak, over any backend."""
