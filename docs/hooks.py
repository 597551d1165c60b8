"""What mkdocs cannot know: the public names, the command line, and the files outside `docs/`.

Three things happen while the site is built:

- `<!-- api: trainkit.metrics -->` becomes the reference of each name in that package's `__all__`;
  `<!-- api: trainkit from accelerator own_loop -->` of those that are defined in these modules, and
  `<!-- api: trainkit but accelerator own_loop -->` of all others.
- `<!-- cli -->` becomes the help of every command, as it is printed.
- A link to a file of the repository outside `docs/`, which works where the Markdown is read, gets
  a page of the site that shows the file.
"""

import argparse
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHOWN = PurePosixPath("repository")  # where pages of files outside `docs/` stand in the site

API = re.compile(
    r"^<!-- api: (?P<package>\S+)(?: (?P<how>from|but) (?P<modules>[^>]+))? -->$", re.M
)
CLI = "<!-- cli -->"
RULE = re.compile(r" \((?:see )?rules? [^)]*\)")
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.M | re.S)
SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
MORE = (  # pages that others write; in the navigation once they are there
    ("Migrate", "Framework by framework", "behaviour.md"),
    ("Reference", "Examples", "repository/examples/README.md"),
    ("Reference", "Benchmarks", "repository/benchmarks/README.md"),
    ("Reference", "Changelog", "repository/CHANGELOG.md"),
)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of `MORE` that exist into the navigation."""
    sections = {name: pages for entry in config.nav or [] for name, pages in entry.items()}
    for section, title, uri in MORE:
        if _source_of(uri).exists():
            sections[section].append({title: uri})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside `docs/` that a page links to, and what those link to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    waiting += [_source_of(uri) for *_, uri in MORE if _source_of(uri).exists()]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.is_relative_to(ROOT / "site"):
            continue
        seen.add(path)
        if not path.is_relative_to(DOCS):
            files.append(_shown_file(path, config))
        if path.suffix == ".md":
            waiting += _targets(path)
        elif path.is_dir():
            waiting += _members(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and let links out of `docs/` point at the pages made for them."""
    markdown = API.sub(_api, markdown)
    if CLI in markdown:
        markdown = markdown.replace(CLI, "\n\n".join(_commands()))
    source = _source_of(page.file.src_uri)

    def point(match: re.Match[str]) -> str:
        target = _resolve(source, match["path"])
        if target is None:
            return match[0]
        place = os.path.relpath(_place(target), PurePosixPath(page.file.src_uri).parent)
        return f"{place}{match['anchor'] or ''}"

    return _outside_code(markdown, point)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out of the docstrings what is for those who work on trainkit, and reST's marks."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    return RULE.sub("", html).replace("::</p>", ":</p>")


# Files outside `docs/`.


def _place(target: Path) -> PurePosixPath:
    """Return where in the site's sources a file of the repository stands."""
    if target.is_relative_to(DOCS):
        return PurePosixPath(target.relative_to(DOCS).as_posix())
    place = SHOWN / target.relative_to(ROOT).as_posix()
    if target.is_dir():
        return place / "README.md" if (target / "README.md").exists() else place / "index.md"
    if target.suffix in (".md", ".png", ".svg", ".html"):
        return place
    return place.with_name(place.name + ".md")


def _source_of(uri: str) -> Path:
    path = PurePosixPath(uri)
    return ROOT / path.relative_to(SHOWN) if path.is_relative_to(SHOWN) else DOCS / path


def _shown_file(path: Path, config: MkDocsConfig) -> File:
    place = str(_place(path))
    if path.suffix in (".png", ".svg", ".html"):
        return File.generated(config, place, abs_src_path=str(path))
    in_nav = place in [uri for *_, uri in MORE]
    inclusion = InclusionLevel.INCLUDED if in_nav else InclusionLevel.NOT_IN_NAV
    return File.generated(config, place, content=_shown_text(path), inclusion=inclusion)


def _shown_text(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        links = [f"- [`{member.name}`]({member.name})" for member in _members(path)]
        return "\n".join([f"# `{name}/`", "", *links, ""])
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    return f"# `{name}`\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{text}`````\n"


def _members(folder: Path) -> list[Path]:
    """Return the files of a folder that are worth a page."""
    suffixes = {".md", *LANGUAGES}
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in suffixes)


def _targets(page: Path) -> Iterator[Path]:
    """Yield the files of the repository outside `docs/` that a page links to."""
    found: list[Path] = []

    def note(match: re.Match[str]) -> str:
        target = _resolve(page, match["path"])
        if target is not None:
            if target.is_dir() and (target / "README.md").exists():
                target = target / "README.md"
            found.append(target)
        return match[0]

    _outside_code(page.read_text("utf-8"), note)
    yield from (target for target in found if not target.is_relative_to(DOCS))


def _resolve(page: Path, link: str) -> Path | None:
    """Return the file that a link names; None where mkdocs has to judge it."""
    target = Path(os.path.normpath(page.parent / link))
    inside = page.is_relative_to(DOCS) and target.is_relative_to(DOCS)
    if inside or not target.is_relative_to(ROOT) or not target.exists():
        return None
    return target


def _outside_code(markdown: str, replace: Any) -> str:
    """Apply `replace` to each link that does not stand in code."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    hidden = SPAN.sub(keep, FENCE.sub(keep, markdown))
    result = LINK.sub(replace, hidden)
    while "\0" in result:
        result = re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], result)
    return result


# What comes from the code.


def _api(match: re.Match[str]) -> str:
    package = import_module(match["package"])
    names = [name for name in package.__all__ if _chosen(package, name, match)]
    assert names, f"{match[0]} names nothing"
    return "\n\n".join(f"::: {package.__name__}.{name}" for name in _in_order(package, names))


def _chosen(package: Any, name: str, match: re.Match[str]) -> bool:
    home = _home(package, name)
    if match["how"] is None:
        return True
    listed = any(home == m or home.startswith(f"{m}.") for m in match["modules"].split())
    return listed == (match["how"] == "from")


def _home(package: Any, name: str) -> str:
    """Return the module of trainkit that defines a public name, such as `own_loop.seeds`."""
    value = getattr(package, name)
    return str(getattr(value, "__module__", "")).removeprefix("trainkit.")


def _in_order(package: Any, names: list[str]) -> list[str]:
    """Return classes before functions, `Trainer` and `Accelerator` first of all."""
    first = ("Trainer", "Callback", "Run", "FitResult", "Accelerator")
    rank = {name: place for place, name in enumerate(first)}
    return sorted(
        names,
        key=lambda n: (rank.get(n, len(first)), not isinstance(getattr(package, n), type), n),
    )


def _commands() -> Iterator[str]:
    """Yield a section for each command: its help, as it is printed on 90 columns."""
    from trainkit.cli import main as cli

    os.environ["COLUMNS"] = "90"
    yield _section(cli._parser(""))
    for name in cli._COMMANDS:
        parser = cli._parser(name)
        action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        yield from _sections(action.choices[name])


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield _section(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _sections(command)


def _section(parser: argparse.ArgumentParser) -> str:
    return f"## {parser.prog}\n\n```text\n{parser.format_help()}```"
