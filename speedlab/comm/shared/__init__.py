"""Shared memory between the CPU ranks of one host: a torch.distributed backend, and tensors that peers read in place.

memfd (files), shared_tensors (tensors in them) → sync_page (numbers on which ranks wait) → staged_collectives, p2p
(collectives and messages of any tensors) → hierarchical (the same over several hosts) → process_group (the backend).
"""

from speedlab.comm.shared.process_group import BACKEND, SharedGroup, SpanningGroup, leave_all, register
from speedlab.comm.shared.shared_tensors import arena

__all__ = ["BACKEND", "SharedGroup", "SpanningGroup", "arena", "leave_all", "register"]
