#!/bin/bash
# Trains on the nodes of a Slurm job, and goes back into the queue until it is done:
#
#   sbatch examples/cluster/slurm.sh train.py --output-dir /shared/runs/big
#
# `train.py` calls fit(..., resume="auto"). Options of sbatch beat the lines below:
# `sbatch --nodes=1 --gpus-per-node=2 examples/cluster/slurm.sh ...`
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# One launcher on each node; they know their place from Slurm. $LAUNCH may hold more options.
srun trainkit launch --shutdown_timeout 240 ${LAUNCH:-} "$@"
code=$?
if [ "$code" -eq 75 ]; then # saved after SIGUSR1: try again later
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
