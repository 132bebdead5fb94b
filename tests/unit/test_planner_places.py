"""What a rank is predicted to hold on device, host and disk, how it travels, and whether each place holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speedlab import cli
from speedlab.config import ConfigError, ModelConfig, OffloadConfig, RunConfig
from speedlab.hardware import Device
from speedlab.layout import Layout
from speedlab.planner.hardware import disk_rates
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.hardware.disk_rates import DiskRates
from speedlab.planner.hardware.hosts import HOSTS, HostSpec, free_disk_bytes
from speedlab.planner.hardware.local import Hardware, hardware_here
from speedlab.planner.memory.places import PlaceBytes, places
from speedlab.planner.memory.predict import predict_memory
from speedlab.planner.plan import plan, plan_setup
from speedlab.planner.request import PlanRequest, size_bytes
from speedlab.planner.search import search
from speedlab.planner.search_space import Fixed
from speedlab.planner.setup import ModelShape, Setup
from speedlab.planner.time.efficiency import efficiency_of
from speedlab.planner.time.offload import flows
from speedlab.planner.time.step_time import PARTS, predict_time, rank_parameters

GPT2 = ModelConfig(preset="gpt2")
CORES = Device(
    kind="cpu",
    name="cpu 0",
    uuid="",
    cores=(0,),
    threads=1,
    capacity_bytes=2**33,
    free_bytes=2**33,
    fast_dtype="float32",
)


def setup(optimizer: Any = "none", parameters: Any = "none", activations: Any = "none", **changes: Any) -> Setup:
    first = {
        "shape": ModelShape.of_config(GPT2, 512),
        "layout": Layout(),
        "zero_stage": 3,
        "dtype": "bfloat16",
        "micro_size": 2,
        "accumulation": 1,
        "offload": OffloadConfig(optimizer=optimizer, parameters=parameters, activations=activations),
    }
    return Setup(**{**first, **changes})


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2)])
def test_optimizer_states_and_summed_gradients_lie_there(place, layout) -> None:
    here = predict_memory(setup(layout=layout))[0]
    away = predict_memory(setup(place, layout=layout))[0]
    states = ("gradients", "master_weights", "optimizer_moments")
    held = away.host if place == "host" else away.disk
    assert {name: held[name] for name in states} == {name: getattr(here, name) for name in states}
    assert away.model_states == away.parameters == here.parameters
    assert held.keys() == set(states)


def test_gradients_that_every_rank_has_stay_on_the_device() -> None:
    for stage, stay in ((0, True), (1, True), (2, False), (3, False)):
        here = predict_memory(setup(layout=Layout(dp=2), zero_stage=stage))[0]
        away = predict_memory(setup("host", layout=Layout(dp=2), zero_stage=stage))[0]
        assert away.gradients == (here.gradients if stay else 0)
        assert ("gradients" in away.host) is not stay


def test_float32_parameters_are_their_own_masters_only_beside_the_update() -> None:
    one = predict_memory(setup("host", dtype="float32"), device="cpu")[0]
    assert "master_weights" not in one.host
    gpu = predict_memory(setup("host", dtype="float32"))[0]
    assert gpu.host["master_weights"] == gpu.parameters
    both = predict_memory(setup("host", "host", dtype="float32"))[0]
    assert "master_weights" not in both.host
    assert both.host["parameters"] == gpu.parameters
    assert both.parameters == 0


def test_parameters_away_pass_through_the_buffers_of_stage_three_with_one_rank_too() -> None:
    here, away = predict_memory(setup("host"))[0], predict_memory(setup("host", "disk"))[0]
    assert here.parameters == away.disk["parameters"]
    assert away.parameters == 0
    two_blocks = 2 * 2 * 12 * 768**2
    assert away.communication_buffers - here.communication_buffers > two_blocks


def test_what_lies_on_disk_passes_through_two_flats_of_each_state() -> None:
    two = predict_memory(setup("disk"))[0]
    # The root: the table and the positions, to 16 bytes; moments, masters and gradients of it.
    root = (50257 * 768 + 1024 * 768 + 768 + 768 + 7) // 8 * 8
    assert two.host == {"communication_buffers": pytest.approx(2 * root * (8 + 4 + 2), rel=1e-3)}
    four = predict_memory(setup("disk", "disk"))[0]
    assert four.host["communication_buffers"] == pytest.approx(2 * root * (8 + 4 + 2 + 2), rel=1e-3)
    assert predict_memory(setup("host", "host"))[0].host.keys() == {
        "parameters",
        "gradients",
        "master_weights",
        "optimizer_moments",
    }


def test_inputs_of_blocks_wait_on_the_host_of_a_gpu() -> None:
    shape = replace(setup().shape, vocab_size=1000)  # So that blocks, not logits, hold most.
    plain = setup(checkpointing="block", shape=shape)
    away = setup("none", "none", "host", checkpointing="block", shape=shape)
    one_input = 2 * 512 * 768 * 2
    before, after = predict_memory(plain)[0], predict_memory(away)[0]
    assert after.host == {"activations": 12 * one_input}
    assert 10 * one_input <= before.activations - after.activations <= 12 * one_input
    assert predict_memory(away, device="cpu") == predict_memory(plain, device="cpu")


def test_inputs_wait_for_as_many_micro_batches_as_are_under_way() -> None:
    away = setup("none", "none", "host", checkpointing="block", layout=Layout(pp=2), zero_stage=0, accumulation=4)
    first, last = predict_memory(away)
    one_input = 2 * 512 * 768 * 2
    blocks = away.shape.layers // 2
    assert first.host["activations"] % one_input == 0
    # Two micro-batches are under way on the first rank, one on the last, which is given its first block's input.
    assert first.host["activations"] >= 2 * (blocks - 1) * one_input
    assert last.host["activations"] <= blocks * one_input


def test_on_cpu_cores_the_host_is_the_device() -> None:
    case = setup("host", dtype="float32")
    here, away = (predict_memory(one, device="cpu")[0] for one in (setup(dtype="float32"), case))
    assert away.one_memory
    assert away.host_bytes == away.total - away.counted
    assert away.total - here.total == away.communication_buffers - here.communication_buffers
    disk = predict_memory(setup("disk", dtype="float32"), device="cpu")[0]
    assert disk.total < here.total


def test_places_are_listed_with_what_is_there() -> None:
    memory = predict_memory(setup("disk", "host"))[0]
    assert list(memory.by_place()) == ["device", "host", "disk"]
    assert memory.by_place()["host"].keys() == {"parameters", "communication_buffers"}
    assert list(predict_memory(setup())[0].by_place()) == ["device"]


# ---- whether it fits -------------------------------------------------------------------------------------------------


def machines(**host: Any) -> Machines:
    found = Machines.parse("2 V100-16")
    return replace(found, host=HostSpec(**host))


def test_each_place_has_its_capacity() -> None:
    case = setup("disk", "host", layout=Layout(dp=2))
    memory = predict_memory(case)
    found = places(memory, case, machines(memory_bytes=10**10, disk_bytes=10**8))
    assert [place.name for place in found] == ["device", "host", "disk"]
    assert [place.capacity_bytes for place in found[1:]] == [10**10 // 2, 10**8 // 2]
    assert [place.fits for place in found] == [True, True, False]
    assert str(found[2]).startswith("disk: ")
    assert str(found[2]).endswith(" too much")
    assert places(memory, case, machines(disk_bytes=None))[2].fits
    assert str(PlaceBytes(name="disk", held_bytes=2**30, capacity_bytes=None)) == (
        "disk: 1.0 GiB, its capacity is not known"
    )


def test_a_plan_fits_where_every_place_does() -> None:
    case = setup("disk", layout=Layout(dp=2), dtype="float16")
    roomy = plan_setup(case, Hardware.of(machines(disk_bytes=10**12)))
    assert roomy.fits
    text = str(roomy)
    assert "optimizer on disk" in text
    assert "\ndisk: " in text
    assert "on disk, " in text
    small = plan_setup(case, Hardware.of(machines(disk_bytes=10**8)))
    assert not small.fits
    assert small.free_bytes > 0
    assert "does not fit on disk" in str(small)
    assert "speedlab-plan" in small._repr_html_()
    assert "<svg" in small._repr_html_()
    assert "on disk" in small._repr_html_()
    assert roomy.table()[0]["disk"] == roomy.memory[0].disk_bytes


def test_states_away_are_offered_where_a_device_is_too_small() -> None:
    big = plan("gpt2-xl", "1 V100-16", micro_size=1)
    assert not big.fits
    words = [str(change) for change in big.cheapest_changes()]
    assert any("offload.optimizer none → host" in text for text in words)
    on_cores = plan_setup(
        setup(dtype="float32", micro_size=1),
        replace(hardware_here([CORES], "float32"), kind="cpu"),
    )
    tight = replace(on_cores.hardware.machines.device, memory_bytes=on_cores.heaviest.total - 2**20)
    hardware = replace(on_cores.hardware, machines=replace(on_cores.machines, device=tight))
    words = [str(change) for change in plan_setup(on_cores.setup, hardware).cheapest_changes()]
    assert not any("→ host" in text for text in words)


def test_what_cannot_lie_there_is_refused_before_anything_is_planned() -> None:
    with pytest.raises(ValueError, match=r"offload\.parameters 'host' needs zero\.stage 3, and it is 2"):
        plan("gpt2", "1 H100", zero_stage=2, offload=OffloadConfig(optimizer="host", parameters="host"))


def test_a_search_with_parameters_away_takes_stage_three() -> None:
    offload = OffloadConfig(optimizer="host", parameters="host", activations="host")
    found = search(
        ModelShape.of_config(GPT2, 512),
        Machines.parse("4 V100-16"),
        global_size=16,
        fixed=Fixed(others={"offload": offload}),
    )
    assert found
    assert all(each.setup.zero_stage == 3 and each.setup.checkpointing == "block" for each in found)
    assert "optimizer on host, parameters on host" in str(found[0])


# ---- time ------------------------------------------------------------------------------------------------------------


def test_bytes_on_the_way_are_those_of_the_engine() -> None:
    gpu = Machines.parse("1 H100")
    owned = 1000.0
    passes, update = flows(setup("host", accumulation=2), gpu, owned)
    assert (passes.link, update.link) == (2 * 4 * owned, 2 * owned)  # Sums in float32 twice; parameters come back once.
    passes, update = flows(setup("disk", "disk", accumulation=2), gpu, owned)
    assert passes.disk_read == 2 * 2 * 2 * owned + 4 * owned  # Parameters in each pass; what is summed so far.
    assert passes.disk_write == 2 * 4 * owned
    assert update.disk_read == (4 + 8 + 4) * owned  # Masters, moments, gradients.
    assert update.disk_write == (4 + 8 + 2) * owned
    assert update.link == 0
    passes, update = flows(setup("host", layout=Layout(dp=2), zero_stage=1), gpu, owned)
    assert (passes.link, update.link) == (0, (2 + 2) * owned)


def test_parameters_that_are_gathered_are_not_read_for_the_update() -> None:
    cores, owned = hardware_here([CORES], "float32").machines, 1000.0
    after = setup("disk", "disk", dtype="float32")
    inside = replace(after, optimizer=after.optimizer.model_copy(update={"in_backward": True}))
    for asked, states in ((after, 2 + 1 + 2 + 1), (inside, 2 + 2)):  # Passes, for the update, moments, gradients.
        passes, update = flows(asked, cores, owned)
        assert (passes + update).disk_read == 4 * states * owned


def test_only_what_is_not_hidden_is_waited_for() -> None:
    def time(read: float, **changes: Any):
        disk = HostSpec(disk_read_bytes_per_second=read, disk_write_bytes_per_second=read)
        found = replace(Machines.parse("1 H100"), host=disk)
        return predict_time(setup("disk", **changes), found, efficiency_of(found.device))

    quick, slow = time(1e15), time(1e9)
    assert quick.parts["offload"] == pytest.approx(0.0, abs=1e-3)
    assert quick.parts["optimizer"] == slow.parts["optimizer"] > 0
    assert slow.parts["offload"] > 1
    assert "the disk" in slow.limit
    assert "disk was not measured" in slow.caution
    assert "offload" in PARTS
    here = predict_time(setup(), Machines.parse("1 H100"), efficiency_of(Machines.parse("1 H100").device))
    assert here.parts["offload"] == 0


def late(asked: Setup) -> Setup:
    return replace(asked, offload=asked.offload.model_copy(update={"delayed_update": 1}))


def test_a_late_update_is_beside_the_step_but_for_reading_masters_again() -> None:
    disk = HostSpec(disk_read_bytes_per_second=1e9, disk_write_bytes_per_second=2e9)
    gpu = replace(Machines.parse("1 H100"), host=disk)
    efficiency = efficiency_of(gpu.device)
    on_host, alongside = (predict_time(each, gpu, efficiency).parts for each in (setup("host"), late(setup("host"))))
    computing = on_host["forward"] + on_host["backward"] + on_host["recompute"] + on_host["logits"]
    assert on_host["optimizer"] > computing > 0, "else there is nothing to see"
    assert alongside["optimizer"] == pytest.approx(on_host["optimizer"] - computing)
    owned = rank_parameters(setup("disk"))
    after = predict_time(late(setup("disk")), gpu, efficiency).parts
    moving = 14 * owned / 1e9 + 14 * owned / 2e9  # Masters, moments, gradients; the latter go in backward.
    shown = 4 * owned / 1e9
    assert after["offload"] == pytest.approx(moving - computing - after["optimizer"] + shown)


def test_gradients_of_two_steps_lie_with_the_states_and_masters_beside_their_parameters() -> None:
    asked = setup("host", dtype="float32", layout=Layout(dp=2), zero_stage=1)
    (at_once,), (alongside,) = (predict_memory(each, device="cpu") for each in (asked, late(asked)))
    owned = at_once.host["optimizer_moments"] // 2
    assert (at_once.gradients, alongside.gradients) == (2 * owned, 2 * owned), "whole ones stay on the device"
    assert (at_once.host.get("gradients", 0), alongside.host["gradients"]) == (0, owned)
    assert (at_once.host.get("master_weights", 0), alongside.host["master_weights"]) == (0, owned)
    asked = setup("disk", dtype="bfloat16")
    (at_once,), (alongside,) = (predict_memory(each, device="cuda") for each in (asked, late(asked)))
    assert alongside.disk["gradients"] == 2 * at_once.disk["gradients"]
    assert alongside.disk["master_weights"] == at_once.disk["master_weights"]


def test_a_disk_is_shared_by_the_ranks_of_a_host() -> None:
    gpus = Machines.parse("8 H100")
    _, update = flows(setup("disk"), gpus, 1e9)
    alone = update.seconds(setup("disk"), gpus, efficiency_of(gpus.device))
    assert update.seconds(setup("disk", layout=Layout(dp=8)), gpus, efficiency_of(gpus.device)) == pytest.approx(
        8 * alone
    )


def test_on_cpu_cores_nothing_travels_to_the_host() -> None:
    hardware = hardware_here([CORES], "float32")
    times = [hardware.time(setup(place, dtype="float32")) for place in ("none", "host", "disk")]
    assert times[0].parts == times[1].parts
    assert times[2].parts["offload"] > 0


# ---- machines and words ----------------------------------------------------------------------------------------------


def test_described_machines_have_hosts() -> None:
    assert Machines.parse("4x8 A100-80").host is HOSTS["A100-80"]
    asked = PlanRequest(model="gpt2", machines="1 H200", host_bytes="128GiB", disk_bytes="1.5TB")
    host = asked.hardware([CORES]).machines.host
    assert (host.memory_bytes, host.disk_bytes) == (128 * 2**30, 1_500_000_000_000)
    assert host.disk_read_bytes_per_second == HOSTS["H200"].disk_read_bytes_per_second


def test_this_machines_disk_is_that_of_the_folder(tmp_path: Path) -> None:
    free = free_disk_bytes(tmp_path / "not" / "yet")
    assert free is not None
    assert free > 0
    assert hardware_here([CORES], "float32", tmp_path).machines.host.disk_bytes == pytest.approx(free, rel=0.1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("128GiB", 128 * 2**30), ("1.5 TB", 1.5e12), ("30e12", 30e12), ("512 MB", 512e6), ("7", 7), ("2KiB", 2048)],
)
def test_sizes_are_read(text, size) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "12 GiBs", "3 XB", "-1GB"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(ValueError, match="is no size; write for instance 128GiB"):
        size_bytes(text)


def test_the_terminal_plans_states_on_disk(capsys) -> None:
    words = ["plan", "gpt2", "--machines", "1 V100-16", "--zero", "3", "--offload.optimizer", "disk"]
    assert cli.main([*words, "--offload.parameters", "host", "--disk-bytes", "2TB"]) == 0
    said = capsys.readouterr().out
    assert "optimizer on disk, parameters on host" in said
    assert "\nhost: " in said
    assert "\ndisk: " in said
    assert cli.main([*words, "--disk-bytes", "1GB"]) == 1
    assert "does not fit on disk" in capsys.readouterr().out
    assert cli.main(["plan", "gpt2", "--offload", "optimizer"]) == 2
    assert "'--offload'; the nearest are '--offload.optimizer', '--offload.parameters'" in capsys.readouterr().err


def test_a_disk_that_was_measured_is_remembered_by_its_file_system(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert disk_rates.known(tmp_path) is None
    assert not hardware_here([CORES], "float32", tmp_path).machines.host.disk_measured
    disk_rates.keep(tmp_path, DiskRates(read_bytes_per_second=3e9, write_bytes_per_second=1e9))
    disk_rates.keep(tmp_path, DiskRates(read_bytes_per_second=2e9, write_bytes_per_second=1e9))
    assert disk_rates.known(tmp_path / "not" / "yet") == DiskRates(
        read_bytes_per_second=2e9, write_bytes_per_second=1e9
    )
    host = hardware_here([CORES], "float32", tmp_path).machines.host
    assert (host.disk_read_bytes_per_second, host.disk_measured) == (2e9, True)
    assert [file.name for file in disk_rates.path().parent.iterdir()] == [disk_rates.path().name]
    with pytest.raises(ValueError, match="is no speed of a disk"):
        disk_rates.keep(tmp_path, DiskRates(read_bytes_per_second=0, write_bytes_per_second=1e9))
    for text in ("{", "[1]", f'{{"{tmp_path.stat().st_dev}": [1, "x"]}}', f'{{"{tmp_path.stat().st_dev}": [-1, 2]}}'):
        disk_rates.path().write_text(text)
        assert disk_rates.known(tmp_path) is None


# ---- the configuration -----------------------------------------------------------------------------------------------


def test_a_configuration_says_where_states_lie() -> None:
    config = RunConfig(zero=3).replace(offload={"optimizer": "disk"})
    assert config.offload == OffloadConfig(optimizer="disk")
    assert config.replace(offload={"parameters": "host"}).offload == OffloadConfig(optimizer="disk", parameters="host")
    assert Setup.of_config(config, 1, dtype="float32").offload == config.offload
    assert RunConfig(**RunConfig(offload={"folder": "~/x"}).model_dump()).offload.folder == Path.home() / "x"


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        (
            {"zero": 2, "offload": {"optimizer": "host", "parameters": "host"}},
            ["offload.parameters 'host' needs zero.stage 3, and it is 2", "set zero.stage to 3"],
        ),
        (
            {"zero": 3, "offload": {"parameters": "disk"}},
            ["offload.parameters 'disk' needs offload.optimizer 'host' or 'disk', and it is 'none'"],
        ),
        (
            {"offload": {"activations": "host"}},
            ["offload.activations 'host' needs activation.checkpointing 'block', and it is 'none'"],
        ),
        ({"offload": "disk"}, ["offload is 'disk', but it has fields of its own", 'offload={"optimizer": "disk"}']),
        ({"offload": {"optimizer": "nvme"}}, ["offload.optimizer: Input should be 'none', 'host' or 'disk'"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(fields, texts) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**fields)
    for text in texts:
        assert text in str(caught.value)
