"""Code of the engine processes: start, fork server, cells and serialization."""
