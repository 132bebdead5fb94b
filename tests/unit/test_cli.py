"""The command line: what it turns into a configuration, what it refuses, and how progress is shown. No engines."""

from __future__ import annotations

import io
import subprocess
import sys
import types
from pathlib import Path

import pytest

from speedlab import cli
from speedlab.cli import cluster as engines
from speedlab.cli import cluster as manage
from speedlab.cli import demo, progress, train
from speedlab.cluster import ClusterError, Run
from speedlab.config import ConfigError, ModelConfig, RunConfig
from speedlab.telemetry.records import Ledger, RunState, StepRecord
from speedlab.telemetry.run_folder import RunFolder, Status
from speedlab.telemetry.writer import RecordWriter


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path) -> None:
    """No cluster of the person's own is seen, and ./runs is the test's."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)


def make_run(path: Path, **status) -> RunFolder:
    folder = RunFolder.create(RunConfig(name=path.name, folder=path.parent, steps=40))
    folder.write_status(Status(**{"state": RunState.FINISHED, "steps": 40, **status}))
    return folder


def write_steps(folder: RunFolder, count: int, *, heldout: float | None = None) -> None:
    writer = RecordWriter(folder, 0, stream_hz=10.0)
    for step in range(1, count + 1):
        writer.write(
            StepRecord(
                step=step,
                rank=0,
                time=1e9 + step,
                loss=5.0,
                learning_rate=1e-3,
                grad_norm=1.0,
                loss_scale=1.0,
                zero_stage=2,
                tokens=2048,
                flops=1.0,
                seconds=0.5,
                heldout_loss=heldout if step == count else None,
                ledger=Ledger(parameters=2**20),
            )
        )
    writer.close()


# train: options


def test_without_options_the_defaults_hold() -> None:
    config, where = train.parse([])
    assert config == RunConfig()
    assert where == train.EngineOptions()


def test_options_change_the_file(tmp_path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("name: a\nsteps: 7\nzero: {stage: 1, bucket_bytes: 99}\n")
    config, where = train.parse(
        [
            str(path),
            "--zero.stage",
            "3",
            "--optimizer.lr",
            "3e-4",
            "--no-compile",
            "--clip-norm",
            "None",
            "--engines",
            "2",
        ]
    )
    assert config == RunConfig(
        name="a", steps=7, zero={"stage": 3, "bucket_bytes": 99}, optimizer={"lr": 3e-4}, clip_norm=None
    )
    assert where.engines == 2


@pytest.mark.parametrize(
    "arguments", [["--model.preset", "gpt2", "--model.layers", "6"], ["--model.layers=6", "--model.preset=gpt2"]]
)
def test_a_preset_gives_the_model_and_other_options_change_it(arguments) -> None:
    # 6 is also gpt-tiny's number of layers: it must still count as asked for.
    assert train.parse(arguments)[0].model == ModelConfig(preset="gpt2", layers=6)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["--zero", "3"], ["--zero.stage", "3"]),
        (["--zero=1", "--batch", "16"], ["--zero.stage=1", "--batch.global-size", "16"]),
        (["--model", "gpt-mini", "--model.layers", "3"], ["--model.preset", "gpt-mini", "--model.layers", "3"]),
        (["--precision", "bfloat16", "--optimizer=sgd"], ["--precision.dtype", "bfloat16", "--optimizer.name=sgd"]),
    ],
)
def test_parts_have_short_forms(short: list[str], long: list[str]) -> None:
    assert train.parse(short) == train.parse(long)


def test_a_preset_may_come_with_what_only_it_allows() -> None:
    config, _ = train.parse(["--model.preset", "gpt2", "--data.sequence-length", "1024"])
    assert config.data.sequence_length == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zero.stage", "7"], "invalid choice '7'"),
        (["--model.heads", "5"], "does not divide by heads 5; heads 4"),
    ],
)
def test_options_that_cannot_be_are_refused(capsys, arguments, message) -> None:
    with pytest.raises(SystemExit) as refusal:
        train.parse(arguments)
    assert refusal.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--zeroo", "3"], "unknown option '--zeroo'; the nearest is '--zero'"),
        (["train", "--zero.stge=1", "--optimizer.eps", "0"], "'--zero.stge'; the nearest is '--zero.stage'"),
        (["train", "--zero.stge=1", "--stepz", "3"], "\nunknown option '--stepz'; the nearest is '--steps'"),
        (["train", "--lr", "3e-4"], "unknown option '--lr'; the nearest are '--optimizer.lr', '--outer.lr'"),
        (["train", "--learning-rate", "3e-4"], "the nearest is '--optimizer.lr'"),
        (["train", "--batch_size", "8"], "the nearest is '--batch.global-size'"),
        (["train", "--vocab-size", "9"], "the nearest are '--model.vocab-size', '--data.vocab-size'"),
        (["train", "--checkpoint", "50"], "the nearest are '--checkpoint.every-steps', '--checkpoint.keep'"),
        (["plan", "gpt2", "--zeroo", "3"], "unknown option '--zeroo'; the nearest is '--zero'"),
        (["plan", "--machine", "8 H100"], "the nearest is '--machines'"),
        (["config", "--jsn"], "the nearest is '--json'"),
        (["status", "--qqq"], "unknown option '--qqq'; `speedlab status --help` lists all"),
        (["stop", "--yess"], "unknown option '--yess'; "),
        (["report", "r", "--outptu", "x"], "unknown option '--outptu'; "),
        (["export", "r", "out", "--dtyp", "float32"], "the nearest is '--dtype'"),
        (["trace", "r", "--stp", "3"], "the nearest is '--step'"),
        (["calibrate", "--engins", "3"], "the nearest is '--engines'"),
        (["demo", "--notebok", "x"], "unknown option '--notebok'; "),
        (["bench", "kernels", "--ronds", "1"], "the nearest is '--rounds'"),
        (["guide", "--sektion"], "unknown option '--sektion'; "),
        (["train", "--zero", "3", "--zero.stage", "2"], "--zero 3 and --zero.stage 2 say two things of one"),
        (["train", "--batch.global-size=8", "--batch=16"], "--batch 16 and --batch.global-size 8 say two things"),
        (["plan", "gpt2", "--zero.stage=1", "--zero", "0"], "--zero 0 and --zero.stage 1 say two things of one"),
    ],
)
def test_an_option_that_is_not_known_is_told_with_the_nearest(capsys, arguments, message) -> None:
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"speedlab {arguments[0]}: ")
    assert message in said.err
    assert not said.out


def test_an_option_may_be_said_twice_alike() -> None:
    assert train.parse(["--zero", "3", "--zero.stage=3"])[0].zero.stage == 3


def test_help_tells_every_fields_description(capsys) -> None:
    with pytest.raises(SystemExit) as ending:
        train.parse(["--help"])
    assert ending.value.code == 0
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    for part in (RunConfig, *filter(None, map(RunConfig.part_of, RunConfig.model_fields))):
        for field in part.model_fields.values():
            assert "".join((field.description or "missing").split()) in shown


def test_the_file_comes_first(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 7\n")
    with pytest.raises(ConfigError, match=r"a.yaml: comes first: speedlab train a.yaml"):
        train.parse(["--steps", "3", "a.yaml"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "4", "--device", "cpu", "--parallel.dp", "3"], "dp 4 would fit"),
        (["--engines", "2", "--device", "cpu", "--batch.global-size", "3"], "has no whole solution; a global batch of"),
        (["--data.source", "no-such-folder"], "no-such-folder"),
        (["--steps", "0"], "steps: Input should be greater than or equal to 1 (got 0)"),
        (["missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
        (["--name", "taken"], "taken exists, finished at step 0 of 40; give another --name"),
    ],
)
def test_what_cannot_run_is_refused_before_engines_start(monkeypatch, capsys, arguments, message) -> None:
    make_run(Path("runs/taken"))
    monkeypatch.setattr(train, "cluster_for", lambda *args, **keywords: pytest.fail("engines were started"))
    assert cli.main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


# The other commands


def test_config_prints_what_can_be_read_again(capsys, tmp_path) -> None:
    assert cli.main(["config"]) == 0
    (tmp_path / "a.yaml").write_text(capsys.readouterr().out)
    assert RunConfig.load(tmp_path / "a.yaml") == RunConfig()
    (tmp_path / "b.yaml").write_text("zero: {stage: 3}")
    assert cli.main(["config", "b.yaml", "--json"]) == 0
    (tmp_path / "b.json").write_text(capsys.readouterr().out)
    assert RunConfig.load(tmp_path / "b.json") == RunConfig(zero=3)


def test_commands_without_a_cluster(capsys) -> None:
    assert cli.main(["status"]) == 0
    assert "no cluster runs" in capsys.readouterr().out
    assert cli.main(["stop", "mine"]) == 2
    assert capsys.readouterr().err == "speedlab stop: cluster 'mine' does not run; none runs\n"


def test_report_is_written_and_named(capsys) -> None:
    folder = make_run(Path("runs/r"))
    write_steps(folder, 3)
    assert cli.main(["report", "r"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == folder.path / "report.html"
    assert path.stat().st_size > 100_000
    assert cli.main(["report", "nope"]) == 2
    assert "there is no run 'nope'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trian"], 2, "unknown command 'trian'; did you mean 'train'?"),
        (["bench", "kernls"], 2, "unknown benchmark 'kernls'; did you mean 'kernels'?"),
        (["bench"], 2, "usage: speedlab bench NAME"),
        ([], 0, "usage: speedlab COMMAND"),
        (["--version"], 0, "speedlab 0."),
    ],
)
def test_usage(capsys, arguments, status, message) -> None:
    assert cli.main(arguments) == status
    out = capsys.readouterr()
    assert message in out.out + out.err


def test_every_command_exists() -> None:
    for name, (module, _) in cli.COMMANDS.items():
        assert callable(getattr(__import__(f"speedlab.cli.{module}", fromlist=[name]), name))


def test_a_reader_that_leaves_is_no_error() -> None:
    command = (
        f"{sys.executable} -c 'from speedlab.cli import main; import sys; sys.exit(main([\"config\"]))' | head -n 1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("name: null")
    assert done.stderr == ""


@pytest.mark.parametrize("answer", ["", "n", "no", "yess"])
def test_stop_asks_before_something_is_lost(monkeypatch, capsys, answer) -> None:
    class Running:
        def stop(self) -> None:
            pytest.fail("stopped without a yes")

    monkeypatch.setattr(manage, "running_clusters", lambda: [type("State", (), {"name": "default"})()])
    monkeypatch.setattr(manage.Cluster, "attach", lambda name: Running())
    monkeypatch.setattr(manage, "_unfinished", lambda cluster: ["run a: running at step 3 of 9"])
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    assert cli.main(["stop"]) == 2
    assert (
        "holds run a: running at step 3 of 9; steps since the last checkpoint would be lost" in capsys.readouterr().out
    )


def test_a_cluster_that_ends_while_it_is_being_stopped_is_no_error(monkeypatch, capsys) -> None:
    """As when a training in another terminal comes to its end, and ends its engines."""
    running = [type("State", (), {"name": "default"})()]

    def ends(name: str) -> None:
        running.clear()
        raise ClusterError(f"cluster {name!r} ended just now")

    monkeypatch.setattr(manage, "running_clusters", lambda: list(running))
    monkeypatch.setattr(manage.Cluster, "attach", ends)
    assert cli.main(["stop"]) == 0
    assert capsys.readouterr() == ("cluster default ended by itself just now\n", "")


# Progress


def test_progress_line() -> None:
    folder = make_run(Path("runs/p"), state=RunState.RUNNING)
    feed = progress.Feed(folder)
    feed.poll()
    assert progress.progress_line(feed) == "step 0/40 ──────────── running"
    write_steps(folder, 20, heldout=5.25)
    feed.poll(files=True)
    line = "step 20/40 ━━━━━━────── 4.1 k tokens/s · loss 5.000 (held-out 5.250) · zero 2 · 10 s left"
    assert progress.progress_line(feed) == line
    folder.write_status(Status(state=RunState.FINISHED, steps=20))
    feed.poll(files=True)
    assert progress.progress_line(feed).endswith(" · finished")
    feed.close()


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (120, "step 20/40 ━━━━━━────── 4.1 k tokens/s · loss 5.000 (held-out 5.250) · zero 2 · 10 s left"),
        (81, "step 20/40 ━━━━━━────── 4.1 k tokens/s · loss 5.000 (held-out 5.250) · 10 s left"),
        (80, "step 20/40 4.1 k tokens/s · loss 5.000 (held-out 5.250) · 10 s left"),
        (60, "step 20/40 4.1 k tokens/s · loss 5.000 · 10 s left"),
        (40, "step 20/40 · loss 5.000 · 10 s left"),
        (30, "step 20/40 · 10 s left"),
    ],
)
def test_progress_fits_the_terminal_and_keeps_its_end(monkeypatch, columns: int, shown: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    folder = make_run(Path("runs/p"), state=RunState.RUNNING)
    write_steps(folder, 20, heldout=5.25)
    feed = progress.Feed(folder)
    feed.poll(files=True)
    monkeypatch.setenv("COLUMNS", str(columns))
    progress.ProgressBar(feed, stream := Terminal()).update()
    assert stream.getvalue().removeprefix("\r\x1b[K") == shown
    assert len(shown) < columns
    feed.close()


def test_progress_in_a_file_is_plain_lines() -> None:
    feed = progress.Feed(make_run(Path("runs/p")))
    stream = io.StringIO()
    bar = progress.ProgressBar(feed, stream)
    bar.update()
    bar.say("rank 0: hello")
    bar.update()
    bar.close()
    assert stream.getvalue().splitlines() == [
        "step 0/0 ──────────── starting",
        "rank 0: hello",
        "step 0/0 ──────────── starting",
    ]
    feed.close()


def test_requests_to_stop_are_counted_and_the_handlers_come_back() -> None:
    import os
    import signal

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with engines.StopRequests() as requests:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.count == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# demo


def test_earlier_runs_are_moved_aside_and_none_is_lost() -> None:
    path = Path("runs/quickstart")
    assert demo.move_aside(path) is None
    for number in (1, 2, 3):
        make_run(path)
        (path / "mark").write_text(str(number))
        assert demo.move_aside(path) == Path(f"runs/quickstart-before-{number}")
    assert [(Path(f"runs/quickstart-before-{n}") / "mark").read_text() for n in (1, 2, 3)] == ["1", "2", "3"]
    assert not path.exists()


def test_a_run_that_engines_hold_is_not_moved(monkeypatch) -> None:
    make_run(Path("runs/quickstart"), state=RunState.RUNNING, token="of these engines")
    monkeypatch.setattr(demo, "running_clusters", lambda: [type("State", (), {"token": "of these engines"})()])
    with pytest.raises(ConfigError, match="engines hold this run"):
        demo.move_aside(Path("runs/quickstart"))
    assert Path("runs/quickstart/config.json").is_file()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file or directory"), ("{", "is no notebook"), ("{}", "is no notebook")],
)
def test_the_demo_refuses_what_is_no_notebook(capsys, content, message) -> None:
    if content is not None:
        Path("a.ipynb").write_text(content)
    assert cli.main(["demo", "a.ipynb"]) == 2
    assert f"a.ipynb: {message}" in capsys.readouterr().err


def test_the_demo_does_not_touch_a_cluster_that_runs(monkeypatch, capsys, tmp_path) -> None:
    notebook = Path(__file__).parents[2] / "notebooks/01_quickstart.ipynb"
    monkeypatch.setattr(demo, "running_clusters", lambda: [type("State", (), {"name": "default"})()])
    assert cli.main(["demo", str(notebook)]) == 2
    assert "cluster 'default' is running and the notebook would use it and end it" in capsys.readouterr().err


# Going on


def make_stopped_run(name: str) -> RunFolder:
    """Stopped at step 12, with a checkpoint of step 10, its engines gone."""
    folder = make_run(Path("runs") / name, state=RunState.STOPPED, step=12, rank_pids=(2**22, 2**22 + 1))
    write_steps(folder, 12)
    path = folder.path / "checkpoints" / "step-000010"
    path.mkdir()
    (path / "manifest.json").write_text('{"step": 10}')
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "there is no run 'nope'; runs in"),
        (["a", "--step", "7"], "holds no checkpoint of step 7; it holds step-000010"),
        (["a", "--tag", "lunch"], "holds no checkpoint 'lunch'; it holds step-000010"),
        (["a", "--tag", "lunch", "--step", "10"], "step 10 and tag 'lunch' both name a checkpoint; give one of them"),
        (["a", "--steps", "10"], "would go on from step 10 and ends at step 10; give it more than 10 steps"),
        (["a", "--zero.stage", "3"], "--zero.stage 3: a run goes on as it is configured; with --resume there are"),
        (["bare"], "has no checkpoint, and its engines are gone: there is nothing to go on from"),
    ],
)
def test_what_cannot_go_on_is_refused_before_engines_start(monkeypatch, capsys, arguments, message) -> None:
    make_stopped_run("a")
    write_steps(make_run(Path("runs/bare"), state=RunState.STOPPED, step=3), 3)
    monkeypatch.setattr(train, "cluster_for", lambda *args, **keywords: pytest.fail("engines were started"))
    assert cli.main(["train", "--resume", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_goes_on_with_as_many_engines_as_before(monkeypatch) -> None:
    make_stopped_run("a")
    asked = []

    def refuse(name: str, engines: int | None, device: str, *, keep: bool) -> None:
        asked.append(engines)
        raise ConfigError("that is enough")

    monkeypatch.setattr(train, "cluster_for", refuse)
    assert [cli.main(["train", "--resume", "a", *more]) for more in ([], ["--engines", "4"])] == [2, 2]
    assert asked == [2, 4]


def test_the_line_that_goes_on_says_all_that_is_needed_and_no_more() -> None:
    folder = make_stopped_run("a")
    where = engines.EngineOptions()
    assert progress.resume_command(Run(folder), where) == "speedlab train --resume a"
    Path("my runs").mkdir()
    elsewhere = RunFolder(folder.path.rename("my runs/b"))
    kept = engines.EngineOptions(device="cpu", cluster="mine", keep_engines=True)
    line = progress.resume_command(Run(elsewhere), kept)
    assert line == "speedlab train --resume 'my runs/b' --device cpu --cluster mine --keep-engines"
    assert progress.resume_command(Run(make_run(Path("runs/bare"))), where) is None


def test_the_same_command_again_offers_to_go_on(monkeypatch, capsys) -> None:
    make_stopped_run("a")
    monkeypatch.setattr(train, "cluster_for", lambda *args, **keywords: pytest.fail("engines were started"))
    assert cli.main(["train", "--name", "a", "--steps", "40"]) == 2
    reported = capsys.readouterr().err
    assert "runs/a exists, stopped at step 12 of 40; `speedlab train --resume a` goes on with it, or give" in reported


# Export


def test_export_says_which_step_it_wrote(monkeypatch, capsys) -> None:
    path = make_run(Path("runs/a")).path / "checkpoints" / "mine"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text('{"step": 1200}')

    def written(checkpoint: Path, folder: Path, **options: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(2**20))

    monkeypatch.setitem(sys.modules, "speedlab.engine.checkpoint", types.SimpleNamespace(export_hf=written))
    assert cli.main(["export", "a", "out"]) == 0
    line = f"out: step 1,200, from {path}, 1.0 MiB, without a tokenizer: the run's folder has none\n"
    assert capsys.readouterr().out == line


def test_export_needs_a_checkpoint(capsys) -> None:
    make_run(Path("runs/bare"), state=RunState.PAUSED)
    assert cli.main(["export", "bare", "out"]) == 2
    assert "holds no complete checkpoint; run.save() writes one while engines hold" in capsys.readouterr().err
    assert cli.main(["export", "bare", "out", "--tag", "step-000007"]) == 2
    assert "step-000007" in capsys.readouterr().err
    assert not Path("out").exists()
