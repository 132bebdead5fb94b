"""The configuration panel: configure a run, predict its memory and speed, start the run, and control it.

1. A change of any control builds a RunConfig of all controls (`refresh`, a few milliseconds).
   `refresh` derives the batch equation, the memory of each rank, the speed, and the differences to the active run.
   If the model does not fit, a thread searches for changes that make it fit.
2. Train submits the configuration from a thread, after it has started engines if none run. The other buttons post
   commands and return at once.
3. A thread follows the run (`PanelRun`): the run's state enables or disables the buttons, and the panel shows each
   answer when it arrives.

JupyterLab sends widget events to a subshell of the kernel if the kernel has subshells, so that a click is handled
while a cell runs. Therefore any thread may call any method here; `_lock` serializes them.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from speedlab.cluster.errors import ClusterError
from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.report import attention_html
from speedlab_notebook.panel.advisor import Advisor, DiskMeasurer
from speedlab_notebook.panel.changes import (
    PendingChange,
    changes,
    changes_line,
    engines_text,
    live_batch,
    marks,
    reshaping,
    show_notes,
    summary_parts,
)
from speedlab_notebook.panel.edits import Edits
from speedlab_notebook.panel.fields import Field, FormValues
from speedlab_notebook.panel.prediction import PanelPrediction, fit_problem, link_of, predict, states_html
from speedlab_notebook.panel.run_control import TROUBLE, WORDS, PanelRun, run_line
from speedlab_notebook.panel.train import PanelTrain, devices_of, engines_note
from speedlab_notebook.panel.view import PanelView

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run


class Panel(widgets.VBox):
    """The configuration panel as a widget; `show` makes one and displays it.

    The attributes give what the panel shows, also in a kernel without a page.
    """

    def __init__(
        self, cluster: Cluster | None = None, run: Run | None = None, *, on_run: Callable[[Run], object] | None = None
    ) -> None:
        """Make the panel's widgets and, if a run is given, follow that run.

        Args:
            cluster: The cluster to train on; None lets Train start one (or takes the cluster of `run`).
            run: A run to show and control; its configuration fills the form.
            on_run: Called with each run that Train starts.
        """
        self.cluster = cluster if cluster is not None or run is None else run.cluster
        self.config: RunConfig | None = None
        """The configuration of the controls; None while the controls give no valid configuration."""
        self.problems: list[tuple[str, str]] = []
        """(path of the field or '', problem). Train is disabled while this list has an entry."""
        self.prediction: PanelPrediction | None = None
        """Memory at every ZeRO stage, and the speed, of the last valid configuration."""
        self.changes: list[PendingChange] = []
        """The differences between the controls and the active run."""
        self.batch_text = self.summary_text = self.status_text = self.message_text = self.effect_text = ""
        """Texts on the page.

        In order: the batch equation; the line below the tabs; the line next to the buttons; the last message;
        the effect of the last change of a control.
        """
        self._lock = threading.RLock()
        self._last_changed = self._hosts_problem = ""
        self.devices: Sequence[Device] = devices_of(self.cluster)
        """One device for each rank: the cluster's devices, or the devices that Train would take."""
        self._run = PanelRun(self, self._lock)
        self._train = PanelTrain(self, self._run, on_run)
        self._advisor = Advisor(self)
        self._disk = DiskMeasurer(self)
        self._view = PanelView(len(self.devices), self._on_change, self._handlers())
        self._edits = Edits(self, self._view)
        # Not fields of RunConfig, so neither the form nor the undo history handles them.
        for box in (self._view.engines, self._view.hosts):
            box.observe(self._on_engines, "value")
        super().__init__(self._view.arranged(self._edits.tools), layout=self._view.looks.plain)
        self.add_class("speedlab-panel")
        if run is not None:
            self._run.take(run, run.config)
            self.show_run_config()
        self._edits.follow()
        self.refresh()

    @property
    def run(self) -> Run | None:
        """The run that the buttons control; after Train, the run that Train started."""
        return self._run.run

    @property
    def states(self) -> list[RankMemory]:
        """Memory of the rank that holds most, at stages 0 to 3; empty before the first prediction."""
        return [] if self.prediction is None else self.prediction.heaviest

    @property
    def fields(self) -> dict[str, Field]:
        """The form's fields by path.

        Setting `panel.fields["zero.stage"].control.value = 3` acts like a click of the user.
        """
        return self._view.form.fields

    @property
    def buttons(self) -> dict[str, Any]:
        """The buttons by name: train, pause, resume, step, save, prove, stop, apply, reset, undo, redo, undo all.

        `panel.buttons["train"].click()` acts like a click of the user.
        """
        return self._view.buttons

    @property
    def step_count(self) -> Any:
        """The box with the number of steps that the Step button computes."""
        return self._view.step_count

    @property
    def engines(self) -> Any:
        """The box with the number of engines; disabled after the engines have started."""
        return self._view.engines

    @property
    def hosts(self) -> Any:
        """The box for the line that names hosts; disabled after the engines have started."""
        return self._view.hosts

    @property
    def edits(self) -> Edits:
        """Actions on all fields: `undo(steps)`, `redo(steps)`, `search`, presets, export."""
        return self._edits

    @property
    def is_busy(self) -> bool:
        """Whether engines are starting or a run is active."""
        return bool(self._train.activity) or self._run.under_way

    @property
    def following(self) -> bool:
        """Whether the thread that follows the run is alive."""
        return self._run.watch.running

    def close(self) -> None:
        """Stop following the run and remove the panel with all its widgets from the page. The run continues."""
        for watch in (self._run.watch, self._advisor.watch, self._disk.watch):
            watch.close()
        with self._lock:
            self._view.looks.close()
            super().close()

    def __repr__(self) -> str:
        return f"<Panel: {self.run!r}>" if self.run is not None else f"<Panel: no run, {self._engines_text()}>"

    def _handlers(self) -> dict[str, Callable[[], None]]:
        return {
            "train": self._train.begin,
            "pause": lambda: self._run.post(lambda run: run.pause()),
            "resume": lambda: self._run.post(lambda run: run.resume()),
            "step": lambda: self._run.post(lambda run: run.advance(self.step_count.value)),
            "save": lambda: self._run.post(lambda run: run.save()),
            "prove": lambda: self._run.post(lambda run: run.prove()),
            "stop": self._train.stop,
            "apply": self._on_apply,
        }

    # 1. From controls to predictions

    def _on_change(self, path: str) -> None:
        with self._lock:
            self._last_changed = path
            self._edits.changed(path)

    def _on_engines(self, change: Any) -> None:
        if self.cluster is not None:
            return  # Not a click: the panel itself wrote the size of the started cluster.
        hosts, self._hosts_problem = self.hosts.value, ""
        asked = self.engines.value if change.owner is self.engines else None
        try:
            self.devices = devices_of(None, asked, hosts)
            self.engines.value = len(self.devices)
        except ClusterError as error:
            if hosts.strip():
                self._hosts_problem = str(error)
            else:
                self.tell_error(error)
                self.engines.value = len(self.devices)
        self.refresh()

    def refresh(self) -> None:
        """Recompute and show everything that follows from the controls and from the run's state."""
        with self._lock:
            reading = self._read_controls()
            running = self._run.running if self._run.under_way else None
            if self.config is not None:
                self.prediction = predict(self.config, self.devices, link_of(self.cluster))
                stage = running.zero.stage if running is not None else None
                self._view.states.value = states_html(self.prediction, self.devices, running=stage)
                self._view.form.attention.value = attention_html(self.prediction.plan.setup)
            self._compare(running)
            self._show_notes(reading)
            self.show_summary()
            self.show_run()
            self._edits.show()

    def _read_controls(self) -> FormValues:
        """Set `config`, `problems` and `batch_text`."""
        form = self._view.form
        reading = FormValues.of(form.values(), self.fields, len(self.devices), self._last_changed)
        self.config, self.problems = reading.config, list(reading.problems)
        self.batch_text = "" if reading.batch is None else str(reading.batch)
        if self._hosts_problem:
            self.problems.insert(0, ("parallel", self._hosts_problem))
        return reading

    def _compare(self, running: RunConfig | None) -> None:
        """Set `changes` to the differences from the active run."""
        self.changes = []
        if running is not None and self.config is not None and not self.problems:
            self.changes = changes(running, self.config, len(self.devices))

    def _show_notes(self, reading: FormValues) -> None:
        reported = marks(self.changes)
        problems = show_notes(self.fields, reading, self.devices, self.prediction, reported)
        if self._hosts_problem:
            problems["parallel"] = self._hosts_problem
        self._view.form.mark(problems, reported)
        self._view.form.arrange()
        fixed = self.cluster is not None or bool(self._train.activity)
        self.engines.disabled, self.hosts.disabled = fixed or self._elsewhere, fixed
        kind = "problem" if self._hosts_problem else "help" if self.cluster is None else "reason"
        self._view.show_line(self._view.engines_note, engines_note(self.cluster, self.hosts.value), kind=kind)

    def show_summary(self) -> None:
        """Show the line below the tabs: fit, speed and batch, or the problems."""
        self._disk.measure_if_wanted()
        if self.problems or self.config is None or self.prediction is None:
            self.summary_text = (
                f"cannot run: {'; '.join(self._naming_its_field(*reported) for reported in self.problems)}"
            )
            self._view.show_line(self._view.summary, self.summary_text, kind="problem", strong="cannot run")
            return
        known = not self._elsewhere
        advice = self._advisor.text() if known and fit_problem(self.prediction, self.devices) else ""
        fits, parts = summary_parts(self.config, self.prediction, self.devices, self.batch_text, advice, known=known)
        self.summary_text = " · ".join([self._engines_text(), *parts])
        self._view.show_line(self._view.summary, self.summary_text, strong=fits)

    def _naming_its_field(self, path: str, text: str) -> str:
        """Return `text` with the field's label in front, unless the text names the field already.

        The summary is far from the field, whose tab may be closed.
        """
        field = self.fields.get(path)
        if field is None or any(name in text for name in (field.label, path.rpartition(".")[2])):
            return text
        return f"{field.label}: {text}"

    @property
    def _elsewhere(self) -> bool:
        """Whether engines will start on other hosts, whose devices are not known yet."""
        return self.cluster is None and bool(self.hosts.value.strip())

    def _engines_text(self) -> str:
        return engines_text(self.cluster, self.devices, self.hosts.value)

    # 2. Actions of the user

    def take_devices(self, devices: Sequence[Device]) -> None:
        """Use the devices of engines that have started or changed.

        Args:
            devices: One device for each rank, in rank order.
        """
        self.devices = devices
        self.engines.value = len(devices)

    def _on_apply(self) -> None:
        wanted = reshaping(self.changes)
        if wanted:
            self._run.post(lambda run: run.reshape(**wanted))

    def show_run_config(self) -> None:
        """Load the run's configuration into the form, with the batch as `live_batch` gives it."""
        if (running := self._run.running) is not None:
            self._view.form.load(running)
            self.show(live_batch(running, len(self.devices)))

    def show(self, values: Mapping[str, Any]) -> None:
        """Show values that the panel computed itself. Undo ignores this change.

        Args:
            values: Values of RunConfig by path of their field.
        """
        self._view.form.put(values)
        self._edits.follow()

    # 3. The run

    def show_run(self) -> None:
        """Show the status line, the differences and the proof, and enable or disable the buttons."""
        self.status_text = self._train.activity or (run_line(self.run) if self.run is not None else "no run yet")
        self._view.show_line(self._view.status, self.status_text)
        self._view.show_changes(changes_line(self.changes))
        self._view.show_proof(self._run.proof())
        waiting, state, engines_run = self._run.waiting, self._run.state, self._run.engines_run
        offered = {
            word: not self._train.activity
            and (self._run.has_engines if word == "resume" else engines_run)
            and state in states
            for word, (states, _) in WORDS.items()
        }
        offered["train"] = self._can_train()
        offered["stop"] |= self._train.is_starting
        offered["apply"] = offered.pop("reshape") and "reshape" not in waiting and any(c.live for c in self.changes)
        offered |= self._edits.offered
        for word in self.buttons:
            is_offered = offered[word] and word not in waiting
            self._view.offer(word, None if is_offered else self._why_not(word))

    def _why_not(self, word: str) -> str:
        """Return why the button of this command is disabled."""
        if self._train.activity or self.run is None:
            return self._train.activity or "there is no run; Train starts one"
        if word in self._run.waiting:
            return "the ranks have not answered the last request yet"
        if not self._run.engines_run:
            return "the engines of the run have ended"
        return f"the run is {self._run.state}" if self._run.state is not None else "the run is just being read"

    def _can_train(self) -> bool:
        if (
            self.config is None
            or self.problems
            or self._train.activity
            or (self._run.under_way and self._run.has_engines)
        ):
            return False
        return self.prediction is not None and (self._elsewhere or not fit_problem(self.prediction, self.devices))

    def tell(self, text: str) -> None:
        """Show a message below the buttons.

        Args:
            text: The message; '' clears the last one.
        """
        self.message_text = text
        self._view.show_message(text, error=False)

    def tell_error(self, error: Exception) -> None:
        """Show an error below the buttons, with a traceback if the error is unexpected.

        Args:
            error: The error; the types of `TROUBLE` and OSError show their message alone.
        """
        reported = isinstance(error, (*TROUBLE, OSError))
        self.message_text = str(error) if reported else "".join(traceback.format_exception(error)).rstrip()
        self._view.show_message(self.message_text, error=True)


def show(
    cluster: Cluster | None = None, run: Run | None = None, *, on_run: Callable[[Run], object] | None = None
) -> Panel:
    """Display a panel for a new run on `cluster`, or for `run`.

    Args:
        cluster: The cluster to train on; None lets Train start one.
        run: A run to show and control.
        on_run: Called with each run that Train starts. None sets `run` and `cluster` in the notebook's namespace.

    Returns:
        The displayed panel.
    """
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if on_run is None and shell is not None:
        from speedlab_notebook.current import push_run

        on_run = partial(push_run, shell)
    panel = Panel(cluster, run, on_run=on_run)
    display(panel)
    return panel
