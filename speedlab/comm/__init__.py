"""Process groups and collectives, with the bytes and the exposed time of each."""

from speedlab.comm.copies import HostCopies
from speedlab.comm.errors import PeerLost
from speedlab.comm.group import Group, Rotation
from speedlab.comm.traffic import BufferMeter, Traffic
from speedlab.comm.transfer import Transfer
from speedlab.comm.world import World, check_peers, join, leave

__all__ = [
    "BufferMeter",
    "Group",
    "HostCopies",
    "PeerLost",
    "Rotation",
    "Traffic",
    "Transfer",
    "World",
    "check_peers",
    "join",
    "leave",
]
