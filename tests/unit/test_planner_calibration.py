"""A measured machine: constants from times, predictions from constants, what runs teach, files that nobody trusts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
from calibration_samples import RATES, calibration, constants

from speedlab.data.cache import default_cache
from speedlab.layout import Layout
from speedlab.planner.calibration import CLASSES, Calibration, engine_events, store
from speedlab.planner.calibration.fit import (
    BlockTime,
    CollectiveTime,
    Samples,
    SetupTime,
    counts,
    fit,
    fit_all,
    fit_constants,
)
from speedlab.planner.calibration.learn import learn
from speedlab.planner.setup import ModelShape, Setup
from speedlab.planner.time.communication import Ring
from speedlab.planner.time.kernels import Rates, block_pass, head_pass
from speedlab.planner.time.step_time import predict_time
from speedlab.telemetry.records import Ledger

SHAPE = ModelShape(
    name="small",
    layers=4,
    hidden=64,
    heads=4,
    ffn_hidden=256,
    vocab_size=1000,
    sequence_length=64,
    biases=frozenset(),
    position="rotary",
    norm="rms",
)


def setup_of(shape: ModelShape = SHAPE, *, pp: int = 1, dp: int = 1, tp: int = 1, **changes) -> Setup:
    values = {"zero_stage": 0, "dtype": "float32", "micro_size": 2, "accumulation": 1, **changes}
    return Setup(shape=shape, layout=Layout(pp=pp, dp=dp, tp=tp), **values)


# ---- constants from times --------------------------------------------------------------------------------------------


def test_counts_are_those_of_a_block_by_hand():
    setup = setup_of()
    flop, attention, nbytes, kernels, drawn = counts(lambda rates: block_pass(setup, rates).forward, setup)
    tokens, hidden = 2 * 64, 64
    assert flop == 2 * tokens * 12 * hidden**2  # qkv, out, up and down: 3 + 1 + 4 + 4 squares
    assert attention == pytest.approx(4 * 2 * 64 * 64 * hidden / 2)  # scores and values, half of them masked
    assert nbytes > 4 * 12 * hidden**2  # at least the weights are read
    assert kernels >= 5
    assert drawn == 0, "nothing is dropped"


def test_least_squares_keep_above_zero_and_above_the_least():
    rows = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
    assert fit(rows, [2.0, 3.0, 5.0]) == pytest.approx([2, 3])
    # A negative slope is what plain least squares would give for the second.
    assert fit([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.5])[1] == 0
    assert fit(rows, [2.0, 3.0, 5.0], least=(0.0, 4.0))[1] == pytest.approx(4)
    assert fit(rows, [2.0, 3.0, 5.0], known=[1.0, 1.0, 2.0]) == pytest.approx([1, 2])


SHAPES = [
    replace(SHAPE, hidden=hidden, heads=heads, ffn_hidden=4 * hidden, sequence_length=length)
    for hidden, heads, length in ((64, 4, 64), (192, 6, 128), (384, 6, 256), (768, 12, 64), (96, 2, 512))
]


def made_samples(rates: Rates, ring: Ring, own: dict[str, float], **changes) -> Samples:
    """What a machine would measure that is exactly as the formulas say, but for bytes and kernels of heads, updates and
    sums of tensor ranks, which take 2, 3 and 1.5 times as long."""
    setups = [setup_of(shape) for shape in SHAPES]
    blocks = [block_pass(setup, rates) for setup in setups]
    heads = [
        setup_of(replace(SHAPE, chunked_loss=chunked, vocab_size=size))
        for chunked in (True, False)
        for size in (100, 1000, 9000)
    ]
    head_rates = replace(rates, memory_bytes=rates.memory_bytes / 2, kernel_seconds=2 * rates.kernel_seconds)
    samples = Samples(
        engines=2,
        threads=1,
        dtype="float32",
        blocks=[
            BlockTime(setup=setup, forward=each.forward, backward=each.backward)
            for setup, each in zip(setups, blocks, strict=True)
        ],
        heads=[
            SetupTime(setup=head, seconds=each.forward + each.backward)
            for head, each in ((head, head_pass(head, head_rates)) for head in heads)
        ],
        # Read and written: weight and two moments; the gradient is read twice: 32 bytes.
        update_seconds=3 * 32 / rates.memory_bytes,
        byte_seconds=0.5 / rates.memory_bytes,
        flop_seconds=0.5 / rates.matmul_flops,
        collectives=[
            *(CollectiveTime(name="all_gather", nbytes=n, seconds=ring.gather(n)) for n in (10**5, 10**7)),
            *(CollectiveTime(name="reduce_scatter", nbytes=n, seconds=ring.gather(n)) for n in (10**5, 10**7)),
            *(CollectiveTime(name="sum", nbytes=n, seconds=1.5 * ring.all_reduce(n)) for n in (10**4, 10**6)),
            CollectiveTime(name="send", nbytes=10**6, seconds=ring.latency_seconds + 10**6 / 1e9),
        ],
        steps=(),
        larger_steps=(),
        **changes,
    )
    fitted = calibration(fit_constants(samples, calibration()))
    steps = []
    for layers, accumulation, dp in ((2, 1, 2), (4, 3, 2), (6, 1, 1), (3, 2, 1), (5, 4, 2), (8, 2, 1)):
        setup = setup_of(replace(SHAPE, layers=layers), accumulation=accumulation, dp=dp, zero_stage=2)
        events = engine_events(setup)
        kernels = fitted.predict(setup).step_seconds
        steps.append(SetupTime(setup=setup, seconds=kernels + sum(own[name] * events[name] for name in own)))
    return replace(samples, steps=steps)


def test_a_machine_that_is_as_the_formulas_say_is_found():
    rates = Rates(matmul_flops=4e10, attention_flops=1.5e10, memory_bytes=6e9, element_bytes=4, kernel_seconds=2e-5)
    ring = Ring(ranks=2, bytes_per_second=3e9, latency_seconds=4e-5, crosses_hosts=False)
    own = {"step": 2e-3, "block": 3e-4, "gather": 5e-5}
    found = fit_constants(made_samples(rates, ring, own), calibration())
    assert asdict(found.rates["rotary"]) == pytest.approx(asdict(rates), rel=1e-6, abs=1e-12)
    assert found.link_bytes_per_second == pytest.approx(3e9, rel=1e-6)
    assert found.link_seconds == pytest.approx(4e-5, rel=1e-6)
    assert found.message_bytes_per_second == pytest.approx(1e9, rel=1e-6)
    for kind in ("logits chunked", "logits full"):
        assert found.rates[kind].memory_bytes == pytest.approx(3e9, rel=1e-6)
        assert found.rates[kind].kernel_seconds == pytest.approx(4e-5, rel=1e-6)
    assert found.factors["optimizer"] == pytest.approx(3)
    assert found.factors["tensor parallel"] == pytest.approx(1.5)
    assert found.block_error == pytest.approx(0, abs=1e-9)
    for name, seconds in own.items():
        assert found.event_seconds[name] == pytest.approx(seconds, rel=1e-4)


def test_other_kinds_of_blocks_have_their_own_time_between_products():
    rates = Rates(matmul_flops=4e10, attention_flops=1e10, memory_bytes=6e9, element_bytes=4, kernel_seconds=2e-5)
    slower = replace(rates, memory_bytes=1.5e9, kernel_seconds=5e-5, drawn_seconds=8e-9)
    ring = Ring(ranks=2, bytes_per_second=3e9, latency_seconds=4e-5, crosses_hosts=False)
    samples = made_samples(rates, ring, {})
    dropping = [replace(shape, dropout=0.1, position="learned") for shape in SHAPES]
    # Torch's attention with dropout on processors makes all probabilities.
    blocks = [block_pass(setup_of(shape, attention="plain"), slower) for shape in dropping]
    more = [
        BlockTime(setup=setup_of(shape), forward=each.forward, backward=each.backward)
        for shape, each in zip(dropping, blocks, strict=True)
    ]
    found = fit_constants(replace(samples, blocks=[*samples.blocks, *more]), calibration())
    assert found.rates["dropping"].memory_bytes == pytest.approx(1.5e9, rel=1e-6)
    assert found.rates["dropping"].drawn_seconds == pytest.approx(8e-9, rel=1e-6)
    assert found.rates["rotary"].kernel_seconds == pytest.approx(2e-5, rel=1e-6), "the others are left as they are"
    predicted = calibration(found).predict(setup_of(dropping[0]))
    assert predicted.parts["forward"] == pytest.approx(SHAPE.layers * blocks[0].forward)
    rotary = calibration(found).predict(setup_of(SHAPES[0]))
    assert rotary.parts["forward"] == pytest.approx(SHAPE.layers * block_pass(setup_of(SHAPES[0]), rates).forward)


def test_shared_cores_stretch_kernels_and_not_collectives():
    rates = Rates(matmul_flops=4e10, attention_flops=1e10, memory_bytes=6e9, element_bytes=4, kernel_seconds=2e-5)
    ring = Ring(ranks=2, bytes_per_second=3e9, latency_seconds=4e-5, crosses_hosts=False)
    samples = made_samples(rates, ring, {})
    found = fit_constants(samples.shared(2), calibration())
    assert found.rates["rotary"].matmul_flops == pytest.approx(2e10, rel=1e-6)
    assert found.rates["rotary"].kernel_seconds == pytest.approx(4e-5, rel=1e-6)
    assert found.link_bytes_per_second == pytest.approx(3e9, rel=1e-6)


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_what_predict_time_is_given_asks_the_calibration():
    here = calibration()
    setup = setup_of(dp=2)
    given = predict_time(setup, here.machines(2), here.efficiency(2))
    assert given.parts == here.predict(setup).parts
    plain = predict_time(setup, here.machines(2), here.shares(2, "float32"))
    assert plain.parts["engine"] == 0
    assert given.step_seconds == pytest.approx(plain.step_seconds + 1e-3)  # the engine's own millisecond


def test_factors_of_parts_count():
    slower = replace(RATES, memory_bytes=8e9 / 3)
    here = calibration(constants(factors={"optimizer": 2.0}, rates={"rotary": RATES, "logits full": slower}))
    before, after = calibration().predict(setup_of()), here.predict(setup_of())
    logits = 2 * 64 * 1000  # made, read twice, read and written backward in float32, beside operands and results
    assert after.parts["logits"] - before.parts["logits"] > logits * 6 * 4 * (3 - 1) / 8e9
    assert after.parts["optimizer"] == pytest.approx(2 * before.parts["optimizer"])
    assert after.parts["forward"] == before.parts["forward"]


def test_a_pipeline_whose_ranks_share_cores_does_not_wait_for_free():
    setup = setup_of(replace(SHAPE, layers=400, vocab_size=1), pp=4, accumulation=4)
    alone = calibration(constants(engines=4), cores=4).predict(setup)
    shared = calibration(constants(engines=4), cores=1).predict(setup)
    working = sum(alone.parts[part] for part in ("forward", "backward", "logits", "pipeline messages", "engine"))
    assert alone.parts["bubble"] == pytest.approx(working * 3 / 4, rel=0.01)  # (pp - 1) / micro-batches
    assert shared.parts["bubble"] == 0  # Four take turns on one core: all of it is busy all the time.


def test_where_cores_are_shared_an_uneven_pipeline_takes_what_the_mean_or_the_slowest_alone_takes():
    wide = setup_of(replace(SHAPE, vocab_size=20000), pp=4, accumulation=8)
    alone = calibration(constants(engines=4), cores=4).predict(wide)
    shared = calibration(constants(engines=4), cores=2).predict(wide)
    turns = ("forward", "backward", "logits", "pipeline messages")
    slowest, mean = (sum(each.parts[part] for part in turns) for each in (alone, shared))
    assert mean < slowest, "only the last rank has the head"
    own = alone.parts["engine"]
    critical = (slowest + own + alone.parts["bubble"]) / 2  # with a core of its own, twice as fast as measured
    assert shared.parts["bubble"] == pytest.approx(max(0.0, critical - mean - own))
    assert shared.parts["bubble"] > 0


def test_the_slowest_rank_waits_only_while_the_others_have_the_first_micro_batch():
    here = calibration(constants(event_seconds={}))
    found = here.predict(setup_of(replace(SHAPE, layers=40), pp=2, accumulation=8, cut=(39, 1)))
    block = (found.parts["forward"] + found.parts["backward"]) / 8 / 39
    head = here.predict(setup_of(replace(SHAPE, layers=40), dp=2)).parts["logits"]
    assert found.parts["logits"] == 0, "the first rank is the slowest"
    assert found.parts["bubble"] == pytest.approx(block + head + found.parts["pipeline messages"] / 8)


def test_zero_bubble_saves_nothing_on_processors():
    for device, saves in (("cpu", False), ("A100-80", True)):
        here = replace(calibration(constants(event_seconds={})), device=device, cores=0)
        times = [
            here.predict(setup_of(pp=2, accumulation=4, schedule=schedule)) for schedule in ("zero-bubble", "1f1b")
        ]
        assert [time.setup.schedule for time in times] == ["zero-bubble", "1f1b"]
        assert (times[0].step_seconds < times[1].step_seconds) is saves, device


def test_what_is_dropped_is_drawn_once_forward_and_again_where_it_is_recomputed():
    drawing = replace(RATES, drawn_seconds=1e-7)
    shape = replace(SHAPE, dropout=0.1, position="learned")
    here = calibration(constants(rates={"rotary": RATES, "dropping": drawing}))
    before, after = (each.predict(setup_of(shape, checkpointing="block")) for each in (calibration(), here))
    drawn = 1e-7 * SHAPE.layers * (2 * 4 * 64 * 64 + 2 * 2 * 64 * 64)  # probabilities; two times tokens × hidden
    for part, times in (("forward", 1), ("recompute", 1), ("backward", 0)):
        assert after.parts[part] - before.parts[part] == pytest.approx(times * drawn, abs=1e-12), part


def test_kernels_are_as_slow_as_in_a_training_each_kind_by_itself():
    rates = Rates(matmul_flops=4e10, attention_flops=1e10, memory_bytes=6e9, element_bytes=4, kernel_seconds=2e-5)
    ring = Ring(ranks=2, bytes_per_second=3e9, latency_seconds=4e-5, crosses_hosts=False)
    samples = made_samples(rates, ring, {"block": 1e-4})
    (bare,) = fit_all([samples], calibration())
    wholes = [
        setup_of(replace(SHAPE, layers=7, **kind), dp=2, zero_stage=1)
        for kind in ({"position": "rotary"}, {"position": "learned"}, {"position": "learned", "dropout": 0.1})
    ]
    larger = []
    for whole, factor in zip(wholes, (1.3, 1.1, 1.5), strict=True):
        parts = calibration(bare).predict(whole).parts
        computing = sum(parts[part] for part in CLASSES["computing"])
        larger.append(SetupTime(setup=whole, seconds=sum(parts.values()) + (factor - 1) * computing))
    found, other = fit_all([replace(samples, larger_steps=larger), replace(samples, steps=())], calibration())
    for step in larger:
        assert calibration(found).predict(step.setup).step_seconds == pytest.approx(step.seconds)
    mean = (1.3 * 1.1 * 1.5) ** (1 / 3)
    for kind in ("logits full", "logits chunked"):
        assert found.rates[kind].memory_bytes == pytest.approx(other.rates[kind].memory_bytes / mean)
        assert found.rates[kind].matmul_flops == pytest.approx(other.rates[kind].matmul_flops / mean)
    assert other.event_seconds == found.event_seconds, "the engine's own time is that of all dtypes"
    assert other.rates == bare.rates


def test_events_of_the_engine_by_hand():
    events = engine_events(setup_of(dp=2, zero_stage=3, accumulation=3, checkpointing="block"))
    assert (events["step"], events["micro-batch"], events["block"]) == (1, 3, 12)
    assert events["gather"] == 5 * (2 * 3 + 3)  # 4 blocks and the root: two gathers and a reduction a micro-batch
    assert events["sum"] == 0
    assert engine_events(setup_of(tp=2, checkpointing="block"))["sum"] == 2 * 3 * 4
    cut = engine_events(setup_of(tp=2, sequence_parallel=True, zero_stage=2, accumulation=3))
    assert (cut["sum"], cut["scatter"]) == (0, 2 * 2 * 4 * 3)
    assert cut["gather"] == 5 * 3  # the norms' gradients of each unit, for each micro-batch


def test_engines_that_were_not_measured_are_said():
    here = calibration()
    assert "4 engines were not measured here; rates are those of 2" in here.predict(setup_of(dp=4)).caution
    assert here.predict(setup_of(dp=2)).caution == ""
    with pytest.raises(ValueError, match="not in bfloat16"):
        here.predict(setup_of(dtype="bfloat16"))


# ---- learning --------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    seconds: float
    phases: dict[str, float]
    traced: bool = False
    ledger: Ledger = field(default_factory=lambda: Ledger(other_framework=10, outside_framework=90))


def records_of(here: Calibration, setup: Setup, factor: float, steps: int = 12) -> dict[int, list[Record]]:
    """A run whose computing takes `factor` times what is predicted; its other ranks are faster and wait."""
    parts = here.predict(setup, learned=False).parts
    predicted = {name: sum(parts[part] for part in members) for name, members in CLASSES.items()}
    slow = predicted["computing"] * factor + parts["engine"]
    seconds = slow + predicted["communication"] + predicted["updating"]
    slowest = {
        "forward": slow / 3,
        "backward": slow * 2 / 3,
        "communication": predicted["communication"],
        "optimizer": predicted["updating"],
    }
    other = {**slowest, "forward": 0.0, "communication": predicted["communication"] + slow / 3}
    ranks = {0: slowest, **dict.fromkeys(range(1, setup.layout.world_size), other)}
    return {
        rank: [Record(9.0, {"forward": 8.0})] * 2 + [Record(seconds, phases)] * steps for rank, phases in ranks.items()
    }


def test_a_run_teaches_half_of_its_ratio_and_runs_in_number_nearly_all():
    here, setup = calibration(), setup_of(dp=2)
    once = learn(here, "run-1", setup, records_of(here, setup, 1.44))
    assert once.learned("computing") == (pytest.approx(1.2), 1)  # sqrt(1.44): one run beside one that was as predicted
    assert once.learned("communication") == (pytest.approx(1), 1)
    many = here
    for number in range(9):
        many = learn(many, f"run-{number}", setup, records_of(here, setup, 1.44))
    assert many.learned("computing") == (pytest.approx(1.44**0.9), 9)
    before, after = here.predict(setup), many.predict(setup)
    assert after.parts["backward"] == pytest.approx(1.44**0.9 * before.parts["backward"])
    assert after.parts["engine"] == before.parts["engine"]


def test_factors_are_bounded_and_misses_stay():
    here, setup = calibration(), setup_of(dp=2)
    for number in range(20):
        records = records_of(calibration(), setup, 50.0)
        here = learn(here, f"run-{number}", setup, records)
    assert here.learned("computing")[0] == 2
    assert len(here.runs) == 20
    first, last = here.runs[0], here.runs[-1]
    assert first.predicted_seconds == pytest.approx(calibration().predict(setup).step_seconds)
    assert first.measured_seconds == pytest.approx(records[0][5].seconds)
    assert first.error == pytest.approx(first.predicted_seconds / first.measured_seconds - 1)
    assert last.predicted_seconds > first.predicted_seconds
    assert last.error < -0.5, "a miss that the bound leaves is shown as what it is"


def test_the_same_run_counts_once_and_the_process_is_learned():
    here, setup = calibration(), setup_of()
    assert here.process_remainder() == (300 * 2**20, 0)
    once = learn(here, "run-1", setup, records_of(here, setup, 1.5))
    again = learn(once, "run-1", setup, records_of(here, setup, 1.5))
    assert len(again.runs) == 1
    assert again.learned("computing") == once.learned("computing")
    assert again.process_remainder() == (100, 1)


def test_too_few_steps_teach_nothing():
    here, setup = calibration(), setup_of(dp=2)
    records = records_of(here, setup, 1.0, steps=5)
    records[1][-1] = replace(records[1][-1], traced=True)
    with pytest.raises(ValueError, match="2 of 2 ranks have 4 steps"):
        learn(here, "run-1", setup, records)
    with pytest.raises(ValueError, match="1 of 2 ranks"):
        learn(here, "run-1", setup, {0: records[0]})


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_calibration_comes_back_as_it_was(tmp_path: Path):
    assert store.load(tmp_path) is None
    setup = setup_of(dp=2)
    here = learn(calibration(), "run-1", setup, records_of(calibration(), setup, 1.3))
    path = store.save(here, tmp_path)
    assert store.load(tmp_path) == here
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "no part is left behind"


def test_the_file_is_where_other_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for value in (str(tmp_path), "not/absolute", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert store.path().parent == default_cache()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda data: data.update(version=99), "version 99, but this SpeedLab reads 3"),
        (lambda data: data.update(machine="another, Z80, 1 core"), "measured on 'another, Z80, 1 core', but this is"),
        (lambda data: data.update(surprise=1), "surprise"),
        (lambda data: data.pop("cores"), "cores"),
        (lambda data: data.update(constants=[]), "no constants"),
        (
            lambda data: data["constants"][0]["rates"]["rotary"].update(matmul_flops=-1),
            "matmul_flops of rotary of 2",
        ),
        (lambda data: data["constants"][0]["rates"]["rotary"].update(memory_bytes=0), "must be above 0"),
        (
            lambda data: data["constants"][0].update(rates={}),
            "rates of rotary blocks of 2 engines",
        ),
        (lambda data: data["constants"][0].update(link_seconds=-1e-3), "link_seconds"),
        (lambda data: data["constants"][0]["event_seconds"].update(step=-1.0), "step of 2 engines"),
        (lambda data: data["constants"][0]["factors"].update(optimizer=0.0), "optimizer of 2 engines"),
        (lambda data: data["constants"][0].update(threads="many"), "constants.0.threads"),
    ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path: Path, change, wrong: str):
    path = store.save(calibration(), tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(store.CalibrationError, match=wrong) as refused:
        store.load(tmp_path)
    assert str(refused.value).startswith(str(path))
    assert "run `speedlab calibrate`" in str(refused.value)


def test_files_that_are_no_calibration_are_refused(tmp_path: Path):
    path = store.path(tmp_path)
    for text in ("", "{", "[]", '{"constants": NaN}', "\x00\xff"):
        path.write_text(text)
        with pytest.raises(store.CalibrationError, match="speedlab calibrate"):
            store.load(tmp_path)
    path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(store.CalibrationError, match="more than a calibration has"):
        store.load(tmp_path)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(store.CalibrationError, match="XDG_CACHE_HOME"):
        store.save(calibration(), tmp_path / "file")


def test_nothing_is_infinite():
    rates = Rates(matmul_flops=4e10, attention_flops=4e10, memory_bytes=1e15, element_bytes=4, kernel_seconds=0.0)
    ring = Ring(ranks=2, bytes_per_second=3e9, latency_seconds=0.0, crosses_hosts=False)
    found = fit_constants(made_samples(rates, ring, {}), calibration())
    numbers = [value for value in vars(found).values() if isinstance(value, float)]
    numbers += [value for rates in found.rates.values() for value in vars(rates).values()]
    assert all(math.isfinite(value) for value in numbers)
