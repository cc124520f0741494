#!/bin/bash
# A run on the nodes of one Slurm allocation: sbatch examples/ray/slurm.sh
# It ends with its allocation; submitted again with the same RUN it goes on.
#SBATCH --job-name=tlora-fx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail

# Seen by all nodes under one name: job files, data, and what comes out.
JOBS=${JOBS:-$PWD/jobs}
RUN=${RUN:-$PWD/runs/team}
ENVIRONMENT=${ENVIRONMENT:-$PWD/.venv}
PORT=${PORT:-6379}

source "$ENVIRONMENT/bin/activate"
export RAY_USAGE_STATS_ENABLED=0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }'):$PORT

# The head's node starts the run once all nodes are there; the end of the run ends Ray on all.
srun ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
  tlora-fx run "$JOBS" -o "$RUN" --executor ray --ray-address "$address" --until-empty &
run=$!
trap 'kill -TERM "$run"' TERM
wait "$run" || wait "$run"
