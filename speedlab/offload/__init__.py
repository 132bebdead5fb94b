"""Where states lie that are not on the device: in the host's memory, or in a file of this rank."""

from speedlab.offload.disk_benchmark import DiskSpeed, measure_disk
from speedlab.offload.disk_store import DiskStore
from speedlab.offload.host_store import HostStore
from speedlab.offload.offloaded_tensor import AwayState, visit
from speedlab.offload.page_pool import Coming
from speedlab.offload.staging_buffers import Buffers
from speedlab.offload.store import Kept, OffloadError, Store
from speedlab.offload.store_registry import Stores

__all__ = [
    "AwayState",
    "Buffers",
    "Coming",
    "DiskSpeed",
    "DiskStore",
    "HostStore",
    "Kept",
    "OffloadError",
    "Store",
    "Stores",
    "measure_disk",
    "visit",
]
