"""Process groups and collectives. Each counts its bytes and the time that a rank waits for it."""

from speedlab.comm.breakpoint_timeouts import patience
from speedlab.comm.errors import CollectiveMismatch, MeetingFailed, PeerLost
from speedlab.comm.group import Group
from speedlab.comm.pinned_copy import HostCopies
from speedlab.comm.process_groups import HierarchicalGroups
from speedlab.comm.quantized_collectives import Blocks, Codec, CodedGathers, CodedSums, hosts_of
from speedlab.comm.rank_activity import doing, named_calls, note_forward, note_update
from speedlab.comm.shared.mapped_shards import MappedShards
from speedlab.comm.simulated_link import own_link
from speedlab.comm.transfers import BufferMeter, CommStats, Rotation, Transfer
from speedlab.comm.world import StoreMailbox, World, check_peers, exchange_numbers, join, leave, prepare_exchange

__all__ = [
    "Blocks",
    "BufferMeter",
    "Codec",
    "CodedGathers",
    "CodedSums",
    "CollectiveMismatch",
    "CommStats",
    "Group",
    "HierarchicalGroups",
    "HostCopies",
    "MappedShards",
    "MeetingFailed",
    "PeerLost",
    "Rotation",
    "StoreMailbox",
    "Transfer",
    "World",
    "check_peers",
    "doing",
    "exchange_numbers",
    "hosts_of",
    "join",
    "leave",
    "named_calls",
    "note_forward",
    "note_update",
    "own_link",
    "patience",
    "prepare_exchange",
]
