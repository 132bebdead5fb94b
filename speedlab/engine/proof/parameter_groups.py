"""Proof checks: parameter groups over the whole model, and parameters without a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speedlab.placement import Placement
from speedlab.telemetry.proof import Finding, ParameterGroup, Severity

KIND = "parameter groups"
NO_GRADIENT = "gradients"
SECTION = "groups"
NO_GRADIENT_SECTION = "gradients"

_FROZEN = -1
_MOST_NAMES = 5


def own_counts(placement: Placement) -> dict[str, list[int]]:
    """Count the parameters that this rank answers for.

    Args:
        placement: The placement table of this rank.

    Returns:
        (tensors, elements) by index of the parameter group; frozen parameters are under "-1". Elements of a sharded
        parameter are this rank's shard.
    """
    counts: dict[str, list[int]] = {}
    for row in placement.rows:
        if row.answers:
            elements = 1
            for size in row.shape:
                elements *= size
            own = counts.setdefault(str(row.group if row.trainable else _FROZEN), [0, 0])
            # Every rank of a tensor-parallel group has a shard of the same tensor, which counts once.
            own[0] += not row.cut_over or (row.part is None or all(low == 0 for low, _ in row.part.ranges[:1]))
            own[1] += elements
    return counts


def groups_of(
    options: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Sequence[int]]], *, copies: int
) -> tuple[ParameterGroup, ...]:
    """Return the groups of the whole model.

    Args:
        options: The optimizer's param_groups.
        ranks: The result of `own_counts` on each rank.
        copies: Number of ranks that hold the same parameters.
    """

    def total(index: int, place: int) -> int:
        return sum(rank.get(str(index), (0, 0))[place] for rank in ranks) // max(1, copies)

    def number(value: Any) -> float | None:
        return None if value is None else float(value)

    groups = [
        ParameterGroup(
            name=f"group {index}",
            learning_rate=number(group.get("lr")),
            weight_decay=number(group.get("weight_decay")),
            tensors=total(index, 0),
            elements=total(index, 1),
        )
        for index, group in enumerate(options)
    ]
    if total(_FROZEN, 0):
        groups.append(
            ParameterGroup(
                name="frozen",
                learning_rate=None,
                weight_decay=None,
                tensors=total(_FROZEN, 0),
                elements=total(_FROZEN, 1),
            )
        )
    return tuple(groups)


def finding_of(groups: Sequence[ParameterGroup]) -> Finding:
    """Return the finding about the groups.

    Args:
        groups: The groups of the whole model.
    """
    trained = [group for group in groups if group.learning_rate is not None]
    frozen = sum(group.elements for group in groups if group.learning_rate is None)
    count = sum(group.elements for group in trained)
    text = f"{count:,} of {count + frozen:,} parameters train, in {len(trained)} group{'s' * (len(trained) != 1)}"
    empty = [group.name for group in trained if not group.tensors]
    if not count:
        return Finding(kind=KIND, severity=Severity.WRONG, text=f"{text}: nothing is trained", section=SECTION)
    if empty:
        reported = f"{text}; {', '.join(empty)} has no parameters"
        return Finding(kind=KIND, severity=Severity.SUSPICIOUS, text=reported, section=SECTION)
    return Finding(kind=KIND, severity=Severity.OK, text=text, section=SECTION)


def without_gradient(names: Sequence[str], trainable: int) -> Finding:
    """Return the finding about missing gradients.

    Args:
        names: Trainable parameters without a gradient on any rank.
        trainable: Number of trainable tensors.
    """
    if not names:
        text = f"all {trainable:,} trainable tensors got a gradient"
        return Finding(kind=NO_GRADIENT, severity=Severity.OK, text=text, section=NO_GRADIENT_SECTION)
    text = (
        f"{len(names)} of {trainable:,} trainable tensors got no gradient: {listed(names)}. The loss does not "
        "depend on them; freeze them, or look for a module that is not called or a detach()"
    )
    return Finding(kind=NO_GRADIENT, severity=Severity.SUSPICIOUS, text=text, section=NO_GRADIENT_SECTION)


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are.

    Args:
        names: The names.
    """
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"
