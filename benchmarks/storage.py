"""Kills runs while they upload, and lets each go on from storage alone, on a machine without files.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.storage --kills 100

The storage is moto's S3 on this machine. A run is killed one to three times, at a request of an
upload or of a removal that chance draws, each start on a machine of its own, and then trains to its
end on another one. The weights must be those of a run that was not killed, bit by bit, and the last
checkpoint must be in the storage, complete. It exits with 1 where they are not; `--seed` draws the
same places again.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.s3 import BUCKET, S3, serving
from tests.storage.toys import STEPS, start, train
from trainkit.checkpoint.format.manifest import Manifest

REQUESTS = 22  # of an upload; a kill after more of them meets none
SECONDS = 120  # in which a start ends


def main() -> int:
    """Kill as often as the command line asks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, begun = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storage-") as folder, serving() as s3:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": s3.url,
            "TRAINKIT_STORAGE_LEASE": "3",
        }
        ((_, unbroken),) = run_ranks(1, train, f"{folder}/unbroken", Path(folder))
        while counts["kills"] < options.kills:
            counts["runs"] += 1
            name = f"run-{options.seed}-{counts['runs']}"
            chance = random.Random(f"{options.seed} {counts['runs']}")
            faults = _trial(s3, name, Path(folder, name), chance, unbroken, counts)
            for fault in faults:
                print(f"FAIL {name}: {fault}", flush=True)
            counts["failures"] += bool(faults)
    print(
        f"{counts['kills']} kills in {counts['runs']} runs, {counts['missed']} starts that ended "
        f"before theirs; {counts['resumed']} runs went on from storage, the others had nothing "
        f"there yet; {counts['failures']} failed. {time.monotonic() - begun:.0f} s."
    )
    return 1 if counts["failures"] else 0


def _trial(
    s3: S3,
    name: str,
    folder: Path,
    chance: random.Random,
    unbroken: list[torch.Tensor],
    counts: Counter[str],
) -> list[str]:
    """Kill one run some times, and let it end; return what is wrong."""
    address, faults = f"s3://{BUCKET}/{name}", []
    folder.mkdir()
    for number in range(chance.randint(1, 3)):
        prints = folder / f"prints-{number}"
        process, gate = start(
            address, folder / f"machine-{number}", prints=prints, keep_last=chance.choice([1, 2])
        )
        # Not the objects of the lease: they are written by the clock, not by the upload.
        match, after = f"(PUT|DELETE) {name}/(?!.trainkit)", chance.randint(0, REQUESTS)
        s3.fault(match=match, after=after, kill=process.pid)
        gate.set()
        process.join(SECONDS)
        if process.exitcode == -signal.SIGKILL:
            counts["kills"] += 1
        elif process.exitcode == 0:
            counts["missed"] += 1
        else:
            process.kill()
            faults.append(f"start {number} ended with {process.exitcode}: {prints.read_text()}")
        s3.fault()
    acknowledged = _complete(s3, name)
    ((came_from, weights),) = run_ranks(1, train, address, folder / "last-machine")
    counts["resumed"] += came_from is not None
    if acknowledged and (came_from is None or came_from < max(acknowledged)):
        faults.append(f"went on from step {came_from}, though storage held {acknowledged}")
    if not all(map(torch.equal, weights, unbroken)):
        faults.append(f"other weights than the run that was not killed, from step {came_from}")
    if STEPS not in _complete(s3, name):
        faults.append(f"storage lacks its last checkpoint: {s3.names(f'{name}/')}")
    return faults


def _complete(s3: S3, name: str) -> list[int]:
    """Return the steps of the checkpoints whose manifest is there, and all that it names."""
    names, found = set(s3.names(f"{name}/checkpoints/")), []
    for manifest in (each for each in names if each.endswith("/manifest.json")):
        place = manifest.rpartition("/")[0]
        read = Manifest.decode(s3.read(manifest), Path(manifest))
        if all(f"{place}/{file}" in names for file in read.sizes()):
            found.append(read.step)
    return found


if __name__ == "__main__":
    sys.exit(main())
