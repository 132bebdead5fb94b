"""Reports of a run: every rank records its steps; rank 0 also writes events and the status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cuda_ops import cpu_sdpa, onednn_matmul
from cuda_ops.gpu import kernels_in_use
from speedlab.comm import own_link
from speedlab.comm.multi_host_rendezvous import own_host
from speedlab.engine.phase_timer import StepCosts
from speedlab.planner.time.step_time import bubble_share
from speedlab.telemetry.records import Event, RunState, StepRecord
from speedlab.telemetry.run_folder import RunCommand, RunFolderError
from speedlab.telemetry.writer import RecordWriter
from speedlab.trainer.diagnostics import matmul_flops
from speedlab.trainer.training_run import Training


class Reporter:
    """Writes to the run folder between `open` and `close`. It does not change the training."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._writer: RecordWriter | None = None
        self._untold: list[Event] = []
        """Events that happened while the folder was closed."""
        self._mailbox_problem = ""
        self._phase: str | None = None
        """Phase of the exchange between data-parallel ranks: 'plain', 'compressed' or 'apart'; None before the
        first step.
        """
        self.last_command = training.folder.read_status().command
        """Number of the last answered command."""

    def open(self) -> None:
        """Open the run folder and write the events that happened while it was closed."""
        training = self._training
        self._writer = RecordWriter(training.folder, training.world.rank, stream_hz=training.config.telemetry.stream_hz)
        # A client may have dropped its commands after a failure. Do not execute these later.
        self.last_command = max(self.last_command, training.folder.read_status().command)
        # Remove an event only after it is written: writing may raise.
        while self._untold:
            self._writer.event(self._untold[0])
            self._untold.pop(0)

    def close(self) -> None:
        """Close the run folder. Later events are kept for the next `open`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def waiting(self) -> list[RunCommand]:
        """Return unanswered commands, on rank 0; [] on other ranks.

        If the mailbox cannot be read, one warning is written, and the run continues without commands.
        """
        if self._training.world.rank != 0:
            return []
        try:
            found, problem = self._training.folder.pending(self.last_command), ""
        except RunFolderError as error:
            found, problem = [], str(error)
        if problem and problem != self._mailbox_problem:
            self.event("warning", f"{problem}; the run goes on, and gets commands again once it can be read")
        self._mailbox_problem = problem
        return found

    # ---- what every rank writes --------------------------------------------------------------------------------------

    def record(self, costs: StepCosts, *, heldout: float | None, traced: bool) -> None:
        """Write the record of the step that has just ended.

        Args:
            costs: Measured times and bytes of the step.
            heldout: Held-out loss, if it was evaluated after this step.
            traced: Whether the activations of this step were measured.
        """
        training, engine = self._training, self._training.engine
        assert engine.totals is not None
        assert self._writer is not None
        reported = engine.partitioned_optimizer.reported() | engine.islands.reported()
        if not engine.totals.finite:
            reported = _nothing_sent(reported)
        self._tell_of_phase(reported)
        tokens = training.batch.global_size * training.config.data.sequence_length
        self._writer.write(
            StepRecord(
                step=engine.global_step,
                rank=training.world.rank,
                time=time.time(),
                loss=engine.totals.loss,
                learning_rate=float(engine.optimizer.param_groups[0]["lr"]),
                grad_norm=engine.totals.grad_norm,
                loss_scale=engine.loss_scale.value,
                zero_stage=engine.zero_stage,
                tokens=tokens,
                counted_tokens=engine.totals.counted,
                flops=training.flops_per_token * tokens / training.world.size,
                seconds=costs.seconds,
                phases=costs.phases,
                sent_bytes=costs.sent_bytes,
                sent_through=costs.sent_through,
                moved_bytes=costs.moved_bytes,
                exchange=reported or costs.exchange,
                kernels=costs.kernels,
                ledger=engine.ledger(),
                heldout_loss=heldout,
                traced=traced,
                began=engine.began,
                timeline=engine.timeline,
                memory=costs.memory,
            )
        )

    def _tell_of_phase(self, reported: Mapping[str, float]) -> None:
        """Write an event each time a new phase of the exchange begins."""
        config = self._training.config
        phase = "apart" if "steps_to_exchange" in reported else "compressed" if reported.get("compressed") else "plain"
        seldom = config.optimizer.name == "zero_one_adam"
        # 0/1 Adam still updates the variance in some steps; these do not end the phase.
        if seldom and phase == "plain" and self._phase is not None:
            phase = self._phase
        before, self._phase = self._phase, phase
        if before is None or phase in (before, "plain"):
            return
        if phase == "apart":
            words = "the variance is frozen: ranks exchange compressed momenta, ever more seldom"
        else:
            words = "momenta travel compressed" if seldom else "the variance is frozen: momenta travel compressed"
            words += ", but where the variance is updated" if seldom else ""
        clip = config.clip_norm
        only = " but there" if seldom and phase == "compressed" else ""
        self.event("compressed", words + ("" if clip is None else f"; clip_norm {clip:g} is off from now on{only}"))

    # ---- what the first rank writes for all --------------------------------------------------------------------------

    def event(self, kind: str, text: str, command: int | None = None, **details: Any) -> None:
        """Write an event of the current step, on rank 0.

        Args:
            kind: Kind of the event.
            text: Text for the user.
            command: Number of the command that this event answers.
            details: Values that JSON can hold.
        """
        if self._training.world.rank != 0:
            return
        step = self._training.engine.global_step
        event = Event(kind=kind, step=step, time=time.time(), text=text, command=command, details=details)
        if self._writer is None:
            self._untold.append(event)
        else:
            self._writer.event(event)

    def status(self, text: str = "") -> None:
        """Write the current state, step and last command to the status file, on rank 0.

        Args:
            text: Text of the status. A failed run keeps its earlier text if this is empty.
        """
        training = self._training
        if training.world.rank == 0:
            before = training.folder.read_status()
            if training.state is RunState.FAILED and before.state is RunState.FAILED:
                text = text or before.text  # Keep the reason of the failure until the run continues.
            status = replace(
                before,
                state=training.state,
                step=training.engine.global_step,
                steps=training.config.steps,
                command=self.last_command,
                text=text,
            )
            training.folder.write_status(status)

    def answer(self, number: int, kind: str, text: str, **details: Any) -> None:
        """Answer a command: write its event first, then the status with its number.

        Args:
            number: Number of the command.
            kind: Kind of the event.
            text: Text for the user.
            details: Values that JSON can hold.
        """
        self.last_command = number
        self.event(kind, text, command=number, **details)
        self.status()

    def started(self) -> None:
        """Write the event with the run's layout, sizes and kernels when the run starts or continues in new engines.
        Collective.
        """
        training, layout = self._training, self._training.layout
        engine = training.engine
        training.tell_placement()
        peak = matmul_flops(training.world.device, engine.dtype)
        details: dict[str, Any] = {
            "parameters": training.parameters,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "optimizer": training.config.optimizer.name,
            "kernels": kernels_in_use(training.world.device),
            "products": onednn_matmul.in_use(training.world.device, engine.dtype, engine.config.precision.products),
            "attention": cpu_sdpa.in_use(training.world.device, engine.config.precision.attention),
            "islands": layout.islands,
            "pp": layout.pp,
            "dp": layout.dp,
            "cp": layout.cp,
            "tp": layout.tp,
            "zero": engine.zero_stage,
            "peak_flops": sum(training.control.collect(peak)),
            "batch": str(training.batch),
        }
        text = f"{details['parameters']:,} parameters, {details['dtype']}, {layout}, {training.batch}"
        if len(set(hosts := training.control.collect(own_host()))) > 1:
            details["hosts"] = hosts
        if layout.pp > 1:
            details["cut"] = engine.cut
            text += f", bubble {_bubble(training):.0%} in theory"
        if (line := own_link()) is not None:
            rate = line.rate
            details["pretended_link"] = {
                "text": str(rate),
                "bits_per_second": rate.bits_per_second,
                "latency_seconds": rate.latency_seconds,
            }
            text += f", over a pretended link of {rate}"
        padding = training.padding_text
        self.event("started", f"{text}, {padding}" if padding else text, **details)


def _bubble(training: Training) -> float:
    """Return the theoretical share of a step in which a pipeline rank is idle."""
    parallel = training.config.parallel
    return bubble_share(
        parallel.schedule,
        pp=training.layout.pp,
        chunks=parallel.stages_per_rank,
        micro_batches=training.batch.accumulation,
    )


def _nothing_sent(reported: Mapping[str, float]) -> dict[str, float]:
    """Return the exchange figures of a step that was skipped because a float16 gradient overflowed.

    `told` holds the figures of the last step that was not skipped.
    """
    stays = ("compressed", "steps_to_exchange", "steps_to_meeting", "float32_bytes")
    return {
        name: reported[name] if name in stays else 0.0 for name in reported if name in (*stays, "sent_bytes", "met")
    }
