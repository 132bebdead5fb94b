"""Code that runs in the engine processes: start-up, fork server, cells and serialization."""
