"""The proof of the first batch: what a run checked about its own training, as data, as text and as HTML.

The engine fills it (`speedlab/engine/proof/`). Rank 0 writes it as `proof.json` into the run folder. It holds no
tensors, so a kernel, a terminal and a report read it without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import Any

from speedlab.config import RunConfig
from speedlab.display.formatting import count_text, seconds_text
from speedlab.telemetry.run_folder import RunFolderError, read_object, write_atomically

PROOF = "proof.json"
"""Name of the file in the run folder."""

_LIMIT_BYTES = 2**22
_FIRST_MINUTE_SECONDS = 60.0
_MOST_PIECES = 4096


class Severity(StrEnum):
    """Result of a check."""

    OK = "ok"
    SUSPICIOUS = "suspicious"
    """It may be intended; the text gives the reason to look."""
    WRONG = "wrong"
    """The training does something else than the batch or the configuration says."""
    NOT_CHECKED = "not checked"
    """The text gives the reason."""


_MARKS = {Severity.OK: "✓", Severity.SUSPICIOUS: "▲", Severity.WRONG: "✕", Severity.NOT_CHECKED: "–"}
_COLORS = {Severity.OK: "#2e7d32", Severity.SUSPICIOUS: "#e69f00", Severity.WRONG: "#c62828", Severity.NOT_CHECKED: ""}
"""Colors of the bar next to a severity. The text keeps the page's color, which is readable in a dark theme."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. `kind` names the check; `section` is the guide's section about it.

    failed: the check itself raised an error, which the text names.
    """

    kind: str
    severity: Severity
    text: str
    section: str = ""
    failed: bool = False

    @property
    def link(self) -> str:
        """A command that prints the guide's section about the check."""
        return f"speedlab guide proof {self.section}" if self.section else ""

    @property
    def needs_a_look(self) -> bool:
        """Whether the finding is suspicious or wrong."""
        return self.severity in (Severity.SUSPICIOUS, Severity.WRONG)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """A parameter group of the optimizer, over the whole model. Frozen parameters are a group of their own."""

    name: str
    learning_rate: float | None
    weight_decay: float | None
    tensors: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Results of the checks of a run's first batch, or of the batch given to `engine.proof`.

    Attributes:
        step: Updates before the batch.
        form: "cheap" or "full".
        seconds: Duration of the checks, without the step itself.
        counted_text: The first sequence of rank 0, in pieces of (text, whether it counts in the loss).
    """

    step: int
    form: str
    seconds: float
    findings: tuple[Finding, ...]
    groups: tuple[ParameterGroup, ...] = ()
    counted_text: tuple[tuple[str, bool], ...] = ()

    def __getitem__(self, kind: str) -> Finding:
        """Return the finding of a check by its kind. Raise KeyError if there is none."""
        for finding in self.findings:
            if finding.kind == kind:
                return finding
        raise KeyError(f"there is no finding {kind!r}; there are: {', '.join(f.kind for f in self.findings)}")

    @property
    def needs_a_look(self) -> list[Finding]:
        """The findings that are suspicious or wrong."""
        return [finding for finding in self.findings if finding.needs_a_look]

    @property
    def counts(self) -> str:
        """'1 wrong, 2 suspicious, 5 ok, 1 not checked'."""
        counts = dict.fromkeys((Severity.WRONG, Severity.SUSPICIOUS, Severity.OK, Severity.NOT_CHECKED), 0)
        for finding in self.findings:
            counts[finding.severity] += 1
        return ", ".join(f"{count} {severity}" for severity, count in counts.items() if count) or "nothing was checked"

    @property
    def failed(self) -> list[Finding]:
        """The findings of checks that raised an error."""
        return [finding for finding in self.findings if finding.failed]

    @property
    def headline(self) -> str:
        """'proof of the first batch: 8 ok', or of the batch of a later step."""
        which = "the first batch" if self.step == 0 else f"the batch of step {self.step + 1:,}"
        return f"proof of {which}: {self.counts}"

    def short(self, name: str) -> str:
        """Return the headline and the findings that need a look.

        Args:
            name: The run's name, as on a command line.
        """
        lines = [f"{self.headline} ({self.cost}); all of it: speedlab proof {name}"]
        for finding in self.needs_a_look:
            more = f"; more: {finding.link}" if finding.link else ""
            lines.append(f"{_MARKS[finding.severity]} {finding.kind}: {finding.text}{more}")
        return "\n".join(lines)

    @property
    def cost(self) -> str:
        """'cheap form, 0.41 s, 0.68 % of the first minute'; without the share for a batch of a later step."""
        cost = f"{self.form} form, {seconds_text(self.seconds)}"
        if self.step:
            return cost
        share = self.seconds / _FIRST_MINUTE_SECONDS
        return f"{cost}, {share:.2%} of the first minute".replace("%", " %")

    def with_findings(self, findings: Iterable[Finding], *, more_seconds: float = 0.0) -> Proof:
        """Return a copy of the proof in which `findings` replace those of the same kinds.

        Args:
            findings: New findings.
            more_seconds: Duration of the new checks.
        """
        newer = {finding.kind: finding for finding in findings}
        kept = [newer.pop(finding.kind, finding) for finding in self.findings]
        return Proof(
            step=self.step,
            form=self.form,
            seconds=self.seconds + more_seconds,
            findings=(*kept, *newer.values()),
            groups=self.groups,
            counted_text=self.counted_text,
        )

    # ---- as text and as HTML ---------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"{self.headline} ({self.cost})"]
        width = max((len(finding.kind) for finding in self.findings), default=0)
        for finding in self.findings:
            lines.append(f"{_MARKS[finding.severity]} {finding.kind:<{width}}  {finding.severity}: {finding.text}")
            if finding.link and finding.severity is not Severity.OK:
                lines.append(f"  {'':<{width}}  more: {finding.link}")
        if self.groups:
            lines += ["", *_columns([_GROUP_HEAD, *map(_group_cells, self.groups)])]
        if self.counted_text:
            marked = "".join(f"⟦{text}⟧" if counts else text for text, counts in self.counted_text)
            lines += ["", "first sequence of rank 0, ⟦what counts in the loss⟧:", marked]
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def headline_html(self) -> str:
        """The headline, and the duration of the checks."""
        return f"<b>{escape(self.headline)}</b> <small>({escape(self.cost)})</small>"

    def _repr_html_(self) -> str:
        return f"<div>{self.headline_html}</div>{self.findings_html()}"

    def findings_html(self) -> str:
        """Return everything below the headline, as HTML."""
        rows = "".join(map(_finding_html, self.findings))
        parts = [f'<table class="speedlab-proof">{rows}</table>']
        if self.groups:
            head = _group_row_html("th", _GROUP_HEAD)
            body = "".join(_group_row_html("td", _group_cells(group)) for group in self.groups)
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        if self.counted_text:
            marked = "".join(
                f'<mark style="background:#ffe08a;color:#1c2530">{escape(text)}</mark>'
                if counts
                else f"<span>{escape(text)}</span>"
                for text, counts in self.counted_text
            )
            parts.append(
                "<details open><summary>First sequence of rank 0; marked: what counts in the loss</summary>"
                f'<pre style="white-space:pre-wrap;max-height:20em;overflow:auto">{marked}</pre></details>'
            )
        return "".join(parts)

    # ---- as a file -------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the proof as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Proof:
        """Return the proof in parsed JSON.

        Args:
            data: The parsed object.

        Raises:
            ValueError, TypeError, KeyError: The data is no proof.
        """
        pieces = [(_text(text), _flag(counts)) for text, counts in data["counted_text"][:_MOST_PIECES]]
        return cls(
            step=int(data["step"]),
            form=_text(data["form"]),
            seconds=float(data["seconds"]),
            findings=tuple(
                Finding(
                    kind=_text(each["kind"]),
                    severity=Severity(each["severity"]),
                    text=_text(each["text"]),
                    section=_text(each["section"]),
                    failed=_flag(each.get("failed", False)),
                )
                for each in data["findings"]
            ),
            groups=tuple(
                ParameterGroup(
                    name=_text(each["name"]),
                    learning_rate=None if each["learning_rate"] is None else float(each["learning_rate"]),
                    weight_decay=None if each["weight_decay"] is None else float(each["weight_decay"]),
                    tensors=int(each["tensors"]),
                    elements=int(each["elements"]),
                )
                for each in data["groups"]
            ),
            counted_text=tuple(pieces),
        )


def write_proof(folder: Path, proof: Proof) -> None:
    """Write a run's proof into its folder atomically.

    Args:
        folder: The run folder.
        proof: The proof.
    """
    write_atomically(folder / PROOF, proof.to_json())


def read_proof(folder: Path) -> Proof | None:
    """Return the proof in a run folder; None if there is none.

    Args:
        folder: The run folder.

    Raises:
        RunFolderError: The file is damaged.
    """
    path = folder / PROOF
    data = read_object(path, _LIMIT_BYTES, missing={})
    if not data and not path.exists():
        return None
    try:
        return Proof.from_data(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{path}: is not the proof of a run: {error}") from error


def why_no_proof(config: RunConfig, step: int) -> str:
    """Return why a run folder has no proof, and what to do.

    Args:
        config: The run's configuration.
        step: The run's present step.
    """
    if config.proof == "none" and step:
        return "its configuration has proof: none; run.prove() makes one"
    if not step:
        return "it is made after the first step"
    return "its first step was made without one; run.prove() makes one"


# ---- inside --------------------------------------------------------------------------------------------------------

_GROUP_HEAD = ("parameters", "learning rate", "weight decay", "tensors", "elements")


def _group_cells(group: ParameterGroup) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.4g}"

    rates = (number(group.learning_rate), number(group.weight_decay))
    return group.name, *rates, f"{group.tensors:,}", count_text(group.elements)


def _columns(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _group_row_html(tag: str, cells: Sequence[str]) -> str:
    sides = ("left", *["right"] * (len(cells) - 1))
    shown = (
        f'<{tag} style="text-align:{side};padding:1px 12px 1px 3px">{escape(cell)}</{tag}>'
        for side, cell in zip(sides, cells, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _finding_html(finding: Finding) -> str:
    color = _COLORS[finding.severity]
    bar = f"border-left:4px solid {color or 'transparent'}"
    cell = f'<td style="text-align:left;white-space:nowrap;padding:1px 10px 1px 6px;{bar}">'
    link = f"<br><small>more: <code>{escape(finding.link)}</code></small>" if finding.link else ""
    more = link if finding.severity is not Severity.OK else ""
    state = f"{cell}{_MARKS[finding.severity]}&nbsp;{escape(finding.severity)}</td>"
    text = f'<td style="text-align:left;white-space:normal">{escape(finding.text)}{more}</td>'
    return f'<tr><th style="text-align:left;white-space:nowrap">{escape(finding.kind)}</th>{state}{text}</tr>'


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__}, expected text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"a {type(value).__name__}, expected true or false")
    return value
