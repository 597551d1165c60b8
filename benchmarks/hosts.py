"""Jobs on several machines: ways to start them wrongly, and faults while they run.

Run it in the root of the repository, as root; it needs no network, see `tests/hosts/harness.py`:

    python -m benchmarks.hosts --rounds 3
    python -m benchmarks.hosts --only "port" --show      # cases whose name has this text
    python -m benchmarks.hosts --strangers               # noise at each socket that listens

Each case makes hosts, starts `trainkit launch` on them, and looks at how it ends. It prints a
table, and exits with 1 if a job hung, left a process, or did not say what was wrong.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.hosts.harness import WHY_NOT, Host, Program, hosts, launch
from trainkit.cli.settings import SETTINGS

MEETING_SECONDS = 12.0  # in which the machines must meet; the default is a minute
START_SECONDS = 60.0  # until the first steps, on a busy machine
DEATH_SECONDS = 20.0  # from a death until all are gone
LOST_SECONDS = 60.0  # from the loss of a link
LEFT_SECONDS = 5.0  # for what is left when the last launcher has ended
STEP_LIMIT = 5  # seconds of the watchdog
STEP = 3  # the step after which something happens
ENDLESS = 10**6  # steps
NEVER = float("inf")  # seconds

RANK = " -u train.py"  # stands in the command of a training process, and in no launcher's

TRAIN = f"""
import ctypes, hashlib, os, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
loop, act, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])

def here(place):
    "Do on the last process what the case asks for."
    where, _, what = act.partition(" ")
    if where != place or rank < size - 1:
        return
    print("now", what, flush=True)
    if what == "raises":
        raise RuntimeError("boom")
    if what == "crashes":
        ctypes.string_at(0)
    if what == "leaves":
        os._exit(0)
    if what == "ends":
        sys.exit(0)

def show(step):
    print("step", step, flush=True)
    if step == {STEP}:
        here("step")
    time.sleep(float(os.environ.get("PACE", "0.05")))

here("first")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Accelerator, Callback, Trainer, Watchdog
from trainkit.callbacks import Checkpoint, Evaluation

class Places(Callback):
    def on_step_end(self, run, result):
        show(run.state.step)
    def on_evaluation_start(self, run):
        here("evaluation")
    def on_checkpoint_start(self, run):
        here("save")

torch.manual_seed(0)
x = torch.randn(64 * size, 8)
data, model, loss = TensorDataset(x, x[:, :1]), nn.Linear(8, 1), nn.MSELoss()
loader = DataLoader(data, 8, shuffle=True)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
if loop == "trainer":
    each = 2 * {STEP} if act != "none" else 20
    trainer = Trainer(
        max_steps=steps, output_dir="run",
        callbacks=[Places(), Evaluation(every_n_steps=each), Checkpoint(every_n_steps=each, keep_last=1)],
        watchdog=Watchdog(step={STEP_LIMIT}, first_step=60, evaluation=30, save=30, end=60),
    )
    trainer.fit(model, (loader, loader), optimizer=sgd, loss_fn=loss)
else:
    accelerator = Accelerator(project_dir="run")
    wrapped, sgd, loader = accelerator.prepare(model, sgd, loader)
    done = 0
    while done < steps:
        for inputs, targets in loader:
            accelerator.backward(loss(wrapped(inputs), targets))
            sgd.step()
            sgd.zero_grad()
            done += 1
            show(done)
            if done == steps:
                break
    accelerator.end_training()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("weights", digest.hexdigest()[:12], flush=True)
