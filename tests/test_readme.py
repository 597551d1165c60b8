"""The README's Python blocks run, and its shell blocks name things that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SECONDS = 300

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
FILE = re.compile(r"(?<![\w./-])((?:examples|benchmarks|docs|tests)/[\w./-]+|[\w-]+\.(?:txt|toml))")


def _blocks(language: str) -> list[str]:
    return [code for found, code in FENCE.findall(README.read_text("utf-8")) if found == language]


def _script() -> str:
    """Return the Python blocks, each on the lines that it has in the README."""
    text = README.read_text("utf-8")
    lines = [""] * len(text.splitlines())
    for block in FENCE.finditer(text):
        if block[1] == "python":
            first = text.count("\n", 0, block.start(2))
            code = block[2].splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines)


@pytest.mark.e2e
def test_the_python_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    script = tmp_path / "README.py"
    script.write_text(_script(), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr


def test_shell_blocks_name_what_exists() -> None:
    code = "\n".join(_blocks("bash"))
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(MAKE.findall(code)) <= set(targets)
    missing = [name for name in FILE.findall(code) if not (ROOT / name).exists()]
    assert not missing


def test_the_readme_has_blocks_of_both_kinds() -> None:
    assert _blocks("python")
    assert "make test" in "\n".join(_blocks("bash"))
