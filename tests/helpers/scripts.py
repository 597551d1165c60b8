"""Run scripts: in forks of this process, which has imported torch, or as programs of their own."""

import os
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from tests.helpers.ranks import run_ranks
from tests.helpers.warm import warm

__all__ = ["ROOT", "TRANSFORMERS", "Ended", "run_forked", "run_program", "torchrun"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
TRANSFORMERS = tuple(
    f"transformers.{name}"
    for name in ("trainer", "models.auto.modeling_auto", "models.gpt2.modeling_gpt2")
)


class Ended(NamedTuple):
    """How a script ended, and what it printed; of several processes, the first one."""

    code: int
    output: str
    errors: str


def run_forked(script: Path, *arguments: str, size: int = 1, code: int = 0) -> Ended:
    """Run a script to its end on `size` forked processes, of which only the first may print."""
    first, *others = run_ranks(size, _be_script, script, arguments, timeout=SECONDS)
    assert not any(other.output for other in others)
    assert [ended.code for ended in (first, *others)] == [code] * size, first
    return Ended(*first)


def _be_script(rank: int, script: Path, arguments: tuple[str, ...]) -> Ended:
    warnings.resetwarnings()  # as in an interpreter of its own
    sys.path.insert(0, str(script.parent))
    sys.argv = [script.name, *arguments]
    code = 0
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code, output.getvalue(), errors.getvalue())


def run_program(*arguments: str, imports: tuple[str, ...] = ()) -> str:
    """Run Python with `arguments`, as users do, and return what it printed; fail where it fails.

    What it `imports` is there, beside torch, when it begins.
    """
    with warm(inside=2, imports=imports):
        result = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def torchrun(size: int, script: Path) -> list[str]:
    """Return the arguments of Python that start a script on `size` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return [*(launcher if size > 1 else []), str(script)]
