"""`trainkit migrate`: the imports of scripts, what is left, and files whole or as before."""

import ast
import os
import stat
from pathlib import Path

import pytest

from trainkit.cli.main import main

BEFORE = """#!/usr/bin/env python
# Größe: from accelerate import Nothing
import os, accelerate
import accelerate.utils as u, accelerate.logging
import accelerate as acc
from accelerate import Accelerator  # accelerate
from accelerate.utils import (
    DistributedType, set_seed as seed,
    is_peft_model,
)
from accelerate \\
    .state import AcceleratorState
from .accelerate import local
from accelerated import other
text = "ä"; from accelerate.logging import get_logger
def f():
    if True:
        from accelerate import __version__ as v
    return accelerate.utils.set_seed, u.set_seed, acc.Accelerator
"""
AFTER = """#!/usr/bin/env python
# Größe: from accelerate import Nothing
import os, trainkit.accelerate_compat as accelerate
import trainkit.accelerate_compat.utils as u, trainkit.accelerate_compat as accelerate
import trainkit.accelerate_compat as acc
from trainkit import Accelerator  # accelerate
from trainkit.accelerate_compat.utils import (
    DistributedType, set_seed as seed,
    is_peft_model,
)
from trainkit.accelerate_compat.state import AcceleratorState
from .accelerate import local
from accelerated import other
text = "ä"; from trainkit import get_logger
def f():
    if True:
        from trainkit.accelerate_compat import __version__ as v
    return accelerate.utils.set_seed, u.set_seed, acc.Accelerator
"""


def test_imports_are_rewritten_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    for ending, encoding in (("\n", "utf-8"), ("\r\n", "utf-8-sig")):
        source = BEFORE.replace("\n", ending).encode(encoding)
        script.write_bytes(source)
        script.chmod(0o755)
        assert main(["migrate", str(script)]) == 0
        told = capsys.readouterr()
        assert "\n-from accelerate import Accelerator  # accelerate" in told.out
        assert "\n+from trainkit import Accelerator  # accelerate" in told.out
        assert told.err == ""
        assert script.read_bytes() == source
        assert main(["migrate", "--write", str(script)]) == 0
        assert script.read_bytes() == AFTER.replace("\n", ending).encode(encoding)
        assert stat.S_IMODE(script.stat().st_mode) == 0o755
        capsys.readouterr()
        assert main(["migrate", "--write", str(script)]) == 0  # nothing more
        assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    ast.parse(AFTER)


def test_what_is_left_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import accelerate as a\n"
        "from accelerate.utils import HfDeepSpeedConfig, set_seed\n"
        "from accelerate import set_sed\n"
        "import importlib\n"
        "importlib.import_module('accelerate.utils')\n"
        "print(a.utils.modelling.x, a.prepare_pippy)\n"
        "print('accelerate everything')\n"
    )
    assert main(["migrate", str(script)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["2", "3", "5", "6", "6"]
    assert "`HfDeepSpeedConfig` cannot be used: DeepSpeed's engine is not driven" in lines[0]
    assert "Did you mean `set_seed`?" in lines[1]
    assert "'accelerate.utils' names Accelerate in a text" in lines[2]
    assert any("`prepare_pippy` cannot be used" in line for line in lines[3:])


def test_settings_that_would_have_no_effect_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import accelerate\n"
        "import accelerate.data_loader as loading\n"
        "accelerator = accelerate.Accelerator(mixed_precision='fp8')\n"  # needs no word
        "accelerator.num_processes = 1\n"
        "self.accelerator._custom = []\n"
        "accelerate.utils.set_seed = loading.skip_first_batches = print\n"
        # None of these needs a word.
        "accelerator.state.deepspeed_plugin.deepspeed_config['a'] = 1\n"
        "accelerator.gradient_accumulation_steps = 2\n"
        "accelerator._optimizers = []\n"
        "accelerator.my_own = 1\n"
        "model.config = accelerator.num_processes\n"
    )
    assert main(["migrate", str(script)]) == 1
    lines = capsys.readouterr().err.splitlines()
    found = [line.split(": ")[0].rpartition(":")[2] for line in lines]
    assert found == ["4", "5", "6", "6"]
    assert "`accelerator.num_processes` cannot be set. Pass it to `Accelerator(...)`" in lines[0]
    assert "`self.accelerator._custom` cannot be set" in lines[1]
    assert "`accelerate.utils.set_seed` is set, where trainkit does not look" in lines[2]
    assert "`loading.skip_first_batches` is set" in lines[3]


def test_folders_and_what_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "project" / "part"
    inside.mkdir(parents=True)
    (inside / "a.py").write_text("import accelerate\n")
    for hidden in (".venv", "site-packages"):
        (tmp_path / "project" / hidden).mkdir()
        (tmp_path / "project" / hidden / "b.py").write_text("import accelerate\n")
    assert main(["migrate", "--write", str(tmp_path / "project"), str(inside / "a.py")]) == 0
    assert "trainkit" in (inside / "a.py").read_text()
    assert "trainkit" not in (tmp_path / "project" / ".venv" / "b.py").read_text()
    capsys.readouterr()
    broken = tmp_path / "broken.py"
    broken.write_text("import accelerate\nfrom accelerate import (\n")
    (tmp_path / "cells.ipynb").write_text('{"cells": []}')
    odd = tmp_path / "odd.py"
    odd.write_bytes(b"# \xff\nimport accelerate\n")
    for path, told in (
        (broken, "line 2 is no Python"),
        (tmp_path / "cells.ipynb", "is a notebook"),
        (odd, "is no Python"),
        (tmp_path / "none.py", "stays as it is: "),
    ):
        before = path.read_bytes() if path.exists() else None
        assert main(["migrate", "--write", str(path), str(inside / "a.py")]) == 1
        assert told in capsys.readouterr().err
        assert before == (path.read_bytes() if path.exists() else None)
    (tmp_path / "empty").mkdir()
    assert main(["migrate", str(tmp_path / "empty")]) == 1
    assert "Name scripts" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "target.py", tmp_path / "link.py"
    target.write_text("import accelerate\n")
    link.symlink_to(target)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["migrate", "--write", str(link)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert target.read_text() == "import accelerate\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "target.py"]
    assert main(["migrate", "--write", str(link)]) == 0
    assert link.is_symlink()
    assert target.read_text() == "import trainkit.accelerate_compat as accelerate\n"
