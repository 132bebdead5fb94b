"""Debug ranks from the notebook: connections, relays and post-mortem sessions."""
