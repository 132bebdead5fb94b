"""Synchronization of a group's ranks on one host: each rank has a page of numbers that only it writes and all others
read.

| number     | its rank raises it when …                                                                   |
|------------|---------------------------------------------------------------------------------------------|
| WRITTEN    | its part of a round of a staged collective is in its staging area (`staged_collectives`)    |
|            | (next to the number: the call of the round, see `meet`)                                     |
| READ       | it has read its peers' parts of a round                                                     |
| OFFERED    | it has published the address of a tensor that peers may read in place (`offer`)             |
| SUMMED     | its own slice of an offered tensor holds the sum over the ranks                             |
| TAKEN      | it no longer needs offered tensors of its peers                                             |
| held       | (one for each offer) below 0 while it uses its peers' offered memory in place               |
| SENT + k   | it has published the address of a message for peer k (`p2p`)                                |
| FETCHED + k| it has copied a message of peer k                                                           |
| FAULT      | it has found that the ranks do not make the same call (`mismatch`)                          |

A wait spins for some microseconds, then sleeps until the number changes. Every 30 ms it returns to Python, which
handles signals, and checks whether the missing peer has left, has died, or exceeds the timeout.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cuda_ops.shared_flags import find_other_words, patience_for, raise_flag, raise_flag_with, wait_for_flags
from speedlab.comm.errors import PeerLost
from speedlab.comm.shared.call_descriptions import Call, described, dtype_code, dtype_name
from speedlab.comm.shared.group_fault import TEXT_BYTES, GroupFault, named
from speedlab.comm.shared.memfd import AnonymousSegment, FileHandle
from speedlab.comm.shared.shared_tensors import Arena, PeerMemory, arena

_LINE = 8
"""Words of a cache line. Numbers that change at different times must not share a line."""

_OFFERS = 1 << 16
"""Entries of a rank's ring for offered tensors."""
_MESSAGES = 1 << 8
"""Entries of a rank's ring for messages to one peer."""

_OFFER_WORDS, _MESSAGE_WORDS = 4, 5
"""Words of a ring entry: (extent, offset, bytes, transfer and dtype) for offers, (extent, offset, bytes, tag, dtype)
for messages.
"""

_WORDS = (8, 32)
"""Byte offsets from WRITTEN, in the same cache line, of the calls of even and odd rounds, three words each. As with
halves of the staging area, a rank writes one only after all peers have read it.
"""

_MOST_CALLS = 2**31 - 1

STAGING_BYTES = 2 << 20
"""Bytes of one of the two halves of a rank's staging area: the data of a round. Both halves about fit into a second-
level cache. Smaller halves cost more time for synchronization than for copies.
"""


class Number(IntEnum):
    """Indices of a rank's numbers in its page, in cache lines."""

    LEFT = 0
    WRITTEN = 1
    READ = 2
    OFFERED = 3
    SUMMED = 4
    TAKEN = 5
    FAULT = 6
    PEERS = 7
    """First of the numbers that exist once per peer: SENT, then FETCHED."""


class OfferPurpose(IntEnum):
    """Purpose of an offered tensor."""

    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3


def transfer_code(transfer: OfferPurpose, dtype: torch.dtype) -> int:
    """Return what ranks compare about an offer, besides its bytes.

    Args:
        transfer: Purpose of the offer.
        dtype: Type of the elements.
    """
    return transfer | dtype_code(dtype) << 8


