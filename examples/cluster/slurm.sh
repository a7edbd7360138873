#!/bin/bash
# SLURM: one task per machine, which starts that machine's processes. Submitted again, it continues.
#   sbatch slurm.sh
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
run=/shared/runs/my
what="my.toml --out $run"
[ -d "$run" ] && what="--resume $run"

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" \
    -m wakeful train $what
