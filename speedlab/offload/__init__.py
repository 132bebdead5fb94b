"""Where states lie that are not on the device: in the host's memory, or in a file of this rank."""

from speedlab.offload.away import AwayState, visit
from speedlab.offload.buffers import Buffers
from speedlab.offload.coming import Coming
from speedlab.offload.disk import DiskStore
from speedlab.offload.host import HostStore
from speedlab.offload.kept import Kept, OffloadError, Store
from speedlab.offload.measure import DiskSpeed, measure_disk
from speedlab.offload.stores import Stores

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
