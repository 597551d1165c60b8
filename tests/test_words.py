"""What the tour of the code names is there."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
