"""Shared memory between the CPU ranks of one host: a torch.distributed backend, and tensors that peers read in place.

segments (files), memory (tensors in them) → meeting (numbers on which ranks wait) → rounds, messages (collectives of
any tensors) → hierarchy (the same over several hosts) → process_group (the backend).
"""

from speedlab.comm.shared.process_group import BACKEND, SharedGroup, SpanningGroup, leave_all, register
from speedlab.comm.shared.shared_tensors import arena

__all__ = ["BACKEND", "SharedGroup", "SpanningGroup", "arena", "leave_all", "register"]
