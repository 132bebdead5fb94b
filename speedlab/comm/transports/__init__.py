"""Ways for flats to travel between ranks: `choose` says which one is taken."""
