"""Where a panel differs from the run that is on: what can be applied live, and what needs a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedlab.config import RunConfig
from speedlab.telemetry.run_shape import CHANGES, differences, present_config, shape_of

if TYPE_CHECKING:
    from speedlab.cluster import Run

_NAMES = {"zero": "stage", "micro_batches": "micro-batches"}
_FIELDS = {"zero": "zero.stage", "micro_batches": "batch.accumulation"}
"""Word of `run.reshape` -> the field that says it, where that is not the layout's of this name."""
_PLACES = {"offload.optimizer", "offload.parameters"}
_SHAPE = {"zero.stage", *_PLACES, *(f"parallel.{name}" for name in CHANGES)}
_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field in which the panel differs from the run that is under way."""

    path: str
    before: Any
    after: Any
    live: bool = False
    """Whether it can be applied between two steps; `path` is then one of `run.reshape`'s words."""

    def __str__(self) -> str:
        told = [f"{path} {_shown(before)} → {_shown(after)}" for path, before, after in self._parts()]
        return f"{', '.join(told)} ({self.when})"

    @property
    def when(self) -> str:
        """'live', or that it needs a restart."""
        return ("live, under 1 s" if self.path == "zero" else "live") if self.live else "needs a restart"

    @property
    def marks(self) -> dict[str, str]:
        """Path of a field -> what stands beside it: 'the run has 2 · live'."""
        if self.path == "offload":
            return {f"offload.{name}": self._mark(self.before[name]) for name in self._moved}
        field = _FIELDS.get(self.path, f"parallel.{self.path}" if self.live else self.path)
        return {field: self._mark(self.before)}

    def _mark(self, before: Any) -> str:
        return f"the run has {_shown(before)} · {self.when}"

    @property
    def _moved(self) -> list[str]:
        return [name for name in self.before if self.before[name] != self.after[name]]

    def _parts(self) -> list[tuple[str, Any, Any]]:
        if self.path == "offload":
            return [(f"offload {name}", self.before[name], self.after[name]) for name in self._moved]
        return [(_NAMES.get(self.path, self.path).replace("_", " "), self.before, self.after)]


def changes(running: RunConfig, wanted: RunConfig, engines: int) -> list[Change]:
    """Where `wanted` differs from a run on `engines` engines that is of `running` now; what is live first. Its name and
    folder are not part of the comparison: they are the next run's."""
    shape = shape_of(running, engines)
    live = differences(running, wanted, engines)
    if live.keys() & {"islands", "tp", "pp", "cp"}:
        live.pop("dp", None)  # It follows.
    found = [Change(path=name, before=shape[name], after=value, live=True) for name, value in live.items()]
    before, after = _flat(running, engines), _flat(wanted, engines)
    return found + [
        Change(path=path, before=before[path], after=after[path]) for path in after if before[path] != after[path]
    ]


def reshaping(found: Sequence[Change]) -> dict[str, Any]:
    """What `run.reshape` is to be given for the changes that are live."""
    return {change.path: change.after for change in found if change.live}


def changes_line(found: Sequence[Change]) -> str:
    """'changed: stage 2 → 3 (live, under 1 s) · steps 200 → 400 (needs a restart)'; '' when nothing differs."""
    if not found:
        return ""
    more = [f"{len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
    hint = "; Stop, then Train takes what needs a restart" if not all(change.live for change in found) else ""
    return f"changed: {' · '.join([*map(str, found[:_MOST_SHOWN]), *more])}{hint}"


def live_config(run: Run, began_as: RunConfig, engines: int) -> RunConfig:
    """What `run` began as, with the shape that it has now: by its newest change, or a newer record's stage."""
    config, last = present_config(began_as, run.feed.events, engines), run.feed.last
    changed = next((event.time for event in reversed(run.feed.events) if event.kind == "reshaped"), float("-inf"))
    return config.replace(zero={"stage": last.zero_stage}) if last is not None and last.time > changed else config


def live_batch(running: RunConfig, engines: int) -> dict[str, Any]:
    """The batch fields of a form that shows a run: the global batch stays when the layout changes, and the number of
    micro-batches follows."""
    batch = running.batch.resolve(running.layout(engines, built_in=False).data_size)
    return {
        "batch.global_size": batch.global_size,
        "batch.micro_size": batch.micro_size,
        "batch.accumulation": None,
    }


def marks(found: Sequence[Change]) -> dict[str, str]:
    """Path of a field -> how it differs from the run."""
    told: dict[str, str] = {}
    for change in found:
        told |= change.marks
    return told


def _flat(config: RunConfig, engines: int) -> dict[str, Any]:
    """Every field by path, but those of the shape; of the batch, the global one."""
    flat = _by_path(config.model_dump(exclude={"name", "folder", "batch"}))
    kept = {path: value for path, value in flat.items() if path not in _SHAPE}
    shares = config.layout(engines, built_in=False).data_size
    return kept | {"batch.global_size": config.batch.resolve(shares).global_size}


def _by_path(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _by_path(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
