"""Run: the kernel's handle to a run. It posts commands, waits for the answers, and reads the records.

Commands are sent to the supervisor of the cluster, which makes the ranks execute them
(`speedlab.cluster.supervisor.runs`). So any number of handles, in any number of kernels, can control one run.

`export_checkpoint` writes a checkpoint as a folder for transformers, in a separate process, because the kernel does not
import torch.
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
from speedlab.telemetry.current_config import CHANGES, changed_config, present_config
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.proof import Proof, read_proof, why_no_proof
from speedlab.telemetry.records import RESTING, Event, RunState, StepRecord
from speedlab.telemetry.run_folder import RunFolder, RunFolderError
from speedlab.telemetry.tables import LayoutTable, PlacementTable, layout_table, placement_of
from speedlab.telemetry.trace import write_trace

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.run_cell_handle import LiveCell
    from speedlab.hardware import Device


def export_checkpoint(path: Path, folder: Path, **options: object) -> Path:
    """Write a checkpoint as a folder for transformers, as `speedlab export` does. Prints one line: step, source and
    size.

    Args:
        path: Folder of the checkpoint.
        folder: Folder to write.
        **options: Options of `speedlab export`; None is left out.

    Returns:
        The folder.

    Raises:
        RunError: With the message of the command, if it fails.
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
    """A run on a cluster; or, without a cluster, the records of a run."""

    def __init__(
        self,
        folder: RunFolder | str | os.PathLike[str],
        cluster: Cluster | None = None,
        *,
        attach: Callable[[str | None], Cluster] | None = None,
    ):
        """Open the folder of a run.

        Args:
            folder: Folder of the run, or its path.
            cluster: Cluster whose engines hold the run.
            attach: Find the engines in which a run without engines can continue; None to only read the run.
        """
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.cluster = cluster
        self.feed = Feed(self.folder)
        self._attach = attach or (type(cluster).attach if cluster is not None else None)
        self._failures = Failures(self.folder)
        self.feed.poll()

    # State

    @property
    def name(self) -> str:
        """Name of the run, which is the name of its folder."""
        return self.folder.name

    @property
    def config(self) -> RunConfig:
        """Configuration with which the run was started."""
        return self.folder.config

    @property
    def present_config(self) -> RunConfig:
        """`config` with the current ZeRO stage, layout and micro-batches of the run."""
        self.feed.poll()
        return present_config(self.config, self.feed.events, self._engines())

    @property
    def errors(self) -> list[RankError]:
        """The errors that ranks raised, oldest first, even if no client was connected then."""
        return self._failures.all()

    @property
    def state(self) -> RunState:
        """Current state of the run."""
        self.feed.poll()
        return self.feed.status.state

    @property
    def step(self) -> int:
        """The last recorded step."""
        self.feed.poll()
        last, status = self.feed.last, self.feed.status
        # After a resume from an older checkpoint, the newest records are ahead of the status.
        went_back = last is not None and status.step < last.step and status.updated > last.time
        return status.step if last is None or went_back else last.step

    @property
    def events(self) -> list[Event]:
        """All events of the run, oldest first."""
        self.feed.poll()
        return self.feed.events

    def records(self, rank: int = 0) -> Sequence[StepRecord]:
        """Return all step records of a rank, from the first step on. The list grows while the run trains.

        Args:
            rank: The rank.

        Raises:
            RunError: If the run has no such rank.
        """
        self.feed.poll()
        if rank not in self.feed.records and not 0 <= rank < len(self.feed.status.rank_pids):
            raise RunError(
                f"{self.name!r} has no rank {rank}; ranks with records: {sorted(self.feed.records) or 'none yet'}"
            )
        return self.feed.records.get(rank, [])

    def table(self) -> list[dict[str, Any]]:
        """Return one row per ZeRO stage that the run has used; see `speedlab.cluster.stage_table`.

        After the end of the run, a note below the rows names an unsaved step.
        """
        from speedlab.cluster.stage_table import stage_table

        self.feed.poll()
        return stage_table(self.feed, devices=self._devices(), notes=filter(None, [unsaved_warning(self)]))

    def proof(self) -> Proof:
        """Return what was checked of the first batch, or of the batch at the last `prove()`.

        Raises:
            RunError: If there is no proof.
        """
        found = read_proof(self.folder.path)
        if found is None:
            raise RunError(f"run {self.name!r} has no proof: {why_no_proof(self.config, self.step)}")
        return found

    def layout_table(self) -> LayoutTable:
        """Return one row per rank: its pipeline stages and their blocks, its data and tensor index, its device."""
        config, engines = self.present_config, self._engines()
        layout, chunks = config.layout(engines, built_in=False), config.parallel.stages_per_rank
        counts = config.parallel.cut or ()
        if not counts and self.is_built_in:
            counts = stage_blocks(config.model, layout.pp * chunks)
        devices = self._devices()
        return layout_table(layout, counts, chunks=chunks, devices=devices, hosts=[platform.node()] * len(devices))

    def placement(self, rank: int = 0) -> PlacementTable:
        """Return one row per parameter that `rank` holds, for the current layout; also while the run trains.

        A row says which shard of the parameter the rank holds, how its gradient is reduced, which rank owns it, and
        where each of its states is stored, and in which format.

        Args:
            rank: The rank.

        Raises:
            RunFolderError: If the run has no such rank.
        """
        return placement_of(self.folder, rank)

    def trace(self, path: str | os.PathLike[str], step: int | None = None) -> int:
        """Write the pipeline's timeline of a step as a Chrome trace, for chrome://tracing and Perfetto.

        Args:
            path: File to write.
            step: The step; None for the newest with a timeline.

        Returns:
            The step.

        Raises:
            RunFolderError: If the step has no timeline.
        """
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
        """Write a checkpoint as a folder that transformers loads: the weights and the tokenizer. Prints which step was
        written.

        The run continues meanwhile. No engines are needed.

        Args:
            folder: Folder to write.
            step: Step of the checkpoint, or what `save` returned; None for the newest.
            tag: Tag or path of the checkpoint, instead of `step`.
            config: config.json of a transformers model, for a model of one's own without one.
            dtype: Name of the data type of the weights.

        Returns:
            The folder.

        Raises:
            CheckpointError: If there is no such checkpoint.
            ConfigError: If both `step` and `tag` are given.
            RunError: If there is nothing to export, or the export fails.
        """
        chosen = checkpoint_of(self, step, tag)
        if chosen is None and not self.has_engines and saved_step(self.folder) is None:
            raise RunError(f"run {self.name!r} has nothing to export: {resume_hint(self)}")
        chosen = chosen or find_checkpoint(self.folder.path)
        return export_checkpoint(chosen, Path(folder).expanduser().absolute(), config=config, dtype=dtype)

    # Commands: each returns at once

    def pause(self) -> CommandFuture:
        """Pause after the current step. The engines keep all state and can execute `%%ranks` cells."""
        return self._post("pause")

    def resume(
        self, step: int | Saved | None = None, tag: Saved | None = None, *, steps: int | None = None
    ) -> CommandFuture:
        """Continue the run: from its current state, or from a checkpoint.

        A stopped run continues, too. A run without engines continues from its newest checkpoint in the engines that run
        now.

        Args:
            step: Step of the checkpoint, or what `save` returned; None for the current state.
            tag: Tag or path of the checkpoint, instead of `step`.
            steps: New last step of the run; a finished run needs it.

        Raises:
            CheckpointError: If there is no such checkpoint.
            ConfigError: If the run would end before it begins.
            RunError: If there is nothing to continue from. Nothing has changed then.
        """
        arguments = resume_arguments(self, step, tag, steps)
        if not self.has_engines and self._attach is not None:
            self.go_on_in(find_engines(self, self._attach))
        return self._post("resume", **arguments)

    def go_on_in(self, cluster: Cluster) -> None:
        """Continue this run in the engines of `cluster`, because its own engines are gone. `resume` calls this itself.

        Args:
            cluster: Cluster that runs.

        Raises:
            RunError: If the model of the run is not stored.
            ClusterError: If another run is active there.
        """
        with cluster.runs.held(self.folder.path):
            rebind_engines(self, cluster)
        self.cluster = cluster

    def advance(self, n: int = 1) -> CommandFuture:
        """Compute `n` more steps, then pause.

        Args:
            n: Number of steps, at least 1.

        Raises:
            ValueError: If `n` is no whole number of at least 1.
        """
        if not isinstance(n, SupportsIndex) or n.__index__() < 1:
            raise ValueError(f"advance({n!r}): a run only goes forward, by whole steps; n is an int, at least 1")
        return self._post("step", n=n.__index__())

    def stop(self) -> CommandFuture:
        """End the run after the current step."""
        return self._post("stop")

    def save(self, tag: str | None = None) -> CommandFuture:
        """Write a checkpoint to `checkpoints/<tag>`.

        Args:
            tag: Name of the checkpoint; None for a name such as 'step-000200'.
        """
        return self._post("save", tag=tag)

    def prove(self) -> CommandFuture:
        """Prove the next batch in full, between two steps; `proof()` then returns the result.

        The step after the proof adds what its update has changed.
        """
        return self._post("prove")

    def live(self, code: str, ranks: Iterable[int] | None = None, *, asks: bool = True) -> LiveCell:
        """Run a cell between two training steps. It finds `engine`, `model`, and `batch`, the next micro-batch of its
        rank.

        - Collectives in the cell, such as those in the forward of a partitioned model, need all ranks.
        - An exception ends the cell, not the run.
        - After the cell, gradients and random states are as if the cell had not run. What the cell changes on purpose
          stays changed, and must be changed on all ranks.
        - Ranks without the cell wait for it, without a limit.
        - Answers that were not read (by `.wait()`, `await` or `.said()`) are kept for the last 16 cells.

        Args:
            code: Source code of the cell.
            ranks: Ranks that run it; None for all.
            asks: Whether `breakpoint()` stops and prompts in `.wait()`. While it may stop, collectives do not time out.
                Without it, a rank fails in a collective that others do not join, as in any cell.

        Returns:
            The cell; `.wait()` returns the text of its last expression by rank.

        Raises:
            SyntaxError: If the code is not valid.
            RunError: If the run has no engines.
            ClusterError: If an engine is dead.
        """
        from speedlab.cluster.run_cell_handle import post_live

        return post_live(self, code, ranks, asks=asks)

    def reshape(self, *, engines: int | None = None, **changes: Any) -> CommandFuture:
        """Change the ZeRO stage, the layout or the pipeline between two steps. No state is lost.

        What is not named stays as it is; dp follows from the number of engines. The global batch stays the same, so the
        order of the data does, too. With another number of `engines`, engines are started or stopped, and the run
        continues from a checkpoint. This call waits for that; after a failure, the run has the engines it had. See
        `speedlab.cluster.run_commands`.

        Args:
            engines: New number of engines; None for the current one.
            **changes: zero, islands, tp, pp, cp, dp, schedule, chunks, micro_batches, sequence, cp_heads, cp_pad, cut,
                offload (a
                dict: where optimizer states and parameters are stored: none, host or disk).

        Raises:
            ConfigError: If the change is not possible; the message has the rule and what would work.
            LayoutError: If the layout does not fit the engines.
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
        """Whether the model is the GPT of the configuration, so that its shape determines the possible layouts."""
        self.feed.poll()
        return is_built_in(self.folder, self.feed.events)

    @property
    def has_engines(self) -> bool:
        """Whether this handle reaches engines; they may have been stopped, here or elsewhere."""
        return self._size() > 0

    def _size(self) -> int:
        """Return the number of engines that this handle reaches."""
        try:
            return self.cluster.size if self.cluster is not None else 0
        except ClusterError:
            return 0

    def _devices(self) -> list[Device]:
        """Return the devices by rank; [] if the engines are gone, because the records can be read without them."""
        try:
            return list(self.cluster.devices) if self.cluster is not None else []
        except ClusterError:
            return []

    def _engines(self) -> int:
        return self._size() or len(self.feed.status.rank_pids)

    def check_can(self, word: str) -> None:
        """Raise RunError if there are no engines to execute a command.

        Args:
            word: Name of the command.
        """
        if self.cluster is None or not self.has_engines:
            raise RunError(f"run {self.name!r} has no engines here and cannot {word}: {resume_hint(self)}")

    def _post(self, word: str, **arguments: Any) -> CommandFuture:
        self.check_can(word)
        assert self.cluster is not None
        return CommandFuture(self, self.cluster.runs.post(self.folder.path, word, arguments), word)

    def _standing(self) -> RunStatus:
        """Return the status of the run from its supervisor. Raises ClusterError if the cluster has ended."""
        return self.cluster.runs.standing(self.folder.path) if self.cluster is not None else RunStatus()

    # Waiting

    def wait(self, timeout: float | None = None) -> RunState:
        """Wait until the run is paused, finished or stopped. An interrupt of the kernel interrupts the ranks, too; a
        restart does not.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.

        Returns:
            The state of the run.

        Raises:
            RankError: If the run failed.
            TimeoutError: After `timeout` seconds.
        """
        return self._until(self._resting_state, timeout, f"run {self.name!r}")

    def __await__(self) -> Generator[Any, None, RunState]:
        return self._until_async(self._resting_state, f"run {self.name!r}").__await__()

    def wait_until(self, step: int, timeout: float | None = None) -> int:
        """Wait until `step` is recorded.

        Args:
            step: The step.
            timeout: Longest time to wait, in seconds; None for no limit.

        Returns:
            The last recorded step.

        Raises:
            RunError: If the run rests before that step.
            RankError: If the run failed.
            TimeoutError: After `timeout` seconds.
        """

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
        """Generate text with the current model. The run must rest; waits until the ranks are idle.

        Args:
            prompt: Beginning of the text.
            tokens: Number of tokens to generate.
            temperature: Temperature of the sampling.
            seed: Seed of the sampling.
            timeout: Longest time of each wait, in seconds.

        Returns:
            The text from rank 0.

        Raises:
            RunError: If the run has no engines or trains.
            TimeoutError: After `timeout` seconds.
        """
        if self.cluster is None or not self.has_engines:
            raise RunError(f"run {self.name!r} has no engines here, so no model: {resume_hint(self)}")
        self._until(self._idle, timeout, f"the ranks of run {self.name!r}")
        results = self.cluster.submit(
            remote.generate, str(self.folder.path), prompt, tokens, temperature=temperature, seed=seed
        )
        self._until(lambda: results.done or None, timeout, "text of the model")
        return results.result()[0]

    def _idle(self) -> RunState | None:
        """Return the state after the ranks have become idle. Raises RunError if they would stay busy."""
        if (state := self._resting_state()) is None and not self.is_settling:
            raise RunError(f"run {self.name!r} is {self.state}: its ranks are busy; run.pause().wait() first")
        return state

    @property
    def is_settling(self) -> bool:
        """Whether the run rests but its ranks are still finishing."""
        status = self.feed.status
        return status.state in RESTING and not self.folder.pending(status.command) and self._standing().active

    # Notebook views

    def dashboard(self) -> None:
        """Display the live dashboard: memory by rank, loss, throughput, time of each part of a step."""
        with extras():
            from speedlab_notebook.dashboard.widget import show

        show(self)

    def panel(self) -> None:
        """Display the panel that controls this run."""
        with extras():
            from speedlab_notebook.panel.panel import show

        show(self.cluster, self)

    def _until(self, check: Callable[[], Any], timeout: float | None, what: str) -> Any:
        """Poll until `check` returns something other than None."""
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
                # An interrupted kernel cancels what its cell awaits. Other code may cancel it without an interrupt.
                if interrupted():
                    self._interrupt_ranks()
                raise

    def _interrupt_ranks(self) -> None:
        if self.cluster is not None and is_the_users():
            self.cluster.runs.interrupt(self.folder.path)

    def _resting_state(self) -> RunState | None:
        """Return the state if only a new command can change it, else None."""
        self.feed.poll()
        self._raise_trouble()
        if self.feed.status.state not in RESTING:
            return None
        if self.cluster is not None and (standing := self._standing()).active | standing.recovering:
            return None
        # Poll again: the supervisor writes the final status before it reports that the run is inactive.
        self.feed.poll()
        status = self.feed.status
        if self.cluster is not None and self.folder.pending(self.folder.read_status().command):
            return None
        self._raise_failure()
        self.feed.poll(files=True)  # The last records may still be in the stream.
        return status.state

    def _raise_failure(self) -> None:
        """Raise RankError if the run has failed; RunError if only another kernel has its details."""
        if self.feed.status.state is not RunState.FAILED:
            return
        if self.errors:
            raise self.errors[-1]
        raise RunError(self._where())

    def _raise_trouble(self) -> None:
        """Raise if the run can never answer: its commands cannot be sent, or its engines are gone."""
        if self.cluster is not None:
            standing = self._standing()
            if standing.trouble:
                raise (RunFolderError if standing.trouble_kind == "RunFolderError" else ClusterError)(standing.trouble)
            if standing.active or standing.recovering:
                return  # The supervisor reports the end of an active run.
        self.feed.poll()  # Poll again: the final status is written before the supervisor reports the end.
        status = self.feed.status
        if status.state in RESTING or time.time() - status.updated <= _ENGINE_CHECK_SECONDS:
            return
        if all(state.token != status.token for state in running_clusters()):
            raise RunError(f"{self._where()}, but {resume_hint(self)}")

    def _where(self) -> str:
        status = self.feed.status
        text = f": {status.reported}" if status.reported else ""
        return f"run {self.name!r} is {status.state} at step {self.step} of {status.steps}{text}"

    def __repr__(self) -> str:
        size = self._size()
        engines = f"{size or 'no'} engine{'' if size == 1 else 's'}"
        unsaved = ", not saved" if unsaved_warning(self) else ""
        return f"<Run {self.name!r}: {self.state}, step {self.step} of {self.feed.status.steps}, {engines}{unsaved}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return data that a page with a run-aware server shows as a live run, in addition to text and HTML."""
        return {RUN_MIME: run_data(self.folder.path)}

    def _repr_html_(self) -> str:
        self.feed.poll()
        last = self.feed.last
        loss = f" · loss {last.loss:.3f} · {last.tokens_per_second:,.0f} tokens/s" if last is not None else ""
        text = f"step {self.step:,}/{self.feed.status.steps:,}{loss} · {self.state}"
        return (
            f"<b>{html.escape(self.name)}</b> · {html.escape(' · '.join(filter(None, [text, unsaved_warning(self)])))}"
        )
