"""Are the tests awake? Puts hand-written faults into the code, one at a time, and runs the tests.

The faults and the tests for each file stand in `mutants.toml`. Each fault goes into a copy of the
tree; a fault that no test notices has survived. Exits with 1 where too many do, or where a fault no
longer fits the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
COPIED = (
    "trainkit", "callbacks", "tests", "docs", "examples", "conftest.py", "pyproject.toml",
    "README.md",
)  # fmt: skip
LEAST = 0.9  # of the faults must be caught


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault: `old` becomes `new` in `file`, a path under the root."""

    words: str
    file: str
    old: str
    new: str


def read() -> tuple[list[Mutant], list[tuple[str, list[str]]]]:
    """Return the faults, and the tests for each file or folder, the first that fits counts."""
    content = tomllib.loads(LIST.read_text(encoding="utf-8"))
    mutants = [Mutant(**entry) for entry in content["mutants"]]
    return mutants, [(entry["file"], entry["tests"]) for entry in content["suites"]]


def misfits(mutants: list[Mutant]) -> list[str]:
    """Return what is wrong with faults that no longer fit the code."""
    problems = []
    for mutant in mutants:
        count = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1:
            problems.append(f"{mutant.words}: `old` stands {count} times in {mutant.file}")
    return problems


def copy_tree(target: Path) -> None:
    """Copy what the tests need; `trainkit/callbacks` stays the link that it is."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target / name)


def run_tests(tree: Path, tests: list[str], timeout: float) -> tuple[bool, str]:
    """Return whether all pass, and the last line that pytest says.

    Args:
        timeout: Seconds; tests that take longer count as failed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return False, f"still running after {timeout:.0f} s"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines = failed or output.strip().splitlines() or ["no output"]
    if process.returncode not in (0, 1, 2):  # 2: a test file could not be imported
        raise SystemExit(f"pytest ended with {process.returncode}:\n{output}")
    return process.returncode == 0, lines[-1][:110]


def try_out(mutant: Mutant, tree: Path, tests: list[str], timeout: float) -> tuple[bool, str]:
    """Return whether the tests notice the fault, and by what; `tree` is as before at the end."""
    path = tree / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        passed, line = run_tests(tree, tests, timeout)
    finally:
        path.write_text(before, encoding="utf-8")
    return not passed, line


def without_fault(tree: Path, tests: list[str]) -> float:
    """Return how many seconds the tests may take with a fault, from what they take without."""
    start = time.perf_counter()
    passed, line = run_tests(tree, tests, 600)
    if not passed:
        raise SystemExit(f"The tests fail without any fault: {line}")
    return 30 + 8 * (time.perf_counter() - start)


def tests_for(file: str, suites: list[tuple[str, list[str]]]) -> list[str]:
    """Return the tests that must notice a fault in `file`."""
    return next(tests for start, tests in suites if file.startswith(start))


def main() -> None:
    """Try out all faults, or those whose words or file hold `--only`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the words or the file of a fault")
    arguments = parser.parse_args()
    mutants, suites = read()
    if problems := misfits(mutants):
        raise SystemExit("\n".join(problems))
    chosen = [one for one in mutants if arguments.only in one.words + " " + one.file]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        limits = {}
        for tests in sorted({tuple(tests_for(one.file, suites)) for one in chosen}):
            limits[tests] = without_fault(tree, list(tests))
        for number, mutant in enumerate(chosen, 1):
            start = time.perf_counter()
            tests = tuple(tests_for(mutant.file, suites))
            caught, line = try_out(mutant, tree, list(tests), limits[tests])
            survivors += [] if caught else [mutant]
            spent = time.perf_counter() - start
            word = "caught" if caught else "SURVIVED"
            print(f"{number:3} {word:8} {spent:5.1f} s  {mutant.words}  [{line}]", flush=True)
    caught_count = len(chosen) - len(survivors)
    print(f"{caught_count} of {len(chosen)} caught")
    if caught_count < LEAST * len(chosen):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
