"""A pretended link: how it is read, when what is sent over it arrives, who may have one, and how it is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from calibration_samples import calibration, constants

from speedlab.cluster import Cluster, ClusterError, simulated_link
from speedlab.comm.simulated_link import SimulatedLink, arrival
from speedlab.config import RunConfig
from speedlab.hardware import cpu_devices
from speedlab.network import LinkRate
from speedlab.planner import parameter_count
from speedlab.planner.calibration import store
from speedlab.planner.hardware import links
from speedlab.planner.hardware.local import hardware_here
from speedlab.planner.setup import Setup
from speedlab.planner.time.efficiency import Efficiency
from speedlab.telemetry.prediction import prediction_of
from speedlab.telemetry.records import Event

GIGABIT = LinkRate(bits_per_second=1e9, latency_seconds=1e-3)
NUMBERS = {"text": "1 Gbit/s 1 ms", "bits_per_second": 1e9, "latency_seconds": 1e-3}


@pytest.fixture(autouse=True)
def own_ipython_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "bits", "seconds", "shown"),
    [
        ("1 Gbit/s 1 ms", 1e9, 1e-3, "1 Gbit/s 1 ms"),
        (" 100Mbit/s ", 1e8, 0.0, "100 Mbit/s"),
        ("2500 Mbit/s  0.05 ms", 2.5e9, 5e-5, "2.5 Gbit/s 50 us"),
        ("500 bit/s 2 s", 500.0, 2.0, "500 bit/s 2 s"),
        ("0.00001 bit/s 0.00001 us", 1e-5, 1e-11, "0.00001 bit/s 0.00001 us"),
        ("4000000000000 Gbit/s", 4e21, 0.0, "4000000000000 Gbit/s"),
    ],
)
def test_a_link_is_read_and_written(text: str, bits: float, seconds: float, shown: str) -> None:
    link = LinkRate.parse(text)
    assert link.bits_per_second == pytest.approx(bits)
    assert link.latency_seconds == pytest.approx(seconds)
    assert str(link) == shown
    assert str(LinkRate.parse(shown)) == shown


@pytest.mark.parametrize(
    "text", ["", "fast", "1 GB/s", "0 Gbit/s", "-1 Gbit/s", "1 Gbit/s 1", "1 ms", 5, "9" * 400 + " bit/s"]
)
def test_what_is_no_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ClusterError, match=r"cannot be read; write a bandwidth above 0 .*: '1 Gbit/s 1 ms'"):
        Cluster(link=text, start=False)


def test_a_link_arrives_after_what_is_before_it() -> None:
    # 125,000 bytes take 1 ms at 1 Gbit/s.
    assert arrival(GIGABIT, now=5.0, free=0.0, nbytes=125_000) == pytest.approx((5.002, 5.001))
    assert arrival(GIGABIT, now=5.0, free=5.5, nbytes=125_000, trips=2) == pytest.approx((5.503, 5.501))


def test_a_line_waits_only_for_what_is_left() -> None:
    now, slept = [10.0], []
    line = SimulatedLink(GIGABIT, clock=lambda: now[0], sleep=slept.append)
    first, second = line.book("all_gather", 250_000), line.book("all_reduce", 125_000)
    assert (first, second) == pytest.approx((10.003, 10.005))
    line.wait_until(first)
    now[0] = 10.004  # Computing went on meanwhile.
    line.wait_until(first)
    line.wait_until(second)
    assert slept == pytest.approx([0.003, 0.001])
    assert (line.has_arrived(first), line.has_arrived(second)) == (True, False)
    assert str(line) == "pretended 1 Gbit/s 1 ms"


def test_hosts_and_gpus_have_links_of_their_own() -> None:
    for way in ({"hosts": ["a:1"]}, {"slurm": {"nodes": 2}}):
        with pytest.raises(ClusterError, match="hosts have links of their own; leave out link, or hosts, slurm"):
            Cluster(link="1 Gbit/s", start=False, **way)
    devices = cpu_devices(2)
    assert simulated_link.between(devices, GIGABIT) == "1 Gbit/s 1 ms"
    assert simulated_link.between(devices, None) == ""
    object.__setattr__(devices[0], "kind", "cuda")
    with pytest.raises(ClusterError, match="which only CPU engines pretend; add device='cpu'"):
        simulated_link.between(devices, GIGABIT)


def test_a_prediction_takes_the_link_that_the_run_tells_of_and_says_that_it_is_pretended() -> None:
    config = RunConfig(zero=1, batch={"micro_size": 2})
    said = {"parameters": parameter_count(config.model), "dtype": "float32", "dp": 2, "pp": 1, "tp": 1, "zero": 1}
    events = [Event(step=0, time=0.0, kind="started", text="", details=said)]
    usual = prediction_of(config, events, cpu_devices(2))
    events = [Event(step=0, time=0.0, kind="started", text="", details={**said, "pretended_link": NUMBERS})]
    slow = prediction_of(config, events, cpu_devices(2))
    assert usual is not None
    assert slow is not None
    assert "pretended" not in usual.note
    assert slow.note.endswith("(over a pretended link of 1 Gbit/s 1 ms)")
    tokens = 2 * 2 * config.data.sequence_length
    # Gradients there and parameters back, half of each: as many bytes as the gradients have.
    wire = parameter_count(config.model) * 4 / 125e6
    took = [tokens / each.speeds[0][1] for each in (usual, slow)]
    assert took[1] - took[0] == pytest.approx(wire, rel=0.15)


@pytest.mark.parametrize("gigabits", [1, 1000])
def test_on_a_calibrated_machine_what_is_sent_takes_what_the_link_takes_where_that_is_longer(
    gigabits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "path", lambda folder=None: tmp_path / "calibration.json")
    store.save(calibration(constants(factors={"data parallel": 2.0})))
    layouts = {
        "data parallel": {"dp": 2},
        "tensor parallel": {"tp": 2},
        "pipeline messages": {"pp": 2},
    }
    for part, layout in layouts.items():
        config = RunConfig(zero=0, batch={"micro_size": 2, "accumulation": 4}, parallel=layout)
        setup = Setup.of_config(config, 2, dtype="float32")
        here = hardware_here(cpu_devices(2), "float32")
        link = links.pretended(f"{gigabits} Gbit/s", bits_per_second=gigabits * 1e9, latency_seconds=0.0)
        usual, over = here.time(setup), here.over(link).time(setup)
        # What the formulas say of the same devices with that link: its bytes at its rate, without the factor here.
        plain = replace(here.over(link), efficiency=Efficiency.measured(kernel_seconds=0)).time(setup)
        assert usual.parts[part] > 0
        assert over.parts[part] == pytest.approx(max(usual.parts[part], plain.parts[part]))
        longer = over.parts[part] - usual.parts[part]
        assert (longer > 0) == (gigabits == 1)
        # A pipeline's first micro-batch of four waits for its message while nothing else is there to do.
        waited = longer * (1 + 1 / 4 if part == "pipeline messages" else 1)
        assert over.step_seconds - usual.step_seconds == pytest.approx(waited)
        assert over.machines.hosts == 2


def test_a_planned_link_is_the_one_that_is_pretended() -> None:
    link = links.pretended(**NUMBERS)
    assert (link.bandwidth_bytes_per_second, link.latency_seconds) == (125e6, 1e-3)
    assert link.name == "pretended link of 1 Gbit/s 1 ms"
