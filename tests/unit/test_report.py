"""report.html: complete in itself, safe with any text, right in its numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from plotly.offline import get_plotlyjs
from telemetry_samples import make_event, make_folder, make_record

from speedlab.planner import parameter_count
from speedlab.telemetry.records import RunState
from speedlab.telemetry.report import write_report
from speedlab.telemetry.run_folder import RunFolder, RunFolderError, Status
from speedlab.telemetry.writer import RecordWriter

MIB = 2**20
ROW = {
    "stage": 2,
    "parameters": 12 * MIB,
    "gradients": 3 * MIB,
    "optimizer": 6 * MIB,
    "formula_parameters": 12 * MIB,
    "formula_gradients": 3 * MIB,
    "formula_optimizer": 5 * MIB,
    "tokens_per_second": 41_234.0,
    "change_seconds": None,
}
NASTY = "</script><script>alert(1)</script><!-- {{plotly}} \\1"


def written(folder: RunFolder, events=(), text: str = "") -> RunFolder:
    for rank in range(2):
        writer = RecordWriter(folder, rank, stream_hz=10)
        for step in range(1, 6):
            writer.write(make_record(step, rank))
        for event in events if rank == 0 else ():
            writer.event(event)
        writer.close()
    folder.write_status(Status(state=RunState.FINISHED, step=5, steps=5, rank_pids=(1, 2), text=text))
    return folder


def own_part(page: str) -> str:
    """The page without plotly's own source."""
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def test_report_holds_everything_it_needs(tmp_path):
    path = write_report(written(make_folder(tmp_path)))
    assert path == tmp_path / "sample" / "report.html"
    page = own_part(path.read_text(encoding="utf-8"))
    assert not re.findall(r"https?://|<link|<img|src=|@import|url\(", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert "step 5/5" in page
    assert "■ finished" in page
    assert "sequence_length: 256" in page
    assert "{{" not in page


def test_report_has_every_plot_with_its_numbers(tmp_path):
    page = own_part(write_report(str(written(make_folder(tmp_path)).path)).read_text(encoding="utf-8"))
    found = re.search(r"const figures = (\{.*\});\n", page)
    assert found
    figures = json.loads(found[1])
    plots = ["memory", "states", "loss", "throughput", "anatomy", "ranks", "gradient", "communication"]
    assert list(figures) == plots
    assert figures["loss"]["data"][0]["y"] == pytest.approx([7.99, 7.98, 7.97, 7.96, 7.95])
    assert all(f'id="plot-{name}"' in page for name in figures)


def test_stage_table_shows_measured_beside_formula(tmp_path):
    rows = [ROW, {**ROW, "stage": 3, "change_seconds": 0.212}]
    page = own_part(write_report(written(make_folder(tmp_path)), rows).read_text(encoding="utf-8"))
    assert page.count("12.0 MiB <small>(12.0 MiB)</small>") == 2
    assert "6.0 MiB <small>(5.0 MiB)</small>" in page
    assert "41.2 k tokens/s" in page
    assert "212 ms" in page
    assert "What a rank holds" not in own_part(write_report(tmp_path / "sample").read_text(encoding="utf-8"))


def test_text_from_a_run_never_becomes_a_part_of_the_page(tmp_path):
    event = make_event("warning", 3, text=NASTY)
    folder = written(make_folder(tmp_path), [event], text=NASTY)
    page = own_part(write_report(folder).read_text(encoding="utf-8"))
    assert "<script>alert" not in page
    assert page.count("<script>") == 2
    assert page.count("</script>") == 2
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&lt;!-- {{plotly}} \\1" in page


def test_a_run_that_has_not_begun_has_a_report(tmp_path):
    page = own_part(write_report(make_folder(tmp_path)).read_text(encoding="utf-8"))
    assert "step 0/200" in page


def test_what_a_query_sees_is_drawn(tmp_path):
    sparse = {"attention": {"kind": "block_sparse", "window": 64}}
    for layers, parameters in ((6, None), (None, 5)):
        folder = make_folder(tmp_path / str(layers), model=sparse)
        own = parameter_count(folder.config.model) if parameters is None else parameters
        event = replace(make_event("started", 0), details={"parameters": own})
        page = own_part(write_report(written(folder, [event])).read_text(encoding="utf-8"))
        assert page.count("What a query sees") == 1
        assert "256 tokens in 4 blocks of 64: 70 % of dense causal attention" in page
        assert "longest path between two tokens: 5 layers" in page
        assert ("the model&#x27;s 6 are enough" in page) == (layers == 6), "of a model of one's own nothing is known"


def test_no_run_no_report(tmp_path):
    with pytest.raises(RunFolderError, match="no run folder"):
        write_report(tmp_path)
