"""The configuration panel: what a run will hold before it starts, and the words for a run that is on.

1. A change of any control makes a RunConfig of all of them, and from it the batch equation, what each rank will
   hold, how fast it will be, and the differences to the run that is under way (`_refresh`, a few milliseconds). Nothing
   else happens, but that changes are looked for which make fit what does not.
2. Train ships the configuration from a thread, after it has started engines where there are none. The other buttons
   post control words, which return at once.
3. A thread follows the run (`_look`): its state greys the buttons, and answers to words are told as they come.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from speedlab.cluster.errors import ClusterError, RankError
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.learning import learn_from
from speedlab.cluster.remote import measure_disk
from speedlab.config import ConfigError, RunConfig
from speedlab.layout import LayoutError
from speedlab.planner import calibration_store, disk_rates
from speedlab.planner.attention_figure import attention_html
from speedlab.planner.disk_rates import DiskRates
from speedlab.planner.rank_memory import RankMemory
from speedlab.planner.setup import Setup
from speedlab.telemetry.folder import RunFolderError
from speedlab.telemetry.records import RunState
from speedlab_notebook.panel_actions import (
    BUSY_LOOK_SECONDS,
    ENDED,
    RESTING_LOOK_SECONDS,
    WORDS,
    Change,
    Watch,
    answer_line,
    changes,
    changes_line,
    live_batch,
    live_config,
    reshaping,
    run_line,
)
from speedlab_notebook.panel_fields import Field, layout_field, place_problem
from speedlab_notebook.panel_reasons import bubble_text, greyed_fields, greyed_options, remarks, sizes
from speedlab_notebook.panel_start import Starting, devices_of, engines_note
from speedlab_notebook.panel_states import (
    Prediction,
    advice_text,
    fit_problem,
    fit_text,
    link_of,
    predict,
    speed_text,
    states_html,
)
from speedlab_notebook.panel_view import View

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run
    from speedlab.cluster.words import Pending

_REST_SECONDS = 0.3
"""A control that is being moved rests so long before changes that fit are looked for: they cost more than an update."""

_MEASURE_SECONDS = 60.0
"""A disk is measured in a few seconds, unless the engine is busy."""

_TROUBLE = (RunError, RankError, ClusterError, RunFolderError, ConfigError, LayoutError)
"""What a person can set right: told without a traceback."""


class Panel(widgets.VBox):
    """The panel. `show` makes and displays one. What it shows can be read from its attributes, also without a page."""

    def __init__(
        self, cluster: Cluster | None = None, run: Run | None = None, *, on_run: Callable[[Run], object] | None = None
    ) -> None:
        self.cluster = cluster if cluster is not None or run is None else run.cluster
        self.run: Run | None = None
        """The run that the buttons speak to; after Train, the one it started."""
        self.config: RunConfig | None = None
        """What the controls say; None while that is no configuration."""
        self.problems: list[tuple[str, str]] = []
        """(path of the field or '', what is wrong): nothing can be trained while there is one."""
        self.prediction: Prediction | None = None
        """Memory at every stage and speed, as the controls say; of the last that was a configuration."""
        self.changes: list[Change] = []
        """Where the panel differs from the run that is under way."""
        self.batch_text = self.summary_text = self.status_text = self.message_text = ""
        """The batch equation; the line below the tabs; the line beside the buttons; what was told last."""
        self._on_run = on_run
        self._lock = threading.RLock()
        self._last_changed = self._activity = ""
        self._began_as = RunConfig()
        self._running: RunConfig | None = None
        """What the run began as, with the shape that it has now."""
        self._pending: list[Pending] = []
        self._state: RunState | None = None
        self._devices = devices_of(self.cluster)
        self._starting = Starting(self._waits_for)
        self._hosts_problem = ""
        self._watch = Watch(self._look)
        self._advisor = Watch(self._advise)
        self._measurer = Watch(self._measure_disk)
        self._tried: set[Path] = set()
        """Folders of which the disk was measured, or could not be."""
        self._advice: tuple[Setup | None, str] = (None, "")
        """How what does not fit would, and what it was that does not."""
        self._view = View(len(self._devices), self._on_change, self._handlers())
        for box in (self._view.engines, self._view.hosts):
            box.observe(self._on_engines, "value")
        super().__init__(self._view.arranged())
        self.add_class("speedlab-panel")
        if run is not None:
            self._take(run, run.config)
            self._show_run_config()
        self._refresh()

    @property
    def states(self) -> list[RankMemory]:
        """What the rank that holds most will hold at stages 0 to 3."""
        return [] if self.prediction is None else self.prediction.heaviest

    @property
    def fields(self) -> dict[str, Field]:
        """The form's fields by path. `panel.fields["zero.stage"].control.value = 3` is a person's click."""
        return self._view.form.fields

    @property
    def buttons(self) -> dict[str, Any]:
        """train, pause, resume, step, save, stop, apply, undo. `panel.buttons["train"].click()` is a person's click."""
        return self._view.buttons

    @property
    def step_count(self) -> Any:
        """The box with the number of steps that the Step button computes."""
        return self._view.step_count

    @property
    def engines(self) -> Any:
        """The box with the number of engines; greyed once they run."""
        return self._view.engines

    @property
    def hosts(self) -> Any:
        """The box for a line that names hosts; greyed once engines run."""
        return self._view.hosts

    @property
    def following(self) -> bool:
        """Whether a thread follows the run."""
        return self._watch.running

    def close(self) -> None:
        """Stop following the run and take the panel from the page; the run goes on."""
        self._watch.close()
        self._advisor.close()
        self._measurer.close()
        super().close()

    def __repr__(self) -> str:
        return f"<Panel: {self.run!r}>" if self.run is not None else f"<Panel: no run, {self._engines_text()}>"

    def _handlers(self) -> dict[str, Callable[[], None]]:
        return {
            "train": self._on_train,
            "pause": lambda: self._post(lambda run: run.pause()),
            "resume": lambda: self._post(lambda run: run.resume()),
            "step": lambda: self._post(lambda run: run.advance(self.step_count.value)),
            "save": lambda: self._post(lambda run: run.save()),
            "stop": self._on_stop,
            "apply": self._on_apply,
            "undo": self._on_undo,
        }

    # 1. From controls to predictions

    def _on_change(self, path: str) -> None:
        self._last_changed = path
        self._refresh()

    def _on_engines(self, change: Any) -> None:
        if self.cluster is not None:
            return  # Not a person: the box follows the cluster that was started.
        hosts, self._hosts_problem = self.hosts.value, ""
        asked = self.engines.value if change.owner is self.engines else None
        try:
            self._devices = devices_of(None, asked, hosts)
            self.engines.value = len(self._devices)
        except ClusterError as error:
            if hosts.strip():
                self._hosts_problem = str(error)
            else:
                self._tell_error(error)
                self.engines.value = len(self._devices)
        self._refresh()

    def _refresh(self) -> None:
        """Show what follows from the controls and from the run's state."""
        with self._lock:
            self._read_controls()
            if self.config is not None:
                self.prediction = predict(self.config, self._devices, link_of(self.cluster))
                running = self._running.zero.stage if self._under_way and self._running is not None else None
                self._view.states.value = states_html(self.prediction, self._devices, running=running)
                self._view.form.attention.value = attention_html(self.prediction.plan.setup)
            self._show_notes()
            self._show_summary()
            self._show_run()

    def _read_controls(self) -> None:
        """Set `config`, `problems` and `batch_text`."""
        found: Sequence[tuple[str, str]] = ()
        self.config, self.batch_text = None, ""
        try:
            self.config = RunConfig(**self._view.form.values())
            layout = self.config.layout(len(self._devices))
            batch = self.config.batch.resolve(layout.data_size)
            self.batch_text = str(batch)
            for name in ("global_size", "micro_size", "accumulation"):
                self.fields[f"batch.{name}"].control.placeholder = f"follows: {getattr(batch, name)}"
        except LayoutError as error:
            found = [(layout_field(str(error), self._last_changed), str(error))]
        except ConfigError as error:
            found = error.problems or [(str(error).partition(":")[0], str(error))]
        self.problems = [(place_problem(path, text, self.fields, self._last_changed), text) for path, text in found]
        if self._hosts_problem:
            self.problems.insert(0, ("parallel", self._hosts_problem))

    def _show_notes(self) -> None:
        problems: dict[str, str] = {}
        for path, text in self.problems:
            problems[path] = f"{problems[path]}; {text}" if path in problems else text
        values = {path: field.get() for path, field in self.fields.items()}
        for axis in ("parallel.tp", "parallel.pp", "parallel.cp"):
            self.fields[axis].control.offer(sizes(len(self._devices)))
        reasons = greyed_fields(values, self._devices)
        options = greyed_options(values, self.config, self._devices)
        plan = self.prediction.plan if self.prediction is not None and not self.problems else None
        more = remarks(values, self._devices, self.config if not self.problems else None, options, plan)
        for path, field in self.fields.items():
            field.show(
                reason=reasons.get(path, ""),
                problem=problems.get(path, ""),
                more=more.get(path, ""),
                greyed=options.get(path),
            )
        self._view.form.mark(problems)
        self.fields["parallel.dp"].control.placeholder = "follows"
        fixed = self.cluster is not None or bool(self._activity)
        self.engines.disabled, self.hosts.disabled = fixed or self._elsewhere, fixed
        kind = "problem" if self._hosts_problem else "help" if self.cluster is None else "reason"
        self._view.show_line(self._view.engines_note, engines_note(self.cluster, self.hosts.value), kind=kind)

    def _show_summary(self) -> None:
        if self._disk_folder() is not None:
            self._measurer.start()
        if self.problems or self.config is None or self.prediction is None:
            self.summary_text = f"cannot run: {'; '.join(text for _, text in self.problems)}"
            self._view.show_line(self._view.summary, self.summary_text, kind="problem", strong="cannot run")
            return
        layout = self.config.layout(len(self._devices))
        fits, parts = "", [self._engines_text()]
        if not self._elsewhere:
            fits = fit_text(self.prediction, self._devices)
            advice = self._advised() if fit_problem(self.prediction, self._devices) else ""
            parts += [fits, advice, speed_text(self.prediction)]
        parts.append("" if layout.world_size == layout.dp else str(layout))
        self.summary_text = " · ".join(filter(None, [*parts, self.batch_text, bubble_text(self.config, layout)]))
        self._view.show_line(self._view.summary, self.summary_text, strong=fits)

    @property
    def _elsewhere(self) -> bool:
        """Whether engines are to be started on hosts whose devices nobody knows yet."""
        return self.cluster is None and bool(self.hosts.value.strip())

    def _advised(self) -> str:
        """How what does not fit would, once that is found."""
        assert self.prediction is not None
        setup, text = self._advice
        if setup == self.prediction.plan.setup:
            return text
        self._advisor.start()
        return "looking for changes that fit …"

    def _advise(self) -> float | None:
        """Find what makes the present controls fit; again at once when they have been moved since."""
        time.sleep(_REST_SECONDS)
        prediction = self.prediction
        if prediction is None or not fit_problem(prediction, self._devices):
            return None
        text = advice_text(prediction.plan)
        with self._lock:
            if self.prediction is None or self.prediction.plan.setup != prediction.plan.setup:
                return 0.0
            self._advice = prediction.plan.setup, text
            self._show_summary()
        return None

    def _disk_folder(self) -> Path | None:
        """Where states are to lie whose disk nobody has measured, while the engines have nothing else to do."""
        if self.config is None or self.prediction is None or self._under_way or self._activity:
            return None
        offload, machines = self.config.offload, self.prediction.plan.machines
        folder = offload.folder or self.config.folder
        wanted = "disk" in (offload.optimizer, offload.parameters) and not machines.host.disk_measured
        free = self.cluster is not None and self.cluster.running and folder not in self._tried
        return folder if wanted and free else None

    def _measure_disk(self) -> float | None:
        """Let an engine measure the disk that was chosen; the kernel has no torch."""
        folder = self._disk_folder()
        if folder is None or self.cluster is None:
            return None
        self._tried.add(folder)
        try:
            (rates,) = self.cluster.submit(measure_disk, str(folder.absolute()), ranks=[0]).result(_MEASURE_SECONDS)
            disk_rates.keep(folder, DiskRates(read_bytes_per_second=rates[0], write_bytes_per_second=rates[1]))
        except (*_TROUBLE, TimeoutError, OSError, ValueError) as error:
            self._tell_error(error if isinstance(error, _TROUBLE) else ClusterError(f"disk of {folder}: {error}"))
            return None
        self._refresh()
        return None

    def _engines_text(self) -> str:
        count = len(self._devices)
        names = ", ".join(dict.fromkeys(device.name for device in self._devices))
        if self._elsewhere:
            names = f"{self.hosts.value.strip()}: whether it fits is known once they have started"
        state = "" if self.cluster is not None else " (not started)"
        return f"{count} engine{'s' if count > 1 else ''}{state} on {names}"

    # 2. What a person asks for

    def _on_train(self) -> None:
        if self.config is None or self._activity:
            return
        self._tell("")
        count = len(self._devices)
        hosts = self.hosts.value.strip()
        where = f"on {hosts}" if hosts else f"{count} engine{'s' if count > 1 else ''}"
        self._activity = f"starting {where} …"
        if self.cluster is not None and self.cluster.running:
            self._activity = "checking configuration and data …"
        self._refresh()
        work = threading.Thread(target=self._train, args=(self.config, count), name="speedlab-panel-train", daemon=True)
        work.start()

    def _train(self, config: RunConfig, count: int) -> None:
        """Start engines where there are none, then the run. In a thread, because both take their time."""
        try:
            cluster = self._started_cluster(count)
            self._activity = "checking configuration and data …"
            self._refresh()
            run = cluster.train(config)
            self._take(run, config)
            if self._on_run is not None:
                self._on_run(run)
        except Exception as error:  # Whatever it is: nobody but the panel can tell it.
            self._tell_error(error)
        finally:
            self._activity = ""
            try:
                self._refresh()
            except _TROUBLE as error:  # The run's folder may have been damaged since.
                self._tell_error(error)

    def _started_cluster(self, count: int) -> Cluster:
        if self.cluster is None or not self.cluster.running:
            self.cluster = self._starting.start(self.cluster, count, self.hosts.value)
        self._devices = self.cluster.devices
        self.engines.value = len(self._devices)
        return self.cluster

    def _waits_for(self, words: str) -> None:
        """The start tells what it waits for, as a place in a queue."""
        self._activity = f"{words}; Stop gives the start up"
        self._refresh()

    def _on_stop(self) -> None:
        if self._starting.under_way:
            self._starting.give_up()
        else:
            self._post(lambda run: run.stop())

    def _post(self, word: Callable[[Run], Pending]) -> None:
        """Post a control word; `_look` tells the answer."""
        if self.run is None:
            return
        try:
            pending = word(self.run)
        except _TROUBLE as error:
            self._tell_error(error)
            return
        with self._lock:
            self._pending.append(pending)
            self._tell(f"{pending.word}: asked for; the ranks act after the step that is being computed")
            self._show_run()
        self._watch.start()

    def _on_apply(self) -> None:
        wanted = reshaping(self.changes)
        if wanted:
            self._post(lambda run: run.reshape(**wanted))

    def _on_undo(self) -> None:
        self._show_run_config()
        self._refresh()

    def _show_run_config(self) -> None:
        if self._running is not None:
            self._view.form.load(self._running)
            self._view.form.put(live_batch(self._running, len(self._devices)))

    # 3. The run

    @property
    def _under_way(self) -> bool:
        return self._state is not None and self._state not in ENDED

    def _take(self, run: Run, began_as: RunConfig) -> None:
        """Speak to `run` from now on; differences are told from what it began as and has become."""
        with self._lock:
            self.run, self._began_as, self._pending, self._state = run, began_as, [], None
            self._running = live_config(run, began_as, len(self._devices))
            self._view.form.put(live_batch(self._running, len(self._devices)))
        self._watch.start()

    def _look(self) -> float | None:
        """Take in what the run has done; seconds until the next look, None when nothing is to come."""
        run = self.run
        if run is None:
            return None
        try:
            before = self._state
            again = self._follow(run)
            if self._state is RunState.FINISHED and before not in (None, *ENDED):
                self._learn(run)
            return again
        except (*_TROUBLE, OSError) as error:  # Its folder has been removed, say: there is nothing left to follow.
            self._tell_error(error)
            return None

    def _follow(self, run: Run) -> float | None:
        with self._lock:
            moved = self._take_engines(run)
            state, running = run.state, live_config(run, self._began_as, len(self._devices))
            self._hear_answers()
            if state is RunState.FAILED and self._state is not state:
                self._tell_error(run.errors[-1] if run.errors else RunError(run.feed.status.text))
            news = moved or (state, running) != (self._state, self._running)
            self._state, self._running = state, running
            if news:
                self._refresh()
            else:
                self._show_run()
            waiting = bool(self._pending)
        if state in ENDED and not waiting:
            return None
        return RESTING_LOOK_SECONDS if state is RunState.PAUSED and not waiting else BUSY_LOOK_SECONDS

    def _take_engines(self, run: Run) -> bool:
        """Show the engines that the run has now, which `reshape(engines=…)` may have changed; whether it has."""
        with suppress(ClusterError):  # They are gone: what was there is all there is to show.
            if run.cluster is not None and (devices := run.cluster.devices) != self._devices:
                self._devices = devices
                self.engines.value = len(devices)
                return True
        return False

    def _learn(self, run: Run) -> None:
        """Let a calibrated machine learn from a run that has just finished, and tell what was predicted of it."""
        if calibration_store.path().exists():
            with suppress(ConfigError):  # A run of which nothing can be learned: too few steps, somebody's own model.
                self._tell(learn_from(run.folder))

    def _hear_answers(self) -> None:
        """Tell the answers to words that have come in."""
        for pending in tuple(self._pending):
            try:
                event = pending.wait(0)
            except TimeoutError:
                continue
            except _TROUBLE as error:
                self._tell_error(error)
            else:
                self._tell(answer_line(event))
            self._pending.remove(pending)

    def _show_run(self) -> None:
        """The line beside the buttons, the differences, and which buttons are offered."""
        self.status_text = self._activity or (run_line(self.run) if self.run is not None else "no run yet")
        self._view.show_line(self._view.status, self.status_text)
        self.changes = []
        if self._under_way and self.config is not None and self._running is not None and not self.problems:
            self.changes = changes(self._running, self.config, len(self._devices))
        self._view.show_changes(changes_line(self.changes))
        offered = {
            word: not self._activity and self._controls_run and self._state in states
            for word, (states, _) in WORDS.items()
        }
        waiting = {pending.word for pending in self._pending}
        offered["train"] = self._can_train()
        offered["stop"] |= self._starting.under_way
        offered["apply"] = offered.pop("reshape") and "reshape" not in waiting and any(c.live for c in self.changes)
        offered["undo"] = bool(self.changes)
        for word, button in self.buttons.items():
            button.disabled = not offered[word] or word in waiting

    @property
    def _controls_run(self) -> bool:
        return self.run is not None and self.run.cluster is not None

    def _can_train(self) -> bool:
        if self.config is None or self.problems or self._activity or (self._under_way and self._controls_run):
            return False
        return self.prediction is not None and (self._elsewhere or not fit_problem(self.prediction, self._devices))

    def _tell(self, text: str) -> None:
        self.message_text = text
        self._view.show_message(text, error=False)

    def _tell_error(self, error: Exception) -> None:
        """What went wrong; for what nobody foresaw, with its traceback."""
        text = str(error) if isinstance(error, _TROUBLE) else "".join(traceback.format_exception(error)).rstrip()
        self.message_text = text
        self._view.show_message(text, error=True)


def show(
    cluster: Cluster | None = None, run: Run | None = None, *, on_run: Callable[[Run], object] | None = None
) -> Panel:
    """Display a panel: for a new run on `cluster` (started by Train when it is None), or for `run`.

    `on_run(run)` is called with each run that Train starts; without it, `run` and `cluster` are set in the notebook's
    namespace.
    """
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if on_run is None and shell is not None:
        from speedlab_notebook.at_hand import push_run

        on_run = partial(push_run, shell)
    panel = Panel(cluster, run, on_run=on_run)
    display(panel)
    return panel
