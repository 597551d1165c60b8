"""The pages of `docs/`: their code runs, their commands parse, their links lead somewhere.

A `python` block runs: the blocks of a page one after the other, in one namespace. One with a
`title` is a file, and is written down besides. A `py` block is code for another framework, and runs
in its place on the page where that framework is installed. Nothing else is code of ours.
"""

import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.markdown import Block, blocks, commands, links
from tests.helpers.scripts import ROOT, shell
from tests.helpers.tiers import with_few
from trainkit.cli import main as cli

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
START = DOCS / "start.md"
ALL_PAGES = [
    *PAGES,
    *(README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *sorted(ROOT.glob("examples/**/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
]
FOREIGN = {"accelerate", "lightning", "moto", "pytorch_lightning", "ignite"}
PACKAGES = ("", ".callbacks", ".metrics", ".data", ".strategies", ".precision", ".checkpoint")
SECONDS = 300


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# Python.


def _runs(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("python", "py")]


@pytest.mark.parametrize(
    "page",
    with_few([START, DOCS / "concepts" / "steps.md"], filter(_runs, [*PAGES, README])),
    ids=_name,
)
def test_the_python_blocks_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    """In a fork, so that each page finds torch imported and nothing else done."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_page, args=(page, tmp_path, theirs))
    process.start()
    theirs.close()
    try:
        failure = ours.recv() if ours.poll(SECONDS) else "still running when the time was up"
    except EOFError:
        failure = "the process died"
    if failure:
        process.kill()
    process.join(10)
    assert not failure, failure


def _run_page(page: Path, folder: Path, result: Connection) -> None:
    os.chdir(folder)
    tempfile.tempdir = str(folder)  # for pages that ask for a folder
    for old in (DeprecationWarning, SyntaxWarning):  # of packages that a page is first to import
        warnings.simplefilter("ignore", old)
    # Of peft, which asks transformers by an older name.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    # Packages that look for the source of a class must find a module, and in it none.
    module = sys.modules["page"] = ModuleType("page")
    module.__file__ = "page"
    names = vars(module)
    try:
        for block in _runs(page):
            if block.title is not None and block.title.endswith(".py"):
                Path(block.title).write_text(block.code, "utf-8")
            # Errors name the page and the line.
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            if block.language == "python":
                exec(code, names)
            elif _has_frameworks(block.code):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    exec(code, names)
    except BaseException:
        result.send(traceback.format_exc())
    else:
        result.send("")


def _has_frameworks(code: str) -> bool:
    return all(name not in code or find_spec(name) is not None for name in FOREIGN)


def test_code_of_ours_is_marked_so_that_it_runs() -> None:
    known = {"python", "py", "bash", "text", "json", "yaml", ""}
    for page in PAGES:
        for block in blocks(page):
            assert block.language in known, f"{_name(page)}, line {block.line}"
            if block.language == "":
                assert "import " not in block.code, f"{_name(page)}, line {block.line}"


# Commands.


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_commands_are_understood(page: Path) -> None:
    for block in blocks(page):
        if block.language not in ("bash", "sh", "shell", "console"):
            continue
        for words in _all_commands(block.code):
            if "trainkit" in words:
                _parse(words[words.index("trainkit") + 1 :])


def _all_commands(code: str) -> Iterator[list[str]]:
    """Yield the commands of a script, and those in a text that it hands to another shell."""
    for words in commands(code):
        yield words
        for word in words:
            if " trainkit " in word:
                yield from _all_commands(re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", word))


def _parse(arguments: list[str]) -> None:
    with suppress(SystemExit):  # which says what is wrong, or shows the help
        cli._parser(arguments[0]).parse_args(arguments)
        return
    assert "--help" in arguments, f"trainkit {' '.join(arguments)}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_commands_name_files_and_targets_that_exist(page: Path) -> None:
    made = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for block in blocks(page):
        if block.language == "bash":
            assert set(re.findall(r"\bmake ([a-z][a-z-]*)", block.code)) <= made
            named = re.findall(
                r"(?<![\w./-])(?:examples|benchmarks|docs|tests)/[\w./-]+", block.code
            )
            assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_commands_beside_figures_can_be_started(page: Path) -> None:
    made = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for command in re.findall(r"`((?:make|pytest|python) [^`]+)`", page.read_text("utf-8")):
        first, *words = shlex.split(command)
        if first == "make":
            assert {word for word in words if "=" not in word} <= made, command
        for place in (word for word in words if word.startswith(("tests/", "benchmarks/"))):
            assert (ROOT / place.partition("::")[0]).exists(), command
        if words[:1] == ["-m"] and words[1].startswith(("benchmarks", "tests")):
            assert find_spec(words[1]) is not None, command


@pytest.mark.e2e
def test_the_ten_minute_start_does_what_it_says(tmp_path: Path) -> None:
    scripts = [block for block in blocks(START) if block.language == "bash"]
    (tmp_path / "train.py").write_text(_titled(START, "train.py"), "utf-8")
    for script in scripts[1:]:  # the first one installs
        done = _run(["bash", "-e", "-c", script.code], tmp_path)
        assert done.returncode == 0, f"{script.code}\n{done.stdout}\n{done.stderr}"
        if "--kill-at" in script.code:
            assert "ended with code 137" in done.stdout
            assert "step-00000060" in done.stdout
    one, two = (_last_figures(tmp_path / "runs" / run) for run in ("one", "two"))
    assert "best          eval/loss 0.2647, eval/accuracy 0.9276" in START.read_text("utf-8")
    assert one["eval/loss"] == pytest.approx(0.2647, abs=0.005)  # other processors round otherwise
    assert one["eval/loss"] == pytest.approx(two["eval/loss"], rel=1e-4)
    assert one["eval/accuracy"] == pytest.approx(0.9276, abs=0.006)  # two samples of 359
    assert one["eval/accuracy"] == pytest.approx(two["eval/accuracy"], abs=0.006)
    assert (tmp_path / "report.html").stat().st_size > 1000


SIGNALLED = """
import os, signal, sys
from functools import partial
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Callback, Trainer
from trainkit.callbacks import Checkpoint

class TimeIsUp(Callback):
    def on_step_end(self, run, result):
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)

if __name__ == "__main__":
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer = Trainer(max_epochs=9, output_dir=sys.argv[2], callbacks=[Checkpoint(), TimeIsUp()])
    trainer.fit(
        torch.nn.Linear(4, 1),
        DataLoader(data, batch_size=4),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=torch.nn.MSELoss(),
        resume="auto",
    )
"""


@pytest.mark.e2e
def test_the_slurm_script_saves_and_puts_itself_back_into_the_queue(tmp_path: Path) -> None:
    """With stand-ins for Slurm's own two commands, on one node; `benchmarks/slurm.sh` has Slurm."""
    script = ROOT / "examples" / "cluster" / "slurm.sh"
    assert (
        _titled(DOCS / "how-to" / "slurm.md", f"{script.relative_to(ROOT)}") == script.read_text()
    )
    (tmp_path / "train.py").write_text(SIGNALLED, "utf-8")
    (tmp_path / "bin").mkdir()
    for name, code in (("srun", 'exec "$@"'), ("scontrol", 'echo "$@" >> asked')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{code}\n", "utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    done = _run(
        ["bash", str(script), "train.py", "--output-dir", "runs/big"], tmp_path, SLURM_JOB_ID="7"
    )
    assert done.returncode == 75, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "asked").read_text("utf-8") == "requeue 7\n"
    assert (tmp_path / "runs" / "big" / "checkpoints" / "step-00000003").exists()


def _titled(page: Path, title: str) -> str:
    return next(block.code for block in blocks(page) if block.title == title)


def _run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    with shell(folder) as environment:
        return subprocess.run(
            command,
            cwd=folder,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )


def _last_figures(run: Path) -> dict[str, float]:
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    last = next(entry for entry in reversed(entries) if entry["kind"] == "eval")
    return {name: value for name, value in last.items() if name.startswith("eval/")}


def test_the_gallery_shows_every_callback() -> None:
    names = import_module("trainkit.callbacks").__all__
    shown = re.findall(r"^### (\w+)$", (DOCS / "callbacks.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(names)


# Links, and the site.


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{_name(page)} links to {link}"
        if anchor and target.suffix == ".md" and not _is_generated(target):
            assert anchor in _anchors(target), f"{_name(page)} links to {link}"


def _is_generated(page: Path) -> bool:
    return "<!-- api: " in page.read_text("utf-8") or "<!-- cli -->" in page.read_text("utf-8")


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = page.read_text("utf-8")
    for block in blocks(page):
        text = text.replace(block.code, "")
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.e2e
def test_the_site_has_what_it_must_and_fetches_nothing(tmp_path: Path) -> None:
    """It is built as `make docs` does; a warning fails."""
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    _check_that_nothing_is_fetched(site)
    _check_that_every_public_name_is_in_the_reference(site)
    commands = (site / "reference" / "cli.html").read_text("utf-8")
    assert not [name for name in cli._COMMANDS if f"usage: trainkit {name}" not in commands]
    # Files outside of the documents have a page too.
    loop = (site / "repository" / "trainkit" / "training" / "loop.py.html").read_text("utf-8")
    assert "train_epoch" in loop
    assert (site / "repository" / "CHANGELOG.html").exists()


def _check_that_nothing_is_fetched(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"(https?:)?//|<link[^>]+href=\"https?://"
    )
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text("utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text("utf-8")), sheet


def _check_that_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = set()
    for page in (site / "reference").glob("*.html"):
        anchors |= set(re.findall(r'id="(trainkit[\w.]+)"', page.read_text("utf-8")))
    also = {anchor.replace("trainkit.export.", "trainkit.") for anchor in anchors}  # the same names
    names = {
        f"trainkit{suffix}.{name}"
        for suffix in (*PACKAGES, ".testing", ".export")
        for name in import_module(f"trainkit{suffix}").__all__
    }
    assert not sorted(names - anchors - also)


def test_blocks_and_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```python title="a.py"\nx = 1\n```\n\n'
        "1. A step.\n\n    ```bash\n    srun a \\\n      b > c &  # why\n    ```\n",
        "utf-8",
    )
    python, bash = blocks(page)
    assert (python.language, python.title, python.code, python.line) == (
        "python",
        "a.py",
        "x = 1\n",
        2,
    )
    assert list(commands(bash.code)) == [["srun", "a", "b"], ["c"], []]
