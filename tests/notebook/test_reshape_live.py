"""A run on four real engines that changes its layout between steps, and goes on as if it had not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speedlab.cluster import Cluster
from speedlab.cluster.run import Run, RunError
from speedlab.config import RunConfig
from speedlab.layout import LayoutError

SIZE = 4
STEPS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        cluster = Cluster(SIZE, name="test-reshape", device="cpu")
        yield cluster
        cluster.stop()


def configuration(folder: Path, name: str, **changes: Any) -> RunConfig:
    return RunConfig(
        name=name,
        folder=folder,
        steps=STEPS,
        model={"layers": 4, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab_size": 512, "dropout": 0.1},
        data={"source": "stdlib", "sequence_length": 64, "vocab_size": 512, "max_bytes": 200_000},
        precision="float32",
        batch={"global_size": 8, "micro_size": 2},
        eval={"every_steps": 0},
        **changes,
    )


def losses(run: Run) -> list[float]:
    return [record.loss for record in run.records(0)]


def train(cluster: Cluster, config: RunConfig, steps: int, model: Any = None) -> Run:
    run = cluster.train(config, model=model)
    run.pause().wait(60)
    run.advance(steps - run.step).wait(60)
    run.wait_until(steps, timeout=60)
    return run


@pytest.fixture(scope="module")
def plain(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the run that keeps its layout."""
    run = cluster.train(configuration(tmp_path_factory.mktemp("plain"), "plain", zero=2))
    run.wait(120)
    return losses(run)


def test_through_many_layouts(cluster: Cluster, plain: list[float], tmp_path: Path) -> None:
    run = cluster.train(configuration(tmp_path, "moving", zero=2))
    run.pause().wait(60)
    for changes in (
        {"tp": 2, "pp": 2, "zero": 1},
        {"tp": 1, "pp": 4},
        {"pp": 2, "zero": 3, "schedule": "interleaved"},
        {"pp": 1, "tp": 4},
        {"tp": 2, "zero": 0},
        {"cp": 2, "zero": 3},
        {"cp": 4, "tp": 1},
        {"cp": 1},
    ):
        event = run.reshape(**changes).wait(60)
        assert event.kind == "reshaped"
        assert changes.items() <= event.details["after"].items()
        assert event.details["through"] == ("in place" if changes.keys() == {"zero"} else "memory")
        assert_reported(run)
        step = run.step
        run.advance(2).wait(60)
        run.wait_until(step + 2, timeout=60)
    run.resume().wait(60)
    run.wait(120)
    assert losses(run) == pytest.approx(plain, rel=1e-5)
    assert run.present_config.parallel.tp == 1


def test_padding_for_cp_is_told_and_counts_nowhere(cluster: Cluster, tmp_path: Path) -> None:
    """Of 61 tokens, up to 62 and 64: without, the change is refused with the lengths and the option."""
    config = configuration(tmp_path, "odd", zero=1)
    config = config.replace(model={"dropout": 0.0}, data={"sequence_length": 61}, steps=6)
    alone = cluster.train(config)
    alone.wait(120)
    run = cluster.train(config.replace(name="padded", parallel={"cp": 2, "cp_pad": True}))
    run.pause().wait(60)
    with pytest.raises(LayoutError, match="cp 4: sequences of 61 tokens do not divide by 4; 60 or 64 would, or set"):
        run.reshape(cp=4, cp_pad=False)
    event = run.reshape(cp=4).wait(60)
    assert "sequences of 61 padded to 64, 4.69% of what is computed" in event.text
    run.resume().wait(60)
    run.wait(120)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert [record.tokens for record in run.records(0)] == [8 * 61] * 6
    started = next(event for event in run.events if event.kind == "started")
    assert "sequences of 61 padded to 62, 1.61% of what is computed" in started.text


def assert_reported(run: Run) -> None:
    """Every rank's placement is that of the present layout and stage."""
    layout, stage = run.present_config.layout(SIZE), run.present_config.zero.stage
    tables = [run.placement(rank) for rank in range(SIZE)]
    held = {row["states"]["parameter"]["holders"] for table in tables for row in table}
    assert held == {"partitioned" if stage == 3 and layout.replicas > 1 else "replicated"}
    cut = [row["name"] for row in tables[0] if row["cut_over"]]
    assert bool(cut) == (layout.tp > 1)
    blocks = {row["name"].split(".")[1] for table in tables for row in table if row["name"].startswith("blocks.")}
    assert blocks == {"0", "1", "2", "3"}
    answered = {rank: {row["answered_by"] for row in table} for rank, table in enumerate(tables)}
    places = {rank: (layout.index(rank, "dp"), layout.index(rank, "cp")) for rank in answered}
    assert all(places[other] == places[rank] for rank in answered for other in answered[rank])


def test_restarted_engines_go_on_in_the_present_layout(cluster: Cluster, plain: list[float], tmp_path: Path) -> None:
    run = cluster.train(configuration(tmp_path, "restarted", zero=1))
    run.pause().wait(60)
    run.reshape(tp=2, pp=2).wait(60)
    run.advance(2).wait(60)
    run.wait_until(run.step, timeout=60)
    run.save().wait(60)
    cluster.restart(1)
    run.resume().wait(60)
    run.wait(120)
    assert losses(run) == pytest.approx(plain, rel=1e-5)
    assert run.present_config.parallel.pp == 2


def test_what_cannot_be_is_refused_and_changes_nothing(cluster: Cluster, plain: list[float], tmp_path: Path) -> None:
    run = cluster.train(configuration(tmp_path, "refused", zero=2))
    run.pause().wait(60)
    with pytest.raises(ValueError, match="tp 3"):
        run.reshape(tp=3)
    with pytest.raises(ValueError, match="has 4 blocks"):
        run.reshape(pp=4, schedule="interleaved", micro_batches=8)
    run.resume().wait(60)
    run.wait(120)
    assert losses(run) == pytest.approx(plain, rel=1e-6)


def test_a_change_that_fails_is_undone(cluster: Cluster, tmp_path: Path) -> None:
    """The model's maker raises on one rank while the new layout is built."""
    config = configuration(tmp_path, "undone", zero=2)
    kept = cluster.train(config.replace(name="kept"), model=fragile_gpt(config))
    kept.wait(120)
    run = cluster.train(config, model=fragile_gpt(config))
    run.pause().wait(60)
    cluster.execute("import os; os.environ['FRAGILE'] = '1'", ranks=[2]).result()
    with pytest.raises(RunError, match=r"no room on rank 2.*goes on under pp 1 × dp 4 × tp 1 as before"):
        run.reshape(tp=2).wait(90)
    cluster.execute("import os; os.environ.pop('FRAGILE', None)", ranks=[2]).result()
    run.resume().wait(60)
    run.wait(120)
    assert losses(run) == pytest.approx(losses(kept), rel=1e-6)
    assert run.present_config.parallel.tp == 1


def fragile_gpt(config: RunConfig) -> Any:
    """A maker that fails once where FRAGILE is set."""

    def make() -> Any:
        import os

        from speedlab.models import GPT

        if os.environ.pop("FRAGILE", None):
            raise MemoryError(f"no room on rank {os.environ['RANK']}")
        return GPT(config.model)

    return make
