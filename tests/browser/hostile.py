"""Texts that would do something if a page took them for more than text, and runs that carry them everywhere.

What each is there for: markup that runs (`window.speedlabPwned`), markup that only shows (bold, giant, hidden), markup
of plotly's own (it knows a few tags and links), of Markdown and TeX, texts that end the element or script they stand
in, names that are properties of every object, texts that turn the writing direction, and texts without an end.
"""

from __future__ import annotations

import json
from pathlib import Path

from speedlab.config import RunConfig
from speedlab.telemetry.records import Event, Ledger, RunState, StepRecord
from speedlab.telemetry.run_folder import RunFolder, Status

RUN = "window.speedlabPwned=1"

PAYLOADS = (
    f"<script>{RUN}</script>",
    f"<SCRIPT>{RUN}</SCRIPT>",
    f"</script><script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f'"><img src=x onerror="{RUN}">',
    f"'><img src=x onerror='{RUN}'>",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f"<body onload={RUN}>",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    f"<iframe src=javascript:parent.{RUN}>",
    f"<a href=javascript:{RUN}>go</a>",
    f"<a href='data:text/html,<script>opener.{RUN}</script>'>go</a>",
    f"<details open ontoggle={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<audio src=x onerror={RUN}>",
    f"<input autofocus onfocus={RUN}>",
    f"<select autofocus onfocus={RUN}>",
    f"<textarea autofocus onfocus={RUN}>",
    f"<marquee onstart={RUN}>",
    f"<object data=javascript:{RUN}>",
    f"<embed src=javascript:{RUN}>",
    f"<math href=javascript:{RUN}>CLICK</math>",
    f"<form><button formaction=javascript:{RUN}>go</button></form>",
    f"<style>@import 'javascript:{RUN}';</style>",
    f"<link rel=stylesheet href=javascript:{RUN}>",
    f"<meta http-equiv=refresh content='0;url=javascript:{RUN}'>",
    f"<base href=javascript:{RUN}//>",
    f"<template><script>{RUN}</script></template>",
    f"<noscript><p title='</noscript><img src=x onerror={RUN}>'>",
    f"<!--><img src=x onerror={RUN}>-->",
    f"<![CDATA[<img src=x onerror={RUN}>]]>",
    f"<x onclick={RUN} style=position:fixed;inset:0>x</x>",
    f"<img/src=x/onerror={RUN}//",
    f"<<img src=x onerror={RUN}>>",
    f"&lt;img src=x onerror={RUN}&gt;",
    f"&#60;img src=x onerror={RUN}&#62;",
    f"\\x3cimg src=x onerror={RUN}\\x3e",
    f"javascript:{RUN}",
    f"${{{RUN}}}",
    f"{{{{{RUN}}}}}",
    f"`${{{RUN}}}`",
    f"');{RUN};//",
    f'");{RUN};//',
    f"]]>{RUN}",
    "<b>bold</b><h1>giant</h1>",
    "<div style='position:fixed;top:0;left:0;width:100vw;height:100vh;background:red'>over all</div>",
    "<style>*{display:none!important}</style>",
    f"<a href='javascript:{RUN}' target='_blank'>of plotly</a><br><sub>2</sub><span style='font-size:99px'>x</span>",
    "%{customdata}<extra></extra>%{x}",
    f"[of Markdown](javascript:{RUN}) ![x](x) **bold** # big",
    "$\\href{javascript:alert(1)}{x}$ $$\\huge x$$",
    "__proto__",
    "constructor",
    "toString",
    "hasOwnProperty",
    "\u202eback to front\u202c",
    "\u2066isolated",
    "zero\u200bwidth\ufeffjoined",
    "combining " + "Z" + "\u0351\u034f\u0357" * 40,
    "\x1b[31mred\x1b[0m\x07\x08",
    "line one\nline two\r\nline three\ttab",
    "🏳️\u200d🌈👩\u200d👩\u200d👧\u200d👦",
    "very-long-" * 40,
    "w" * 2000,
    "",
    "   ",
    "null",
    "NaN",
    "-Infinity",
)
assert len(PAYLOADS) >= 60


def make_runs(parent: Path) -> list[RunFolder]:
    """A run for every few payloads; each of them is in a name, a text, an event, and in names inside of records."""
    made = []
    for number in range(0, len(PAYLOADS), 6):
        made.append(make_hostile(parent, f"hostile-{number:02d}", PAYLOADS[number : number + 6]))
    for number, text in enumerate(PAYLOADS):
        name = text.replace("/", "\u2215").replace("\0", "")[:120].strip()
        if name.encode()[:200].decode(errors="ignore") == name and name not in ("", ".", ".."):
            _renamed(make_hostile(parent, f"named-{number:02d}", (text,)), name)
    return made


def make_hostile(parent: Path, name: str, texts: tuple[str, ...]) -> RunFolder:
    """A run of two ranks, on hosts called by the first and the last of `texts`, which has each of them everywhere."""
    folder = RunFolder.create(RunConfig(name=name, folder=str(parent), steps=20))
    hosts = [texts[0], max(texts, key=len)]
    events = [Event(kind="started", step=0, time=0.0, text="", details={"hosts": hosts})]
    events += [Event(kind=text or "warning", step=index, time=index, text=text) for index, text in enumerate(texts)]
    events += [Event(kind="warning", step=3, time=3.0, text=text, details={text: text}) for text in texts]
    (folder.path / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    for rank in range(2):
        lines = [_record(step, rank, texts).to_json() for step in range(1, 9)]
        (folder.path / "records" / f"rank-{rank}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        rows = [_row(text) for text in texts]
        (folder.path / "placement").mkdir(exist_ok=True)
        (folder.path / "placement" / f"rank-{rank}.json").write_text(json.dumps({"rows": rows}))
    text = "\n".join(texts)
    folder.write_status(Status(state=RunState.FAILED, step=8, steps=20, rank_pids=(1, 2), text=text))
    return folder


def _row(text: str) -> dict[str, object]:
    """Of a placement table."""
    home = {"holders": text, "where": "device", "form": text}
    return {
        "name": text,
        "unit": text,
        "shape": [4, 2],
        "whole_shape": [8, 2],
        "cut_over": [text],
        "owners": [1, 0, 0],
        "held": {"parameter": [0, 8, 32]},
        "states": {"parameter": home},
    }


def _renamed(folder: RunFolder, name: str) -> None:
    """As a person might have called it in a file browser."""
    target = folder.path.with_name(name)
    if not target.exists():
        folder.path.rename(target)


def _record(step: int, rank: int, texts: tuple[str, ...]) -> StepRecord:
    return StepRecord(
        step=step,
        rank=rank,
        time=1000.0 + step,
        loss=8.0 - step / 10,
        learning_rate=1e-3,
        grad_norm=1.0,
        loss_scale=1.0,
        zero_stage=1,
        tokens=1024,
        flops=1e9,
        seconds=0.1,
        phases={"forward": 0.05, "backward": 0.05, **dict.fromkeys(texts, 0.001)},
        sent_bytes=dict.fromkeys(texts, 100),
        sent_through={text: {text: 100} for text in texts},
        moved_bytes=dict.fromkeys(texts, 100),
        kernels={text: {"calls": 1.0, "bytes": 100.0, "seconds": 0.001} for text in texts},
        ledger=Ledger(parameters=100, gradients=100, reported_bytes=400, other_framework=200, capacity_bytes=10_000),
    )
