"""Update this machine's calibration of the planner from the records of a run."""

from __future__ import annotations

from pathlib import Path

from speedlab.config import ConfigError
from speedlab.planner.calibration import store
from speedlab.planner.calibration.learn import learn
from speedlab.planner.formulas import parameter_count
from speedlab.planner.setup import Setup
from speedlab.telemetry.current_config import present_config
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.run_folder import RunFolder


def learn_from(run: RunFolder, *, folder: Path | None = None) -> str:
    """Learn from a run and store the result in this machine's calibration.

    Args:
        run: Folder of the run.
        folder: Folder of the calibration; None for the user's cache.

    Returns:
        One line with the predicted and the measured step time.

    Raises:
        ConfigError: If there is no calibration, too few steps, a change of layout or stage, a simulated link, or a
            model other than the built-in one.
    """
    calibration = store.load(folder)
    if calibration is None:
        raise ConfigError("this machine was never measured; run `speedlab calibrate` first")
    feed = Feed(run)
    try:
        feed.poll(files=True)
        if any(event.kind == "reshaped" for event in feed.events):
            raise ConfigError(f"{run.name}: its layout or stage changed on the way, so its steps are not of one kind")
        engines = len(feed.records)
        config = present_config(run.config, feed.events, engines)
        said = next((event.details for event in feed.events if event.kind == "started"), {})
        if said.get("parameters") != parameter_count(config.model):
            raise ConfigError(
                f"{run.name}: its model is not the built-in GPT of its configuration, and times of others are not "
                "predicted"
            )
        if "pretended_link" in said:
            raise ConfigError(f"{run.name}: its link was pretended, so its times are not this machine's")
        setup = Setup.of_config(config, engines, dtype=said.get("dtype", "float32"))
        found = learn(calibration, str(run.path), setup, feed.records)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    finally:
        feed.close()
    store.save(found, folder)
    last = found.runs[-1]
    return (
        f"{run.name}: predicted {last.predicted_seconds * 1e3:.1f} ms a step, measured "
        f"{last.measured_seconds * 1e3:.1f} ms ({last.error:+.1%}); learned from {len(found.runs)} "
        f"run{'' if len(found.runs) == 1 else 's'}"
    )
