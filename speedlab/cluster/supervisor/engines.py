"""The engines of one cluster, as its supervisor has them: work for them, interrupts, restarts, another number of them.

The supervisor is the only one that speaks to the controller, so what ranks work on is known here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.launch.start as start
import speedlab.cluster.worker.remote as remote
from speedlab.cluster.agents.rpc import send_to
from speedlab.cluster.errors import DIED, ClusterError, RankError, name_ranks
from speedlab.cluster.files.cluster_dir import INTERRUPTING, ClusterDir, ClusterState, EngineEntry
from speedlab.cluster.supervisor.journal import FileJournal, RecoveredWork
from speedlab.cluster.supervisor.output import RankOutput
from speedlab.cluster.supervisor.process_control import AtWork, EngineProcess, ProcessController
from speedlab.cluster.supervisor.protocol import RankStatus
from speedlab.cluster.supervisor.resize import Resize
from speedlab.cluster.supervisor.unreachable_hosts import LostHosts, PendingInterrupts, at_work
from speedlab.cluster.supervisor.work_queue import Submission, WorkQueue
from speedlab.cluster.worker.serialization import pack

if TYPE_CHECKING:
    from ipyparallel import Client

    from speedlab.cluster.supervisor.record_relay import RecordRelay
    from speedlab.hardware import Device
    from speedlab.telemetry.run_folder import RunFolder

log = logging.getLogger("speedlab.supervisor")

RELEASE_SECONDS = 2.0
"""After a rank has failed or died, how long the others may still work on the same submission before they are
interrupted: normally they wait for the one that will not come."""
RESEND_SECONDS = 0.5
"""An engine misses a signal that comes before its task has begun: it is sent again while the task goes on."""
CUT_SECONDS = 1.4
"""A rank that has not stopped by then waits for a peer in native code, most likely: its connections are cut. A trainer
needs up to 1.2 s to end its step cleanly."""

_RESET_SECONDS = 5.0
_UNREGISTER_SECONDS = 20.0
_POLL_SECONDS = 0.02


class Engines:
    """One engine for each rank. Methods may be called from any thread."""

    def __init__(self, home: ClusterDir, state: ClusterState, client: Client, hands: ProcessController) -> None:
        self.home = home
        self.hands = hands
        self.state = state
        self.client = client
        self.lock = threading.RLock()
        """Held while engines are started, ended or counted anew."""
        self._interrupting = threading.Lock()
        self._counting = threading.Lock()
        """Held while ranks are given other engines, or engines up for lost."""
        self._rank_by_id: dict[int, int] = {}
        self._lost = LostHosts()
        journal = FileJournal(home.path / "submissions.jsonl")
        self.line = WorkQueue(self._send, journal, self._release_in_a_while)
        self.output = RankOutput(start.read_connection(home), self._rank_by_id.get, len(state.devices), home.output)
        self._unreached = PendingInterrupts(self.line, hands)
        self._count(state)
        with self._after_an_interrupt():
            self.adopted = RecoveredWork(self.line, client, state, journal)

    @property
    def directory(self) -> Path:
        """The cluster's own folder."""
        return self.home.path

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def token(self) -> str:
        """Which cluster of this name it is."""
        return self.state.token

    @property
    def devices(self) -> list[Device]:
        """Devices by rank."""
        return list(self.state.devices)

    # ---- work --------------------------------------------------------------------------------------------------------

    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        first: bool = False,
        label: str = "",
    ) -> Submission:
        """Let ranks, or all, call `function(*arguments)`. Raises ClusterError for a rank that is not there, or dead."""
        return self._add(function, arguments, self.living(ranks), first=first, label=label)

    def _add(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        ranks: list[int],
        *,
        first: bool,
        label: str = "",
    ) -> Submission:
        """As `submit`; of a rank whose engine is dead, or dies just now, it ends as that."""
        work = pack((function, arguments, {}), {function.__name__: function, "its arguments": arguments})
        return self.line.add(Submission(work, ranks, label=label), first=first)

    def at_work(self, submission: Submission) -> bool:
        """Whether some rank works on it."""
        return bool(self.line.working(submission))

    def left_of(self, label: str) -> Submission | None:
        """The newest submission of this label that an earlier supervisor has sent."""
        return self.adopted.newest(label)

    def wire(self, folder: RunFolder) -> RecordRelay | None:
        """What a run needs whose folder not all hosts see."""
        return self.hands.wire(folder)

    def ask(self, ranks: list[int], function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """What ranks that are idle return. Raises RankError, ClusterError after `seconds`."""
        return self.ask_each(function, dict.fromkeys(ranks, arguments), seconds=seconds)

    def ask_each(
        self, function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], *, seconds: float
    ) -> list[Any]:
        """As `ask`, of ranks with arguments of their own. Where an engine is known to be dead, none is asked."""
        if arguments:
            self.living(arguments)
        asked = [self._add(function, given, [rank], first=True) for rank, given in arguments.items()]
        deadline = time.monotonic() + seconds
        late = [one for one in asked if not one.wait(max(0.0, deadline - time.monotonic()))]
        for one in late:
            self.line.take_back(one)  # It must not be done later, when nobody counts on it any more.
        if late:
            ranks = name_ranks(rank for one in late for rank in one.ranks)
            raise ClusterError(f"the engines do not answer: {ranks} not done after {seconds:g} s")
        if failures := {rank: failure for one in asked for rank, failure in one.failures.items()}:
            raise RankError(failures)
        return [value for one in asked for value in one.results()]

    @property
    def _ranks(self) -> list[int]:
        return [engine.rank for engine in self.state.engines]

    def existing(self, ranks: Iterable[int] | None) -> list[int]:
        """`ranks`, or all; raises ClusterError when one does not exist."""
        known = self._ranks
        chosen = known if ranks is None else list(dict.fromkeys(ranks))
        unknown = [rank for rank in chosen if rank not in known]
        if unknown or not chosen:
            are = "is" if len(unknown) == 1 else "are"
            wanted = f"there {are} no {name_ranks(unknown)}" if unknown else "no rank is named"
            raise ClusterError(f"{wanted}; cluster {self.state.name!r} has {name_ranks(known)}")
        return chosen

    def living(self, ranks: Iterable[int] | None) -> list[int]:
        """`ranks`, or all; raises ClusterError when one does not exist or its engine is dead."""
        chosen = self.existing(ranks)
        dead = [rank for rank in chosen if not self.reaches(self.state.engines[rank])]
        if dead:  # The controller hears of one after the other: whose process has ended is named with them.
            ended = {status.rank for status in self.status() if status.state == "dead"}
            raise ClusterError(self.way_back([rank for rank in chosen if rank in dead or rank in ended]))
        return chosen

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks whose engines are on hosts that are lost."""
        return self._lost.ranks(self.state)

    def way_back(self, dead: list[int]) -> str:
        """Which engines are gone, and how one brings them back."""
        return self._lost.way_back(self.state, dead)

    @property
    def dead(self) -> list[int]:
        """Ranks whose engines have ended or do not answer, as far as the controller knows. Asks nobody."""
        return [engine.rank for engine in self.state.engines if not self.reaches(engine)]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the engines, by rank."""
        return tuple(engine.pid for engine in self.state.engines)

    def reaches(self, engine: EngineEntry) -> bool:
        """Whether the controller knows this engine, and it answers."""
        return engine.engine_id in self.client.ids and not self._lost.gave_up(engine)

    def status(self) -> list[RankStatus]:
        """Each rank's engine, as it is now."""
        busy, engines = self.line.busy(), self.state.engines
        looks = self.hands.look(engines)
        return [self._status_of(engine, look, engine.rank in busy) for engine, look in zip(engines, looks, strict=True)]

    # ---- interrupts --------------------------------------------------------------------------------------------------

    def interrupt(self, only: Submission | None = None, seconds: float = 2.0) -> list[int]:
        """Interrupt `only`, or everything; returns the ranks that are idle then.

        1. What ranks have not begun with is taken out of the line.
        2. SIGINT, a look, and SIGINT again to a rank that still works on it.
        3. The connections to the other ranks of one that does not come back are cut, and the store is broken in which
           ranks meet: it waits for a peer.
        4. The ranks leave their process group: a collective that was cut off makes it unusable.

        A rank that is missing in the answer works on something else, is inside a long native call, or frozen.
        """
        alone = only.ranks if only is not None and len(only.ranks) == 1 else []  # It met nobody; others may be meeting.
        # Who waits for the end of what is interrupted may ask for more at once; that has to come after all of this.
        with self._interrupting, self.line.held(alone or self._ranks):
            for submission in {*([] if only is None else [only]), *self.line.working(only).values()}:
                submission.stop()  # Before what is taken back counts as its first failure.
            self.line.take_back(only)
            alive = {engine.rank for engine in self.state.engines if self.reaches(engine)}
            working = {rank: one for rank, one in self.line.working(only).items() if rank in alive}
            if working:
                if alone:
                    self._stop(working, seconds)
                    return sorted(alive - self.line.working().keys())
                with self.home.amid(INTERRUPTING):
                    still, unreached = self._stop(working, seconds)
                    # Not all ranks may have joined the group, or the same one: they meet again where none has been.
                    self.hands.next_generation(at_once=True)
                    self.reset(sorted((alive - still) | unreached))
            return sorted(alive - self.line.working().keys())

    def _stop(self, working: dict[int, Submission], seconds: float) -> tuple[set[int], set[int]]:
        """Signal what these ranks work on; returns those that still work on it after `seconds`, and those of them that
        cannot be reached now."""
        begun = time.monotonic()
        deadline, signal_at = begun + seconds, begun
        lost = set(self.lost_ranks)
        # Who waits for a rank on a host that is lost has no step that could end.
        in_vain = any(lost & one.failures.keys() for one in working.values())
        cut_at = begun + (0.0 if in_vain else min(CUT_SECONDS, 0.7 * seconds))
        still, unreached = set(working), set[int]()

        def signal(hands: Callable[[AtWork], list[EngineEntry]]) -> None:
            at = at_work(self.state, {rank: working[rank] for rank in still})
            unreached.clear()
            unreached.update(engine.rank for engine in hands(at))

        while still and time.monotonic() < deadline:
            if time.monotonic() >= signal_at:
                signal_at = time.monotonic() + RESEND_SECONDS
                signal(self.hands.interrupt)
            if time.monotonic() >= cut_at:
                cut_at = time.monotonic() + RESEND_SECONDS
                signal(self.hands.cut)
            time.sleep(_POLL_SECONDS)
            now = self.line.working()
            still = {rank for rank in still if now.get(rank) is working[rank]}
        unreached &= still
        if told := self._unreached.note({rank: working[rank] for rank in unreached}, self.state):
            self.output.on_lines(sorted(unreached), "stderr", told)
        return still, unreached

    def interrupt_those_back(self) -> None:
        """Interrupt ranks that an interrupt could not reach, and now does; those that still work on the same."""
        self._unreached.try_again(self.state)

    def reset(self, ranks: list[int]) -> None:
        """Let ranks leave their process group, before whatever waits for them, and meet in the present generation next;
        waits for those that are idle."""
        ranks = [rank for rank in ranks if self.reaches(self.state.engines[rank])]
        if not ranks:
            return
        working = self.line.working()
        # One that dies just now is no reason to stop here.
        resets = self._add(remote.reset, (self.home.generation,), ranks, first=True)
        deadline = time.monotonic() + _RESET_SECONDS
        while set(resets.unfinished) - working.keys() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for rank in sorted(set(resets.unfinished) - working.keys()):
            log.warning("rank %d does not leave its process group; cluster.restart(%d) brings it back", rank, rank)
        for rank, failure in resets.failures.items():
            log.warning("rank %d could not leave its process group: %s", rank, failure)

    @contextlib.contextmanager
    def _after_an_interrupt(self) -> Iterator[None]:
        """For whoever takes over from a supervisor that has ended while it interrupted ranks: before they are given
        anything that it has left, those that are idle leave their process group, as some have and others not. What the
        others work on ends as its ranks are released."""
        if not self.home.was_amid(INTERRUPTING):
            yield
            return
        with self._interrupting, self.home.amid(INTERRUPTING), self.line.held(self._ranks):
            yield
            self.hands.next_generation()
            self.reset(self._ranks)

    def _release_in_a_while(self, submission: Submission) -> None:
        """A rank of it has failed: interrupt the others in RELEASE_SECONDS, if they have not ended by then; at once
        where its process is gone, as they can end in no other way."""
        died = any(failure.kind == DIED for failure in submission.failures.values())
        timer = threading.Timer(0.0 if died else RELEASE_SECONDS, self._release, [submission])
        timer.daemon = True
        timer.start()

    def _release(self, submission: Submission) -> None:
        if not submission.done:
            try:
                self.interrupt(submission)
            except Exception:  # On this thread nobody else would hear of it.
                log.exception("ranks that wait for a failed one could not be interrupted")

    # ---- engines that come and go ------------------------------------------------------------------------------------

    def restart(self, *ranks: int) -> None:
        """End the engines of `ranks`, where they are still there, and start new ones on the same devices.

        What they held is lost. The others are interrupted, keep what they hold, and form a new process group with them.
        """
        with (
            self.lock,
            self.line.held(self._ranks),
        ):  # Who met others before all have left would meet them in another group.
            ranks = self._lost.with_its_host(self.state, self.existing(ranks))
            self.hands.require(ranks)
            self.end([self.state.engines[rank] for rank in ranks])
            with ThreadPoolExecutor(1) as meanwhile:  # Engines that are no forks import torch meanwhile.
                started = meanwhile.submit(self.start, self.state, ranks)
                self.interrupt()
                self.hands.next_generation()
            new = {engine.rank: engine for engine in started.result()}
            try:
                # Written down last: a supervisor that takes over in between finds the ranks dead, not in another group.
                self.reset([engine.rank for engine in self.state.engines if engine.rank not in new])
            except BaseException:
                self.end(list(new.values()))  # Nobody counts them.
                raise
            self.take(replace(self.state, engines=tuple(new.get(old.rank, old) for old in self.state.engines)))

    def start(
        self, state: ClusterState, ranks: Iterable[int], cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[EngineEntry, ...]:
        """New engines for these ranks of `state`, ready. Raises ClusterError, also once it is cancelled."""
        return self.hands.start(state, ranks, cancelled)

    def take(self, state: ClusterState) -> None:
        """From now on this is what runs; it is written down."""
        self.home.write(state)
        with self._counting:
            self._count(state)

    def check_size(self, size: int) -> None:
        """Raise ClusterError where there cannot be so many engines."""
        self.hands.plan(self.state, size)

    def resize(
        self,
        size: int,
        progress: Callable[[str], object] = lambda text: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Another number of engines; see `resizing.py`. Raises ClusterError."""
        with self.lock:
            with self._interrupting:
                pass  # One that is under way leaves ranks idle; a run may have failed just now.
            Resize(self, progress, cancelled).to(size)

    def end(self, engines: Iterable[EngineEntry]) -> None:
        """End these engines and what they started; returns when the controller has noticed. ClusterError when a process
        cannot be ended."""
        left = self.hands.end(list(engines), self._await_unregistered)
        if left:
            ranks = name_ranks(engine.rank for engine in left)
            raise ClusterError(f"process {left[0].pid} of {ranks} cannot be ended; it may wait for a device or a disk")

    def give_up(self, lost: Mapping[str, str]) -> list[tuple[list[int], str]]:
        """These hosts are lost, and why; see `LostHosts.take`."""
        with self._counting:
            return self._lost.take(lost, self.state, self.line)

    def abandon(self, reason: str) -> None:
        """Nothing comes from the engines any more: whoever waits is told why."""
        self.line.give_up(self._ranks, DIED, reason)

    def close(self) -> None:
        self.adopted.close()
        self.line.close()
        self.output.close()
        self.client.close(linger=0)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, work: bytes) -> Any:
        task: Any = send_to(self.client, self.state.engines[rank].engine_id, remote.call, work)
        for child in task._children:
            # ipyparallel keeps all that a task prints as long as it runs, and a run may print for days.
            child.iopub_callbacks.append(functools.partial(_forget_output, child.output.metadata))
        return task

    def _count(self, state: ClusterState) -> None:
        self.state = state
        ranks = {engine.engine_id: engine.rank for engine in state.engines}
        self._rank_by_id.update(ranks)
        for engine_id in self._rank_by_id.keys() - ranks.keys():
            del self._rank_by_id[engine_id]
        self.output.size = len(ranks)

    def _await_unregistered(self, engine: EngineEntry) -> None:
        deadline = time.monotonic() + _UNREGISTER_SECONDS
        while self.reaches(engine):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"after {_UNREGISTER_SECONDS:g} s the controller counts the old engine of rank {engine.rank}: "
                    f"cluster.stop() ends all"
                )
            time.sleep(_POLL_SECONDS)

    def _status_of(self, engine: EngineEntry, look: EngineProcess, busy: bool) -> RankStatus:
        if look.suspended:
            word = "frozen"
        elif not look.alive or not self.reaches(engine):
            word = "dead"
        else:
            word = "busy" if busy else "idle"
        return RankStatus(
            rank=engine.rank,
            engine_id=engine.engine_id,
            pid=engine.pid,
            state=word,
            rss_bytes=look.rss_bytes,
            cpu_cores=look.load.cpu_cores,
            gpu_share=look.load.gpu_share,
        )


def _forget_output(kept: Any, message: Any) -> None:
    kept.update(stdout="", stderr="", outputs=[])
