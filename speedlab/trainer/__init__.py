"""Train a run inside the engine processes: loop, commands, records, reshaping, interrupts."""
