#!/bin/bash
# A grid as jobs of SLURM that share the work:  sbatch examples/cluster/slurm_array.sh cifar10/resnet74
# What one of them has claimed the others leave. A job at its time limit writes checkpoints, and the next goes on.
#SBATCH --array=1-16
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail
: "${CPT_DATA_DIR:?name the folder of the data}" "${CPT_RUNS_DIR:?name a folder that all machines share}"
exec cpt run "$@" --workers 1
