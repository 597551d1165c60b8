"""What launchers start: one process of a job, `script.py FRAMEWORK JOB`."""

import sys

from benchmarks.behaviour import toys
from benchmarks.behaviour.frameworks import load
from benchmarks.behaviour.job import Job

JOBS = {"raises": Job(samples=32, model=toys.Raises, options={"devices": 2})}

if __name__ == "__main__":
    load(sys.argv[1]).train(JOBS[sys.argv[2]])
