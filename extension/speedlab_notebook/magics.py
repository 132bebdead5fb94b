"""The `%speedlab` line magic."""
