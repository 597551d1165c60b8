"""`trainkit launch`: start a script on several processes, on one machine or more."""

import argparse
import os
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.basics.systems import require_fork
from trainkit.basics.terminal import print_table
from trainkit.errors import ConfigError
from trainkit.launch import failure
from trainkit.launch.plan import Plan, Script, make_plan
from trainkit.launch.resolving import Resolved, add_options, resolve
from trainkit.watch.report import FOLDER_VARIABLE

_TORCHRUN = re.compile(
    "PET_(NNODES|NODE_RANK|NPROC_PER_NODE|RDZV_.*|MASTER_.*|STANDALONE|MODULE|NO_PYTHON|RUN_PATH)"
)

_END = """What is given on the command line beats the file, which beats the environment variables
TRAINKIT_<NAME>. Options may be written with hyphens instead of underscores."""


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "launch",
        description="Start a script on several processes, on one machine or more.",
        epilog=_END,
        usage="trainkit launch [options] SCRIPT [arguments of the script]",
    )
    add_options(parser)
    flags = {
        ("--standalone",): "one machine, any free port, whatever a file says",
        ("-m", "--module"): "SCRIPT is a module, as for `python -m`",
        ("--no_python", "--no-python"): "SCRIPT is any program",
        ("--dry-run", "--dry_run"): "print the command and its environment; start nothing",
        ("--show-config", "--show_config"): "print every setting and where it comes from",
    }
    for names, text in flags.items():
        parser.add_argument(*names, action="store_true", help=text)
    # All behind the first argument that is no option is the script's.
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    resolved = resolve(options)
    if options.standalone:
        resolved = _standalone(resolved)
    if options.show_config:
        print(f"file: {resolved.file or 'none'}")
        print_table(("SETTING", "VALUE", "SOURCE"), resolved.rows())
        if not options.script:
            return 0
    if options.script[:1] == ["--"]:
        del options.script[0]
    if not options.script:
        raise ConfigError("There is no script. Use: trainkit launch [options] SCRIPT [arguments]")
    plan = _plan(options, resolved)
    if plan.note:
        print(f"trainkit: {plan.note}", file=sys.stderr)
    if options.dry_run:
        print(plan.line())
        return 0
    return 0 if options.show_config else start(plan)


def _plan(options: argparse.Namespace, resolved: Resolved) -> Plan:
    path, *arguments = options.script
    script = Script(
        path=path,
        arguments=tuple(arguments),
        is_module=options.module,
        is_program=options.no_python,
    )
    return make_plan(resolved, script)


def _standalone(resolved: Resolved) -> Resolved:
    if resolved.job.num_machines > 1:
        raise ConfigError(
            f"`--standalone` is for one machine, but `num_machines` is {resolved.job.num_machines} "
            f"({resolved.sources['num_machines']}). Pass `--num_machines 1` too."
        )
    return replace(resolved, job=replace(resolved.job, main_process_port=None))


def start(plan: Plan) -> int:
    """Start the processes of this machine, wait for their end, and return the exit code.

    After a failure, what the processes reported is shown, and the reports stay.

    Raises:
        ConfigError: This machine cannot do its part.
        DistributedError: The machines do not come together.
    """
    folder = _report_folder(plan.job.report_dir)
    keeps = False
    try:
        environment = {**plan.environment, FOLDER_VARIABLE: str(folder)}
        code, keeps = _run_processes(replace(plan, environment=environment))
        return code
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)


def _report_folder(parent: str | None) -> Path:
    """Make the folder of this job; its path holds wherever a script goes."""
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="trainkit-", dir=parent)).absolute()
    except OSError as error:
        raise ConfigError(
            f"No folder for reports can be made in `{parent or tempfile.gettempdir()}`: "
            f"{error.strerror}. Pass another `--report_dir`."
        ) from None


def _run_processes(plan: Plan) -> tuple[int, bool]:
    """Return the exit code, and whether there are reports to keep."""
    require_fork("`trainkit launch`", "Start the script by `torchrun`.")
    job = plan.job
    for name in filter(_TORCHRUN.fullmatch, list(os.environ)):
        del os.environ[name]  # the plan has taken from them what nobody else said
    os.environ.update(plan.environment)  # before torch looks for GPUs
    from trainkit.basics.device import accelerator_count
    from trainkit.launch import meeting as meetings
    from trainkit.launch.elastic import ElasticMeeting
    from trainkit.launch.orphan_killer import OrphanKiller
    from trainkit.launch.supervisor import MACHINE_LOST_SECONDS, supervise

    gpus = accelerator_count() if plan.needs_gpus else 0
    if plan.needs_gpus > gpus:
        have = f"{gpus} of them" if gpus else "none"
        raise ConfigError(
            f"Each of the {plan.needs_gpus} processes of this machine needs a GPU of its own, but "
            f"torch sees {have}. Start fewer processes (`--num_processes`), name other GPUs "
            "(`--gpu_ids`), or train on the CPU (`--cpu`)."
        )
    grace = job.shutdown_timeout
    if job.num_machines > 1 and not job.is_elastic:  # the others wait for it
        grace = min(grace, MACHINE_LOST_SECONDS)
    orphan_killer = OrphanKiller(grace)  # before there are threads
    try:
        if job.is_elastic:
            meeting: meetings.Meeting = ElasticMeeting(plan)
        elif job.num_machines > 1:
            meeting = meetings.meet(job, meetings.to_compare(plan))
        else:
            meeting = meetings.alone(job)
        try:
            outcome = supervise(plan, meeting, orphan_killer)
            return outcome.code, failure.explain(outcome, meeting)
        finally:
            meeting.close()
    finally:
        orphan_killer.release()
