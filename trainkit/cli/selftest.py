"""`trainkit test`: start the processes of a job, and check that they work together here."""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.basics.terminal import print_table
from trainkit.errors import ConfigError
from trainkit.launch.command import start
from trainkit.launch.plan import Plan, Script, make_plan
from trainkit.launch.resolving import Resolved, add_options, resolve

_DESCRIPTION = """Check that the processes of a job work together here: collectives, precision,
training steps that equal those of one process, a checkpoint and a resume. Takes the options of
`launch`. On several machines run it on all, in a folder that they share."""


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser("test", description=_DESCRIPTION, usage="trainkit test [options]")
    help_text = (
        "instead: train a small model again, resumed, accumulated, compiled, on one process and on "
        "several (2 unless told), and say whether the numbers agree as promised"
    )
    parser.add_argument("--determinism", action="store_true", help=help_text)
    help_text = (
        "instead: try the accelerators of this machine (the checks above on one and on two "
        "processes, speed beside a loop by hand) in ten minutes, and write a page to send with a "
        "report; takes no options but `--output` and `--also`"
    )
    parser.add_argument("--gpu", action="store_true", help=help_text)
    parser.add_argument("--output", metavar="FILE", default="trainkit-gpu.md", help="of `--gpu`")
    also_help = "a command that `--gpu` is to run besides; may be given several times"
    parser.add_argument("--also", metavar="COMMAND", action="append", default=[], help=also_help)
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.gpu:
        from trainkit.cli.gpu_page import write_page  # torch; nothing else here needs it

        return write_page(Path(options.output), options.also)
    resolved = resolve(options)
    if options.determinism:
        return _compare_trainings(resolved)
    code = _start(make_plan(resolved, _checks()))
    if code:
        print(f"trainkit test: FAILED (exit code {code})", file=sys.stderr)
    return code


def _checks(*arguments: object) -> Script:
    """Return what the processes run."""
    path = "trainkit.testing.job"
    return Script(path=path, arguments=tuple(map(str, arguments)), is_module=True)


def _start(plan: Plan) -> int:
    if plan.note:
        print(f"trainkit: {plan.note}", file=sys.stderr)
    return start(plan)


def _compare_trainings(resolved: Resolved) -> int:
    """Train on one process and on several, in two rounds, and print what agrees and what not."""
    if resolved.job.num_machines > 1:
        raise ConfigError(
            f"`--determinism` is for one machine, but `num_machines` is "
            f"{resolved.job.num_machines} ({resolved.sources['num_machines']}). Run it on each, "
            "with `--num_machines 1`."
        )
    from trainkit.testing.job import ROUNDS, findings  # torch; nothing else here needs it

    most = resolved.job.num_processes or 2
    with tempfile.TemporaryDirectory(prefix="trainkit-test-") as folder:
        plans = [
            (size, part, make_plan(job, _checks(folder, part, most)))
            for size, job in _jobs(resolved, most)
            for part in ROUNDS
        ]
        for size, part, plan in plans:
            if code := _start(plan):
                which = f"the {part} start of {size} process(es)"
                print(f"trainkit test: FAILED in {which} (exit code {code})", file=sys.stderr)
                return code
        rows = findings(Path(folder))
    words = {True: "ok", False: "BROKEN", None: "-"}
    print_table(
        ("DEVICE", "WHAT", "PROMISED", "FOUND", ""), [(*row, words[holds]) for *row, holds in rows]
    )
    broken = sum(row[-1] is False for row in rows)
    print(f"{broken} of {len(rows)} promises BROKEN" if broken else "All that was tried holds.")
    return int(broken > 0)


def _jobs(resolved: Resolved, most: int) -> list[tuple[int, Resolved]]:
    """Return the jobs to start, by their processes: on accelerators as far as there are enough.

    Those on the CPU come last: what is set for them hides the accelerators for good.
    """
    job = replace(resolved.job, num_processes=None)
    there = make_plan(replace(resolved, job=job), _checks()).needs_gpus
    sizes = sorted({1, most})
    jobs = [(size, False) for size in sizes if size <= there]
    if len(jobs) < len(sizes):
        jobs += [(size, True) for size in sizes]
    return [
        (size, replace(resolved, job=replace(job, num_processes=size, use_cpu=on_cpu)))
        for size, on_cpu in jobs
    ]
