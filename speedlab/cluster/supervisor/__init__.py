"""The process that owns a cluster, and the client side of its connections. Does not import torch."""
