"""Debug ranks from the notebook: post-mortem sessions and breakpoints, over sockets and relays."""
