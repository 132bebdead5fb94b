"""Run: the kernel's handle of a run. It posts control words, waits for their answers, and keeps the ranks advancing.

The words travel through the supervisor of its cluster, so any number of handles, in any number of kernels, may speak
to one run. `speedlab.cluster.supervisor.runs` keeps the ranks working on them.

A checkpoint as a folder of transformers, written by a process of its own: the kernel's has no torch.
"""

from __future__ import annotations

import asyncio
import html
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import speedlab.cluster.worker.remote as remote
from speedlab.cluster.errors import ClusterError, Failures, RankError
from speedlab.cluster.files.cluster_dir import running_clusters
from speedlab.cluster.files.user_model import OWN_MODEL
from speedlab.cluster.interrupts import is_the_users, noting_interrupts
from speedlab.cluster.known_runs import RUN_MIME, RunError, run_data, saved_step
from speedlab.cluster.run_commands import (
    CommandFuture,
    Saved,
    checkpoint_of,
    find_engines,
    is_built_in,
    rebind_engines,
    resume_arguments,
    resume_hint,
    unsaved_warning,
)
from speedlab.cluster.supervisor.protocol import RunStatus
from speedlab.config import ConfigError, RunConfig
from speedlab.display.optional_dependencies import extras
from speedlab.planner import stage_blocks
from speedlab.telemetry.checkpoint_index import find_checkpoint
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.proof import Proof, read_proof, why_no_proof
from speedlab.telemetry.records import RESTING, Event, RunState, StepRecord
from speedlab.telemetry.run_folder import RunFolder, RunFolderError
from speedlab.telemetry.run_shape import CHANGES, changed_config, present_config
from speedlab.telemetry.tables import LayoutTable, PlacementTable, layout_table, placement_of
from speedlab.telemetry.trace import write_trace

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.live_cells import LiveCell
    from speedlab.hardware import Device


def export_checkpoint(path: Path, folder: Path, **options: object) -> Path:
    """Write the checkpoint `path` to `folder` as `speedlab export` does, whose `options` these are; None is left out.
    Prints its line: which step was written, from where, how much.

    Raises RunError with what the command says is wrong.
    """
    command = [sys.executable, "-m", "speedlab.cli", "export", str(path), str(folder)]
    for name, value in options.items():
        command += [f"--{name}", str(value)] if value is not None else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(done.stderr.strip().removeprefix("speedlab export: ") or f"{folder}: was not written")
    print(done.stdout.strip())
    return folder


_POLL_SECONDS = 0.02
_ENGINE_CHECK_SECONDS = 1.0


