"""Train `causal_lm.py` on one process and on two, the same blocks an update, and compare.

    make data
    .venv/bin/python examples/compare_processes.py

The losses are the same but for the order in which numbers are added up. The speed-up is that of
this machine: one process has it for itself too, with one thread and with two. Further options go
to `causal_lm.py`, such as `--bf16` or `--config_overrides n_layer=8`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

SCRIPT = Path(__file__).resolve().parent / "causal_lm.py"
WINDOW = 4  # micro-batches of an update, all processes together


class Setting(NamedTuple):
    """How one of the trainings runs."""

    processes: int
    threads: int  # of each process

    @override
    def __str__(self) -> str:
        """Return its name in the table."""
        processes = "process" if self.processes == 1 else "processes"
        threads = "thread" if self.threads == 1 else "threads"
        return f"{self.processes} {processes}, {self.threads} {threads} each"


def parse_setting(text: str) -> Setting:
    """Return what "2x1" means: two processes with one thread each."""
    processes, threads = map(int, text.split("x"))
    if processes not in (1, 2, 4) or threads < 1:
        raise ValueError(text)
    return Setting(processes, threads)


def train(setting: Setting, steps: int, folder: Path, more: list[str]) -> list[dict[str, Any]]:
    """Train in a program of its own, and return the lines that it logged."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher.append(f"--nproc-per-node={setting.processes}")
    command = [sys.executable, *(launcher if setting.processes > 1 else []), str(SCRIPT)]
    command += ["--max_steps", str(steps), "--logging_steps", "1", "--output_dir", str(folder)]
    command += ["--gradient_accumulation_steps", str(WINDOW // setting.processes), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    print(f"{setting} ...", flush=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "train"]


def blocks_per_second(lines: list[dict[str, Any]]) -> float:
    """Return the speed of a median step: neither the first ones nor a pause count."""
    speeds = sorted(
        (after["samples"] - before["samples"]) / (after["time/seconds"] - before["time/seconds"])
        for before, after in pairwise(lines)
    )
    return float(speeds[len(speeds) // 2])


def print_table(runs: dict[Setting, list[dict[str, Any]]]) -> None:
    """Print the losses of all runs side by side, and how fast each was."""
    reference, *_ = runs.values()
    steps = len(reference)
    shown = sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps - 1})
    print(f"{'loss after update':28}" + "".join(f"{index + 1:>10}" for index in shown))
    for setting, lines in runs.items():
        print(f"{setting!s:28}" + "".join(f"{lines[index]['loss']:10.5f}" for index in shown))
    print(f"\n{'':28}{'largest difference':>20}{'blocks/s':>10}{'speed-up':>10}")
    for setting, lines in runs.items():
        pairs = zip(reference, lines, strict=True)
        difference = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in pairs)
        speed = blocks_per_second(lines)
        gain = speed / blocks_per_second(reference)
        print(f"{setting!s:28}{difference:20.1e}{speed:10.1f}{gain:9.2f}x")


def main() -> None:
    """Run all settings one after the other, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings",
        type=parse_setting,
        nargs="+",
        default=[Setting(1, 1), Setting(1, 2), Setting(2, 1)],
        metavar="NxT",
        help="1, 2 or 4 processes with so many threads each (default: 1x1 1x2 2x1)",
    )
    parser.add_argument("--steps", type=int, default=40, help="updates of each (default: 40)")
    arguments, more = parser.parse_known_args()
    if arguments.steps < 2:
        parser.error(f"--steps must be at least 2, but is {arguments.steps}.")
    runs = {}
    for setting in arguments.settings:
        with tempfile.TemporaryDirectory() as folder:
            runs[setting] = train(setting, arguments.steps, Path(folder), more)
    print_table(runs)


if __name__ == "__main__":
    main()
