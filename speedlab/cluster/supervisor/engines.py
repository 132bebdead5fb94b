"""The engines of one cluster, as the supervisor sees them: submit, interrupt, restart, resize.

The supervisor is the only process that talks to the controller. So only the supervisor knows what each rank works on.
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
"""After a rank fails or dies: how long the other ranks may still work on the same submission before they are
interrupted. Normally they wait for the failed rank in a collective.
"""
RESEND_SECONDS = 0.5
"""Interval between two signals. An engine misses a signal that arrives before its task begins."""
CUT_SECONDS = 1.4
"""After this time, a rank that has not stopped probably waits for a peer in native code: its connections are aborted. A
trainer needs up to 1.2 s to end its step cleanly.
"""

_RESET_SECONDS = 5.0
_UNREGISTER_SECONDS = 20.0
_POLL_SECONDS = 0.02


class Engines:
    """One engine per rank. Methods are thread-safe."""

    def __init__(self, home: ClusterDir, state: ClusterState, client: Client, hands: ProcessController) -> None:
        """Connect to running engines and adopt the work of an earlier supervisor.

        Args:
            home: Folder of the cluster.
            state: Engines, devices and hosts of the cluster.
            client: Client of the ipyparallel controller.
            hands: Controls the processes of the engines, on this host or on several.
        """
        self.home = home
        self.hands = hands
        self.state = state
        self.client = client
        self.lock = threading.RLock()
        """Held while engines are started, ended or replaced."""
        self._interrupting = threading.Lock()
        self._counting = threading.Lock()
        """Held while the engines of ranks are replaced, or engines are given up."""
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
        """Folder of the cluster."""
        return self.home.path

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self.state.name

    @property
    def token(self) -> str:
        """Unique id; distinguishes clusters of the same name."""
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
        """Queue `function(*arguments)` on the ranks.

        Args:
            function: Function that can be pickled.
            *arguments: Arguments of the function.
            ranks: Ranks that call the function; None for all.
            first: Whether to queue it before everything that has not begun.
            label: Name by which a later supervisor finds the submission.

        Returns:
            The submission.

        Raises:
            ClusterError: If a rank does not exist or its engine is dead.
        """
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
        """Do the same as `submit` without checking the engines: on a dead rank, the submission fails."""
        work = pack((function, arguments, {}), {function.__name__: function, "its arguments": arguments})
        return self.line.add(Submission(work, ranks, label=label), first=first)

    def at_work(self, submission: Submission) -> bool:
        """Return whether some rank works on a submission.

        Args:
            submission: The submission.
        """
        return bool(self.line.working(submission))

    def left_of(self, label: str) -> Submission | None:
        """Return the newest submission of an earlier supervisor with this label; None if there is none."""
        return self.adopted.newest(label)

    def wire(self, folder: RunFolder) -> RecordRelay | None:
        """Return the relay for a run whose folder not all hosts see; None if all hosts see the folder."""
        return self.hands.wire(folder)

    def ask(self, ranks: list[int], function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """Call a function on idle ranks and wait for the results.

        Args:
            ranks: Ranks that call the function.
            function: Function that can be pickled.
            *arguments: Arguments of the function, the same on each rank.
            seconds: Longest time to wait.

        Returns:
            One result per rank, in the order of `ranks`.

        Raises:
            RankError: If the function raises on a rank.
            ClusterError: If a rank does not answer in time.
        """
        return self.ask_each(function, dict.fromkeys(ranks, arguments), seconds=seconds)

    def ask_each(
        self, function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], *, seconds: float
    ) -> list[Any]:
        """Call a function on idle ranks with different arguments; see `ask`.

        Args:
            function: Function that can be pickled.
            arguments: Arguments by rank.
            seconds: Longest time to wait.

        Raises:
            RankError: If the function raises on a rank.
            ClusterError: If a rank does not answer in time, or an engine is dead; then no rank is asked.
        """
        if arguments:
            self.living(arguments)
        asked = [self._add(function, given, [rank], first=True) for rank, given in arguments.items()]
        deadline = time.monotonic() + seconds
        late = [one for one in asked if not one.wait(max(0.0, deadline - time.monotonic()))]
        for one in late:
            self.line.take_back(one)  # A late rank must not execute it later, when the caller has given up.
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
        """Return `ranks` without duplicates, or all ranks for None.

        Raises:
            ClusterError: If a rank does not exist.
        """
        known = self._ranks
        chosen = known if ranks is None else list(dict.fromkeys(ranks))
        unknown = [rank for rank in chosen if rank not in known]
        if unknown or not chosen:
            are = "is" if len(unknown) == 1 else "are"
            wanted = f"there {are} no {name_ranks(unknown)}" if unknown else "no rank is named"
            raise ClusterError(f"{wanted}; cluster {self.state.name!r} has {name_ranks(known)}")
        return chosen

    def living(self, ranks: Iterable[int] | None) -> list[int]:
        """Return `ranks` without duplicates, or all ranks for None.

        Raises:
            ClusterError: If a rank does not exist or its engine is dead.
        """
        chosen = self.existing(ranks)
        dead = [rank for rank in chosen if not self.reaches(self.state.engines[rank])]
        if dead:  # The controller notices dead engines one by one: name all whose process has ended.
            ended = {status.rank for status in self.status() if status.state == "dead"}
            raise ClusterError(self.way_back([rank for rank in chosen if rank in dead or rank in ended]))
        return chosen

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks whose engines run on lost hosts."""
        return self._lost.ranks(self.state)

    def way_back(self, dead: list[int]) -> str:
        """Return a sentence that names dead engines and the command that restarts them.

        Args:
            dead: Ranks of the dead engines.
        """
        return self._lost.way_back(self.state, dead)

    @property
    def dead(self) -> list[int]:
        """Ranks whose engines have ended or do not answer, as far as the controller knows. Sends no request."""
        return [engine.rank for engine in self.state.engines if not self.reaches(engine)]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the engines, by rank."""
        return tuple(engine.pid for engine in self.state.engines)

    def reaches(self, engine: EngineEntry) -> bool:
        """Return whether an engine can be reached.

        Args:
            engine: The engine.

        Returns:
            True if the controller knows the engine and it was not given up with its host.
        """
        return engine.engine_id in self.client.ids and not self._lost.gave_up(engine)

    def status(self) -> list[RankStatus]:
        """Return the current status of each rank."""
        busy, engines = self.line.busy(), self.state.engines
        looks = self.hands.look(engines)
        return [self._status_of(engine, look, engine.rank in busy) for engine, look in zip(engines, looks, strict=True)]

    # ---- interrupts --------------------------------------------------------------------------------------------------

    def interrupt(self, only: Submission | None = None, seconds: float = 2.0) -> list[int]:
        """Interrupt `only`, or everything.

        1. Remove what ranks have not begun from the queue.
        2. Send SIGINT, look, and send SIGINT again to each rank that still works.
        3. A rank that does not stop waits for a peer: abort its connections to the other ranks, and break the
           rendezvous store.
        4. Let the ranks leave their process group: an aborted collective makes it unusable.

        Args:
            only: Submission to interrupt; None for all.
            seconds: Longest time to wait until the ranks stop.

        Returns:
            The ranks that are idle afterwards. A missing rank works on something else, is inside a long native call, or
            is suspended.
        """
        # One rank alone is in no collective; others may be.
        alone = only.ranks if only is not None and len(only.ranks) == 1 else []
        # A client that waits for the interrupted work may submit more at once; that must run after the interrupt.
        with self._interrupting, self.line.held(alone or self._ranks):
            for submission in {*([] if only is None else [only]), *self.line.working(only).values()}:
                submission.stop()  # Before `take_back` adds a failure: `stop` looks at whether there was one.
            self.line.take_back(only)
            alive = {engine.rank for engine in self.state.engines if self.reaches(engine)}
            working = {rank: one for rank, one in self.line.working(only).items() if rank in alive}
            if working:
                if alone:
                    self._stop(working, seconds)
                    return sorted(alive - self.line.working().keys())
                with self.home.amid(INTERRUPTING):
                    still, unreached = self._stop(working, seconds)
                    # Some ranks may not have joined the group: all join a new generation of the store.
                    self.hands.next_generation(at_once=True)
                    self.reset(sorted((alive - still) | unreached))
            return sorted(alive - self.line.working().keys())

    def _stop(self, working: dict[int, Submission], seconds: float) -> tuple[set[int], set[int]]:
        """Signal what these ranks work on.

        Returns the ranks that still work on it after `seconds`, and those of them that cannot be reached now.
        """
        begun = time.monotonic()
        deadline, signal_at = begun + seconds, begun
        lost = set(self.lost_ranks)
        # A rank that waits for a rank on a lost host cannot end its step.
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
        if reported := self._unreached.note({rank: working[rank] for rank in unreached}, self.state):
            self.output.on_lines(sorted(unreached), "stderr", reported)
        return still, unreached

    def interrupt_those_back(self) -> None:
        """Interrupt ranks that an earlier interrupt could not reach, if they still work on the same submission."""
        self._unreached.try_again(self.state)

    def reset(self, ranks: list[int]) -> None:
        """Let ranks leave their process group before they begin anything else; they join the current generation next.

        Args:
            ranks: Ranks to reset; waits only for those that are idle.
        """
        ranks = [rank for rank in ranks if self.reaches(self.state.engines[rank])]
        if not ranks:
            return
        working = self.line.working()
        # A rank that dies just now must not stop the reset of the others.
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
        """Finish the interrupt of a supervisor that ended during it.

        Some ranks have left their process group and others have not. Inside the block, the work of the earlier
        supervisor is adopted; after it, idle ranks leave the group. Ranks that still work end their work as they are
        released.
        """
        if not self.home.was_amid(INTERRUPTING):
            yield
            return
        with self._interrupting, self.home.amid(INTERRUPTING), self.line.held(self._ranks):
            yield
            self.hands.next_generation()
            self.reset(self._ranks)

    def _release_in_a_while(self, submission: Submission) -> None:
        """Interrupt the other ranks `RELEASE_SECONDS` after a failure; at once if a process died, because they cannot
        end alone.
        """
        died = any(failure.kind == DIED for failure in submission.failures.values())
        timer = threading.Timer(0.0 if died else RELEASE_SECONDS, self._release, [submission])
        timer.daemon = True
        timer.start()

    def _release(self, submission: Submission) -> None:
        if not submission.done:
            try:
                self.interrupt(submission)
            except Exception:  # An exception on a timer thread would be lost.
                log.exception("ranks that wait for a failed one could not be interrupted")

    # ---- start, restart and resize -----------------------------------------------------------------------------------

    def restart(self, *ranks: int) -> None:
        """End the engines of `ranks` if they still run, and start new ones on the same devices.

        The state of these engines is lost. The other ranks are interrupted, keep their state, and form a new process
        group with the new engines.

        Args:
            *ranks: Ranks to restart; includes the ranks of a host that was lost with them.

        Raises:
            ClusterError: If a rank does not exist or a new engine does not start.
        """
        with (
            self.lock,
            self.line.held(self._ranks),
        ):  # A rank must not join a group before all ranks have left the old one.
            ranks = self._lost.with_its_host(self.state, self.existing(ranks))
            self.hands.require(ranks)
            self.end([self.state.engines[rank] for rank in ranks])
            # Starting overlaps with the interrupt: engines that are not forked import torch.
            with ThreadPoolExecutor(1) as meanwhile:
                started = meanwhile.submit(self.start, self.state, ranks)
                self.interrupt()
                self.hands.next_generation()
            new = {engine.rank: engine for engine in started.result()}
            try:
                # Record the new engines last. A supervisor that takes over in between finds dead ranks, not ranks of
                # another group.
                self.reset([engine.rank for engine in self.state.engines if engine.rank not in new])
            except BaseException:
                self.end(list(new.values()))  # The state does not record these engines, so nothing else would end them.
                raise
            self.take(replace(self.state, engines=tuple(new.get(old.rank, old) for old in self.state.engines)))

    def start(
        self, state: ClusterState, ranks: Iterable[int], cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[EngineEntry, ...]:
        """Start engines for these ranks and wait until they are ready.

        Args:
            state: Devices and hosts by rank.
            ranks: Ranks to start.
            cancelled: Polled during the start.

        Raises:
            ClusterError: If an engine does not start, or the start was cancelled.
        """
        return self.hands.start(state, ranks, cancelled)

    def take(self, state: ClusterState) -> None:
        """Record the current engines, in the folder of the cluster and in memory.

        Args:
            state: New state of the cluster.
        """
        self.home.write(state)
        with self._counting:
            self._count(state)

    def check_size(self, size: int) -> None:
        """Check that the cluster can have so many engines.

        Args:
            size: Number of engines.

        Raises:
            ClusterError: If it cannot.
        """
        self.hands.plan(self.state, size)

    def resize(
        self,
        size: int,
        progress: Callable[[str], object] = lambda text: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Change the number of engines; see `resize.py` for the steps.

        Args:
            size: New number of engines.
            progress: Called with a sentence for the user.
            cancelled: Polled until the new engines are ready.

        Raises:
            ClusterError: If the engines are busy, or devices are missing.
        """
        with self.lock:
            with self._interrupting:
                pass  # Wait for an interrupt in progress, which leaves the ranks idle: a run may have failed just now.
            Resize(self, progress, cancelled).to(size)

    def end(self, engines: Iterable[EngineEntry]) -> None:
        """End these engines and their child processes; return after the controller has noticed.

        Raises:
            ClusterError: If a process cannot be ended.
        """
        left = self.hands.end(list(engines), self._await_unregistered)
        if left:
            ranks = name_ranks(engine.rank for engine in left)
            raise ClusterError(f"process {left[0].pid} of {ranks} cannot be ended; it may wait for a device or a disk")

    def give_up(self, lost: Mapping[str, str]) -> list[tuple[list[int], str]]:
        """Give up the engines on lost hosts; see `LostHosts.take`.

        Args:
            lost: Reason by host.

        Returns:
            (ranks, reason) for each newly lost host.
        """
        with self._counting:
            return self._lost.take(lost, self.state, self.line)

    def abandon(self, reason: str) -> None:
        """Fail everything that runs or waits, because no engine can be reached any more.

        Args:
            reason: Message of the failures.
        """
        self.line.give_up(self._ranks, DIED, reason)

    def close(self) -> None:
        """Stop the threads and close the client; the engines keep running."""
        self.adopted.close()
        self.line.close()
        self.output.close()
        self.client.close(linger=0)

    # ---- private -----------------------------------------------------------------------------------------------------

    def _send(self, rank: int, work: bytes) -> Any:
        task: Any = send_to(self.client, self.state.engines[rank].engine_id, remote.call, work)
        for child in task._children:
            # ipyparallel stores the output of a running task, and a run may print for days: discard it.
            child.iopub_callbacks.append(functools.partial(_forget_output, child.output.metadata))
        return task

    def _count(self, state: ClusterState) -> None:
        self.state = state
        ranks = {engine.engine_id: engine.rank for engine in state.engines}
        # Change the dict in place, because `RankOutput` holds its `get`.
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
