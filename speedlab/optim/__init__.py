"""What a step does: losses and scale, the update, random streams, times, memory."""
