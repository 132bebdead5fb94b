"""Agents: one process per host that starts, watches and ends the engines there."""
