"""Plans: what is asked for in words, what is shown of it, and what is refused. No engines, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speedlab import cli
from speedlab.config import ConfigError, OuterConfig, ParallelConfig, RunConfig
from speedlab.display.figure_style import plain
from speedlab.hardware import Device
from speedlab.layout import Layout
from speedlab.planner import presets
from speedlab.planner.calibration import store
from speedlab.planner.hardware.local import hardware_here
from speedlab.planner.layer_shapes import head_size
from speedlab.planner.memory.predict import predict_memory
from speedlab.planner.plan import Found, plan
from speedlab.planner.report import plan_table
from speedlab.planner.request import PlanRequest, count
from speedlab.planner.setup import Setup

CLUSTER = "128x8 A100-80 nvlink3 ib-200x8"
GPT3 = ["gpt3-175b", "--machines", CLUSTER, "--tp", "8", "--pp", "16", "--zero", "1", "--global", "1536"]
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


@pytest.fixture(autouse=True)
def _not_calibrated(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(store, "path", lambda folder=None: tmp_path / "none.json")


def gpt3(**changes):
    return plan("gpt3-175b", CLUSTER, tp=8, pp=16, zero_stage=1, global_size=1536, **changes)


def test_the_numbers_of_a_plan_belong_together() -> None:
    made = gpt3(tokens=300e9, price_per_device_hour=2.0)
    setup = made.setup
    assert (setup.layout.dp, setup.accumulation, setup.global_size) == (8, 192, 1536)
    assert sum(rank.ranks for rank in made.memory) == 1024
    assert made.free_bytes == made.capacity_bytes - max(rank.total for rank in made.memory)
    assert made.fits == (made.free_bytes >= 0)
    tokens_a_step = 1536 * 2048
    seconds = 300e9 / tokens_a_step * made.time.step_seconds
    assert made.days == pytest.approx(seconds / 86400)
    assert made.device_hours == pytest.approx(seconds / 3600 * 1024)
    assert made.cost == pytest.approx(2.0 * seconds / 3600 * 1024)


def test_neighbours_that_hold_the_same_are_one_row_of_the_table() -> None:
    made = gpt3(checkpointing="block", schedule="gpipe")
    rows = plan_table(made)
    named = [number for row in rows for number in re.findall(r"pp (\d+)(?:–(\d+))?", row["rank"])]
    covered = [stage for first, last in named for stage in range(int(first), int(last or first) + 1)]
    assert covered == list(range(16))
    assert len(rows) < 16  # Stages in the middle are alike under a schedule that keeps all micro-batches.
    for row in rows:
        stage = int(re.findall(r"\d+", row["rank"])[0])
        memory = next(rank for rank in made.memory if rank.pipeline == stage)
        assert row["total"] == memory.total == sum(memory.by_category().values())
        assert row["free"] == made.capacity_bytes - memory.total


def test_the_text_says_what_limits_and_what_does_not_fit() -> None:
    text = str(gpt3(tokens=300e9))
    assert "gpt3-175b: 175 G parameters, bfloat16, on 128 × 8 A100-80" in text
    assert "global batch 1,536 = micro-batch 1 × accumulation 192 × dp 8" in text
    assert "speed: limited by " in text
    assert re.search(r"300 G tokens: [\d.]+ days, [\d,]+ device-hours", text)
    large = str(plan("gpt3-175b", "dgx-2", micro_size=1))
    assert "does not fit" in large
    assert "fits: " not in large


def test_changes_that_make_it_fit_do() -> None:
    made = plan("gpt2-xl", "8 V100-16", micro_size=8, zero_stage=0, dtype="float16")
    assert not made.fits
    changes = made.cheapest_changes()
    assert 1 <= len(changes) <= 3
    for change in changes:
        assert max(rank.total for rank in predict_memory(change.setup)) <= made.capacity_bytes
        assert str(change) in str(made)
    assert gpt3(checkpointing="block").cheapest_changes() == []


def test_the_figure_stacks_to_the_bytes_and_the_seconds() -> None:
    made = gpt3(checkpointing="block")
    figure = plain(made.figure())
    memory = [trace for trace in figure["data"] if "xaxis" not in trace]
    heaviest = max(sum(heights) for heights in zip(*(trace["y"] for trace in memory), strict=True))
    assert heaviest == pytest.approx(made.heaviest.total / 2**30)
    step = [trace for trace in figure["data"] if trace.get("xaxis") == "x2"]
    assert sum(trace["y"][0] for trace in step) == pytest.approx(made.time.step_seconds)
    outlines = [shape["y1"] for shape in figure["layout"]["shapes"] if shape["type"] == "rect"]
    assert max(outlines) == pytest.approx(heaviest)


def test_a_page_shows_a_plan_without_scripts_and_escaped() -> None:
    made = gpt3()
    shape = replace(made.setup.shape, name="<b>mine</b>")
    page = replace(made, setup=replace(made.setup, shape=shape))._repr_html_()
    assert "&lt;b&gt;mine" in page
    assert "<b>mine" not in page
    assert "<script" not in page
    assert page.count("speedlab-outline") >= 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt3-17b"], "nearest: gpt3-175b"),
        (["gpt2", "--machines", "8 A100-81"], "device 'A100-81' is not known; nearest: A100-80"),
        (["gpt2", "--machines", "4x8"], "do not say how many of what; write for instance"),
        (["gpt2", "--machines", "dgx-3"], "cluster 'dgx-3' is not known; nearest: dgx-2"),
        (["gpt2", "--machines", "8 A100-80", "--tp", "8"], "12 heads do not divide by it; tp 4 does"),
        (
            ["gpt2", "--machines", "8 H100", "--tp", "3"],
            "8 ranks do not divide by pp 1 × tp 3 = 3; pp 1 × dp 2 × tp 4 or pp 2 × dp 1 × tp 4 or pp 1 × dp 4 × tp 2 "
            "would work; so would pp 1 × dp 2 × tp 3 on 6 of them: --dp 2",
        ),
        (
            ["--layers", "4", "--hidden", "100", "--heads", "3", "--machines", "8 H100"],
            "or say how wide a head is: --head-size",
        ),
        (["--machines", "8 H100", "--largest", "--head-size", "64"], "cannot have --head-size"),
        (["gpt2", "--machines", "16 V100-32", "--pp", "16"], "gpt2 has 12 layers"),
        (["gpt2", "--machines", "8 A100-80", "--global", "12"], "a global batch of 16 would work"),
        (["gpt2", "--machines", "8 A100-80", "--tokens", "many"], "write for instance 300B"),
        (["gpt2", "--machines", "8 A100-80", "--engines", "2"], "give one of the two"),
        (["none.yaml"], "none.yaml: there is no such file"),
        ([], "no model is named; known: 1t, "),
        (["gpt3-175b", "--machines", "8 A100-80", "--search"], "add for instance --global 1536"),
        (["llama-3-8b", "--machines", "16 H100 on 2 nodes", "--tp", "16"], "8 KV heads do not divide by it; tp 8 does"),
        (["gpt2", "--seq", "2048", "--machines", "8 H100"], "gpt2 has learned 1,024 positions"),
        (["--layers", "24", "--machines", "8 H100"], "add --hidden, --heads"),
        (
            ["--layers", "9" * 18, "--hidden", "64", "--heads", "2", "--machines", "8 H100"],
            "999,999,999,999,999,999 layers; at most 10,000 are planned",
        ),
        (
            ["gpt2", "--machines", "8 H100", "--pp", "8", "--schedule", "interleaved"],
            "8 × 2 stages a rank: gpt2 has 12",
        ),
        (
            ["gpt2", "--machines", "4 H100", "--pp", "4", "--schedule", "interleaved", "--global", "9"],
            "9 are no whole rounds; 8 or 12 would be: a global batch of 8 or 12",
        ),
        (
            ["gpt2", "--machines", "8 H100", "--chunks", "3", "--schedule", "1f1b"],
            "--chunks are of --schedule interleaved",
        ),
        (["gpt2", "--machines", "8 H100", "--price", "2"], "say how long it is, for instance --tokens 300B"),
        (["gpt2", "--machines", "8 H100", "--tokens", "1B", "--price", "nan"], "is no price of a device-hour; give 0"),
        (["gpt2", "--machines", "8 H100", "--tokens", "1e400"], "'1e400' is more than can be counted with"),
        (["gpt2", "--machines", "8 H100", "--disk-bytes", "1e400"], "'1e400' is more than can be counted with"),
        (["gpt2", "--machines", "8 H100", "--dp", "1000000000000", "--islands", "1000000000000"], "has 8 devices"),
        (["gpt2", "--machines", "8 H100", "--target", "cheapest"], "add --search"),
        (
            ["gpt2", "--machines", "8 H100", "--largest"],
            "looks for the model, so that it cannot have gpt2; leave it out",
        ),
        (["--machines", "8 H100", "--largest", "--kv-heads", "8"], "cannot have --kv-heads"),
        (["--machines", "8 H100", "--largest", "--search"], "give one of the two"),
        (["--machines", "8 H100", "--largest", "--tp", "3"], "has no layout on 1 × 8 H100 (nvlink4) with tp 3"),
        (["gpt2", "--machines", "8 H100", "--search", "--global", "64", "--tp", "8"], "with tp 8: tp divides 12 heads"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_would_be(words: list[str], said: str, capsys) -> None:
    assert cli.main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_terminal_prints_the_plan_and_tells_whether_it_fits(capsys) -> None:
    assert cli.main(["plan", *GPT3, "--checkpointing", "block", "--tokens", "300B"]) == 0
    assert capsys.readouterr().out.rstrip() == str(gpt3(checkpointing="block", tokens=300e9))
    assert cli.main(["plan", "gpt3-175b", "--machines", "8 A100-80"]) == 1


def test_a_configuration_is_planned_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    RunConfig(model="gpt-tiny", zero=1, parallel={"tp": 2}).save(path)
    made = PlanRequest(model=str(path), zero=3, micro=2).plan([DEVICE] * 4)
    setup = made.setup
    assert (setup.layout.tp, setup.layout.dp, setup.zero_stage, setup.micro_size) == (2, 2, 3, 2)
    assert setup.dtype == "float32"
    assert made.capacity_bytes == DEVICE.capacity_bytes
    assert "(not yet calibrated)" in str(made)


def test_a_search_orders_what_it_finds(capsys) -> None:
    assert cli.main(["plan", "gpt2-xl", "--machines", "8 A100-40", "--global", "64", "--search"]) == 0
    printed = capsys.readouterr().out
    found = PlanRequest(model="gpt2-xl", machines="8 A100-40", global_size=64, search=True).answer([DEVICE])
    assert printed.rstrip() == str(found)
    seconds = [candidate.time.step_seconds for candidate in found.candidates]  # pyright: ignore[reportAttributeAccessIssue]
    assert seconds == sorted(seconds)
    assert len(seconds) >= 2


SEARCH = ["llama-3-8b", "--machines", "2x8 H100", "--search", "--global", "64"]


@pytest.mark.parametrize(
    ("words", "obeyed"),
    [
        (["--zero", "1"], lambda setup: setup.zero_stage == 1),
        (["--tp", "4"], lambda setup: setup.layout.tp == 4),
        (["--pp", "2", "--dp", "2"], lambda setup: (setup.layout.pp, setup.layout.dp) == (2, 2)),
        (
            ["--checkpointing", "selective", "--micro", "2"],
            lambda s: (s.checkpointing, s.micro_size) == ("selective", 2),
        ),
        (
            ["--pp", "2", "--schedule", "zero-bubble"],
            lambda setup: (setup.schedule, setup.chunks) == ("zero-bubble", 2),
        ),
        (
            ["--offload.optimizer", "host", "--attention", "plain"],
            lambda s: (s.offload.optimizer, s.attention) == ("host", "plain"),
        ),
        (["--dtype", "float16", "--seq", "1024"], lambda s: (s.dtype, s.shape.sequence_length) == ("float16", 1024)),
    ],
)
def test_a_search_leaves_what_is_asked_for(words: list[str], obeyed, monkeypatch) -> None:
    found: list[Found] = []
    monkeypatch.setattr("builtins.print", found.append)
    assert cli.main(["plan", *SEARCH, *words]) == 0
    assert found[0].candidates
    assert all(obeyed(candidate.setup) for candidate in found[0].candidates)


def test_the_largest_model_leaves_what_is_asked_for(monkeypatch) -> None:
    found: list[Found] = []
    monkeypatch.setattr("builtins.print", found.append)
    words = [
        "--machines",
        "8 A100",
        "--largest",
        "--tp",
        "8",
        "--zero",
        "1",
        "--checkpointing",
        "none",
        "--seq",
        "1024",
    ]
    assert cli.main(["plan", *words, "--global", "4", "--tokens", "100B", "--price", "2"]) == 0
    (largest,) = found[0].candidates
    setup = largest.setup
    assert (setup.layout.tp, setup.zero_stage, setup.checkpointing, setup.shape.sequence_length) == (8, 1, "none", 1024)
    assert setup.global_size == 4
    assert largest.time.cost(100e9) == pytest.approx(2 * largest.time.device_hours(100e9))
    assert f"{largest.time.cost(100e9):,.1f}" in str(found[0])


def test_the_largest_model_says_where_its_states_lie_and_of_how_much(capsys) -> None:
    words = ["--machines", "1 H200", "--host-bytes", "128GiB", "--offload.optimizer", "host", "--disk-bytes", "30TB"]
    assert cli.main(["plan", "--largest", *words]) == 0
    asked, head, row = capsys.readouterr().out.splitlines()[:3]
    assert asked == "the largest model that fits on 1 × 1 H200 (nvlink4), with optimizer on host"
    assert "on host" in head
    assert "on disk" not in head
    assert re.search(r"1\d\d GiB of 128 GiB", row)
    assert cli.main(["plan", "--largest", "--machines", "1 H200", "--offload.parameters", "host"]) == 2
    assert "needs offload.optimizer 'host' or 'disk'" in capsys.readouterr().err


def test_tokens_and_price_are_told_of_what_is_found(capsys) -> None:
    assert cli.main(["plan", *SEARCH, "--tokens", "1T", "--price", "2.5"]) == 0
    head, first = capsys.readouterr().out.splitlines()[1:3]
    assert {"days", "cost"} <= set(head.split())
    request = PlanRequest(model="llama-3-8b", machines="2x8 H100", search=True, global_size=64, tokens="1T", price=2.5)
    found = request.answer([DEVICE])
    assert isinstance(found, Found)
    assert f"{found.candidates[0].time.days(1e12):,.1f}" in first
    assert f"{found.candidates[0].time.cost(1e12):,.1f}" in first


def test_a_search_of_a_configuration_keeps_its_optimizer_and_obeys(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    RunConfig(model="gpt-tiny", optimizer="sgd", batch=16).save(path)
    request = PlanRequest(model=str(path), machines="4 H100", search=True, zero=1, dp=2, tokens="1B", price=1.0)
    found = request.answer([DEVICE])
    assert isinstance(found, Found)
    for candidate in found.candidates:
        setup = candidate.setup
        assert (setup.optimizer.name, setup.zero_stage, setup.layout.dp, setup.global_size) == ("sgd", 1, 2, 16)
        assert candidate.time.cost(1e9)


DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "fp16": {"enabled": True},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def test_a_deepspeed_file_is_obeyed_and_asks_for_the_model(tmp_path: Path, capsys) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))
    for words in ([str(path)], ["--config", str(path)]):
        assert cli.main(["plan", *words, "--machines", "8 A100"]) == 2
        said = capsys.readouterr().err
        assert f"name one next to it: speedlab plan llama-3-8b --config {path}" in said
    for request in (
        PlanRequest(model="llama-3-8b", config=str(path), machines="8 A100"),
        PlanRequest(model=str(path), layers=12, hidden=768, heads=12, machines="8 A100"),
    ):
        setup = request.plan([DEVICE]).setup
        assert (setup.zero_stage, setup.micro_size, setup.accumulation, setup.layout.dp) == (3, 2, 4, 8)
        assert (setup.dtype, setup.optimizer.name) == ("float16", "sgd")
    assert setup.shape.name == "12 layers of 768, 12 heads, feed-forward 3,072, vocabulary 50,257"
    changed = PlanRequest(
        model="llama-3-8b", config=str(path), machines="8 A100", zero=1, tp=2, offload_optimizer="host"
    )
    setup = changed.plan([DEVICE]).setup
    assert (setup.zero_stage, setup.layout.tp, setup.accumulation, setup.offload.optimizer) == (1, 2, 8, "host")
    assert cli.main(["plan", str(path), "--config", str(path)]) == 2
    assert "are two configurations" in capsys.readouterr().err


def test_a_schedule_of_stages_has_the_default_number_of_them() -> None:
    assert gpt3(schedule="interleaved").setup.chunks == ParallelConfig().chunks == 2
    assert gpt3(schedule="interleaved", chunks=3).setup.chunks == 3
    assert gpt3(schedule="1f1b").setup.chunks == 1
    assert "schedule interleaved of 2" in str(gpt3(schedule="interleaved"))


def test_any_model_is_described_by_its_sizes() -> None:
    sizes: dict[str, Any] = {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 128256,
        "seq": 8192,
    }
    made = PlanRequest(**sizes, gated=True, machines="8 H100").plan([DEVICE])
    named = PlanRequest(model="llama-3-8b", machines="8 H100").plan([DEVICE])
    assert replace(made.setup.shape, name="llama-3-8b") == named.setup.shape
    assert made.setup.shape.name == "32 layers of 4,096, 32 heads, feed-forward 14,336, vocabulary 128,256"


def test_what_sizes_leave_open_is_told_with_the_option_that_says_it() -> None:
    words: dict[str, Any] = {"layers": 8, "hidden": 512, "heads": 8, "machines": "1x8 H100-80"}
    assert "assumed: a vocabulary of 50,257 (--vocab sets it), sequences of 2,048 tokens (--seq sets it)" in str(
        PlanRequest(**words).plan([DEVICE])
    )
    assert "50,257 (--vocab" in str(PlanRequest(**words, search=True, global_size=64).answer([DEVICE]))
    said = str(PlanRequest(**words, vocab=50257, seq=2048).plan([DEVICE]))
    assert "--vocab" not in said
    assert "--seq" not in said


def test_the_width_of_a_head_may_be_said() -> None:
    made = PlanRequest(layers=4, hidden=100, heads=3, head_size=32, machines="8 H100").plan([DEVICE])
    assert head_size(made.setup.shape) == 32


def test_a_heading_does_not_name_a_model_that_was_replaced(tmp_path: Path) -> None:
    def heading(**words) -> str:
        return str(PlanRequest(**words, machines="8 H100").plan([DEVICE])).splitlines()[0]

    assert heading(model="GPT2").startswith("gpt2: 124 M parameters")
    assert heading(model="gpt2", layers=6).startswith("gpt2 with layers 6: ")
    assert heading(model="gpt2", layers=6, hidden=1024, heads=16).startswith("6 layers of 1,024, 16 heads, ")
    path = tmp_path / "mine.yaml"
    RunConfig(model={"layers": 24, "hidden": 1024, "heads": 16, "ffn_hidden": 4096}).save(path)
    assert heading(model=str(path)).startswith("24 layers of 1,024, 16 heads, ")
    assert "gpt-tiny" not in heading(model=str(path))


def test_an_8b_llama_is_not_said_to_fit_where_a_gate_keeps_more() -> None:
    """Four tensors of 14,336 in each of 32 layers: with three of them 73 GiB would be predicted, and fit."""
    made = plan("llama-3-8b", "8xA100", zero_stage=3)
    assert not made.fits
    shape = replace(made.setup.shape, ffn_hidden=2 * 14336)
    wider = plan(replace(shape, name="wider"), "8xA100", zero_stage=3)
    tensor = 8192 * 14336 * 2 * 32
    assert wider.heaviest.activations - made.heaviest.activations == pytest.approx(4 * tensor, rel=0.03)


def test_gpipe_of_an_encoder_and_decoder_holds_all_micro_batches() -> None:
    words: dict[str, Any] = {"pp": 4, "global_size": 32, "dp": 1, "zero_stage": 0}
    held = {s: plan("t5-3b", "4 H100", schedule=s, **words).heaviest.activations for s in ("1f1b", "gpipe")}
    assert held["gpipe"] > 4 * held["1f1b"]


def test_counts_as_people_write_them() -> None:
    assert [count(text) for text in ("300B", "1.5T", "3e11", "12", "2 k")] == [300e9, 1.5e12, 3e11, 12, 2000]
    with pytest.raises(ValueError, match="is no count"):
        count("B300")


def test_words_of_a_notebooks_line_are_read() -> None:
    asked = PlanRequest.of_words({"model": "gpt2", "global": 64, "zero": "3", "price": "1.5"})
    assert (asked.global_size, asked.zero, asked.price) == (64, 3, 1.5)


def test_a_gpu_of_this_machine_is_known_by_its_name() -> None:
    gpu = replace(DEVICE, kind="cuda", name="NVIDIA H200", capacity_bytes=140 * 2**30)
    hardware = hardware_here([gpu] * 2, "bfloat16")
    assert hardware.machines.device.name == "H200"
    assert hardware.machines.device.memory_bytes == 140 * 2**30
    assert hardware.machines.world_size == 2


def test_a_damaged_calibration_is_told_and_not_used(monkeypatch, tmp_path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    monkeypatch.setattr(store, "path", lambda folder=None: path)
    hardware = hardware_here([DEVICE], "float32")
    assert hardware.note.startswith("(not calibrated: ")
    assert hardware.calibration is None


def test_planning_starts_no_torch() -> None:
    code = "import sys; from speedlab.planner.request import PlanRequest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_refusal_is_a_config_error() -> None:
    from speedlab.cli.plan import plan as command

    with pytest.raises(ConfigError, match="no model is named"):
        command([])


def test_an_encoder_and_decoder_is_planned_by_published_rules_and_says_so() -> None:
    made = plan("t5-3b", "4x8 V100-32 nvlink2 ib-100x4", tp=1, pp=1, zero_stage=2, global_size=64)
    assert {rank.ranks for rank in made.memory} == {32}
    # 2 + 2/32 (4 where several micro-batches are summed) + 12/32 bytes of each parameter.
    shares = 2 + (4 if made.setup.accumulation > 1 else 2) / 32 + 12 / 32
    assert made.heaviest.model_states == pytest.approx(shares * made.parameters, rel=0.01)
    assert "published rules" in made.caution
    assert "published rules" in str(made)


def test_what_memory_was_never_compared_with_is_named() -> None:
    assert "memory" not in gpt3().caution
    assert "memory" not in gpt3(checkpointing="selective").caution
    plain = gpt3(checkpointing="selective", attention="plain").caution
    assert "attention's probabilities computed again was not compared with the engine" in plain
    tiled = plan(RunConfig(model={"ffn_tile": 64}), "1x1 A100-80")
    assert "memory" not in tiled.caution
    assert tiled.heaviest.activations < plan(RunConfig(), "1x1 A100-80").heaviest.activations


def test_padding_is_planned_and_told() -> None:
    """Of 4,000 tokens over three ranks, 4,002: each has 1,334 of them, and 4,000 count."""
    config = RunConfig(
        model={"layers": 2, "hidden": 96, "heads": 6, "context": 4096},
        data={"sequence_length": 4000},
        parallel={"cp": 3, "cp_pad": True},
        batch={"micro_size": 2},
    )
    padded = plan(config, "3 A100-80")
    assert padded.setup.tokens == 2 * 1334
    assert "sequences of 4,000 padded to 4,002, 0.05% of what is computed" in str(padded)
    assert padded.time.tokens_per_second == pytest.approx(2 * 4000 / padded.time.step_seconds)
    with pytest.raises(ValueError, match="4000 tokens do not divide by 3; 3999 or 4002 would, or set "):
        plan(config.replace(parallel={"cp_pad": False}), "3 A100-80")
    with pytest.raises(ValueError, match="4,000 tokens, which do not divide by 3; 3999 or 4002 would, or set"):
        plan(replace(padded.setup, cp_pad=False), "3 A100-80")
    assert "padded" not in str(plan(config.replace(data={"sequence_length": 3999}), "3 A100-80"))


def test_a_sparse_plan_says_and_draws_what_queries_see() -> None:
    """Windows of 256 tokens over 4,096 of a Llama: as the built-in GPT's, the blocks that are seen count."""
    sparse = {"attention": {"kind": "block_sparse", "window": 256}, "context": 4096}
    config = RunConfig(model=sparse, data={"sequence_length": 4096}, parallel={"tp": 8})
    shape = replace(presets.model("llama-3-8b"), sequence_length=4096)
    setups = [
        Setup.of_config(each, 8, dtype="bfloat16", shape=shape)
        for each in (config, config.replace(model={"attention": {"kind": "dense"}}))
    ]
    seen, dense = (plan(setup, "8 H100") for setup in setups)
    share = (64 * 5 - 10) / (64 * 65 / 2)
    assert seen.setup.attention_share == pytest.approx(share, rel=1e-12)
    assert dense.setup.attention_share == 1
    assert seen.time.parts["forward"] < dense.time.parts["forward"]
    scores = 12 * 32 * 4096 * 4096
    flops = [plan.time.tflops("model") / plan.time.tokens_per_second for plan in (dense, seen)]
    assert (flops[0] - flops[1]) * 8e12 == pytest.approx(scores * (1 - share), rel=1e-6)
    text = str(seen)
    assert "attention: longest path between two tokens: 17 layers; the model's 32 are enough for every token" in text
    assert "attention: a query sees 248 tokens on average" in text
    assert seen._repr_html_().count('class="speedlab-attention"') == 1
    assert "attention:" not in str(dense)
    assert "speedlab-attention" not in dense._repr_html_()
    assert replace(seen.setup, shape=replace(shape, sequence_length=8192)).attention_share < share
    assert seen.search().candidates[0].setup.pattern == config.model.attention


