"""Stores for offloaded states: host memory, or a file of this rank on disk."""

from speedlab.offload.disk_benchmark import DiskSpeed, measure_disk
from speedlab.offload.disk_store import DiskStore
from speedlab.offload.host_store import HostStore
from speedlab.offload.offloaded_tensor import OffloadedTensor, visit
from speedlab.offload.page_pool import RepinnableTensor
from speedlab.offload.staging_buffers import BufferPool
from speedlab.offload.store import OffloadedState, OffloadError, StateStore
from speedlab.offload.store_registry import StoreRegistry

__all__ = [
    "BufferPool",
    "DiskSpeed",
    "DiskStore",
    "HostStore",
    "OffloadError",
    "OffloadedState",
    "OffloadedTensor",
    "RepinnableTensor",
    "StateStore",
    "StoreRegistry",
    "measure_disk",
    "visit",
]
