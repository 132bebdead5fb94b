"""The process that owns a cluster, and its clients' side. Nothing here imports torch."""
