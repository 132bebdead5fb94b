"""Transports of flat parameters between ranks; `choose` selects one for a group."""
