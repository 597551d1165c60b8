"""What is installed is what is in the tree."""

import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import trainkit
from trainkit.cli.main import main as cli

ROOT = Path(__file__).resolve().parent.parent


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_list_is_the_tree() -> None:
    listed = _project()["tool"]["setuptools"]["packages"]
    core = [path.parent for path in (ROOT / "trainkit").rglob("__init__.py")]  # skips links
    extra = [path.parent for path in (ROOT / "callbacks").rglob("__init__.py")]
    found = {".".join(path.relative_to(ROOT).parts) for path in core}
    found |= {".".join(("trainkit", *path.relative_to(ROOT).parts)) for path in extra}
    assert sorted(listed) == sorted(found)


def test_the_link_leads_to_the_callbacks() -> None:
    link = ROOT / "trainkit" / "callbacks"
    assert link.is_symlink()
    assert link.readlink() == Path("../callbacks")
    assert link.resolve() == ROOT / "callbacks"


@pytest.mark.e2e
def test_the_wheel_holds_the_callbacks_and_no_link(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"  # a build leaves folders beside what it builds
    for name in ("trainkit", "callbacks"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    entries = zipfile.ZipFile(wheel).infolist()
    assert not [each.filename for each in entries if stat.S_ISLNK(each.external_attr >> 16)]
    found = {each.filename for each in entries if "dist-info" not in each.filename}
    core = [path for path in (ROOT / "trainkit").rglob("*.py") if not path.is_symlink()]
    core = [path for path in core if ROOT / "trainkit" / "callbacks" not in path.parents]
    expected = {path.relative_to(ROOT).as_posix() for path in core}
    expected |= {
        f"trainkit/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "callbacks").rglob("*.py")
    }
    assert {name for name in found if name.endswith(".py")} == expected


def test_callbacks_refuse_their_folder_s_name() -> None:
    command = [sys.executable, "-c", "import callbacks"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ImportError: Import `trainkit.callbacks`" in result.stderr


def test_the_version_stands_once_more_in_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainkit.__version__ == _project()["project"]["version"]
    with pytest.raises(SystemExit, match="0"):
        cli(["--version"])
    assert capsys.readouterr().out == f"trainkit {trainkit.__version__}\n"


def test_the_types_are_announced() -> None:
    assert (ROOT / "trainkit" / "py.typed").is_file()
    assert _project()["tool"]["setuptools"]["package-data"]["trainkit"] == ["py.typed"]


def test_files_that_are_no_modules_are_listed() -> None:
    listed = _project()["tool"]["setuptools"]["package-data"]
    others = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "trainkit").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    names = {
        f"{package.replace('.', '/')}/{name}" for package, files in listed.items() for name in files
    }
    assert others == names


def test_torch_is_a_range_in_the_project_and_a_pin_in_the_constraints() -> None:
    assert "torch>=2.10.0" in _project()["project"]["dependencies"]
    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["torch==2.13.0"]


def test_the_lowest_versions_are_those_that_are_run() -> None:
    project = _project()["project"]
    extra = project["optional-dependencies"]["transformers"]
    declared = sorted([*project["dependencies"], *extra])
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(line.replace("==", ">=") for line in lines if line[0] != "#") == declared
    oldest = _project()["project"]["requires-python"].removeprefix(">=")
    assert f"PYTHON_OLDEST ?= python{oldest}" in (ROOT / "Makefile").read_text(encoding="utf-8")