class SyncPage:
    """One rank's view of the pages of all ranks of its group on this host.

    Args:
        page: This rank's page.
        handles: (page, directory of the arena) of each rank.
        index: Index of this rank.
        ranks: Names of the ranks in errors.
        timeout_seconds: Timeout of waits.
        cores: Number of CPU cores of all ranks together, which decides how long waits spin.
        ranks_of_group: Names of all ranks of the group, if it has ranks on other hosts.
    """

    def __init__(
        self,
        page: AnonymousSegment,
        handles: Sequence[tuple[FileHandle, FileHandle]],
        index: int,
        ranks: Sequence[int],
        timeout_seconds: float,
        *,
        cores: int,
        ranks_of_group: Sequence[int] | None = None,
    ) -> None:
        self.index, self.size, self.ranks = index, len(handles), list(ranks)
        self.ranks_of_group = self.ranks if ranks_of_group is None else list(ranks_of_group)
        self.timeout_seconds = timeout_seconds
        self._pages = [page if k == index else AnonymousSegment.open(own) for k, (own, _) in enumerate(handles)]
        self._words = [segment.bytes.view(np.int64) for segment in self._pages]
        self._memory = {k: PeerMemory.of(handles[k][1]) for k in range(self.size) if k != index}
        self.peers = [k for k in range(self.size) if k != index]
        self._spins, self._yields = patience_for(self.size, cores)
        self._offers_at = (int(Number.PEERS) + 2 * self.size) * _LINE
        self._held_at = self._offers_at + _OFFER_WORDS * _OFFERS
        self._messages_at = self._held_at + _OFFERS
        self._addresses = {
            number: np.array([self._address(k, number) for k in self.peers], dtype=np.int64)
            for number in Number
            if number is not Number.PEERS
        }
        self._own_written = self._address(index, Number.WRITTEN)
        self._agreed = 0
        """Number of calls that all ranks found to be equal, and of the current call."""
        self._call, self._is_new = Call(0, 0), False
        """The current or last staged collective, and whether ranks have not compared it yet."""
        self._third = 0
        """Third word of that call: its number and its digest."""
        self.faults = GroupFault(
            index,
            self.ranks,
            [segment.address + _texts_at(self.size) for segment in self._pages],
            [self._address(k, Number.FAULT) for k in range(self.size)],
            partial(_is_gone, self._words, self._memory),
        )
        self.offered = 0
        """Number of tensors that this rank has offered."""
        self._taken = 0
        self._pinned: deque[tuple[int, np.ndarray]] = deque()
        """(number of an offer, its memory) that peers may still read; kept even if all other references are gone."""
        self._held: set[int] = set()
        """Offers whose tensors this rank uses in place."""
        self._pid = os.getpid()
        self._sent = [0] * self.size
        self.under_way: dict[int, deque[tuple[int, Tensor]]] = {k: deque() for k in self.peers}
        """Messages that each peer has not copied yet, as of the last check: (number, memory), oldest first."""

    @staticmethod
    def page_bytes(size: int) -> int:
        """Return the bytes of a rank's page. Untouched pages of memory take no room.

        Args:
            size: Number of ranks.
        """
        return _staging_at(size) + 2 * STAGING_BYTES

    def staging(self, k: int, half: int) -> int:
        """Return the address in this process of one half of a rank's staging area.

        Args:
            k: Index of the rank.
            half: 0 or 1.
        """
        return self._pages[k].address + _staging_at(self.size) + half * STAGING_BYTES

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def raise_own(self, number: Number, value: int) -> None:
        """Set a number of this rank and wake waiting peers.

        Args:
            number: Which number.
            value: New value.
        """
        raise_flag(self._address(self.index, number), value)

    def wait_all(self, number: Number, value: int) -> None:
        """Wait until a number of every peer has reached a value.

        Args:
            number: Which number.
            value: Least value.

        Raises:
            PeerLost: If a peer left, died or did not arrive; names the rank.
        """
        asked = partial(self._waiting_for, number, value)
        self._wait(self._addresses[number], value, self.peers, asked, closes=number is not Number.TAKEN)

    def reached(self, number: Number, value: int) -> bool:
        """Return whether a number of every peer has reached a value now.

        Args:
            number: Which number.
            value: Least value.
        """
        return _reached(self._addresses[number], value)

    def leave(self) -> None:
        """Leave the group: peers that wait for this rank fail at once.

        Earlier work stays valid: memory that a peer may still read is kept until that peer has read it, or has left.
        """
        if not self._has_left(self.index):
            for offer in list(self._held):
                self.release_offer(offer)
            self.raise_own(Number.LEFT, 1)
            if self._pinned or any(self.under_way.values()):
                arena().keep(self, self._read_by_all)

    def _has_left(self, k: int) -> bool:
        return _has_raised(self._words, Number.LEFT, k)

    def _read_by_all(self) -> bool:
        """Return whether no peer will read memory of this rank any more."""
        for k in self.peers:
            if self._has_left(k) or self._memory[k].ended:
                continue
            taken = not self._pinned or int(self._words[k][int(Number.TAKEN) * _LINE]) > self._pinned[-1][0]
            taken = taken and not any(self._holds(k, offer) for offer, _ in self._pinned)
            fetched = not self.under_way[k] or self.fetched_by(k) > self.under_way[k][-1][0]
            if not taken or not fetched:
                return False
        return True

    def _address(self, k: int, number: int) -> int:
        return self._pages[k].address + int(number) * _LINE * 8

    def _wait(
        self,
        addresses: np.ndarray,
        value: int,
        peers: Sequence[int],
        asked: Callable[[], str],
        *,
        closes: bool = True,
    ) -> None:
        # Spin, yield, then sleep for up to 30 ms.
        missing = wait_for_flags(addresses, value, self._spins, self._yields, True)
        if missing < 0:
            return
        deadline = time.monotonic() + self.timeout_seconds
        while missing >= 0:
            # Check all missing peers: the first may have failed because of another one.
            for k in range(missing, len(peers)):
                self.look(peers[k], partial(_reached, addresses[k : k + 1], value), deadline, asked, closes=closes)
            missing = wait_for_flags(addresses, value, 0, 0, True)

    def look(
        self, peer: int, there: Callable[[], bool], deadline: float, asked: Callable[[], str], *, closes: bool = True
    ) -> None:
        """Raise PeerLost if `peer` can no longer do what this rank waits for, unless it is done already.

        Args:
            peer: Index of the peer.
            there: Returns whether it is done.
            deadline: Time of the timeout, in seconds of the monotonic clock.
            asked: Returns what this rank waits for, for the errors of all ranks.
            closes: Whether a timeout closes the group. Not for waits that a rank may repeat.

        Raises:
            PeerLost: If the peer left, died or is late.
            CollectiveMismatch: If ranks made different calls.
        """
        rank, waiting = self.ranks[peer], self.ranks[self.index]
        if self._has_left(self.index):
            reason = f"rank {waiting} itself left"  # The rank left while one of its threads was waiting.
        elif self.faults.is_open:
            if there():
                return
            raise self.faults.join(asked())
        elif self._has_left(peer):
            reason = f"rank {rank} left"
        elif self._memory[peer].ended:
            reason = f"the process of rank {rank} has ended"
        elif time.monotonic() > deadline:
            reason = f"rank {rank} did not come within {self.timeout_seconds:g} s"
            if closes and not there():
                text = f"rank {waiting} waited for rank {rank} in a collective: {reason}"
                raise self.faults.late(text, asked(), self.timeout_seconds)
        else:
            return
        # Work before the peer left counts, and may have ended between the wait and this check.
        if not there():
            raise PeerLost(f"rank {waiting} waited for rank {rank} in a collective: {reason}")

    # ---- the call that a round belongs to ----------------------------------------------------------------------------

    def begin_call(self, call: Call) -> None:
        """Set the call of the following rounds.

        Args:
            call: Description of the call.

        Raises:
            PeerLost: The earlier error of this group, if there was one.
        """
        self.faults.check()
        self._call, self._is_new = call, True
        self._third = (self._agreed & _MOST_CALLS) << 32 | call.digest

    def meet(self, number: int) -> None:
        """Report that this rank's part of a round is written, and wait until all peers' parts are.

        Ranks write the call of the round with it, and compare calls.

        Args:
            number: Number of the round.

        Raises:
            CollectiveMismatch: On all ranks, if calls differ.
        """
        kind, elements, _, _ = self._call
        # Even and odd rounds use different words: a fast rank may write the next round before a peer compares this one.
        third, words = self._third, _WORDS[number % 2]
        written = self._own_written
        raise_flag_with(written, number + 1, written + words, kind, elements, third)
        self.wait_all(Number.WRITTEN, number + 1)
        if find_other_words(self._addresses[Number.WRITTEN], words, kind, elements, third) >= 0:
            raise self._mismatch(words)
        if self._is_new:
            self._agreed += 1
            self._is_new = False

    def _mismatch(self, words: int) -> PeerLost:
        at = int(Number.WRITTEN) * _LINE + words // 8
        known = {k: self._described(*self._words[k][at : at + 3].tolist()) for k in self.peers}
        reason = f"{named(self.ranks).capitalize()} called different collectives."
        return self.faults.mismatch(reason, self.own_call(), known)

    def mismatch(self, reason: str) -> PeerLost:
        """Return the error of the current call.

        Args:
            reason: Found by all ranks of this host.
        """
        return self.faults.mismatch(reason, self.own_call(), {})

    @property
    def words_of_call(self) -> tuple[int, int, int]:
        """The words of the current call that ranks compare."""
        return self._call.kind, self._call.elements, self._third

    def own_call(self) -> str:
        """Return the current call as a sentence, for errors."""
        text = self._described(self._call.kind, self._call.elements, self._third)
        return f"{text} ({self._call.note})" if self._call.note else text

    def _described(self, kind: int, elements: int, third: int) -> str:
        text = described(kind, elements, third & 0xFFFFFFFF, self.ranks_of_group)
        return f"{text}, call {(third >> 32) + 1}" if kind else text

    def _waiting_for(self, number: Number, value: int) -> str:
        """Return what this rank waits for if it waits until a `number` of its peers is `value`."""
        if number in (Number.WRITTEN, Number.READ):
            return self.own_call()
        if number is Number.TAKEN:
            return "the end of a pass, until all ranks have read what this rank has offered"
        return self._described_offer(self.index, value - 1)

    # ---- tensors read in place ---------------------------------------------------------------------------------------

    def offer(self, address: int, nbytes: int, code: int) -> int:
        """Publish the address of a tensor in this rank's arena.

        All ranks offer in the same order; offers with the same number belong together.

        Args:
            address: Address in this process.
            nbytes: Bytes of the tensor.
            code: Result of `transfer_code`.

        Returns:
            Number of the offer.

        Raises:
            PeerLost: The earlier error of this group, if there was one.
        """
        place = arena().find(address, nbytes)
        assert place is not None, "offered memory must come from the arena"
        self.faults.check()
        self._recycle()
        self._pinned.append((self.offered, place.block))
        entry = self._offer_entry(self.offered)
        self._words[self.index][entry : entry + _OFFER_WORDS] = place.extent, place.offset, nbytes, code
        self.offered += 1
        self.raise_own(Number.OFFERED, self.offered)
        return self.offered - 1

    def addresses(self, offer: int) -> np.ndarray:
        """Wait until all ranks have offered, and return the addresses of their tensors in this process.

        Args:
            offer: Number of the offer.

        Returns:
            (size,) int64; 0 for this rank.

        Raises:
            CollectiveMismatch: If a peer's offer has another purpose, dtype or size.
            PeerLost: If a peer's memory is gone.
        """
        self.wait_all(Number.OFFERED, offer + 1)
        found = np.zeros(self.size, dtype=np.int64)
        for k in self.peers:
            found[k] = self._address_in(k, *self._offered_by(k, offer))
        return found

    def places(self, offer: int) -> list[tuple[PeerMemory | Arena, int, int]]:
        """Wait until all ranks have offered, and return (memory, extent, offset) of each tensor, including this rank's.

        Args:
            offer: Number of the offer.

        Raises:
            CollectiveMismatch: See `addresses`.
        """
        self.wait_all(Number.OFFERED, offer + 1)
        return [(self._memory.get(k, arena()), *self._offered_by(k, offer)) for k in range(self.size)]

    def _offered_by(self, peer: int, offer: int) -> tuple[int, int]:
        """Return (extent, offset) of a peer's offer.

        Raises CollectiveMismatch if this rank's offer has other bytes, another dtype, or another purpose.
        """
        entry = self._offer_entry(offer)
        extent, offset, nbytes, code = self._words[peer][entry : entry + _OFFER_WORDS].tolist()
        own = self._words[self.index]
        if own[entry + 2] != nbytes or own[entry + 3] != code:
            raise self.faults.mismatch(
                f"{named(self.ranks).capitalize()} are out of step: they began different transfers.",
                self._described_offer(self.index, offer),
                {k: self._described_offer(k, offer) for k in self.peers},
                together=False,
            )
        return extent, offset

    def _offer_entry(self, offer: int) -> int:
        return self._offers_at + _OFFER_WORDS * (offer % _OFFERS)

    def _described_offer(self, k: int, offer: int) -> str:
        entry = self._offer_entry(offer)
        nbytes, code = self._words[k][entry + 2 : entry + _OFFER_WORDS].tolist()
        name = dtype_name(code >> 8)
        elements = nbytes // getattr(torch, name).itemsize
        return f"{OfferPurpose(code & 255).name.lower()} of {elements:,} {name} in place, transfer {offer + 1}"

    def _address_in(self, peer: int, extent: int, offset: int) -> int:
        """Return the address in this process of memory in a peer's arena. Raises PeerLost if it is gone with its
        process.
        """
        try:
            return self._memory[peer].address(extent, offset)
        except OSError as error:
            raise self.gone(peer, error) from error

    def gone(self, peer: int, error: OSError) -> PeerLost:
        """Return the error for memory of a peer that is no longer available.

        Args:
            peer: Index of the peer.
            error: Why it could not be opened.
        """
        rank, waiting = self.ranks[peer], self.ranks[self.index]
        return PeerLost(f"rank {waiting} found the memory of rank {rank} gone: {error}")

    def took(self) -> None:
        """Report that this rank no longer needs the tensors of one more offer.

        This counts offers in any order: between two calls of `wait_until_all_read`, every rank takes all of them.
        """
        self._taken += 1
        self.raise_own(Number.TAKEN, self._taken)

    def can_hold(self, offer: int) -> bool:
        """Return whether the ring entry of an offer is free, and not held since `_OFFERS` offers ago.

        Args:
            offer: Number of the offer.
        """
        return bool(self._words[self.index][self._held_at + offer % _OFFERS] >= 0)

    def hold(self, offer: int) -> None:
        """Report that this rank uses an offer's tensors in place, until `release_offer`. Call this before `took`.

        Args:
            offer: Number of the offer.
        """
        self._held.add(offer)
        self._words[self.index][self._held_at + offer % _OFFERS] = -1 - offer

    def release_offer(self, offer: int) -> None:
        """Report that this rank no longer uses an offer's tensors.

        Finalizers may call this. In a forked child it does nothing, because the parent still uses the tensors.

        Args:
            offer: Number of the offer.
        """
        if offer in self._held and os.getpid() == self._pid:
            raise_flag(self._held_address(self.index, offer), 0)
            self._held.discard(offer)

    def wait_until_let_go(self, blocks: Sequence[np.ndarray]) -> None:
        """Wait until no peer uses these blocks of this rank's memory. Call `wait_until_all_read` first.

        Args:
            blocks: Blocks of the arena.
        """
        wanted = {id(block) for block in blocks}
        held = [offer for offer, block in self._pinned if id(block) in wanted]
        each = [(k, self._held_address(k, offer)) for offer in held for k in self.peers if self._holds(k, offer)]
        asked = "the end of a pass, until all ranks have let go of what this rank has offered"
        addresses = np.array([address for _, address in each], dtype=np.int64)
        self._wait(addresses, 0, [k for k, _ in each], lambda: asked, closes=False)

    def _held_address(self, k: int, offer: int) -> int:
        return self._pages[k].address + (self._held_at + offer % _OFFERS) * 8

    def _holds(self, k: int, offer: int) -> bool:
        return bool(self._words[k][self._held_at + offer % _OFFERS] == -1 - offer)

    def take_no_more(self) -> None:
        """Report that this rank will not read any offer made until now."""
        self._taken = self.offered
        self.raise_own(Number.TAKEN, self._taken)

    def _recycle(self) -> None:
        # The ring entry is reused, so all peers must have read its old offer.
        if self.offered >= _OFFERS:
            self.wait_all(Number.TAKEN, self.offered - _OFFERS + 1)
        while self._pinned and self.reached(Number.TAKEN, self._pinned[0][0] + 1):
            if self._is_held(self._pinned[0][0]):
                break
            self._pinned.popleft()

    def _is_held(self, offer: int) -> bool:
        return any(self._holds(k, offer) for k in self.peers)

    def wait_until_all_read(self) -> None:
        """Wait until all peers have taken all offers of this rank."""
        self.wait_all(Number.TAKEN, self.offered)
        self._pinned = deque(each for each in self._pinned if self._is_held(each[0]))

    # ---- messages ----------------------------------------------------------------------------------------------------

    def has_room(self, peer: int) -> bool:
        """Return whether one more message to `peer` fits in the ring.

        Args:
            peer: Index of the peer.
        """
        return self._sent[peer] - self.fetched_by(peer) < _MESSAGES

    def send(self, peer: int, buffer: Tensor, nbytes: int, tag: int, dtype: int) -> None:
        """Publish a message for a peer that has room.

        Args:
            peer: Index of the receiver.
            buffer: Memory of the arena.
            nbytes: Bytes of the message, from the start of `buffer`.
            tag: Tag of the message.
            dtype: Code of the dtype, see `call_descriptions.dtype_code`.
        """
        place = arena().find(buffer.data_ptr(), nbytes)
        assert place is not None, "sent memory must come from the arena"
        number = self._sent[peer]
        entry = self._message_entry(peer, number)
        self._words[self.index][entry : entry + _MESSAGE_WORDS] = place.extent, place.offset, nbytes, tag, dtype
        self._sent[peer] = number + 1
        self.under_way[peer].append((number, buffer))
        raise_flag(self._address(self.index, self._sent_to(peer)), number + 1)

    def message(self, peer: int, number: int) -> tuple[int, int, int, int] | None:
        """Return (address in this process, bytes, tag, code of the dtype) of a message; None if it is not sent yet.

        Args:
            peer: Index of the sender.
            number: Number of the message.
        """
        if wait_for_flags(np.array([self._address(peer, self._sent_to(self.index))]), number + 1, 0, 0, False) >= 0:
            return None
        entry = self._message_entry(self.index, number)
        extent, offset, nbytes, tag, dtype = self._words[peer][entry : entry + _MESSAGE_WORDS].tolist()
        return self._address_in(peer, extent, offset), nbytes, tag, dtype

    def _message_entry(self, peer: int, number: int) -> int:
        return self._messages_at + (peer * _MESSAGES + number % _MESSAGES) * _MESSAGE_WORDS

    def fetched(self, peer: int, number: int) -> None:
        """Report that messages of `peer` up to `number` have been copied.

        Args:
            peer: Index of the sender.
            number: Number of the last message.
        """
        raise_flag(self._address(self.index, self._fetched(peer)), number + 1)

    def fetched_by(self, peer: int) -> int:
        """Return how many of this rank's messages a peer has copied.

        Args:
            peer: Index of the receiver.
        """
        return int(self._words[peer][int(self._fetched(self.index)) * _LINE])

    def wait_message(self, peer: int, number: int, asked: Callable[[], str]) -> None:
        """Wait until a peer has sent a message.

        Args:
            peer: Index of the sender.
            number: Number of the message.
            asked: Returns what this rank waits for, for errors.
        """
        self._wait(np.array([self._address(peer, self._sent_to(self.index))]), number + 1, [peer], asked)

    @staticmethod
    def _sent_to(peer: int) -> int:
        return int(Number.PEERS) + peer

    def _fetched(self, peer: int) -> int:
        return int(Number.PEERS) + self.size + peer


def _has_raised(words: Sequence[np.ndarray], number: Number, k: int) -> bool:
    """Return whether rank k's number is not 0, in the pages `words` of all ranks."""
    return bool(words[k][int(number) * _LINE])


def _is_gone(words: Sequence[np.ndarray], memory: Mapping[int, PeerMemory], k: int) -> bool:
    """Return whether rank k has left, or its process has ended."""
    return _has_raised(words, Number.LEFT, k) or (k in memory and memory[k].ended)


def _reached(addresses: np.ndarray, value: int) -> bool:
    return wait_for_flags(addresses, value, 0, 0, False) < 0


def _staging_at(size: int) -> int:
    """Return the byte of a page at which its staging area begins; page-aligned, so that copies are aligned."""
    return -(-(_texts_at(size) + TEXT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _texts_at(size: int) -> int:
    """Return the byte of a page at which its rank writes its call after a mismatch."""
    numbers, rings = int(Number.PEERS) + 2 * size, (_OFFER_WORDS + 1) * _OFFERS + size * _MESSAGES * _MESSAGE_WORDS
    return 8 * (numbers * _LINE + rings)
