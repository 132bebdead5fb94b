"""Process groups and collectives, with the bytes and the exposed time of each."""

from speedlab.comm.activity import doing, named_calls, note_forward, note_update
from speedlab.comm.board import Board
from speedlab.comm.calls import exchange_numbers, prepare_exchange
from speedlab.comm.codecs import Blocks, Codec
from speedlab.comm.coded import CodedGathers, CodedSums, hosts_of
from speedlab.comm.copies import HostCopies
from speedlab.comm.errors import CollectiveMismatch, MeetingFailed, PeerLost
from speedlab.comm.group import Group
from speedlab.comm.lifted_limits import patience
from speedlab.comm.pretended import own_line
from speedlab.comm.rails import Rails
from speedlab.comm.rotation import Rotation
from speedlab.comm.shared.joined import Joined
from speedlab.comm.traffic import BufferMeter, Traffic
from speedlab.comm.transfer import Transfer
from speedlab.comm.world import World, check_peers, join, leave

__all__ = [
    "Blocks",
    "Board",
    "BufferMeter",
    "Codec",
    "CodedGathers",
    "CodedSums",
    "CollectiveMismatch",
    "Group",
    "HostCopies",
    "Joined",
    "MeetingFailed",
    "PeerLost",
    "Rails",
    "Rotation",
    "Traffic",
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
    "own_line",
    "patience",
    "prepare_exchange",
]
