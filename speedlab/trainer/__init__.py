"""What runs a run inside the engines: the loop, control words, records, reshaping, interrupts."""
