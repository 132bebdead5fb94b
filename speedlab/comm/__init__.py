"""Process groups and collectives, with the bytes and the exposed time of each."""

from speedlab.comm.group import BufferMeter, Group, PeerLost, Pending, Traffic
from speedlab.comm.world import World, join, leave

__all__ = ["BufferMeter", "Group", "PeerLost", "Pending", "Traffic", "World", "join", "leave"]
