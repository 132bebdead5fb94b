"""Files of a cluster: its folder, locks, signatures and the processes listed in it."""
