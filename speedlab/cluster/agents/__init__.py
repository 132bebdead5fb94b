"""Run one agent process on each further host and talk to it."""
