"""Process groups and collectives, with the bytes and the exposed time of each."""

from speedlab.comm.errors import PeerLost
from speedlab.comm.group import Group
from speedlab.comm.traffic import BufferMeter, Pending, Traffic
from speedlab.comm.world import World, join, leave

__all__ = ["BufferMeter", "Group", "PeerLost", "Pending", "Traffic", "World", "join", "leave"]
