"""The words that were given up do not come back, and what the tour names is there."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What stands in these is what it was called then, or what others call it.
LEFT_OUT = ("CHANGELOG.md", "tests/test_words.py", "tests/fixtures/")

RETIRED = {
    r"DESIGN \d": "rule N",
    r"\b(run|trainer)\.accelerator\b": "run.processes",
    r"\bVerbs\b": "Communicator",
    r"\b(gather_together|take_divided)\b": "run_and_gather, take_states",
    r"\bby_all_or_main\b": "run_on_all_or_main",
    r"\bas_evaluate\(\)": "metrics.as_evaluate(metric)",
    r"\bWishes\b": "arguments.Handlers",
    r"\bPreparation\b": "LoaderContext, Preparer",
    r"\b(Lifeline|Lookout)\b": "OrphanKiller, WatchThread",
    r"\b(Hub|Spoke)\b": "Server, Client",
    r"\b(Skeleton|Filling)\b": "MetaInitializer, ParameterInitializer",
    r"\b(LoneLog|StepClock)\b": "NoRun, StepTimer",
    r"\b(Placing|Stages|slots_of)\b": "ShardingSpec, CommitSteps, targets_of",
    r"\b(Stream|Key|Foreign)Feed\b": "StreamSource, KeySource, CustomSource",
    r"\bhas_spare\b": "has_fallback",
    r"\bannounce_epoch\b": "set_epoch_on",
    r"\b(expected_figures|evaluates_epochs)\b": "run.evaluation.check, .after_epochs",
    r"\bstrategy\.(adopt|rewrap|agree|place|adding_nothing)\b": "the names of Strategy",
    r"\b(run|strategy)\.vote\b": "run.flags",
    r"\bWatchedRun\b": "RunProgress",
    r"\baccelerator[./](states|loadable)\b": "state_saver, state_contents",
    r"\b([Ll]ogged|evaluated|[Tt]wo) figures?\b": "logged values, metrics",
    r"\bfigures? (to watch|of an evaluation)\b": "metrics",
}
"""What is given up, as a regular expression, and what is said instead."""


def _texts() -> list[tuple[str, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    if not listed:
        pytest.skip("no git, or not a checkout")
    paths = [path for path in listed if not path.startswith(LEFT_OUT)]
    return [(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths]


def test_words_that_were_given_up_do_not_come_back() -> None:
    assert not [
        f"{path}: {found[0]!r}, say {instead}"
        for path, text in _texts()
        for word, instead in RETIRED.items()
        if (found := re.search(word, text))
    ]


def test_the_tour_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tour = text[text.index("## A tour of the code") : text.index("## How code looks here")]
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", tour))
    assert len(named) > 30
    assert not [
        path for path in named if not any((ROOT / top / path).exists() for top in ("", "trainkit"))
    ]


def test_the_page_on_new_parts_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "how-to" / "add-a.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:trainkit|callbacks|tests|docs)/[a-z_/.-]+)`", text))
    assert len(named) > 15
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_picture_of_the_layers_is_drawn_from_the_imports() -> None:
    layers = runpy.run_path(str(ROOT / "docs" / "layers.py"))
    assert layers["PICTURE"].read_text(encoding="utf-8") == layers["draw"](), (
        "The imports have changed: run `python docs/layers.py`."
    )
