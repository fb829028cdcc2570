#!/bin/sh
#SBATCH --job-name=20260101T000000Z-sft-demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --output=/runs/20260101T000000Z-sft-demo/slurm.log
#SBATCH --open-mode=append
#SBATCH --chdir=/
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
#SBATCH --partition=gpu
#SBATCH --time=1-00:00:00
#SBATCH --comment="a \"b\" $(c)"

set -- env PYTHONPATH=/opt/launch /env/bin/python -m launcher exec /runs/20260101T000000Z-sft-demo
# queued again, the run continues from its last complete checkpoint
"$@" --prepare || exit
# whoever stops the job tells every process of it: wait for what they still write down
trap 'signalled=1' TERM INT
# its time is almost up: it saves a checkpoint, and goes back into the queue, without one if that takes too long
limit=/runs/20260101T000000Z-sft-demo/slurm.limit
export LAUNCH_SAVE_GRACE=10
trap 'signalled=1; : >"$limit"; again=1; ("$@" --save || scontrol requeue "$SLURM_JOB_ID") &' USR1
srun --nodes=2 --ntasks-per-node=1 --mpi=none --cpu-bind=none --kill-on-bad-exit=0 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} "$@" &
job=$!
while signalled=; wait $job; code=$?; [ "$signalled" ]; do :; done
[ "$again" ] && [ "$code" -ne 0 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
