#!/bin/bash
# Each run on all GPUs of two machines:  sbatch examples/cluster/slurm_torchrun.sh imagenet/resnet34
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
#SBATCH --time=48:00:00
#SBATCH --signal=TERM@120
set -euo pipefail
: "${CPT_DATA_DIR:?name the folder of the data}" "${CPT_RUNS_DIR:?name a folder that all machines share}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${GPUS:-4}" \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" -m cpt_lab run "$@"
