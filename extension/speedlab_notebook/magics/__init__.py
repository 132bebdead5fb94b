"""The magics `%speedlab` and `%%ranks`, and what their cells display."""
