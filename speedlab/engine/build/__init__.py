"""What builds an engine: the model's parts on this rank, their units and values, the optimizer's groups, the schedule."""
