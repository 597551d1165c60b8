# ruff: noqa: D103 - what is done to a site is said by the name
"""Jobs on several machines: ways to start them wrongly, and faults while they run.

Run it in the root of the repository, as root; it needs no network, see `tests/hosts/harness.py`:

    python -m benchmarks.hosts --rounds 3
    python -m benchmarks.hosts --only port --show bad    # cases whose name has this text
    python -m benchmarks.hosts --strangers 10000         # noise at each socket that listens

Each case makes hosts, starts `trainkit launch` on them, and looks at how it ends. It prints a
table, and exits with 1 if a job hung, left a process, or did not say what was wrong.
"""

import argparse
import ctypes
import json
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.hosts.harness import ROOT, WHY_NOT, Host, Program, hosts, launch
from trainkit.launch.settings import SETTINGS

MEETING_SECONDS = 12.0  # in which the machines must meet; the default is a minute
START_SECONDS = 90.0  # until the first steps, on a busy machine
DEATH_SECONDS = 20.0  # from a death until all are gone
LOST_SECONDS = 60.0  # from the loss of a link
STEP_LIMIT = 10  # seconds of the watchdog
STEP = 3  # the step after which something happens
ENDLESS = 10**6  # steps
NEVER = float("inf")  # seconds

MEETING = "--meeting_timeout" if "meeting_timeout" in SETTINGS else ""
RANK = " -u train.py"  # stands in the command of a training process, and in no launcher's

