"""Whatever stands in a run's folder: what can be read is shown, the rest is named once."""

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer
from tests.resume.test_forged import sign_body
from trainkit.callbacks import Checkpoint, CSVLogger, Evaluation, JSONLLogger, TensorBoardLogger
from trainkit.cli import main as cli
from trainkit.cli.main import main
from trainkit.inspect.report import listing

METRICS, EVENTS, TABLE = "metrics.jsonl", "metrics.events.jsonl", "metrics.csv"
JOURNAL, PINS = "journal.txt", "checkpoints/pins.json"
MANIFEST = "checkpoints/step-00000006/manifest.json"
NESTED = "[" * 50_000 + "]" * 50_000
STRANGE = [
    *("dear diary", "1", "null", "[]", "[1]", '"text"', "{}", '{"step": 1', NESTED),
    *('{"step": ' + NESTED + "}", '{"a": ' * 600 + "1" + "}" * 600, "\x00" * 500, "\ud800"),
    *("step", ",,,,", '"', "=1,2\r,3", "1 0 0 0 4 0.5 -", "0 0 0 0 0 nan nan", "-1 x"),
    *("9" * 5000, '{"kind": "start"}', '{"journal": 1, "after": 0}', "{" * 100, "\\" * 100),
]
"""Lines that no program of ours writes."""
VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**30, 10**400, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "NaN", "-Infinity", "text", "\x1b[31m", "1", [], [1], {}, {"a": {"b": [None]}}),
]
"""What stands where something else is expected."""


PARSERS = cache(cli._parser)

LAST = [("train", 7), ("train", 8), ("eval", 8)]


def train(folder: Path, resume: Any = None, steps: int = 8) -> int:
    callbacks = [
        *(JSONLLogger(), CSVLogger(), TensorBoardLogger(), Evaluation(["accuracy"])),
        Checkpoint(every_n_steps=2, keep_last=2, keep_best=("eval/accuracy", "max", 1)),
    ]
    trainer = make_trainer(
        callbacks=callbacks, output_dir=folder, max_steps=steps, log_every_n_steps=1,
        hparams={"lr": 0.1, "model": {"width": 8}},
    )  # fmt: skip
    return fit(trainer, resume=resume, schedule=None if resume is None else "keep").step


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was resumed once."""
    folder = tmp_path_factory.mktemp("original") / "good"
    train(folder, steps=4)
    train(folder, "auto", steps=6)
    (folder / PINS).write_text('{"pinned": [4]}\n')
    return folder


def _with_line(text: str) -> Callable[[Path, random.Random], None]:
    def forge(path: Path, chance: random.Random) -> None:
        lines = path.read_bytes().split(b"\n")
        lines.insert(chance.randrange(len(lines)), text.encode(errors="surrogatepass"))
        path.write_bytes(b"\n".join(lines))

    return forge


def _with_values(path: Path, chance: random.Random) -> None:
    """Replace values of some lines, and take some out."""
    lines = path.read_text().split("\n")
    for index, line in enumerate(lines):
        if line.startswith("{"):
            lines[index] = json.dumps(_other(json.loads(line), chance))
        elif chance.random() < 0.5:
            mark = "," if "," in line else " "
            words = [str(chance.choice([w, w, *VALUES])) for w in line.split(mark)]
            lines[index] = mark.join(words)
    path.write_text("\n".join(lines))


def _other(node: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    found = {}
    for key, value in node.items():
        if isinstance(value, dict) and chance.random() < 0.8:
            found[key] = _other(value, chance)
        elif (draw := chance.random()) < 0.9:
            found[key] = value if draw < 0.6 else chance.choice(VALUES)
    return found


def _cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _noise(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(20):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)


def _long_line(path: Path, chance: random.Random) -> None:
    _with_line('{"step": "' + "a" * 2_000_000 + '"}')(path, chance)


def _instead(make: Callable[[Path], Any]) -> Callable[[Path, random.Random], None]:
    def forge(path: Path, chance: random.Random) -> None:
        path.unlink()
        make(path)

    return forge


LINES = [_with_line(text) for text in STRANGE] + [_with_values] * 10 + [_cut, _noise] * 4
MORE = [_with_values] * 20  # seeds of what ten of before have shown
PARTS = [*with_few([0], range(8)), pytest.param(8, marks=pytest.mark.slow)]
WHOLE = [
    _long_line,
    _instead(lambda path: path.write_bytes(b"")),
    _instead(lambda path: path.write_bytes(b"\n\n\n")),
    _instead(lambda path: path.write_bytes(bytes(5000))),
    _instead(lambda path: path.write_text(f"{NESTED}\n")),
    _instead(lambda path: path.write_bytes(b'{"step": 1, "loss": "\xc3')),
]
OTHER_KINDS = [
    _instead(Path.mkdir),
    _instead(os.mkfifo),
    _instead(lambda path: path.symlink_to(path)),
    _instead(lambda path: path.symlink_to("/dev/zero")),
    _instead(lambda path: path.symlink_to(path.parent)),
    _instead(lambda path: path.symlink_to("nowhere")),
    _instead(lambda path: None),
]


def _manifest(path: Path, chance: random.Random) -> None:
    """Say other things in the newest manifest, and sign it."""
    body = json.loads(path.read_bytes())
    del body["manifest_xxh3_128"]
    sign_body(path, body | {"metadata": _other(body["metadata"], chance)})


def _forged(good: Path, folder: Path, name: str, forge: Any, seed: int) -> Path:
    """Return the folder of a run with one file forged, beside a good one."""
    for place in ("bad", "good"):
        shutil.copytree(good, folder / place)
    forge(folder / "bad" / name, random.Random(seed))
    return folder


def _part_of(forges: list[Any], more: list[Any], part: int) -> list[tuple[int, Any]]:
    """Return an eighth of the forgeries with their seeds, or, as the ninth part, some more."""
    every = [*enumerate([*forges, *more])]
    return every[part : len(forges) : 8] if part < 8 else every[len(forges) :]


def _commands(folder: Path) -> Iterator[list[str]]:
    good, bad = str(folder / "good"), str(folder / "bad")
    yield ["runs", "ls", str(folder)]
    yield ["runs", "ls", str(folder), "--json", "--sort", "eval/accuracy"]
    yield ["report", str(folder), "-o", str(folder / "page.html")]
    yield ["report", bad, "-o", str(folder / "page.html")]
    yield ["diff", good, bad]
    yield ["diff", bad, good, "--json"]
    yield ["replay", bad, "--step", "5", "--", "true"]
    yield ["checkpoint", "ls", bad]
    yield ["checkpoint", "show", bad]
    yield ["checkpoint", "diff", good, bad]
    yield ["checkpoint", "verify", bad]
    yield ["checkpoint", "prune", bad, "--keep-last", "1", "--dry-run"]


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each parser once: that took half the time of thousands of commands."""
    monkeypatch.setattr(cli, "_parser", PARSERS)


