"""Fixtures of the notebook tier."""

from magics_fakes import notebook

__all__ = ["notebook"]
