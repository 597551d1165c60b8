"""The page shows what is there, runs nothing that stands in it, and needs nothing else."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.callbacks import Skips
from tests.helpers.toys import fit, make_trainer
from tests.report.logs import event, line, write_run
from trainkit.callbacks import Checkpoint, JSONLLogger, LRMonitor
from trainkit.inspect.report import read_run, read_runs
from trainkit.inspect.report.curves import charts_of, thin
from trainkit.inspect.report.page import make_page
from trainkit.inspect.report.picture import make_picture

EVIL = "</script><img src=x onerror=alert(1)>"


def _real(folder: Path, **settings: Any) -> Path:
    callbacks = [JSONLLogger(), LRMonitor(), Skips(2), Checkpoint()]
    settings = {"log_every_n_steps": 2, "max_grad_norm": 1.0} | settings
    fit(make_trainer(callbacks=callbacks, output_dir=folder, **settings))
    return folder


def _data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1], parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_the_page_of_a_real_run(tmp_path: Path) -> None:
    page = make_page([read_run(_real(tmp_path / "first"))])
    data = _data(page)
    assert [chart["title"] for chart in data["charts"]] == [
        *("loss", "learning rate", "gradient norm", "samples per second")
    ]
    assert [series["label"] for series in data["charts"][0]["series"]] == ["loss", "eval/loss"]
    run = data["runs"][0]
    assert (run["name"], run["resumes"], run["skips"]) == ("first", [], [2])
    assert run["axes"]["epoch"][-1] == [*run["axes"]["samples"][-1][:1], 1.0]
    for text in (
        "Where the time went",
        "checkpoints",
        "1 windows were skipped",
        '"ended":"max_epochs"',
    ):
        assert text in page


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = make_page([read_run(_real(tmp_path))])
    assert not re.findall(r"(?:src|href)\s*=|@import|url\((?!#)|fetch\(|XMLHttp|import\(", page)
    assert re.findall(r"https?://[^\s\"'<]+", page) == ["http://www.w3.org/2000/svg"]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    _real(tmp_path / "a")
    _real(tmp_path / "b", seed=1)
    page = make_page(read_runs([tmp_path / "a", tmp_path / "b"]))
    differences = page.split("Differences in configuration")[1].split("Equal in all runs")[0]
    assert "<th>seed</th><td>0</td><td>1</td>" in differences
    assert "max_grad_norm" not in differences
    charts = _data(page)["charts"]
    assert [chart["title"] for chart in charts][:3] == ["loss", "eval/loss", "lr"]
    assert [series["run"] for series in charts[0]["series"]] == [0, 1]
    assert "pid" not in differences


def test_names_cannot_put_anything_into_the_page(tmp_path: Path) -> None:
    facts = {"config": {EVIL: EVIL}, "started": {"command": EVIL}, "time": 0.0}
    for name in ("<b>bold", "second"):
        events = [event("start", 0, {"setup": 1.0}, **facts), event("end", 1, {}, reason=EVIL)]
        write_run(tmp_path / name, [line(1, **{EVIL: 1.0, f"eval/{EVIL}": 2.0})], events)
    runs = read_runs(sorted(tmp_path.iterdir()))
    for page in (make_page(runs), make_page(runs[:1])):
        assert page.count("</script>") == 2
        assert not re.findall(r"<img|<b>bold", page)
    assert _data(make_page(runs))["runs"][0]["name"] == "<b>bold"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [line(1, loss=1.0)],
        [line(1, loss="NaN"), line(2, loss="Infinity")],
        [line(1, loss=0.0), line(2, loss=0.0)],
        [line(1, loss=1e308), line(2, loss=-1e308)],
    ],
)
def test_strange_curves_are_drawn(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    started = event("start", 0, {"setup": 1.0}, time=0.0)
    run = read_run(write_run(tmp_path, lines, [started]))
    _data(make_page([run]))
    assert make_picture([run]).startswith(b"\x89PNG")


def test_what_is_not_finite_is_marked_and_never_a_number(tmp_path: Path) -> None:
    lines = [line(1, loss="NaN"), line(2, loss=3.0), line(3, loss="-Infinity")]
    (chart,) = _data(make_page([read_run(write_run(tmp_path, lines))]))["charts"]
    assert chart["series"][0]["points"] == [[2, 3.0]]
    assert chart["series"][0]["marks"] == [[1, "NaN"], [3, "-Infinity"]]


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [(step, math.sin(step)) for step in range(100_000)]
    points[77_777] = (77_777, 9.0)
    points[12_345] = (12_345, -9.0)
    thinned = thin(points)
    assert len(thinned) <= 1200
    assert {(77_777, 9.0), (12_345, -9.0), points[0], points[-1]} <= set(thinned)
    assert thinned == sorted(thinned)
    assert thin(points[:1200]) == points[:1200]


def test_loaders_share_a_chart_and_own_figures_come_last(tmp_path: Path) -> None:
    figures = {"mine": 1.0, "eval/a/f1": 2.0, "eval/b/f1": 3.0, "lr/0": 4.0, "lr/1": 5.0, "loss": 6}
    charts = charts_of([read_run(write_run(tmp_path, [line(1, **figures)]))])
    assert [chart.title for chart in charts] == ["loss", "learning rate", "evaluation: f1", "mine"]
    assert [series.label for series in charts[2].series] == ["eval/a/f1", "eval/b/f1"]