"""


class Site:
    """The hosts of a case, what is told to them, and what runs there.

    Args:
        machines: The hosts; the first is machine 0.
        work: The folder that they share, where the launchers start.
        script: The arguments of the training script.
    """

    def __init__(self, machines: Sequence[Host], work: Path, script: Sequence[object]) -> None:
        self.machines = machines
        self.work = work
        self.script = ["train.py", *script]
        self.network = machines[0].network
        self.options: list[object] = ["--main_process_port", 29500]
        if "meeting_timeout" in SETTINGS:
            self.options += ["--meeting_timeout", MEETING_SECONDS]
        self.each: defaultdict[Host, list[object]] = defaultdict(list)
        self.environment: dict[Host, dict[str, str]] = {}
        self.late: dict[Host, float] = {}  # seconds; those with infinity do not come
        self.jobs: dict[Host, Program] = {}
        self.aside: set[Host] = set()  # frozen: they cannot end before they are let go
        (work / "train.py").write_text(TRAIN)

    @property
    def a(self) -> Host:
        return self.machines[0]

    @property
    def b(self) -> Host:
        return self.machines[1]

    @property
    def c(self) -> Host:
        return self.machines[2]

    def tell(self, *options: object, only: Host | None = None) -> None:
        """Give options to all launchers, or to one."""
        (self.options if only is None else self.each[only]).extend(options)

    def names(self, *lines: str, only: Host | None = None) -> None:
        """Give hosts an `/etc/hosts` with these lines, in which `{own}` is the own name."""
        for host in self.machines if only is None else [only]:
            text = "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""])
            host.names = text.format(own=host.name)

    def alter(self, host: Host, path: Path, old: str, new: str) -> None:
        """Let one host see a file that differs."""
        text = path.read_text()
        assert old in text, f"{path} has no {old!r}"
        copy = host.folder / f"other-{path.name}"
        copy.write_text(text.replace(old, new))
        host.sh(f"mount --bind {copy} {path.resolve()}")

    def start(self) -> None:
        """Start the launchers, those that are late too."""
        begin = time.monotonic()
        for host in sorted(self.machines, key=lambda each: self.late.get(each, 0.0)):
            if (late := self.late.get(host, 0.0)) < NEVER:
                time.sleep(max(0.0, begin + late - time.monotonic()))
                self.start_one(host)

    def start_one(self, host: Host) -> None:
        """Start the launcher of one machine."""
        self.jobs[host] = launch(
            self.machines,
            *self.script,
            options=self.options,
            each=self.each,
            only=host,
            folder=self.work,
            environment=self.environment.get(host),
        )[0]

    def wait_for_steps(self, seconds: float = START_SECONDS) -> None:
        """Return when every machine trains."""
        for job in self.jobs.values():
            job.wait_for(f"step {STEP}\n", seconds=seconds)

    def left(self) -> list[Host]:
        """Return the machines whose launchers were started and that can do something."""
        return [host for host in self.jobs if host.is_alive() and host not in self.aside]


def nothing(site: Site) -> None:
    """Change nothing."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, what goes wrong with it, and what it promises then.

    Args:
        name: What goes wrong, for the table.
        before: What is changed before the launchers start.
        fault: What happens when every machine trains; None: nothing.
        at: When it happens instead: seconds after the launchers have started.
        size: Machines.
        processes: On each machine.
        script: Arguments of the training script: the loop, what it does where, steps.
        works: Whether all processes must come to the end with equal weights.
        says: Patterns that the output of every machine that is left must match.
        within: Seconds, from the fault or else the start, until everybody is gone.
    """

    name: str
    before: Callable[[Site], None] = nothing
    fault: Callable[[Site], None] | None = None
    at: float | None = None
    size: int = 2
    processes: int = 1
    loop: str = "trainer"
    act: str = "none"
    steps: int = ENDLESS
    works: bool = False
    says: tuple[str, ...] = ()
    within: float = DEATH_SECONDS

    @property
    def reports(self) -> bool:
        """Whether the job had begun, and so has a report."""
        return self.fault is not None and self.at is None or self.act != "none"


# Before the first step: what works, and what is refused.

DOCKER = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"


def own_name_is_dockers(site: Site) -> None:
    for host in site.machines:
        host.sh(DOCKER)
    site.names("172.17.0.1 {own}")


def by_name(site: Site) -> None:
    site.tell("--main_process_ip", site.a.name)


def only_ipv6(site: Site) -> None:
    for host in site.machines:
        host.sh(f"ip addr del {host.ip}/24 dev eth0")
    site.names("127.0.1.1 {own}", *(f"{host.ip6} {host.name}" for host in site.machines))
    by_name(site)


def range_of_ports(site: Site) -> None:
    """Firewalls that admit 20 ports."""
    site.tell("--ports", "40000-40019", "--main_process_port", 40000)
    for host in site.machines:
        host.sh(
            "for f in -4 -6; do for s in sport dport; do ip $f rule add pref 4 iif eth0 ipproto tcp "
            "$s 40000-40019 lookup local; done; done"
        )
        host.drop("ipproto tcp")


def second_network(site: Site) -> None:
    """A network that only the job uses, and one where everything is dropped."""
    site.network.sh("ip link add storage type bridge; ip link set storage up")
    for index, host in enumerate(site.machines):
        site.network.sh(
            f"ip link add second{index} type veth peer name eth1 netns {host.pid}\n"
            f"ip link set second{index} master storage up"
        )
        host.sh(f"ip addr add 10.88.0.{index + 1}/24 dev eth1; ip link set eth1 up")
        host.drop("")
    site.tell("--main_process_ip", "10.88.0.1")


def first_address_is_dead(site: Site) -> None:
    by_name(site)
    site.names("127.0.1.1 {own}", "10.77.0.99 host-a", "10.77.0.1 host-a", only=site.b)


def silent_name_server(site: Site) -> None:
    for host in site.machines:
        (host.folder / "resolv.conf").write_text("nameserver 10.77.0.99\n")
    site.tell("--main_process_ip", "no-such-host")


def port_taken(site: Site) -> None:
    code = "import socket; s = socket.create_server(('', 29500)); print('up'); s.accept(); s.accept()"
    site.a.run(sys.executable, "-Suc", code).wait_for("up")


def port_of_another_server(site: Site) -> None:
    port_taken(site)
    site.late[site.a] = NEVER


def site_packages(package: str) -> Path:
    """Return the file of an installed package that holds its version."""
    module = __import__(f"{package}.version")
    return Path(str(module.version.__file__)).resolve()


def other_version(package: str, site: Site) -> None:
    path = site_packages(package)
    match = re.search(r"""__version__.*?["'](.+?)["']""", path.read_text())
    assert match, path
    site.alter(site.b, path, match[1], "1.99.0")


def other_python(site: Site) -> None:
    patch = "import platform, sys; sys.version = '3.99.0 (main)'\n"
    patch += "platform.python_version = lambda: '3.99.0'\n"
    (site.b.folder / "sitecustomize.py").write_text(patch)
    site.environment[site.b] = {"PYTHONPATH": f"{site.b.folder}:{Path.cwd()}"}


def not_shared(site: Site) -> None:
    (site.work / "run").mkdir()
    site.b.sh(f"mount -t tmpfs tmpfs {site.work / 'run'}")


SETUPS = (
    Case(name="two machines", works=True),
    Case(name="three machines", works=True, size=3),
    Case(name="own name unknown", works=True, before=lambda s: s.names()),
    Case(name="own name is docker0's address", works=True, before=own_name_is_dockers),
    Case(name="machine 0 by name", works=True, before=by_name),
    Case(name="IPv6 address", works=True, before=lambda s: s.tell("--main_process_ip", s.a.ip6)),
    Case(name="only IPv6, by name", works=True, before=only_ipv6),
    Case(name="firewall with 20 open ports", works=True, before=range_of_ports),
    Case(name="a network for the job", works=True, before=second_network),
    Case(name="first of two addresses is dead", works=True, before=first_address_is_dead),
    Case(name="machine 1 is late", works=True, before=lambda s: s.late.update({s.b: 5.0})),
    Case(name="machine 0 is late", works=True, before=lambda s: s.late.update({s.a: 5.0})),
    Case(
        name="unknown name",
        before=lambda s: s.tell("--main_process_ip", "no-such-host"),
        says=("no-such-host", "name|resolve"),
    ),
    Case(name="name server is silent", before=silent_name_server, says=("no-such-host",), within=40),
    Case(
        name="no way to the address",
        before=lambda s: s.tell("--main_process_ip", "10.99.0.1"),
        says=(r"10\.99\.0\.1",),
    ),
    Case(
        name="address of nobody",
        before=lambda s: s.tell("--main_process_ip", "10.77.0.99", only=s.b),
        says=(r"10\.77\.0\.99|machine 1\b",),
    ),
    Case(
        name="machine 0 has another address",
        before=lambda s: s.tell("--main_process_ip", s.b.ip),
        says=(r"10\.77\.0\.2",),
    ),
    Case(
        name="firewall drops the port",
        before=lambda s: s.a.drop("ipproto tcp dport 29500"),
        says=(r"29500|machine 1\b",),
    ),
    Case(
        name="firewall with one open port",
        before=lambda s: [h.drop("ipproto tcp dport 1024-29499") for h in s.machines]
        and [h.drop("ipproto tcp dport 29501-65534") for h in s.machines],
        says=("port|firewall",),
    ),
    Case(
        name="machines 1 and 2 apart",
        before=lambda s: s.network.separate(s.b, s.c),
        size=3,
        says=(r"machine [12]\b.*machine [12]\b|host-[bc].*host-[bc]",),
    ),
    Case(name="port taken", before=port_taken, says=("29500",)),
    Case(name="port of another server", before=port_of_another_server, says=("29500",)),
    Case(
        name="machine 0 not started",
        before=lambda s: s.late.update({s.a: NEVER}),
        size=3,
        says=(r"machine 0\b|10\.77\.0\.1\b",),
    ),
    Case(
        name="machine 0 without power",
        before=lambda s: s.late.update({s.a: NEVER}) or s.network.cut(s.a),
        says=(r"machine 0\b|10\.77\.0\.1\b",),
    ),
    Case(
        name="machine 2 missing",
        before=lambda s: s.late.update({s.c: NEVER}),
        size=3,
        says=(r"machine 2\b",),
    ),
    Case(
        name="machine_rank 1 twice",
        before=lambda s: s.tell("--machine_rank", 1, only=s.c),
        size=3,
        says=(r"machine_rank.*\b1\b|machine 1\b",),
    ),
    Case(
        name="machine_rank 0 twice",
        before=lambda s: s.tell("--machine_rank", 0, only=s.b),
        says=(r"machine_rank|machine [01]\b",),
    ),
    Case(
        name="other number of processes",
        before=lambda s: s.tell("--num_processes", 4, only=s.b),
        says=(r"num_processes: 2 \(machine 0.*\), 4 \(machine 1",),
    ),
    Case(name="other torch", before=partial(other_version, "torch"), says=("torch", r"1\.99\.0")),
    Case(name="other Python", before=other_python, says=("Python", r"3\.99\.0")),
    Case(
        name="other trainkit", before=partial(other_version, "trainkit"), says=(r"1\.99\.0",)
    ),
    Case(
        name="other script",
        before=lambda s: s.alter(s.b, s.work / "train.py", "lr=0.01", "lr=0.02"),
        says=("train.py|script",),
    ),
    Case(
        name="other settings",
        before=lambda s: s.tell("--mixed_precision", "bf16", only=s.b),
        says=(r"(?i)mixed_precision: no \(machine 0.*\), bf16 \(machine 1",),
    ),
    Case(name="output_dir not shared", before=not_shared, says=("output_dir",), within=40),
)  # fmt: skip


# While the job runs.


def freeze_launcher(site: Site) -> None:
    site.jobs[site.b].send(signal.SIGSTOP)
    site.aside.add(site.b)


def freeze_host(site: Site) -> None:
    site.network.cut(site.b)
    site.b.freeze()
    site.aside.add(site.b)


def away(seconds: float, stop: Callable[[Site], None], go_on: Callable[[Site], None]) -> Callable[[Site], None]:
    """Return a fault that passes."""

    def act(site: Site) -> None:
        stop(site)
        time.sleep(seconds)
        go_on(site)

    return act


LONG = 150  # steps: some seconds longer than what passes
BOOM = (r"machine 1\b", r"process 1\b", "RuntimeError: boom", "step 3")


def dies(*, machine: int, process: int | None = None) -> tuple[str, ...]:
    """Return what a report on the end of a process says."""
    return (rf"machine {machine}\b", rf"process {machine if process is None else process}\b", r"step \d")


def lost(machine: int) -> tuple[str, ...]:
    """Return what a report on a lost machine says."""
    return (rf"machine {machine} \(host-{'abc'[machine]}\)", "unreachable|machine, network or power")


FAULTS = (
    Case(name="process on machine 0 killed", fault=lambda s: s.a.kill(RANK), says=dies(machine=0)),
    Case(name="process on machine 1 killed", fault=lambda s: s.b.kill(RANK), says=dies(machine=1)),
    Case(
        name="process on machine 2 killed", size=3, fault=lambda s: s.c.kill(RANK), says=dies(machine=2)
    ),
    Case(
        name="both processes of machine 1 killed", processes=2, fault=lambda s: s.b.kill(RANK),
        says=(r"machine 1\b", r"process [23]\b"),
    ),
    Case(
        name="launcher on machine 0 killed", fault=lambda s: s.jobs[s.a].send(signal.SIGKILL),
        says=(r"machine 0\b",),
    ),
    Case(
        name="launcher on machine 1 killed", fault=lambda s: s.jobs[s.b].send(signal.SIGKILL),
        says=(r"machine 1\b",),
    ),
    Case(
        name="launcher on machine 2 told to end", size=3,
        fault=lambda s: s.jobs[s.c].send(signal.SIGTERM), says=("SIGTERM",),
    ),
    Case(
        name="launcher on machine 1 killed at the start", at=1.0,
        fault=lambda s: s.jobs[s.b].send(signal.SIGKILL), says=(r"machine 1\b",),
    ),
    Case(name="machine 1 dies", fault=lambda s: s.b.die(), says=lost(1)),
    Case(name="machine 0 dies", fault=lambda s: s.a.die(), says=lost(0)),
    Case(
        name="machine 1 loses power", fault=lambda s: s.b.die(silently=True), says=lost(1), within=LOST_SECONDS
    ),
    Case(
        name="machine 0 of 3 loses power", size=3, fault=lambda s: s.a.die(silently=True), says=lost(0),
        within=LOST_SECONDS,
    ),
    Case(
        name="machine 2 of 3 loses power", size=3, fault=lambda s: s.c.die(silently=True), says=lost(2),
        within=LOST_SECONDS,
    ),
    Case(name="network of machine 1 lost", fault=lambda s: s.network.cut(s.b), says=("unreachable",), within=LOST_SECONDS),
    Case(
        name="network of machine 0 of 3 lost", size=3, fault=lambda s: s.network.cut(s.a), says=("unreachable",),
        within=LOST_SECONDS,
    ),
    Case(name="cable of machine 1 out", fault=lambda s: s.network.unplug(s.b), says=("unreachable",), within=LOST_SECONDS),
    Case(name="machine 1 hears nobody", fault=lambda s: s.b.drop(""), says=("unreachable",), within=LOST_SECONDS),
    Case(name="machine 0 hears nobody", fault=lambda s: s.a.drop(""), says=("unreachable",), within=LOST_SECONDS),
    Case(
        name="machines 1 and 2 apart", size=3, fault=lambda s: s.network.separate(s.b, s.c), says=("machine [12]",),
        within=LOST_SECONDS,
    ),
    Case(name="process on machine 0 frozen", fault=lambda s: s.a.freeze(RANK), says=(*dies(machine=0), "SIGSTOP|frozen|stopped"), within=LOST_SECONDS),
    Case(name="process on machine 1 frozen", fault=lambda s: s.b.freeze(RANK), says=(*dies(machine=1), "SIGSTOP|frozen|stopped"), within=LOST_SECONDS),
    Case(
        name="launcher on machine 1 frozen", fault=freeze_launcher,
        says=(r"machine 1\b",), within=LOST_SECONDS,
    ),
    Case(name="machine 1 frozen", fault=freeze_host, says=lost(1), within=LOST_SECONDS),
    Case(name="machine 1 raises", act="step raises", says=BOOM),
    Case(name="machine 1 raises in its first line", act="first raises", says=(r"machine 1\b", "boom")),
    Case(name="machine 1 ends in its first line", act="first ends", says=(r"machine 1\b",)),
    Case(name="machine 2 raises in an evaluation", size=3, act="evaluation raises", says=(r"machine 2\b", "boom")),
    Case(name="machine 1 raises in a save", act="save raises", says=(r"machine 1\b", "boom")),
    Case(name="machine 1 crashes", act="step crashes", says=(*dies(machine=1), "SIGSEGV")),
    Case(name="machine 1 leaves with code 0", act="step leaves", says=dies(machine=1)),
    Case(name="own loop: process on machine 1 killed", loop="own", fault=lambda s: s.b.kill(RANK), says=(r"machine 1\b", r"process 1\b")),
    Case(name="own loop: network of machine 1 lost", loop="own", fault=lambda s: s.network.cut(s.b), says=("unreachable",), within=LOST_SECONDS),
    Case(
        name="own loop: process on machine 1 frozen", loop="own", fault=lambda s: s.b.freeze(RANK),
        says=(r"machine 1\b", "SIGSTOP|frozen|stopped"), within=LOST_SECONDS,
    ),
    Case(
        name="network of machine 1 away for 5 s", steps=LONG, works=True,
        fault=away(5.0, lambda s: s.network.cut(s.b), lambda s: s.network.plug(s.b)), within=40,
    ),
    Case(
        name="process on machine 1 away for 3 s", steps=LONG, works=True,
        fault=away(3.0, lambda s: s.b.freeze(RANK), lambda s: s.b.thaw(RANK)), within=40,
    ),
    Case(
        name="launcher on machine 0 away for 5 s", steps=LONG, works=True,
        fault=away(5.0, lambda s: s.jobs[s.a].send(signal.SIGSTOP), lambda s: s.jobs[s.a].send(signal.SIGCONT)),
        within=40,
    ),
)  # fmt: skip


# How a case ends.


@dataclass
class Outcome:
    """What became of a case."""

    case: str
    seconds: float = 0.0
    codes: list[int | None] = field(default_factory=list)
    report: str = ""
    problems: list[str] = field(default_factory=list)
    output: str = ""

    def row(self) -> str:
        codes = ", ".join("-" if code is None else str(code) for code in self.codes)
        return f"| {self.case} | {self.seconds:.1f} | {codes} | {self.report} |"


def run_case(case: Case, folder: Path) -> Outcome:
    """Run a case on hosts of its own."""
    outcome = Outcome(case.name)
    work = folder / "work"
    work.mkdir()
    script = (case.loop, case.act, 40 if case.works and case.fault is None else case.steps)
    with hosts(case.size, folder) as machines:
        site = Site(machines, work, script)
        try:
            if case.processes > 1:
                site.tell("--num_processes", case.size * case.processes)
            case.before(site)
            _play(case, site, outcome)
        except Exception as error:
            outcome.problems.append("".join(traceback.format_exception_only(error)).strip())
        jobs = site.jobs.items()
        outcome.output = "\n".join(f"---- {host.name}\n{job.output}" for host, job in jobs)
    return outcome


def _play(case: Case, site: Site, outcome: Outcome) -> None:
    begin = time.monotonic()
    site.start()
    if case.fault is None and case.act == "none":
        if case.works:
            site.wait_for_steps()
            outcome.problems += [bad for host in site.machines for bad in loose_sockets(site, host)]
            begin = time.monotonic()
    elif case.at is not None:
        time.sleep(case.at)
    elif not case.act.startswith("first"):
        site.wait_for_steps()
    if case.fault is not None:
        begin = time.monotonic()
        case.fault(site)
    limit = case.within + (0 if case.reports or case.works else MEETING_SECONDS)
    running = wait_for_end(site, begin + limit)
    outcome.seconds = time.monotonic() - begin
    for host in site.aside:
        site.network.plug(host)
        host.thaw()
    site.aside.clear()
    running = running or wait_for_end(site, time.monotonic() + DEATH_SECONDS)
    outcome.codes = [site.jobs[host].code if host in site.jobs else None for host in site.machines]
    if running:
        outcome.problems.append(f"after {limit:g} s these run: {', '.join(running)}")
        for host in site.left():
            host.kill("")
    look = look_at_weights if case.works else look_at_words
    look(case, site, outcome)


def wait_for_end(site: Site, end: float) -> list[str]:
    """Wait until no process is left; return what is when the time is up."""
    while left := [f"{host.name}: {pid}" for host in site.left() for pid in host.pids()]:
        if time.monotonic() > end:
            return left
        time.sleep(0.1)
    return []


def look_at_weights(case: Case, site: Site, outcome: Outcome) -> None:
    """Note what is wrong with a job that should have come to its end."""
    weights = re.findall(r"^weights (\w+)$", "".join(j.output for j in site.jobs.values()), re.M)
    if len(weights) != case.size * case.processes or len(set(weights)) != 1:
        outcome.problems.append(f"weights {weights}")
    if set(outcome.codes) != {0}:
        outcome.problems.append(f"exit codes {outcome.codes}")
    outcome.report = "trains to the end"


def look_at_words(case: Case, site: Site, outcome: Outcome) -> None:
    """Note what is missing in what the machines that are left have said."""
    left = site.left()
    if 0 in [site.jobs[host].code for host in left]:
        outcome.problems.append(f"exit codes {outcome.codes}")
    for host in left:
        said = site.jobs[host].output
        missing = [pattern for pattern in case.says if not re.search(pattern, said)]
        if missing:
            outcome.problems.append(f"{host.name} does not say {' or '.join(missing)}")
        if not case.reports and "Traceback" in said:
            outcome.problems.append(f"{host.name} shows a traceback")
    told = [host for host in left if REPORT.search(site.jobs[host].output)]
    if case.reports and len(told) != 1:
        outcome.problems.append(f"reports by {[host.name for host in told]}, not by one machine")
    first = told or left
    outcome.report = sentence(site.jobs[first[0]].output) if first else ""


REPORT = re.compile(r"^report: (.+\.json)$", re.M)


def sentence(output: str) -> str:
    """Return the line that tells the cause."""
    lines = [line for line in output.splitlines() if re.match(r"(trainkit|error)\b.*:", line)]
    return lines[-1].replace("|", "\\|")[:200] if lines else ""


def loose_sockets(site: Site, host: Host) -> list[str]:
    """Return which sockets listen to more than the job needs, or outside the range of ports."""
    address = r"127\.\d+\.\d+\.\d+|\[::1\]|\[::ffff:127.*\]"
    if len(site.machines) > 1:
        named = [host.ip, host.ip6, f"10.88.0.{site.machines.index(host) + 1}"]
        address += "|" + "|".join(rf"\[?(::ffff:)?{re.escape(each)}\]?" for each in named)
    words = list(map(str, [*site.options, *site.each[host]]))
    low, high = 0, 1 << 16
    if "--ports" in words:
        low, high = map(int, words[words.index("--ports") + 1].split("-"))
    loose = []
    for place in listening(host):
        where, _, port = place.rpartition(":")
        if not re.fullmatch(address, where) or not low <= int(port) <= high:
            loose.append(f"{host.name} listens at {place}")
    return loose


def listening(host: Host) -> list[str]:
    """Return the addresses and ports at which TCP sockets of a host listen."""
    return [line.split()[3] for line in host.sh("ss -tlnH").splitlines()]


# What strangers send.

NOISE = """
import json, os, random, socket, struct, sys, time
hosts, random_messages = json.loads(sys.argv[1]), int(sys.argv[2])
chance = random.Random(0)
store = struct.Struct("<BI")  # torch's store: 0 says hello, with a number
text = lambda s: struct.pack("<Q", len(s)) + s
hello = store.pack(0, 0x3C85F7CE)
line = lambda **words: json.dumps(words).encode() + b"\\n"
CRAFTED = [
    b"",
    b"\\n" * 5000,
    b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n",
    bytes.fromhex("160301020001fc0303") + bytes(500),
    b"{" * 100000 + b"\\n",
    b"[" * 900 + b"\\n",
    b"a" * (3 << 20),
    b"\\xff\\xfe\\n{}\\n",
    line(kind="hello", token="", rank=1, who=["x", "x", 1, "x"]),
    line(kind="hello", token="0" * 32, rank=-1, who=[]),
    line(kind="hello", token=None, rank=1.0, who=None),
    line(kind="hello", token=["a"], rank=True, who={}),
    line(kind="failed", fit=0, text="boom", **{"from": 0}),
    line(kind="gone", **{"from": 1}),
    line(kind="done", how="x", **{"from": 0, "to": 0}),
    b"cos\\nsystem\\n(S'exit 1'\\ntR.",
    hello + bytes([1]) + struct.pack("<Q", 1 << 62),
    hello + bytes(range(256)) * 8,
    struct.pack("<Q", 1 << 63) * 64,
    struct.pack(">I", 0xFFFFFFFF) * 64,
]
def send(host, port, data, linger=0.0):
    try:
        with socket.create_connection((host, port), timeout=1.0) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.sendall(data)
            if linger:
                s.settimeout(linger)
                s.recv(100)
    except OSError:
        pass
end = time.monotonic() + 240
sent = 0
for host, port in hosts:
    held = []
    for _ in range(20):  # silent ones
        try:
            held.append(socket.create_connection((host, port), timeout=1.0))
        except OSError:
            pass
    for data in CRAFTED:
        send(host, port, data, linger=0.3)
    for _ in range(random_messages):
        if time.monotonic() > end:
            sys.exit("no time left")
        send(host, port, chance.randbytes(chance.choice((1, 5, 8, 64, 2000))))
        sent += 1
    for s in held:
        s.close()
print("sent", sent, "to", len(hosts))
"""


def strangers(messages: int, folder: Path) -> Outcome:
    """Send noise to every socket of a job, while it meets and while it trains."""
    outcome = Outcome(f"{messages} random and 20 crafted messages to each socket")
    work = folder / "work"
    work.mkdir()
    with hosts(3, folder) as (a, b, stranger):
        quiet = Site((a, b), work, ("trainer", "none", 1000))
        quiet.environment = dict.fromkeys((a, b), {"PACE": "0"})
        quiet.start()
        expected = _weights(quiet)
        site = Site((a, b), work, ("trainer", "none", 1000))
        site.tell("--meeting_timeout", 300)
        try:
            begin = time.monotonic()
            site.start_one(a)
            while not listening(a):
                assert time.monotonic() < begin + START_SECONDS, site.jobs[a].output
                time.sleep(0.1)
            told = [_noise(messages, [a], stranger)]
            site.start_one(b)
            site.wait_for_steps()
            told += [_noise(messages, [a, b], stranger), _noise(messages, [a], a)]
            told += [_noise(messages, [b], b)]
            assert None in [job.code for job in site.jobs.values()], "the job ended before the noise"
            if (weights := _weights(site)) != expected:
                outcome.problems.append(f"weights {weights} are not {expected}")
            outcome.seconds = time.monotonic() - begin
            outcome.report = "; ".join(told)
        except AssertionError as error:
            outcome.problems.append(str(error))
        outcome.codes = [job.code for job in site.jobs.values()]
        outcome.output = "\n".join(job.output for job in site.jobs.values())
    return outcome


def _noise(messages: int, targets: Sequence[Host], sender: Host) -> str:
    """Send noise to what listens on hosts and the sender can reach; return what was sent."""
    places = []
    for host in targets:
        for place in listening(host):
            where, _, port = place.rpartition(":")
            where = where.strip("[]")
            if where in ("*", "0.0.0.0", "::"):
                where = host.ip
            if (where.startswith("127.") or where == "::1") == (host is sender):
                places.append((where, int(port)))
    program = sender.run(sys.executable, "-Sc", NOISE, json.dumps(places), messages)
    assert program.wait(300) == 0, program.output
    return program.output.strip()


def _weights(site: Site) -> list[str]:
    for job in site.jobs.values():
        job.wait(120)
    return sorted(re.findall(r"^weights (\w+)$", "".join(j.output for j in site.jobs.values()), re.M))


# The whole.


def trial(case: Case) -> Outcome:
    """Run a case in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        return run_case(case, Path(folder))


def tell(outcome: Outcome, shows: bool) -> bool:
    """Print what became of a case; return whether all was well."""
    print(outcome.row(), flush=True)
    for problem in outcome.problems:
        print(f"    {problem}", flush=True)
    if shows and outcome.output:
        print(outcome.output, flush=True)
    return not outcome.problems


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--part", choices=("setups", "faults"), help="one of the two tables")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--show", choices=("all", "bad"), help="print what the launchers printed")
    parser.add_argument("--strangers", type=int, metavar="N", help="random messages to each socket")
    options = parser.parse_args()
    if WHY_NOT:
        print(WHY_NOT, file=sys.stderr)
        return 2
    if options.strangers is not None:
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
            outcome = strangers(options.strangers, Path(folder))
        return 0 if tell(outcome, options.show == "all" or bool(outcome.problems)) else 1
    parts = {"setups": SETUPS, "faults": FAULTS}
    named = [parts[options.part]] if options.part else [*parts.values()]
    cases = [case for part in named for case in part if options.only in case.name]
    good = 0
    print("| case | seconds | exit codes | report |\n|---|---|---|---|")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        for outcome in pool.map(trial, cases * options.rounds):
            shows = options.show == "all" or (options.show == "bad" and bool(outcome.problems))
            good += tell(outcome, shows)
    print(f"{good} of {len(cases) * options.rounds} end or go on as promised")
    return 0 if good == len(cases) * options.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