def _check_commands(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that no command breaks off, and that the good run is shown."""
    for command in _commands(folder):
        capfd.readouterr()
        assert main(command) in (0, 1)
        told = capfd.readouterr()
        if command[:2] == ["runs", "ls"]:
            assert str(folder / "good") in told.out
        if command[:2] == ["report", str(folder)]:
            assert '"name":"good"' in (folder / "page.html").read_text()
        if command[:2] == ["checkpoint", "ls"]:
            assert "step-00000006" in told.out
        named = [line for line in told.err.splitlines() if line]
        assert len(named) == len(set(named)), command
        assert all(len(line) < 1000 for line in named), command


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [METRICS, EVENTS, JOURNAL, PINS, MANIFEST])
def test_every_command_shows_what_can_be_read(
    good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, part: int
) -> None:
    forges = [_manifest] * 16 if name == MANIFEST else [*LINES, *WHOLE, *OTHER_KINDS]
    for seed, forge in _part_of(forges, [_manifest] * 24 if name == MANIFEST else MORE, part):
        folder = tmp_path / f"{seed}"
        _check_commands(_forged(good, folder, name, forge, seed), capfd)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", [METRICS, EVENTS])
def test_runs_of_which_only_the_ends_are_read_are_listed_too(
    good: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(listing, "_SHORT", -1)
    for seed, forge in enumerate([*LINES, *WHOLE, *OTHER_KINDS]):
        folder = _forged(good, tmp_path / f"{seed}", name, forge, seed)
        assert main(["runs", "ls", str(folder)]) in (0, 1)
        assert str(folder / "good") in capfd.readouterr().out
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore:.*moved away")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [METRICS, EVENTS, TABLE, JOURNAL])
def test_a_run_goes_on_whatever_its_logs_hold(
    good: Path, tmp_path: Path, name: str, part: int
) -> None:
    for seed, forge in _part_of([*LINES, *WHOLE], MORE, part):
        folder = _forged(good, tmp_path / f"{seed}", name, forge, seed) / "bad"
        assert train(folder, "auto") == 8
        lines = (folder / METRICS).read_bytes().splitlines()
        new = [json.loads(line) for line in lines[-3 if name == METRICS else 0 :]]
        assert [(e["kind"], e["step"]) for e in new][-3:] == LAST
        assert [e["step"] for e in new] == sorted(e["step"] for e in new)
        shutil.rmtree(folder.parent)


def _without_rights(rank: int, folder: Path) -> list[tuple[str, str]]:
    for module in ("checkpoint", "diff", "parting", "runs"):
        import_module(f"trainkit.cli.{module}")  # which may lie where nobody else may read
    os.setuid(65534)
    told = []
    good, bad = str(folder / "good"), str(folder / "journal.txt")
    for command in (["runs", "ls", str(folder)], ["diff", good, bad], ["checkpoint", "ls", bad]):
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            main(command)
        told.append((out.getvalue(), err.getvalue()))
    return told


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give up its rights")
def test_what_may_not_be_read_is_named_and_hides_nothing(good: Path, tmp_path: Path) -> None:
    for place in (tmp_path, *tmp_path.parents[:-2]):
        place.chmod(0o755)
    shutil.copytree(good, tmp_path / "good")
    for name in ("", METRICS, EVENTS, JOURNAL):
        shutil.copytree(good, tmp_path / (name or "whole"))
        (tmp_path / (name or "whole") / name).chmod(0)
    (tmp_path / JOURNAL / "checkpoints").chmod(0)
    (told,) = run_ranks(1, _without_rights, tmp_path)
    (listed, named), (_, parted), (_, saved) = told
    shown = [row.split()[0].rpartition("/")[2] for row in listed.splitlines()[1:]]
    assert sorted(shown) == sorted([EVENTS, METRICS, JOURNAL, "good"])
    for name in ("whole", f"{METRICS}/{METRICS}", f"{EVENTS}/{EVENTS}"):
        assert f"{tmp_path}/{name}`: it was left out (Permission denied)" in named
    assert "Permission denied" in parted
    assert "Permission denied" in saved
