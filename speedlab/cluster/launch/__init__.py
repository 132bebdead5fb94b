"""Start a cluster: launch backends, host specifications, placement and rendezvous."""
