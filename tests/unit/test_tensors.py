"""The tensors in a segment of the memory bars, from the placement table in the run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from telemetry_samples import make_folder, make_record

from speedlab.telemetry import tables
from speedlab.telemetry.records import Ledger
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.tables import SegmentError, tensors_in

sys.path.append(str(Path(__file__).parents[1] / "browser"))
from hostile import PAYLOADS


def row(name: str, *, where: str = "device", nbytes: int = 16, **changes: Any) -> dict[str, Any]:
    homes = {
        "parameter": {"holders": "replicated", "where": "device", "form": "bfloat16"},
        "moments": {"holders": "partitioned", "where": where, "form": "float32"},
    }
    held = {"parameter": [0, 8, 16], "moments": [4, 8, nbytes]}
    shapes = {"shape": [4, 2], "whole_shape": [8, 2], "cut_over": ["tp"]}
    return {"name": name, "unit": "blocks.0", "states": homes, "held": held, "owners": [2, 2, 3], **shapes, **changes}


def reported(folder: RunFolder, category: str, place: str = "device", **ledger: int) -> dict[str, Any]:
    newest = {0: make_record(7, ledger=Ledger(**ledger))} if ledger else {}
    return tensors_in(folder, newest, rank=0, category=category, place=place)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


def test_largest_first_with_what_is_here_who_owns_it_and_what_is_left(folder: RunFolder) -> None:
    folder.write_placement(0, [row("small"), row("large", nbytes=64), row("away", where="host")])
    found = reported(folder, "optimizer_moments", optimizer_moments=96)
    assert [each["name"] for each in found["rows"]] == ["large", "small"]
    assert found["rows"][0] == {
        "name": "large",
        "unit": "blocks.0",
        "state": "moments",
        "shape": "4×2 of 8×2, cut over tp",
        "here": "4 to 7 of 8",
        "owner": "2 ranks, 2 to 3",
        "form": "float32, partitioned",
        "bytes": 64,
    }
    assert (found["step"], found["measured_bytes"], found["tensor_bytes"], found["count"]) == (7, 96, 80, 2)
    assert found["text"] == "16 B more are padding, with which flats divide among ranks."
    whole = reported(folder, "parameters", parameters=40)
    assert {(each["here"], each["owner"]) for each in whole["rows"]} == {("all of it", "every data-parallel rank")}
    assert whole["text"] == "parameters were measured 8 B smaller: not all of it is there yet, or still."
    assert [each["name"] for each in reported(folder, "optimizer_moments", "host")["rows"]] == ["away"]
    assert reported(folder, "gradients", gradients=0)["rows"] == []


def test_of_very_many_tensors_the_largest_are_told(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_TENSORS", 2)
    folder.write_placement(0, [row(f"t{i}", nbytes=i) for i in range(5)])
    found = reported(folder, "optimizer_moments")
    assert [each["name"] for each in found["rows"]] == ["t4", "t3"]
    assert (found["count"], found["tensor_bytes"], found["measured_bytes"], found["step"]) == (5, 10, None, -1)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "rank 0 has reported no placement"),
        ([{key: value for key, value in row("a").items() if key != "held"}], "did not tell how much of each tensor"),
        ([row("a", held={})], "The placement table is damaged: a row has no 'parameter'."),
        ([row("a", held={"parameter": [0, "x", 1]})], "The placement table is damaged: invalid literal"),
        (["text"], "The placement table is damaged"),
        ([row("a", states=[])], "The placement table is damaged"),
    ],
)
def test_a_table_that_is_none_is_told(folder: RunFolder, rows: list[Any] | None, said: str) -> None:
    if rows is not None:
        folder.write_placement(0, rows)
    found = reported(folder, "parameters", parameters=40)
    assert said in found["text"]
    assert (found["rows"], found["measured_bytes"]) == ([], 40)


def test_what_is_no_tensor_says_what_it_is_and_what_is_no_segment_is_refused(folder: RunFolder) -> None:
    assert reported(folder, "activations", activations=5)["text"].startswith("What forward keeps for backward")
    for wrong in ({"rank": -1}, {"category": "everything"}, {"place": "moon"}):
        with pytest.raises(SegmentError, match="is no segment: a rank is 0 or more, a category one of parameters, "):
            tensors_in(folder, {}, **{"rank": 0, "category": "parameters", "place": "device", **wrong})


def test_hostile_names_come_as_the_text_that_they_are(folder: RunFolder) -> None:
    folder.write_placement(0, [row(text, unit=text, cut_over=[text]) for text in PAYLOADS])
    found = reported(folder, "parameters")
    assert [(each["name"], each["unit"]) for each in found["rows"]] == [(text, text) for text in PAYLOADS]
