"""trainkit beside a loop written by hand and beside other frameworks: what a step costs.

    OMP_NUM_THREADS=1 python -m benchmarks.compare

A workload (`workload.py`) is data; a peer (`peers/`) has one small function for each kind of
workload. Every pair of them runs in processes of its own, which stay alive over the rounds and wait
idle while the others are measured.
"""
