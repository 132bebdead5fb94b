"""Which layouts of a run exist: the rules that tensor and pipeline parallelism put on model, data and micro-batches.

Pure arithmetic, for the panel as much as for the engine. A rule that is broken is told with its numbers and the nearest
layouts that work.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from speedlab.config.attention import direction_problem, length_problems
from speedlab.config.context import context_problem
from speedlab.config.errors import ConfigError
from speedlab.config.in_backward import in_backward_problems
from speedlab.config.island_rules import meeting_problem
from speedlab.config.optimizer_rules import warmup_problem
from speedlab.layout import AXES, Layout, LayoutError

if TYPE_CHECKING:
    from speedlab.config.run import RunConfig

_NAMED = 3
"""How many layouts that work an error names."""


def resolve(config: RunConfig, engines: int, *, built_in: bool = True) -> Layout:
    """The layout of `config` on `engines` engines. Raises LayoutError when there is none, and ConfigError where the
    update cannot be in backward under it, or the model's attention is wider than a sequence or an encoder's.

    Without `built_in` the model is somebody's own, and only what does not depend on it is checked; the engine looks at
    the rest when it has the model.
    """
    parallel = config.parallel
    try:
        layout = _asked(config, engines)
    except LayoutError as error:
        asked = Layout(dp=parallel.dp or 1, **_other_axes(config))
        advice = _dp_text(config, engines, built_in) + _nearest_text(config, asked, engines, built_in)
        raise LayoutError(f"{error}{advice}{_fewer_text(config, engines, built_in)}") from None
    problem = _first_problem(config, layout, built_in)
    if problem is not None:
        raise LayoutError(f"parallel: {problem}{_nearest_text(config, layout, engines, built_in)}")
    problems = in_backward_problems(config, layout)
    if built_in:
        problems += warmup_problem(config.optimizer, config.steps)
        problems += meeting_problem(layout.islands, config.outer, config.steps)
        problems += length_problems(config.model.attention, config.data.sequence_length)
        problems += filter(None, [direction_problem(config.model.attention, "the built-in GPT")])
    if problems:
        raise ConfigError("\n".join(problems))
    return layout


def possible(config: RunConfig, engines: int, *, built_in: bool = True) -> list[Layout]:
    """Every layout of `engines` ranks that `config` could run under with its islands and cp, by tp, then by pp. The
    batch equation counts."""
    parallel = config.parallel
    all_of_them = factorisations(engines, parallel.cp, parallel.islands)
    return [layout for layout in all_of_them if _works(config, layout, built_in)]


def nearest(layouts: Iterable[Layout], asked: Layout) -> list[Layout]:
    """The few of `layouts` that are nearest to what was asked for, as factors on the axes; nearest first."""

    def distance(layout: Layout) -> float:
        return sum(abs(math.log(getattr(layout, axis) / getattr(asked, axis))) for axis in AXES)

    return sorted(layouts, key=distance)[:_NAMED]


def why_not(config: RunConfig, engines: int, *, built_in: bool = True, **changes: Any) -> str | None:
    """What stands against these changes of `config.parallel`, and of the number of micro-batches as `micro_batches`, on
    `engines` engines; None when nothing does. dp follows from the others unless it is among the changes."""
    micro_batches = changes.pop("micro_batches", None)
    try:
        changed = config.replace(
            parallel={"dp": None, **changes}, **({"batch": {"accumulation": micro_batches}} if micro_batches else {})
        )
        layout = changed.layout(engines, built_in=built_in)
    except (ConfigError, LayoutError) as error:
        return str(error).removeprefix("parallel: ")
    return _batch_problem(changed, layout)


def _first_problem(config: RunConfig, layout: Layout, built_in: bool) -> str | None:
    model, parallel = config.model, config.parallel
    tp, pp = layout.tp, layout.pp
    if built_in:
        for name, count in (("heads", model.heads), ("ffn_hidden", model.ffn_hidden)):
            if count % tp:
                return f"tp {tp}: {count} {name} do not divide by {tp}; {_divisors_text(count)} do"
        if model.vocab_size < tp:
            return f"tp {tp}: a vocabulary of {model.vocab_size} leaves ranks without a token"
        if (problem := context_problem(model, layout, parallel, config.data.sequence_length)) is not None:
            return problem
    length, ways = config.data.sequence_length, tp * layout.cp
    padded = parallel.cp_pad and layout.cp > 1
    if parallel.sequence and tp > 1 and length % ways and not padded:
        cut = f" and cp {layout.cp}" if layout.cp > 1 else ""
        return (
            f"tp {tp}{cut} with sequence parallelism: sequences of {length} tokens do not divide by {ways}; "
            f"{length // ways * ways} would, or set parallel.sequence to false"
        )
    return _pipeline_problem(config, pp, built_in) if pp > 1 else None


def _pipeline_problem(config: RunConfig, pp: int, built_in: bool) -> str | None:
    parallel, layers = config.parallel, config.model.layers
    chunks = parallel.stages_per_rank
    stages = pp * chunks
    equation = f"pp {pp}" + (f" × {chunks} stages a rank = {stages} pipeline stages" if chunks > 1 else "")
    if built_in and stages > layers:
        return f"{equation}, but the model has {layers} blocks; each pipeline stage needs at least one"
    if parallel.cut is not None:
        total = sum(parallel.cut)
        if len(parallel.cut) != stages:
            return f"{equation} need as many numbers in parallel.cut, which has {len(parallel.cut)}; leave cut out"
        if min(parallel.cut) < 1 or (built_in and total != layers):
            return (
                f"parallel.cut {' + '.join(map(str, parallel.cut))} = {total} blocks, but the model has {layers} and "
                f"each pipeline stage needs at least one; leave cut out for a balanced one"
            )
    micro_batches = config.batch.accumulation
    if chunks > 1 and micro_batches is not None:
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            nearest = micro_batches // pp * pp
            return (
                f"schedule {parallel.schedule} takes micro-batches in rounds of pp {pp}: {micro_batches} do not divide "
                f"by {rounds} rounds; {nearest} or {nearest + pp} would"
            )
    return None


def _batch_problem(config: RunConfig, layout: Layout) -> str | None:
    try:
        config.batch.resolve(layout.data_size)
    except ConfigError as error:
        return str(error)
    return None


def _works(config: RunConfig, layout: Layout, built_in: bool) -> bool:
    if _first_problem(config, layout, built_in) is not None or _batch_problem(config, layout) is not None:
        return False
    return not in_backward_problems(config, layout)


def _dp_text(config: RunConfig, engines: int, built_in: bool) -> str:
    """Another dp beside what else is asked for, where one works."""
    if config.parallel.dp is None or why_not(config, engines, built_in=built_in) is not None:
        return ""
    parallel = config.parallel
    return f"; dp {engines // (parallel.islands * parallel.tp * parallel.pp * parallel.cp)} would fit"


def _nearest_text(config: RunConfig, asked: Layout, engines: int, built_in: bool) -> str:
    """The layouts of `engines` ranks that work and are nearest to `asked`."""
    near = nearest(possible(config, engines, built_in=built_in), asked) if engines > 0 else []
    return f"; on {engines} engines {' or '.join(map(str, near))} would work" if near else ""


def _fewer_text(config: RunConfig, engines: int, built_in: bool) -> str:
    """The most of fewer engines on which what is asked for works. Whether there can be more, nobody knows here."""
    for count in range(engines - 1, 0, -1):
        with contextlib.suppress(LayoutError):
            if _works(config, _asked(config, count), built_in):
                return f"; as it is asked for it works on {count} engines"
    return ""


def factorisations(engines: int, cp: int = 1, islands: int = 1) -> list[Layout]:
    """Every layout of so many ranks with this cp and so many islands, by tp, then by pp."""
    if engines % (cp * islands):
        return []
    rest = engines // (cp * islands)
    sizes = [n for n in range(1, rest + 1) if rest % n == 0]
    return [
        Layout(islands=islands, tp=tp, pp=pp, cp=cp, dp=rest // (tp * pp))
        for tp in sizes
        for pp in sizes
        if rest % (tp * pp) == 0
    ]


def _asked(config: RunConfig, engines: int) -> Layout:
    """The layout that `config.parallel` says. Raises LayoutError."""
    return Layout.for_world(engines, dp=config.parallel.dp, **_other_axes(config))


def _other_axes(config: RunConfig) -> dict[str, int]:
    return {axis: getattr(config.parallel, axis) for axis in AXES if axis != "dp"}


def _divisors_text(count: int) -> str:
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    kept = [str(n) for n in (sizes if len(sizes) <= 6 else sizes[:6])]
    return " and ".join([", ".join(kept[:-1]), kept[-1]]) if len(kept) > 1 else kept[0]
