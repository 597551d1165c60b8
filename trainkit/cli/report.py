"""`trainkit report`: a page, or a picture, of what runs did."""

import argparse
from pathlib import Path
from typing import Any

from trainkit.basics.formatting import readable_size
from trainkit.cli.addresses import LOGS
from trainkit.errors import ConfigError
from trainkit.inspect.report.page import make_page
from trainkit.inspect.report.records import read_runs

_DESCRIPTION = (
    "Write a page that shows what runs did: curves, where the time went, skipped steps, resumes, "
    "configuration. Several runs are drawn over each other, and their differences listed."
)


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser("report", description=_DESCRIPTION)
    run_help = "a run's directory, or the file that `JSONLLogger` wrote"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=run_help)
    page_help = "the page (default: report.html, unless --png is given)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=page_help)
    png_help = "draw the curves into a picture, with matplotlib"
    parser.add_argument("--png", metavar="FILE", type=Path, help=png_help)
    parser.set_defaults(run=_run, reads={"runs": LOGS})


def _run(options: argparse.Namespace) -> int:
    runs = read_runs(options.runs)
    page: Path | None = options.output
    if page is None and options.png is None:
        page = Path("report.html")
    if page is not None:
        _write(page, make_page(runs).encode("utf-8"))
    if options.png is not None:
        from trainkit.inspect.report.picture import make_picture  # needs matplotlib

        _write(options.png, make_picture(runs))
    return 0


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be written: {error}.") from None
    print(f"wrote {path} ({readable_size(len(content))})")
