"""Changes that a plan proposes are options that exist, and give what was proposed; so does the loss in chunks."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from speedlab_notebook.magics import commands

from speedlab.cli.plan import parse
from speedlab.config import RunConfig
from speedlab.config.model_shape import ModelShape
from speedlab.hardware import Device
from speedlab.planner.fit_suggestions import _changes, options_of
from speedlab.planner.plan import Found, Plan
from speedlab.planner.request import PlanRequest

DEVICE = Device(
    kind="cpu",
    name="cpu 0",
    uuid="",
    cores=(0,),
    threads=1,
    capacity_bytes=4 * 2**30,
    free_bytes=3 * 2**30,
    fast_dtype="float32",
)


def answer_of(words: list[str]) -> Plan | Found:
    """Of a terminal's command line."""
    return parse(words).answer([DEVICE])


def plan_of(words: list[str]) -> Plan:
    made = answer_of(words)
    assert isinstance(made, Plan)
    return made


@pytest.mark.parametrize("words", [["gpt2"], ["gpt2", "--search", "--global", "64"], ["--largest"]])
def test_the_loss_may_be_asked_for_in_chunks(words: list[str], monkeypatch) -> None:
    def shape(*more: str) -> ModelShape:
        made = answer_of([*words, "--machines", "8 H100", *more])
        return made.setup.shape if isinstance(made, Plan) else made.candidates[0].setup.shape

    assert shape("--chunked-loss") == replace(shape("--chunked-loss"), chunked_loss=True)
    assert not shape().chunked_loss


def test_a_configuration_says_whether_the_loss_is_in_chunks_and_the_option_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    RunConfig(model={"loss": "full"}).save(path)
    full, chunked = (PlanRequest(model=str(path), chunked_loss=asked).plan([DEVICE] * 2) for asked in (False, True))
    RunConfig(model={"loss": "chunked"}).save(path)
    said = PlanRequest(model=str(path)).plan([DEVICE] * 2)
    assert not full.setup.shape.chunked_loss
    assert chunked.setup == said.setup
    assert chunked.heaviest.total == said.heaviest.total < full.heaviest.total


@pytest.mark.parametrize(
    "words",
    [
        ["gpt2-xl", "--machines", "8 V100-16", "--micro", "8", "--zero", "0", "--dtype", "float16"],
        [
            "gpt2-xl",
            "--machines",
            "8 V100-16",
            "--micro",
            "12",
            "--zero",
            "1",
            "--attention",
            "plain",
            "--global",
            "96",
        ],
        ["llama-3-8b", "--machines", "8 A100-40", "--zero", "1", "--tp", "2", "--micro", "2", "--dtype", "float32"],
        ["llama-3-8b", "--machines", "8 A100-40", "--zero", "3", "--dp", "2", "--micro", "4"],
        ["llama-3-8b", "--machines", "1 A100-40", "--host-bytes", "256GiB", "--disk-bytes", "4TB"],
        ["FILE", "--machines", "4 V100-16"],
        ["gpt2-xl", "--config", "FILE", "--machines", "4 V100-16"],
    ],
)
def test_options_that_a_plan_proposes_give_the_plan_that_fits(words: list[str], tmp_path: Path) -> None:
    """Not only the cheapest: whatever might be proposed is asked for as it is told."""
    file = tmp_path / "mine.yaml"
    RunConfig(
        model={"preset": "gpt2-xl", "loss": "full"},
        data={"sequence_length": 1024},
        zero=0,
        batch={"micro_size": 8, "accumulation": 4},
        parallel={"pp": 2, "cut": (23, 25)},
    ).save(file)
    words = [str(file) if word == "FILE" else word for word in words]
    made = plan_of(words)
    assert not made.fits
    singles = list(_changes(made.setup, made.machines))
    pairs = [twice for once in singles for twice in _changes(once, made.machines)]
    assert len(singles) > 2
    for setup in singles + pairs[::12]:
        options = options_of(made.setup, setup).split()
        assert plan_of([*words, *options]).setup == setup, options
        in_a_notebook = commands.parse(" ".join(f"'{word}'" for word in ["plan", *words, *options]))[1]
        said = parse([*words, *options])
        assert PlanRequest.of_words(in_a_notebook) == PlanRequest(
            **{f.name: getattr(said, f.name) for f in fields(PlanRequest)}
        )
    assert all(f": {change.options}\n" in f"{made}\n" for change in made.cheapest_changes())
