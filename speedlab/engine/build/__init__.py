"""What builds an engine: the model's parts on this rank, the placement table, the optimizer's groups, the schedule."""