class Run:
    """A run on a cluster, or, without one, the record of a run to look at."""

    def __init__(
        self,
        folder: RunFolder | str | os.PathLike[str],
        cluster: Cluster | None = None,
        *,
        attach: Callable[[str | None], Cluster] | None = None,
    ):
        """`attach`: finds the engines in which a run whose own are gone may go on; without it, it is only looked at."""
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.cluster = cluster
        self.feed = Feed(self.folder)
        self._attach = attach or (type(cluster).attach if cluster is not None else None)
        self._failures = Failures(self.folder)
        self.feed.poll()

    # What it is doing

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def config(self) -> RunConfig:
        return self.folder.config

    @property
    def present_config(self) -> RunConfig:
        """`config` with the ZeRO stage, layout and micro-batches that the run has now."""
        self.feed.poll()
        return present_config(self.config, self.feed.events, self._engines())

    @property
    def errors(self) -> list[RankError]:
        """What the ranks raised, oldest first, whether or not anybody watched them."""
        return self._failures.all()

    @property
    def state(self) -> RunState:
        self.feed.poll()
        return self.feed.status.state

    @property
    def step(self) -> int:
        """The last step recorded."""
        self.feed.poll()
        last, status = self.feed.last, self.feed.status
        went_back = last is not None and status.step < last.step and status.updated > last.time
        return status.step if last is None or went_back else last.step

    @property
    def events(self) -> list[Event]:
        self.feed.poll()
        return self.feed.events

    def records(self, rank: int = 0) -> Sequence[StepRecord]:
        """All step records of a rank, from the first step on, growing while the run does."""
        self.feed.poll()
        if rank not in self.feed.records and not 0 <= rank < len(self.feed.status.rank_pids):
            raise RunError(
                f"{self.name!r} has no rank {rank}; ranks with records: {sorted(self.feed.records) or 'none yet'}"
            )
        return self.feed.records.get(rank, [])

    def table(self) -> list[dict[str, Any]]:
        """One row for each ZeRO stage the run has been through; see `speedlab.cluster.stage_table`. Below them: once
        the run has ended, what of it is not saved."""
        from speedlab.cluster.stage_table import stage_table

        self.feed.poll()
        return stage_table(self.feed, devices=self._devices(), notes=filter(None, [unsaved_warning(self)]))

    def proof(self) -> Proof:
        """What was checked of the run's first batch, or of the batch at the last `prove()`. Raises RunError if there is
        no proof."""
        found = read_proof(self.folder.path)
        if found is None:
            raise RunError(f"run {self.name!r} has no proof: {why_no_proof(self.config, self.step)}")
        return found

    def layout_table(self) -> LayoutTable:
        """One row for each rank: its pipeline stages and their blocks, its data and tensor index, its device."""
        config, engines = self.present_config, self._engines()
        layout, chunks = config.layout(engines, built_in=False), config.parallel.stages_per_rank
        counts = config.parallel.cut or ()
        if not counts and self.is_built_in:
            counts = stage_blocks(config.model, layout.pp * chunks)
        devices = self._devices()
        return layout_table(layout, counts, chunks=chunks, devices=devices, hosts=[platform.node()] * len(devices))

    def placement(self, rank: int = 0) -> PlacementTable:
        """One row for each parameter that `rank` holds: which part of the whole, how its gradient comes together, who
        answers for it, and who holds each of its states, where, and as what. As the run stands, also while it trains.

        Raises RunFolderError for a rank that the run has not."""
        return placement_of(self.folder, rank)

    def trace(self, path: str | os.PathLike[str], step: int | None = None) -> int:
        """Write the pipeline's timeline of `step`, or of the newest step, to `path`, as a Chrome trace that
        chrome://tracing and Perfetto open; returns the step. Raises RunFolderError when there is no timeline of it."""
        return write_trace(self.folder, path, step, devices=self._devices())

    def export(
        self,
        folder: str | os.PathLike[str],
        step: int | Saved | None = None,
        tag: Saved | None = None,
        *,
        config: str | os.PathLike[str] | None = None,
        dtype: str | None = None,
    ) -> Path:
        """Write a checkpoint, the newest when none is named, as a folder that transformers loads: the weights, and the
        tokenizer beside them. Prints which step that is, and returns the folder; the run goes on meanwhile, and needs
        no engines.

        `config`: config.json of a model of transformers, for a model of your own that carried none; `dtype`: of the
        weights, by name. Raises CheckpointError, ConfigError or RunError.
        """
        chosen = checkpoint_of(self, step, tag)
        if chosen is None and not self.has_engines and saved_step(self.folder) is None:
            raise RunError(f"run {self.name!r} has nothing to export: {resume_hint(self)}")
        chosen = chosen or find_checkpoint(self.folder.path)
        return export_checkpoint(chosen, Path(folder).expanduser().absolute(), config=config, dtype=dtype)

    # Control words: each returns at once

    def pause(self) -> CommandFuture:
        """Stop after the step that is being computed; the engines keep everything and are free for `%%ranks` cells."""
        return self._post("pause")

    def resume(
        self, step: int | Saved | None = None, tag: Saved | None = None, *, steps: int | None = None
    ) -> CommandFuture:
        """Go on: from where the run stands, or from the checkpoint of a step, or of a tag, or that `save` returned.

        `steps` makes the run longer (or shorter); a finished one needs it. A run that was stopped goes on, too, and one
        whose engines are gone, from its newest checkpoint in the engines that run now. Raises CheckpointError,
        ConfigError or RunError, before anything is done, for what cannot be.
        """
        arguments = resume_arguments(self, step, tag, steps)
        if not self.has_engines and self._attach is not None:
            self.go_on_in(find_engines(self, self._attach))
        return self._post("resume", **arguments)

    def go_on_in(self, cluster: Cluster) -> None:
        """Let this run's next words go to the engines of `cluster`; its own are gone. `resume` does so by itself."""
        with cluster.runs.held(self.folder.path):
            rebind_engines(self, cluster)
        self.cluster = cluster

    def advance(self, n: int = 1) -> CommandFuture:
        """Compute `n` more steps, then pause. Raises ValueError for anything but a whole number of at least 1."""
        if not isinstance(n, SupportsIndex) or n.__index__() < 1:
            raise ValueError(f"advance({n!r}): a run only goes forward, by whole steps; n is an int, at least 1")
        return self._post("step", n=n.__index__())

    def stop(self) -> CommandFuture:
        """End the run after the step that is being computed."""
        return self._post("stop")

    def save(self, tag: str | None = None) -> CommandFuture:
        """Write a checkpoint to `checkpoints/<tag>`, 'step-000200' when no tag is given."""
        return self._post("save", tag=tag)

    def prove(self) -> CommandFuture:
        """Make the full proof of the next batch, between two steps; `proof()` then returns it. The step after it adds
        what its update has changed."""
        return self._post("prove")

    def live(self, code: str, ranks: Iterable[int] | None = None, *, asks: bool = True) -> LiveCell:
        """Run a cell between two steps on ranks, or on all, beside what they train: it finds `engine`, `model` and
        `batch`, the micro-batch that its rank takes next. `.wait()` gives its last expression's text by rank.

        Collectives in it, as those of a partitioned model's forward, need all ranks. An exception ends the cell, not
        the run. Afterwards gradients and random numbers are what they would have been without it; what it changes on
        purpose stays, and has to be changed on all ranks. Ranks without the cell wait for it, however long. Answers
        that nobody takes (by `.wait()`, `await` or `.said()`) are kept of the last 16 cells. `asks`: `breakpoint()` in
        it stops and asks whoever waits for it, by `.wait()`; while it may, no rank is late in a collective, and without
        it a rank that others do not meet fails there as in any cell. Raises SyntaxError, RunError or ClusterError.
        """
        from speedlab.cluster.live_cells import post_live

        return post_live(self, code, ranks, asks=asks)

    def reshape(self, *, engines: int | None = None, **changes: Any) -> CommandFuture:
        """Change the ZeRO stage, the layout, or how a pipeline works, between two steps; no state is lost.

        `changes`: zero, islands, tp, pp, cp, dp, schedule, chunks, micro_batches, sequence, cp_heads, cp_pad, cut,
        offload (a dict of where the optimizer's states and the parameters lie: none, host or disk). What is not named
        stays as it is, and dp follows from the engines. The global batch stays, so that the same data follow. Raises
        ConfigError or LayoutError at once, with the rule and what would work, for what cannot be.

        With another number of `engines`, engines are started or stopped, and the run goes on from a checkpoint; this
        waits for it, and a failure leaves the run with the engines it had. See `speedlab.cluster.run_commands`.
        """
        size = self._engines()
        if engines not in (None, size):
            from speedlab.cluster.run_commands import resize_run

            return resize_run(self, engines, **changes)
        if not changes:
            raise ConfigError(f"reshape() changes nothing; name what is to change: engines, {', '.join(CHANGES)}")
        changed_config(self.present_config, size, built_in=self.is_built_in, **changes)
        return self._post("reshape", **changes)

    @property
    def own_model(self) -> bool:
        """Whether the run trains a model that the user gave."""
        return (self.folder.path / OWN_MODEL).exists()

    @property
    def is_built_in(self) -> bool:
        """Whether the model is the GPT of the configuration, so that its shape says which layouts there are."""
        self.feed.poll()
        return is_built_in(self.folder, self.feed.events)

    @property
    def has_engines(self) -> bool:
        """Whether this handle reaches engines: they may have been stopped, here or elsewhere."""
        return self._size() > 0

    def _size(self) -> int:
        """Number of engines that this handle reaches."""
        try:
            return self.cluster.size if self.cluster is not None else 0
        except ClusterError:
            return 0

    def _devices(self) -> list[Device]:
        """Devices by rank; [] when the engines are gone: what is on the disk can be looked at without."""
        try:
            return list(self.cluster.devices) if self.cluster is not None else []
        except ClusterError:
            return []

    def _engines(self) -> int:
        return self._size() or len(self.feed.status.rank_pids)

    def check_can(self, word: str) -> None:
        """Raise RunError where no engines hear a control word."""
        if self.cluster is None or not self.has_engines:
            raise RunError(f"run {self.name!r} has no engines here and cannot {word}: {resume_hint(self)}")

    def _post(self, word: str, **arguments: Any) -> CommandFuture:
        self.check_can(word)
        assert self.cluster is not None
        return CommandFuture(self, self.cluster.runs.post(self.folder.path, word, arguments), word)

    def _standing(self) -> RunStatus:
        """How it stands with the ranks of its cluster. Raises ClusterError when that has ended."""
        return self.cluster.runs.standing(self.folder.path) if self.cluster is not None else RunStatus()

    # Waiting

    def wait(self, timeout: float | None = None) -> RunState:
        """Wait until the run rests: paused, finished or stopped. Raises RankError when it failed, TimeoutError after
        `timeout` seconds. An interrupt of the kernel interrupts the ranks too, its restart does not."""
        return self._until(self._resting_state, timeout, f"run {self.name!r}")

    def __await__(self) -> Generator[Any, None, RunState]:
        return self._until_async(self._resting_state, f"run {self.name!r}").__await__()

    def wait_until(self, step: int, timeout: float | None = None) -> int:
        """Wait until `step` is recorded; returns the last step recorded. Raises what wait() raises, and RunError when
        the run rests before that step."""

        def reached() -> int | None:
            if self.step >= step:
                return self.step
            if self._resting_state() is not None and self.step < step:
                raise RunError(f"step {step} was not reached: {self._where()}")
            return None

        return self._until(reached, timeout, f"step {step} of run {self.name!r}")

    def generate(
        self, prompt: str, tokens: int = 100, *, temperature: float = 0.8, seed: int = 0, timeout: float = 300.0
    ) -> str:
        """Text that the model, as it is now, writes after `prompt`. The run has to rest; waits for the ranks."""
        if self.cluster is None or not self.has_engines:
            raise RunError(f"run {self.name!r} has no engines here, so no model: {resume_hint(self)}")
        self._until(self._idle, timeout, f"the ranks of run {self.name!r}")
        results = self.cluster.submit(
            remote.generate, str(self.folder.path), prompt, tokens, temperature=temperature, seed=seed
        )
        self._until(lambda: results.done or None, timeout, "text of the model")
        return results.result()[0]

    def _idle(self) -> RunState | None:
        """The state once the ranks have nothing to do. Raises RunError unless they come to that by themselves."""
        if (state := self._resting_state()) is None and not self.is_settling:
            raise RunError(f"run {self.name!r} is {self.state}: its ranks are busy; run.pause().wait() first")
        return state

    @property
    def is_settling(self) -> bool:
        """Whether the run has come to rest, and its ranks are about to be free."""
        status = self.feed.status
        return status.state in RESTING and not self.folder.pending(status.command) and self._standing().active

    # Views, in a notebook

    def dashboard(self) -> None:
        """Display the live dashboard: memory by rank, loss, throughput, anatomy of a step."""
        with extras():
            from speedlab_notebook.dashboard.widget import show

        show(self)

    def panel(self) -> None:
        """Display the panel that steers this run."""
        with extras():
            from speedlab_notebook.panel.panel import show

        show(self.cluster, self)

    def _until(self, check: Callable[[], Any], timeout: float | None, what: str) -> Any:
        """Poll until `check` returns something."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while (found := check()) is None:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{what}: nothing after {timeout:g} s; {self._where()}")
                time.sleep(_POLL_SECONDS)
            return found
        except KeyboardInterrupt:
            self._interrupt_ranks()
            raise

    async def _until_async(self, check: Callable[[], Any], what: str) -> Any:
        with noting_interrupts() as interrupted:
            try:
                while (found := check()) is None:
                    await asyncio.sleep(_POLL_SECONDS)
                return found
            except (KeyboardInterrupt, asyncio.CancelledError):
                # A kernel that is interrupted cancels what its cell awaits; others may cancel it without such a wish.
                if interrupted():
                    self._interrupt_ranks()
                raise

    def _interrupt_ranks(self) -> None:
        if self.cluster is not None and is_the_users():
            self.cluster.runs.interrupt(self.folder.path)

    def _resting_state(self) -> RunState | None:
        """The state when nothing will change it without a new control word, else None."""
        self.feed.poll()
        self._raise_trouble()
        if self.feed.status.state not in RESTING:
            return None
        if self.cluster is not None and (standing := self._standing()).active | standing.recovering:
            return None
        self.feed.poll()  # Once more: what the supervisor made of the end was written before it said so.
        status = self.feed.status
        if self.cluster is not None and self.folder.pending(self.folder.read_status().command):
            return None
        self._raise_failure()
        self.feed.poll(files=True)  # The last records may still be on their way through the stream.
        return status.state

    def _raise_failure(self) -> None:
        """RankError, or what the folder knows of it when another kernel saw the failure, if the run has failed."""
        if self.feed.status.state is not RunState.FAILED:
            return
        if self.errors:
            raise self.errors[-1]
        raise RunError(self._where())

    def _raise_trouble(self) -> None:
        """Raise what keeps the run from ever answering: its words cannot be sent on, or its engines are gone."""
        if self.cluster is not None:
            standing = self._standing()
            if standing.trouble:
                raise (RunFolderError if standing.trouble_kind == "RunFolderError" else ClusterError)(standing.trouble)
            if standing.active or standing.recovering:
                return  # The supervisor tells of its end.
        self.feed.poll()  # What became of it was written before the supervisor said that it is over.
        status = self.feed.status
        if status.state in RESTING or time.time() - status.updated <= _ENGINE_CHECK_SECONDS:
            return
        if all(state.token != status.token for state in running_clusters()):
            raise RunError(f"{self._where()}, but {resume_hint(self)}")

    def _where(self) -> str:
        status = self.feed.status
        text = f": {status.told}" if status.told else ""
        return f"run {self.name!r} is {status.state} at step {self.step} of {status.steps}{text}"

    def __repr__(self) -> str:
        size = self._size()
        engines = f"{size or 'no'} engine{'' if size == 1 else 's'}"
        unsaved = ", not saved" if unsaved_warning(self) else ""
        return f"<Run {self.name!r}: {self.state}, step {self.step} of {self.feed.status.steps}, {engines}{unsaved}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Beside its text and its line of HTML: pages whose server knows runs show the run itself, live."""
        return {RUN_MIME: run_data(self.folder.path)}

    def _repr_html_(self) -> str:
        self.feed.poll()
        last = self.feed.last
        loss = f" · loss {last.loss:.3f} · {last.tokens_per_second:,.0f} tokens/s" if last is not None else ""
        text = f"step {self.step:,}/{self.feed.status.steps:,}{loss} · {self.state}"
        return (
            f"<b>{html.escape(self.name)}</b> · {html.escape(' · '.join(filter(None, [text, unsaved_warning(self)])))}"
        )
