"""The command line: `python -m benchmarks.compare`."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.compare.crew import Peer
from benchmarks.compare.measure import RAW, measure
from benchmarks.compare.peers import PEERS
from benchmarks.compare.picture import draw
from benchmarks.compare.report import machine, write, write_markdown
from benchmarks.compare.rows import Row
from benchmarks.compare.table import Table
from benchmarks.compare.workload import Workload
from benchmarks.compare.workloads import WORKLOADS

DEFAULT_OUTPUT = Path("runs/bench")
ROUNDS, FULL_ROUNDS = 3, 15


def main() -> int:
    """Measure, print the table, write the files."""
    arguments = _parse()
    chosen = _chosen(arguments)
    names = [name for name in PEERS if name == RAW or name in arguments.peers]
    rounds = arguments.rounds or (FULL_ROUNDS if arguments.full else ROUNDS)
    arguments.output.mkdir(parents=True, exist_ok=True)
    peers = [Peer(name) for name in names]  # all import at the same time
    for peer in peers:
        peer.wait()
    facts = machine({peer.name: peer.version for peer in peers}, arguments.clock)
    table = Table(sys.stdout)
    table.open(facts, rounds)
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            for workload in chosen:
                new = measure(workload, peers, rounds, Path(folder), arguments.clock)
                table.show(workload, new)
                rows += new
    finally:
        for peer in peers:
            peer.close()
    table.close(rows)
    write(arguments.output / "compare.json", facts, rounds, chosen, rows)
    write_markdown(arguments.output / "compare.md", facts, rows)
    draw(arguments.output / "compare.png", chosen, rows)
    print(f"\nWritten: compare.json, compare.md and compare.png in {arguments.output}")
    return 1 if any(row.is_wrong for row in rows) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Compare trainkit with a loop written by hand and with other frameworks.",
        epilog="Exits with 1 where a peer failed, or where its result is not that of the loop.",
    )
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--full", action="store_true", help="all workloads, more rounds")
    parser.add_argument("--workloads", nargs="+", choices=names, metavar="NAME", help=_list(names))
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=PEERS, metavar="NAME", help=_list(PEERS)
    )
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, or {FULL_ROUNDS} with --full")
    parser.add_argument(
        "--clock",
        choices=("time", "cpu"),
        default="time",
        help="cpu: processor time of the first process, for a machine that others use too; it does "
        "not see waiting, nor the loader's workers",
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder")
    return parser.parse_args()


def _list(names: list[str] | tuple[str, ...]) -> str:
    return f"some of: {', '.join(names)}"


def _chosen(arguments: argparse.Namespace) -> list[Workload]:
    if arguments.workloads is not None:
        return [workload for workload in WORKLOADS if workload.name in arguments.workloads]
    return [workload for workload in WORKLOADS if arguments.full or not workload.full]


if __name__ == "__main__":
    sys.exit(main())