TRAIN = f"""
import ctypes, hashlib, os, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
loop, act, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])

def say(*words):
    "Write a line at once: `print` writes its end later, and two processes share the pipe."
    os.write(1, (" ".join(map(str, words)) + os.linesep).encode())

def here(place):
    "Do on the last process what the case asks for."
    where, _, what = act.partition(" ")
    if where != place or rank < size - 1:
        return
    say("now", what)
    if what == "raises":
        raise RuntimeError("boom")
    if what == "crashes":
        ctypes.string_at(0)
    if what == "leaves":
        os._exit(0)
    if what == "ends":
        sys.exit(0)

def show(step):
    say("step", step)
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
        callbacks=[Places(), Evaluation(every_n_steps=each), Checkpoint(every_n_steps=each)],
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
say("weights", digest.hexdigest()[:12])
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
        self.a, self.b, self.c = [*machines, machines[-1]][:3]  # of two, `c` is the second
        self.work = work
        self.script = ["train.py", *script]
        self.network = machines[0].network
        self.options: list[object] = ["--main_process_port", 29500]
        self.options += [MEETING, MEETING_SECONDS] if MEETING else []
        self.each: defaultdict[Host, list[object]] = defaultdict(list)
        self.environment: dict[Host, dict[str, str]] = {}
        self.late: dict[Host, float] = {}  # seconds; those with infinity do not come
        self.jobs: dict[Host, Program] = {}
        self.bystanders: list[int] = []  # processes that are no part of the job
        self.aside: set[Host] = set()  # frozen: they cannot end before they are let go
        self.mute: set[Host] = set()  # their launchers are killed, and say nothing
        work.mkdir()
        (work / "train.py").write_text(TRAIN)

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

    def pids(self, host: Host) -> list[int]:
        """Return the processes of the job on a host."""
        return [pid for pid in host.pids() if pid not in self.bystanders]

    def weights(self) -> list[str]:
        """Return what all processes have said of their weights at the end."""
        return re.findall(r"^weights (\w+)$", "".join(j.output for j in self.jobs.values()), re.M)

    def output(self) -> str:
        """Return what the launchers and their processes have printed."""
        return "\n".join(f"---- {host.name}\n{job.output}" for host, job in self.jobs.items())


Act = Callable[["Site"], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, what goes wrong with it, and what it promises then.

    Args:
        name: What goes wrong, for the table.
        before: What is changed before the launchers start.
        fault: What happens when every machine trains; None: nothing.
        at: When it happens instead: seconds after machine 0 has begun to listen.
        size: Machines.
        processes: On each machine.
        loop: "trainer", or "own" with `Accelerator`.
        act: The place in the script where the last process does something, and what.
        steps: Updates of the training.
        works: Whether all processes must come to the end with equal weights.
        says: Patterns for the report, or for what each machine says of a job that did not begin.
        within: Seconds, from the fault or else the start, until everybody is gone.
        parts: Whether machines are parted, so that each may tell what it knows.
    """

    name: str
    before: Act = lambda site: None
    fault: Act | None = None
    at: float | None = None
    size: int = 2
    processes: int = 1
    loop: str = "trainer"
    act: str = "none"
    steps: int = ENDLESS
    works: bool = False
    says: tuple[str, ...] = ()
    within: float = DEATH_SECONDS
    parts: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether there were training processes."""
        return not self.works and (self.fault or self.act) != "none" and self.at is None

    @property
    def has_report(self) -> bool:
        """Whether there must be a report of the job, in the `output_dir` of its run."""
        return self.has_begun and self.loop == "trainer" and not self.act.startswith("first")


def works(name: str, before: Act = lambda site: None, **more: Any) -> Case:
    """Return a case in which the job comes to its end."""
    return Case(name=name, before=before, steps=40, works=True, **more)


def refused(name: str, before: Act, *says: str, **more: Any) -> Case:
    """Return a case that each machine refuses with a sentence, when the time to meet is up."""
    return Case(name=name, before=before, says=says, **{"within": MEETING_SECONDS + 48, **more})


def dies(name: str, fault: Act, *says: str, **more: Any) -> Case:
    """Return a case in which something dies, which the kernel tells the others."""
    return Case(name=name, fault=fault, says=says, **more)


def vanishes(name: str, fault: Act, *says: str, **more: Any) -> Case:
    """Return a case in which something says nothing any more."""
    more = {"within": LOST_SECONDS, **more}
    return Case(name=name, fault=fault, says=says, parts=True, **more)


def acts(name: str, act: str, *says: str, **more: Any) -> Case:
    """Return a case in which the last process does something itself."""
    return Case(name=name, act=act, says=says, **more)


def passes(name: str, fault: Act) -> Case:
    """Return a case in which the job goes on after a while."""
    return Case(name=name, fault=fault, steps=200, works=True, within=LOST_SECONDS)


# Before the first step: what works, and what is refused.


def own_name_is_dockers(site: Site) -> None:
    """The name of each host means an address that all of them have."""
    for host in site.machines:
        host.sh("ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0")
        host.sh("ip link set docker0 up")
    site.names("172.17.0.1 {own}")


def option(*words: object, machine: int | None = None) -> Act:
    """Return what gives an option to all launchers, or to that of one machine."""
    return lambda site: site.tell(*words, only=None if machine is None else site.machines[machine])


unknown_name = option("--main_process_ip", "no-such-host")
no_way = option("--main_process_ip", "10.99.0.1")
address_of_nobody = option("--main_process_ip", "10.77.0.99", machine=1)
rank_1_twice = option("--machine_rank", 1, machine=2)
rank_0_twice = option("--machine_rank", 0, machine=1)
more_processes = option("--num_processes", 4, machine=1)
other_precision = option("--mixed_precision", "bf16", machine=1)


def by_name(site: Site) -> None:
    site.tell("--main_process_ip", site.a.name)


def only_ipv6(site: Site) -> None:
    for host in site.machines:
        host.sh(f"ip addr del {host.ip}/24 dev eth0")
    site.names("127.0.1.1 {own}", *(f"{host.ip6} {host.name}" for host in site.machines))
    by_name(site)


def admit_only(site: Site, ports: str) -> None:
    """Firewalls drop each connection that does not end at one of these ports."""
    for host in site.machines:
        for family, side in product(("-4", "-6"), ("sport", "dport")):
            rule = f"pref 4 iif eth0 ipproto tcp {side} {ports} lookup local"
            host.sh(f"ip {family} rule add {rule}")
        host.drop("ipproto tcp")


def range_of_ports(site: Site) -> None:
    """Only the ports of the job are open; gloo takes its own from where the kernel says."""
    gloo_elsewhere(site)
    for host in site.machines:
        host.sh("sysctl -qw net.ipv4.ip_local_port_range='40100 40199'")


def gloo_elsewhere(site: Site) -> None:
    site.tell("--ports", "40000-40199", "--main_process_port", 40000)
    admit_only(site, "40000-40199")


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
    unknown_name(site)


def address_of_another(site: Site) -> None:
    site.tell("--main_process_ip", site.b.ip)


def port_dropped(site: Site) -> None:
    site.a.drop("ipproto tcp dport 29500")


def one_open_port(site: Site) -> None:
    admit_only(site, "29500")


def apart(site: Site) -> None:
    site.network.separate(site.b, site.c)


def port_taken(site: Site) -> None:
    code = "import socket, time; s = socket.create_server(('', 29500)); print('up')"
    site.a.run(sys.executable, "-Suc", f"{code}; time.sleep(600)").wait_for("up")
    site.bystanders = [*site.a.pids("time.sleep(600)")]


def port_of_another_server(site: Site) -> None:
    port_taken(site)
    without_a(site)


def without_a(site: Site) -> None:
    site.late[site.a] = NEVER


def a_is_off(site: Site) -> None:
    without_a(site)
    site.network.cut(site.a)


def other_script(site: Site) -> None:
    site.alter(site.b, site.work / "train.py", "lr=0.01", "lr=0.02")


def other_version(package: str, site: Site) -> None:
    """Machine 1 has another version of a package."""
    path = Path(str(import_module(f"{package}.version").__file__)).resolve()
    match = re.search(r"""^__version__.*?["'](.+?)["']""", path.read_text(), re.M)
    assert match, path
    site.alter(site.b, path, match[1], "1.99.0")


def other_python(site: Site) -> None:
    patch = "import sys\nsys.version = '3.99.0' + sys.version[sys.version.index(' '):]\n"
    (site.b.folder / "sitecustomize.py").write_text(patch)
    site.environment[site.b] = {"PYTHONPATH": f"{site.b.folder}:{ROOT}"}


def not_shared(site: Site) -> None:
    (site.work / "run").mkdir()
    site.b.sh(f"mount -t tmpfs tmpfs {site.work / 'run'}")


def differ(name: str, *values: str) -> str:
    """Return the pattern of a line that tells what each machine was told."""
    return f"{name}.*" + ".*".join(rf"{v}\b.*machine {rank}\b" for rank, v in enumerate(values))


SETUPS = (
    works("two machines"),
    works("three machines", size=3),
    works("own name unknown", lambda s: s.names()),
    works("own name is docker0's address", own_name_is_dockers),
    works("machine 0 by name", by_name),
    works("IPv6 address", lambda s: s.tell("--main_process_ip", s.a.ip6)),
    works("only IPv6, by name", only_ipv6),
    works("firewall with 200 open ports", range_of_ports),
    works("a network for the job", second_network),
    works("first of two addresses is dead", first_address_is_dead),
    works("machine 1 is late", lambda s: s.late.update({s.b: 5.0})),
    works("machine 0 is late", lambda s: s.late.update({s.a: 5.0})),
    refused("unknown name", unknown_name, "no-such-host", "name|resolve"),
    refused("name server is silent", silent_name_server, "no-such-host", within=90.0),
    refused("no way to the address", no_way, r"10\.99\.0\.1"),
    refused("address of nobody", address_of_nobody, r"10\.77\.0\.99|machine 1\b"),
    refused("address of another machine", address_of_another, r"10\.77\.0\.2"),
    refused("firewall drops the port", port_dropped, r"29500|machine 1\b"),
    refused("firewall with one open port", one_open_port, "port|firewall"),
    refused("firewall drops gloo", gloo_elsewhere, "ip_local_port_range|gloo"),
    refused("machines 1 and 2 apart", apart, r"(machine|host).*(machine|host)", size=3),
    refused("port taken", port_taken, "[Pp]ort.*taken"),
    refused("port of another server", port_of_another_server, "port"),
    refused("machine 0 not started", without_a, r"machine 0\b|10\.77\.0\.1\b", size=3),
    refused("machine 0 without power", a_is_off, r"machine 0\b|10\.77\.0\.1\b"),
    refused("machine 2 missing", lambda s: s.late.update({s.c: NEVER}), r"machine 2\b", size=3),
    refused("machine_rank 1 twice", rank_1_twice, "machine_rank 1 is there twice", size=3),
    refused("machine_rank 0 twice", rank_0_twice, "machine_rank"),
    refused("other number of processes", more_processes, differ("num_processes", "2", "4")),
    refused("other torch", partial(other_version, "torch"), "torch", r"1\.99\.0"),
    refused("other Python", other_python, "Python", r"3\.99\.0"),
    refused("other trainkit", partial(other_version, "trainkit"), "trainkit", r"1\.99\.0"),
    refused("other script", other_script, r"train\.py|script"),
    refused("other settings", other_precision, differ("(?i)mixed_precision", "no", "bf16")),
    acts("output_dir not shared", "first nothing", "output_dir", before=not_shared, within=90.0),
)


# While the job runs.

FROZEN = "SIGSTOP|frozen|stopped"
GONE = "unreachable|cannot reach"


def launcher(machine: int, signum: int) -> Act:
    """Return a fault: a signal to the launcher of a machine."""

    def act(site: Site) -> None:
        host = site.machines[machine]
        site.jobs[host].send(signum)
        if signum == signal.SIGKILL:
            site.mute.add(host)

    return act


def cut(site: Site) -> None:
    site.network.cut(site.b)


def freeze_launcher(site: Site) -> None:
    launcher(1, signal.SIGSTOP)(site)
    site.aside.add(site.b)


def freeze_host(site: Site) -> None:
    site.network.cut(site.b)
    site.b.freeze()
    site.aside.add(site.b)


def away(seconds: float, stop: Act, go_on: Act) -> Act:
    """Return a fault that passes."""

    def act(site: Site) -> None:
        stop(site)
        time.sleep(seconds)
        go_on(site)

    return act


def process(number: int) -> tuple[str, ...]:
    """Return what a report says of a process, the only one of the machine of that number."""
    return rf"machine {number}\b", rf"process {number}\b", r"step \d"


def lost(machine: int) -> tuple[str, ...]:
    """Return what a report says of a machine that is not there any more."""
    return rf"machine {machine} \(host-{'abc'[machine]}\)", GONE


FAULTS = (
    dies("process on machine 0 killed", lambda s: s.a.kill(RANK), *process(0)),
    dies("process on machine 1 killed", lambda s: s.b.kill(RANK), *process(1)),
    dies("process on machine 2 killed", lambda s: s.c.kill(RANK), *process(2), size=3),
    dies("both of machine 1 killed", lambda s: s.b.kill(RANK), r"machine 1\b", processes=2),
    dies("launcher on machine 0 killed", launcher(0, signal.SIGKILL), r"machine 0\b"),
    dies("launcher on machine 1 killed", launcher(1, signal.SIGKILL), r"machine 1\b"),
    dies("launcher on machine 2 told to end", launcher(2, signal.SIGTERM), "SIGTERM", size=3),
    dies("launcher killed at the start", launcher(1, signal.SIGKILL), r"machine 1\b", at=1.0),
    dies("machine 1 dies", lambda s: s.b.die(), lost(1)[0]),
    dies("machine 0 dies", lambda s: s.a.die(), lost(0)[0]),
    vanishes("machine 1 loses power", lambda s: s.b.die(silently=True), *lost(1)),
    vanishes("machine 0 of 3 loses power", lambda s: s.a.die(silently=True), *lost(0), size=3),
    vanishes("machine 2 of 3 loses power", lambda s: s.c.die(silently=True), *lost(2), size=3),
    vanishes("network of machine 1 lost", cut, GONE),
    vanishes("network of machine 0 of 3 lost", lambda s: s.network.cut(s.a), GONE, size=3),
    vanishes("cable of machine 1 out", lambda s: s.network.unplug(s.b), GONE),
    vanishes("machine 1 hears nobody", lambda s: s.b.drop(""), GONE),
    vanishes("machine 0 hears nobody", lambda s: s.a.drop(""), GONE),
    vanishes("machines 1 and 2 apart", apart, r"machine [12]\b", size=3),
    vanishes("process on machine 0 frozen", lambda s: s.a.freeze(RANK), *process(0), FROZEN),
    vanishes("process on machine 1 frozen", lambda s: s.b.freeze(RANK), *process(1), FROZEN),
    vanishes("launcher on machine 1 frozen", freeze_launcher, r"machine 1\b"),
    vanishes("machine 1 frozen", freeze_host, *lost(1)),
    acts("machine 1 raises", "step raises", *process(1), "RuntimeError: boom"),
    acts("machine 1 raises in its first line", "first raises", r"machine 1\b", "boom.*, line"),
    # A script may do without the others: that it must not is known when these have come to wait.
    acts("machine 1 ends in its first line", "first ends", r"machine 1\b", within=LOST_SECONDS),
    acts("machine 2 raises in an evaluation", "evaluation raises", *process(2), "boom", size=3),
    acts("machine 1 raises in a save", "save raises", *process(1), "boom"),
    acts("machine 1 crashes", "step crashes", *process(1), "SIGSEGV"),
    acts("machine 1 leaves with code 0", "step leaves", *process(1)),
    dies("own loop: process killed", lambda s: s.b.kill(RANK), r"machine 1\b", loop="own"),
    vanishes("own loop: network lost", cut, GONE, loop="own"),
    vanishes("own loop: process frozen", lambda s: s.b.freeze(RANK), FROZEN, loop="own"),
    passes("network away for 5 s", away(5.0, cut, lambda s: s.network.plug(s.b))),
    passes("process away for 3 s", away(3.0, lambda s: s.b.freeze(RANK), lambda s: s.b.thaw(RANK))),
    passes(
        "launcher away for 5 s",
        away(5.0, launcher(0, signal.SIGSTOP), launcher(0, signal.SIGCONT)),
    ),
)


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
        """Return a line of the table."""
        codes = ", ".join("-" if code is None else str(code) for code in self.codes)
        return f"| {self.case} | {self.seconds:.1f} | {codes} | {self.report} |"


def run_case(case: Case, folder: Path) -> Outcome:
    """Run a case on hosts of its own."""
    outcome = Outcome(case.name)
    with hosts(case.size, folder) as machines:
        site = Site(machines, folder / "work", (case.loop, case.act, case.steps))
        if case.processes > 1:
            site.tell("--num_processes", case.size * case.processes)
        try:
            case.before(site)
            begin = _begin(case, site, outcome)
            left = wait_for_end(site, begin + case.within)
            outcome.seconds = time.monotonic() - begin
            outcome.problems += left + wake_up(site)
            outcome.codes = [job.wait() for job in site.jobs.values()]
            (look_at_weights if case.works else look_at_words)(case, site, outcome)
        except Exception as error:
            outcome.problems.append("".join(traceback.format_exception_only(error)).strip())
        outcome.output = site.output()
    return outcome


def _begin(case: Case, site: Site, outcome: Outcome) -> float:
    """Start the job and do what the case asks for; return when."""
    begin = time.monotonic()
    site.start()
    if case.at is not None:
        while not listening(site.a):
            assert time.monotonic() < begin + START_SECONDS, site.output()
            time.sleep(0.1)
        time.sleep(case.at)
    elif case.act.startswith("first"):
        site.jobs[site.machines[-1]].wait_for("now ", seconds=START_SECONDS)
    elif case.works or case.has_begun:
        site.wait_for_steps()
    if case.works and case.fault is None:
        outcome.problems += [bad for host in site.machines for bad in loose_sockets(site, host)]
    if case.fault is not None:
        begin = time.monotonic()
        case.fault(site)
    elif case.works or case.act != "none":
        begin = time.monotonic()
    return begin


def wait_for_end(site: Site, end: float) -> list[str]:
    """Wait until no process of the job is left; when the time is up kill them, and name them."""
    while left := [f"{host.name}: {who}" for host in site.left() for who in site.pids(host)]:
        if time.monotonic() > end:
            for host in site.left():
                host.die()
            return [f"not ended in time: {', '.join(left)}"]
        time.sleep(0.1)
    return []


def wake_up(site: Site) -> list[str]:
    """Let frozen hosts go on, and wait until nothing of the job is left there."""
    woken, site.aside = site.aside, set()
    for host in woken:
        site.network.plug(host)
        host.thaw()
    return wait_for_end(site, time.monotonic() + DEATH_SECONDS)


def look_at_weights(case: Case, site: Site, outcome: Outcome) -> None:
    """Note what is wrong with a job that should have come to its end."""
    weights = site.weights()
    if len(weights) != case.size * case.processes or len(set(weights)) != 1:
        outcome.problems.append(f"weights {weights}")
    if set(outcome.codes) != {0}:
        outcome.problems.append(f"exit codes {outcome.codes}")
    outcome.report = "trains to the end"


REPORT = re.compile(r"^report(?: of the job)?: (.+-job\.json)$", re.M)


def look_at_words(case: Case, site: Site, outcome: Outcome) -> None:
    """Note what is missing in what the machines that are left have said."""
    said = {host: site.jobs[host].output for host in site.left() if host not in site.mute}
    if 0 in [site.jobs[host].code for host in said]:
        outcome.problems.append(f"exit codes {outcome.codes}")
    told = [host for host in said if REPORT.search(said[host])]
    if case.has_report and not 0 < len(told) <= (len(said) if case.parts else 1):
        names = ", ".join(host.name for host in told) or "nobody"
        outcome.problems.append(f"the report was printed by {names}, not by one machine")
    for host in told[:1] or said:
        missing = [pattern for pattern in case.says if not re.search(pattern, said[host])]
        if missing:
            outcome.problems.append(f"{host.name} does not say {' and '.join(missing)}")
        if not case.has_begun and "Traceback" in said[host]:
            outcome.problems.append(f"{host.name} shows a traceback")
    for host in told[: int(case.has_report)]:
        outcome.problems += look_at_file(Path(REPORT.findall(said[host])[-1]), site.work / "run")
    outcome.report = sentence(said[(told or [*said])[0]]) if said else ""


def look_at_file(path: Path, folder: Path) -> list[str]:
    """Return what is wrong with the report as JSON."""
    found = json.loads(path.read_text())
    wrong = [] if path.is_relative_to(folder) else [f"the report is {path}"]
    missing = {"machine", "process", "step", "cause"} - found.keys()
    return [*wrong, *([f"the report has no {', '.join(sorted(missing))}"] if missing else [])]


def sentence(output: str) -> str:
    """Return the line that tells the cause."""
    lines = [line for line in output.splitlines() if re.match(r"(trainkit|error)\b.*:", line)]
    return lines[-1].replace("|", "\\|")[:200] if lines else ""


def loose_sockets(site: Site, host: Host) -> list[str]:
    """Return which sockets listen to more than the job needs, or outside the range of ports."""
    own = [host.ip, host.ip6, f"10.88.0.{site.machines.index(host) + 1}"]
    own = [] if len(site.machines) == 1 else own
    words = list(map(str, [*site.options, *site.each[host]]))
    low, high = 0, 1 << 16
    if "--ports" in words:
        low, high = map(int, words[words.index("--ports") + 1].split("-"))
    return [
        f"{host.name} listens at {where}, port {port}"
        for where, port in listening(host)
        if not (where in own or is_loopback(where)) or not low <= port <= high
    ]


def is_loopback(address: str) -> bool:
    """Return whether only processes of the same host reach an address."""
    return address.startswith("127.") or address == "::1"


def listening(host: Host) -> list[tuple[str, int]]:
    """Return the addresses and ports at which TCP sockets of a host listen."""
    places = [line.split()[3].rpartition(":") for line in host.sh("ss -tlnH").splitlines()]
    return [(where.strip("[]").removeprefix("::ffff:"), int(port)) for where, _, port in places]


# What strangers send.

NOISE = """
import json, os, random, socket, struct, sys, time
hosts, random_messages = json.loads(sys.argv[1]), int(sys.argv[2])
chance = random.Random(0)
store = struct.Struct("<BI")  # torch's store: 0 says hello, with a number
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
sent = closed = 0
for host, port in hosts:
    try:
        held = [socket.create_connection((host, port), timeout=1.0)]
    except OSError:  # it lets nobody in any more
        closed += 1
        continue
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
print("sent", sent, "to", len(hosts) - closed, "and none to", closed, "that let nobody in")
"""


def strangers(messages: int, folder: Path) -> Outcome:
    """Send noise to every socket of a job, while it meets and while it trains."""
    outcome = Outcome(f"{messages} random and 20 crafted messages to each socket")
    with hosts(3, folder) as (a, b, stranger):
        quiet = Site((a, b), folder / "quiet", ("trainer", "none", 4000))
        quiet.environment = {host: {"PACE": "0"} for host in (a, b)}
        quiet.start()
        outcome.problems += wait_for_end(quiet, time.monotonic() + 2 * START_SECONDS)
        site = Site((a, b), folder / "work", ("trainer", "none", 4000))
        site.tell(*([MEETING, 300] if MEETING else []))
        begin = time.monotonic()
        try:
            site.start_one(a)
            while not listening(a):
                assert time.monotonic() < begin + START_SECONDS, site.output()
                time.sleep(0.1)
            told = [send_noise(messages, [a], stranger)]
            site.start_one(b)
            site.wait_for_steps()
            told += [send_noise(messages, [a, b], stranger)]
            told += [send_noise(messages, [host], host) for host in (a, b)]
            assert None in [job.code for job in site.jobs.values()], "ended before the noise did"
            outcome.report = "; ".join(told)
        except AssertionError as error:
            outcome.problems.append(str(error))
        outcome.problems += wait_for_end(site, time.monotonic() + 3 * START_SECONDS)
        outcome.seconds = time.monotonic() - begin
        if not quiet.weights() or site.weights() != quiet.weights():
            outcome.problems.append(f"weights {site.weights()} are not {quiet.weights()}")
        outcome.codes = [job.code for job in site.jobs.values()]
        outcome.output = site.output()
    return outcome


def send_noise(messages: int, targets: Sequence[Host], sender: Host) -> str:
    """Send noise to what listens on hosts and the sender can reach; return what was sent."""
    places = [
        (host.ip if where in ("*", "0.0.0.0", "::") else where, port)
        for host in targets
        for where, port in listening(host)
        if is_loopback(where) == (host is sender)
    ]
    program = sender.run(sys.executable, "-Sc", NOISE, json.dumps(places), messages)
    assert program.wait(300) == 0, program.output
    return program.output.strip()


# The whole.


def trial(number: int) -> Outcome:
    """Run the case of a number in a folder of its own."""
    case = (*SETUPS, *FAULTS)[number]
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        return run_case(case, Path(folder))


def end_with_parent() -> None:
    """Let this process, and with it the hosts that it holds, end when the parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


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
    parts = {None: (*SETUPS, *FAULTS), "setups": SETUPS, "faults": FAULTS}
    named = [case for case in parts[options.part] if options.only in case.name]
    numbers = [parts[None].index(case) for case in named] * options.rounds
    good = 0
    print("| case | seconds | exit codes | report |\n|---|---|---|---|")
    fork = get_context("fork")
    with ProcessPoolExecutor(options.jobs, fork, initializer=end_with_parent) as pool:
        for future in as_completed([pool.submit(trial, number) for number in numbers]):
            outcome = future.result()
            shows = options.show == "all" or (options.show == "bad" and bool(outcome.problems))
            good += tell(outcome, shows)
    print(f"{good} of {len(numbers)} end or go on as promised")
    return 0 if good == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