def test_islands_are_planned_and_searched_by_words() -> None:
    words = {"model": "gpt2-xl", "machines": "2x4 A100-40 eth-1", "global": 64, "islands": 2}
    plan = PlanRequest.of_words(words).answer([DEVICE])
    assert plan.setup.layout == Layout(dp=4, islands=2)
    assert plan.setup.global_size == 64
    assert "× dp 4 × islands 2" in str(plan)
    every = {**words, "outer-every-steps": 9, "outer-compression": "signs", "search": True}
    found = PlanRequest.of_words(every).answer([DEVICE])
    assert found.candidates
    assert "with islands 2" in found.asked
    assert all(each.setup.outer == OuterConfig(every_steps=9, compression="signs") for each in found.candidates)
    # What a plan of islands is searched further for are islands, too.
    assert all(each.setup.layout.islands == 2 for each in plan.search().candidates)
    with pytest.raises(ValueError, match="--outer-compression: said how islands meet, and there is one"):
        PlanRequest.of_words({**words, "islands": 1, "outer-compression": "signs"}).answer([DEVICE])
    with pytest.raises(ValueError, match="islands of 3 ranks cut the ranks of host 1"):
        PlanRequest.of_words({**words, "machines": "3x2 A100-80 eth-1", "global": 96}).answer([DEVICE])


def test_meetings_of_a_configuration_without_islands_are_refused(tmp_path: Path) -> None:
    RunConfig(batch={"micro_size": 2, "global_size": 8}).save(tmp_path / "run.yaml")
    request = PlanRequest(config=str(tmp_path / "run.yaml"), machines="1x4 A100-40", outer_every_steps=9)
    with pytest.raises(ValueError, match="--outer-every-steps: said how islands meet, and there is one"):
        request.answer([DEVICE])
