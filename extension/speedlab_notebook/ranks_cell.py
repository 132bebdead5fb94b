"""The `%%ranks` cell magic."""
