"""Writes the table of model losses: `python -m benchmarks.model_losses`, in the root.

It prints what is found of each class. With names, `python -m benchmarks.model_losses
BertForPreTraining`, it tries these and leaves the page alone. All take some minutes on two
processors; nothing is downloaded.
"""

import argparse
import multiprocessing
import os
import re
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import transformers

from benchmarks.model_losses.measure import Found, measure
from benchmarks.model_losses.small import EXPERTS, classes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate" / "transformers.md"
BEGIN = "<!-- What follows is written by `python -m benchmarks.model_losses`. -->\n"
END = "<!-- Until here. -->\n"

NOT_TRAINED = {  # the first whose pattern fits what was said
    "it draws random numbers for its loss, so that no two are alike": "draws random",
    "its forward returned no loss for the samples that the script makes up": "no loss",
    "another package is missing": "ImportError|ModuleNotFoundError",
    "transformers does not train it": "NotImplementedError|not trainable|support training",
    "trainkit refuses it": "ConfigError",
    "its gradient is not finite on such small samples": "not finite",
    "it is too large, or too slow, even so": "MemoryError|TimeoutError",
    "no small configuration, or no fitting samples, were guessed": "",
}


def main() -> None:
    """Try classes and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_losses", description=__doc__)
    parser.add_argument("names", nargs="*", help="of classes; none: all, into the page")
    names = parser.parse_args().names
    every = names or [kind.__name__ for kind in classes()]
    found = []
    # A worker is made anew now and then: what was imported for a class stays in memory.
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), _quiet, (), 100) as pool:
        for several in pool.imap_unordered(_try, every):
            print(*several, sep="\n", flush=True)
            found += several
    if not names:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table(found)}{END}{rest.partition(END)[2]}", "utf-8")


def _quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)


def _try(name: str) -> list[Found]:
    """Measure a class; a mixture of experts that can be trained once more, with its own loss."""
    kind = getattr(transformers, name)
    found = [measure(kind)]
    if found[0].gradient is not None and hasattr(kind.config_class(), EXPERTS):
        found.append(measure(kind, **{EXPERTS: True}))
    return found


def table(found: Iterable[Found]) -> str:
    """Return what the page says of all classes."""
    found = sorted(found, key=lambda each: each.name)
    plain = [each for each in found if "=" not in each.name]
    trained = [each for each in plain if each.gradient is not None]
    with_experts = [each for each in found if "=" in each.name and each.gradient is not None]
    rows = defaultdict[str, list[Found]](list)
    for each in trained:
        rows[_task(each.name)].append(each)
    others = [task for task, of_task in rows.items() if len(of_task) < 4]
    rows["others"] = [each for task in others for each in rows.pop(task)]
    rows[f"with `{EXPERTS}=True`"] = with_experts
    lines = [
        f"transformers {transformers.__version__} has {len(plain)} classes for a task. "
        f"{len(trained)} of them could be trained: {_count(trained, _is_exact)} are exact, of "
        f"{_count(trained, _is_told)} it is said before the first step that they are not. "
        f"Neither: {_count(trained, _is_silent)}.",
        "",
        "| task | classes | exact | said |",
        "|---|--:|--:|--:|",
        *(
            f"| {task} | {len(of_task)} | {_count(of_task, _is_exact)} | "
            f"{_count(of_task, _is_told)} |"
            for task, of_task in sorted(rows.items(), key=lambda row: -len(row[1]))
        ),
        "",
        *_lists("Said before the first step", filter(_is_told, trained)),
        *_lists("Neither exact nor said", filter(_is_silent, [*trained, *with_experts])),
        "<details markdown><summary>What could not be trained, and why</summary>",
        "",
    ]
    untrained = [each for each in plain if each.gradient is None]
    for reason, pattern in NOT_TRAINED.items():
        of_reason = [each for each in untrained if re.search(pattern, each.said)]
        untrained = [each for each in untrained if each not in of_reason]
        lines += _lists(reason[0].upper() + reason[1:], of_reason)
    return "\n".join([*lines, "</details>", "", ""])


def _task(name: str) -> str:
    matched = re.search(r"For[A-Z].*|LMHead.*|DoubleHeads.*", name)
    return f"`{matched[0]}`" if matched else name


def _is_exact(found: Found) -> bool:
    return found.is_exact and not found.said


def _is_told(found: Found) -> bool:
    return bool(found.said)


def _is_silent(found: Found) -> bool:
    return not found.is_exact and not found.said


def _count(found: Iterable[Found], is_so: Callable[[Found], bool]) -> int:
    return sum(map(is_so, found))


def _lists(title: str, found: Iterable[Found]) -> Iterator[str]:
    names = ", ".join(each.name for each in found)
    if names:
        yield textwrap.fill(f"**{title}:** {names}.", 100, break_on_hyphens=False)
        yield ""


if __name__ == "__main__":
    main()
