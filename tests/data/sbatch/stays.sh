#!/bin/sh
#SBATCH --job-name=20260101T000000Z-sft-demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=/runs/20260101T000000Z-sft-demo/slurm.log
#SBATCH --open-mode=append
#SBATCH --chdir=/
#SBATCH --no-requeue
#SBATCH --gpus-per-node=h100:8

set -- env PYTHONPATH=/opt/launch /env/bin/python -m launcher exec /runs/20260101T000000Z-sft-demo
# queued again, the run continues from its last complete checkpoint
"$@" --prepare || exit
# whoever stops the job tells every process of it: wait for what they still write down
trap 'signalled=1' TERM INT
srun --nodes=2 --ntasks-per-node=1 --mpi=none --cpu-bind=none --kill-on-bad-exit=0 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} "$@" &
job=$!
while signalled=; wait $job; code=$?; [ "$signalled" ]; do :; done
exit "$code"
