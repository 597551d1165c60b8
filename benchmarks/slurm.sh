#!/bin/bash
# Runs trainkit under a real Slurm of one node on this machine, started and ended here:
#
#   sudo benchmarks/slurm.sh            # needs slurmctld, slurmd, munged (Debian: slurm-wlm)
#   sudo benchmarks/slurm.sh COMMAND    # or: run one command with it, such as "srun -n 2 env"
#
# Prints a line for each check; ends with 1 where one fails.
set -u
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=$(realpath --no-symlinks "${PYTHON:-$ROOT/.venv/bin/python}")
for command in slurmctld slurmd munged srun sbatch; do
    command -v "$command" >/dev/null || { echo "no $command: apt-get install slurm-wlm"; exit 2; }
done
HOST=$(hostname -s)
WORK=$(mktemp -d)
chmod 755 "$WORK"
mkdir "$WORK/bin" "$WORK/spool" "$WORK/state" "$WORK/log"
export SLURM_CONF=$WORK/slurm.conf

cat > "$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$WORK/munge.socket
StateSaveLocation=$WORK/state
SlurmdSpoolDir=$WORK/spool
SlurmctldPidFile=$WORK/slurmctld.pid
SlurmdPidFile=$WORK/slurmd.pid
SlurmctldLogFile=$WORK/log/slurmctld
SlurmdLogFile=$WORK/log/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=20
MpiDefault=none
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
echo "${CGROUP:-CgroupPlugin=cgroup/v1}" > "$WORK/cgroup.conf"
printf '#!/bin/sh\nexec %s -m trainkit.cli "$@"\n' "$PYTHON" > "$WORK/bin/trainkit"
printf '#!/bin/sh\nexec %s "$@"\n' "$PYTHON" > "$WORK/bin/python"
chmod +x "$WORK"/bin/*
export PATH=$WORK/bin:$PATH PYTHONPATH=$ROOT OMP_NUM_THREADS=1

PIDS=()
finish() {
    scancel --state=RUNNING --user="$(id -un)" 2>/dev/null
    for ((i = ${#PIDS[@]} - 1; i >= 0; i--)); do kill "${PIDS[i]}" 2>/dev/null; done
    wait 2>/dev/null
    rm -rf "$WORK"
}
trap finish EXIT

dd if=/dev/urandom of="$WORK/munge.key" bs=1024 count=1 status=none
chmod 400 "$WORK/munge.key"
munged --foreground --force --socket="$WORK/munge.socket" --key-file="$WORK/munge.key" \
    --log-file="$WORK/log/munged" --pid-file="$WORK/munged.pid" \
    --seed-file="$WORK/munge.seed" > "$WORK/log/munged.out" 2>&1 &
PIDS+=($!)
sleep 1
slurmctld -D -c > "$WORK/log/slurmctld.out" 2>&1 &
PIDS+=($!)
slurmd -D -N "$HOST" > "$WORK/log/slurmd.out" 2>&1 &
PIDS+=($!)
for _ in $(seq 60); do
    sinfo --noheader --format=%T 2>/dev/null | grep -q idle && break
    sleep 0.5
done
if ! sinfo --noheader --format=%T 2>/dev/null | grep -q idle; then
    tail -n 5 "$WORK"/log/*
    echo "Slurm does not come up"
    exit 1
fi
if [ $# -gt 0 ]; then
    bash -c "$1"
    exit
fi

cat > "$WORK/train.py" <<'END'
import sys
import time
from functools import partial

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer
from trainkit.callbacks import Checkpoint, Summary

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


class Slow(Trainer):
    def training_step(self, model, batch):
        if "--slow" in sys.argv:
            time.sleep(0.5)
        return super().training_step(model, batch)


trainer = Slow(max_epochs=8, split_batches=True, output_dir=sys.argv[2],
               callbacks=[Checkpoint(), Summary()])
model = torch.nn.Linear(4, 1)
trainer.fit(model, DataLoader(data, 16), optimizer=partial(torch.optim.SGD, lr=0.01),
            loss_fn=torch.nn.MSELoss(), resume="auto")
if trainer.processes.is_main_process:
    print("processes:", trainer.processes.num_processes)
END
cd "$WORK" || exit 1
failed=0
check() { # WHAT HOW-OFTEN LINE COMMAND...: the output has the line so often
    local what=$1 times=$2 line=$3 output found
    shift 3
    output=$("$@" 2>&1 < /dev/null)
    found=$(grep -c -- "$line" <<< "$output")
    if [ "$found" -eq "$times" ]; then
        echo "ok      $what"
    else
        echo "FAILED  $what: $found times '$line' in"
        tail -n 30 <<< "$output" | sed 's/^/        /'
        failed=1
    fi
}
alone="processes: 1"
check "srun -n 2 python: one training" 1 "processes: 2" srun -n 2 python train.py --to a
check "srun -n 1 python: one process" 1 "$alone" srun -n 1 python train.py --to b
check "salloc -n 2 python: one process" 1 "$alone" salloc -n 2 python train.py --to c
check "srun -n 1 --pty: one process" 1 "$alone" \
    script -qec "srun -n 1 --pty python train.py --to d" /dev/null
check "srun -n 2 --pty: says what to write" 1 "srun --overlap" \
    script -qec "srun -K -n 2 --pty python train.py --to d2" /dev/null
check "srun in srun --pty: one training" 1 "processes: 2" script -qec \
    "srun -n 1 -c 2 --pty bash -c 'srun --overlap -n 2 -c 1 python train.py --to d3'" /dev/null
check "srun -n 2 with RANK=0 WORLD_SIZE=1: two trainings" 2 "$alone" \
    srun -n 2 bash -c 'RANK=0 WORLD_SIZE=1 exec python train.py --to e$SLURM_PROCID'
check "srun -n 1 trainkit launch: its processes" 1 "processes: 2" \
    srun -n 1 trainkit launch --cpu --num_processes 2 train.py --to f
check "srun -n 2 trainkit launch on one node: refused" 2 "each would start a job of its own" \
    srun -n 2 trainkit launch --cpu train.py --to g
check "a port that another program has: an error for both" 2 "another program using" \
    bash -c 'python -m http.server 23456 --bind 127.0.0.1 >/dev/null 2>&1 & server=$!; sleep 1
             MASTER_PORT=23456 srun -n 2 python train.py --to h; kill $server'

# The example: it is asked to end after a few seconds, saves, and goes back into the queue.
LAUNCH="--cpu --num_processes 2" sbatch --wait --nodes=1 --gpus-per-node=0 --time=10 \
    --signal=USR1@60 --output="$WORK/batch" "$ROOT/examples/cluster/slurm.sh" train.py --to i --slow \
    > "$WORK/submitted" &
waiting=$!
for _ in $(seq 120); do grep -qs planned "$WORK/batch" && break; sleep 0.5; done
sleep 3
job=$(grep -o '[0-9]*' "$WORK/submitted" | head -n 1)
scancel --signal=USR1 "$job"
for _ in $(seq 100); do
    [ "$(scontrol show job "$job" | grep -o 'Restarts=[0-9]*')" = "Restarts=1" ] && break
    sleep 0.5
done
scontrol release "$job" 2>/dev/null
scontrol update JobId="$job" StartTime=now 2>/dev/null
wait "$waiting"
check "examples/cluster/slurm.sh: requeued, resumed, done" 1 "processes: 2" cat "$WORK/batch"
check "... from its checkpoint" 1 "resuming from" cat "$WORK/batch"
exit "$failed"
