"""`trainkit report` writes what was asked for, and says what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_checkpoint import NO_TORCH, ROOT
from tests.report.logs import event, line, write_run
from trainkit.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [line(step, loss=1 / step) for step in range(1, 9)]
    return write_run(tmp_path / "run", lines, [event("start", 0, {"setup": 1.0}, time=0.0)])


def test_the_page_goes_where_it_is_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new folder" / "page.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert f"wrote {page} (" in capsys.readouterr().out


def test_without_a_name_it_is_report_html(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.e2e
def test_a_picture_alone(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), "--png", "run.png"]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "report.html").exists()


def test_a_page_needs_no_torch(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_TORCH, "report", str(run), "-o", str(tmp_path / "p.html")]
    subprocess.run(command, cwd=ROOT, check=True)


def test_what_cannot_be_done_is_a_line_and_a_code(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(run)]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_without_matplotlib_the_error_names_the_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainkit.inspect.report.picture.find_spec", lambda name: None)
    assert main(["report", str(run), "--png", "run.png"]) == 1
    assert "pip install 'trainkit[report]'" in capsys.readouterr().err
