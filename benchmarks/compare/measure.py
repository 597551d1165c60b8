"""Runs the rounds of one workload: A B C, B C A, C A B, one peer at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.compare.channel import Message
from benchmarks.compare.crew import Failed, Peer, Team
from benchmarks.compare.meter import Mode
from benchmarks.compare.rows import Row, difference, ratios
from benchmarks.compare.workload import Unsupported, Workload

__all__ = ["RAW", "measure"]

RAW = "raw"


def measure(
    workload: Workload,
    peers: Sequence[Peer],
    rounds: int,
    folder: Path,
    clock: Literal["time", "cpu"] = "time",
) -> list[Row]:
    """Return a row for each peer; `folder` is for logs, `clock` a mode of `Meter`."""
    session = _Session(workload, peers, folder, clock)
    try:
        session.try_out()
        for number in range(rounds):
            session.run_round(number / rounds)
        session.count()
    finally:
        session.close()
    return session.finish()


class _Session:
    """One workload, and the teams that do it."""

    def __init__(
        self, workload: Workload, peers: Sequence[Peer], folder: Path, clock: Mode
    ) -> None:
        self._workload = workload
        self._clock: Mode = clock
        self._folder = folder
        self._teams: dict[str, Team] = {}
        self._rows = {
            peer.name: Row(workload=workload.name, peer=peer.name, bound=workload.bound)
            for peer in peers
        }
        for peer in peers:
            if peer.version is None:
                self._rows[peer.name].missing = f"not installed ({peer.missing})"
            else:
                self._teams[peer.name] = Team.start(peer, workload, folder)

    def try_out(self) -> None:
        """Run each once without noting its time: first calls cost more."""
        for name in list(self._teams):
            self._ask(name, self._clock)

    def run_round(self, turn: float) -> None:
        """Measure each once, beginning at another one in each round.

        A machine that gets slower or faster within a round then favours nobody.

        Args:
            turn: From 0 to 1, how far down the list the first one stands.
        """
        names = list(self._teams)
        first = int(turn * len(names))
        for name in names[first:] + names[:first]:
            answer = self._ask(name, self._clock)
            if answer is not None:
                self._rows[name].seconds.append(answer["seconds"])

    def count(self) -> None:
        """Count calls and syncs, and keep the product."""
        for name in list(self._teams):
            row = self._rows[name]
            if (answer := self._ask(name, "calls")) is not None:
                row.calls, row.modules = answer["calls"], answer["modules"]
            if (answer := self._ask(name, "syncs", self._product(name))) is not None:
                row.syncs = answer["syncs"]

    def finish(self) -> list[Row]:
        """Compare all with the loop by hand."""
        raw = self._rows[RAW]
        expected = self._load(RAW)
        for row in self._rows.values():
            if not row.is_measured or not raw.is_measured:
                continue
            row.ratios = ratios(row.seconds, raw.seconds)
            product = self._load(row.peer)
            if expected is not None and product is not None:
                row.difference = difference(product, expected)
        return list(self._rows.values())

    def close(self) -> None:
        """End the teams."""
        for name in list(self._teams):
            self._teams.pop(name).close()

    def _ask(self, name: str, mode: Mode, product: Path | None = None) -> Message | None:
        """Let a team work once; None, and no more work for it, where that is of no use."""
        try:
            return self._teams[name].run(mode, product)
        except Unsupported as error:
            self._rows[name].missing = str(error)
        except Failed as error:
            self._rows[name].failure = str(error)
        self._teams.pop(name).close()
        return None

    def _product(self, name: str) -> Path:
        return self._folder / f"{self._workload.name}-{name}.npy"

    def _load(self, name: str) -> Tensor | None:
        path = self._product(name)
        if not path.exists():
            return None
        return torch.from_numpy(np.load(path))
