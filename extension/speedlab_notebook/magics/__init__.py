"""The magics `%speedlab` and `%%ranks`, and the outputs of their cells."""
