#!/usr/bin/env bash
# One run over the nodes of one Slurm job, from a repository that all nodes see (make setup TARGET=rocm, or cuda, done):
#   sbatch --nodes 8 deploy/slurm.sh recipes/train.py --scale mi300x-64 --model ... --sft.data ... --data.train ... --run-dir /shared/runs/first
# In containers (pyxis): CONTAINER=/shared/rstar-ray.sqsh sbatch ..., with the paths that the job needs in MOUNTS.
# The same command again resumes from the newest checkpoint.
#SBATCH --job-name=rstar_ray
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
set -euo pipefail

[ $# -ge 1 ] || { echo "which recipe? sbatch deploy/slurm.sh recipes/train.py --scale mi300x-64 ..." >&2; exit 2; }
target=${TARGET:-rocm}

# Ours first, the site's over it; exported, so that srun hands it to every node.
set -a
. "deploy/$target.env"
if [ -f deploy/site.env ]; then . deploy/site.env; fi
set +a
# Slurm's masks: the first alone makes `import ray` fail, and the job has whole nodes anyway.
unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD"
[ -s ~/.ray/auth_token ] || ray get-auth-token --generate > /dev/null
chmod 600 ~/.ray/auth_token
export RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token" # a container may have another home

# All lines are read: under pipefail, who leaves at the first ends the script when the rest is written.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# On some systems a node's own name is 127.0.1.1, which the others cannot reach.
ip=$(getent ahostsv4 "$head" | awk '$1 !~ /^127[.]/ && !seen++ { print $1 }' || true)
ip=${ip:-$(hostname -I | awk '{ print $1 }')}
[ -n "$ip" ] || { echo "$head has no IPv4 address that other nodes can reach" >&2; exit 1; }
address="$ip:6379"
container=(${CONTAINER:+--container-image="$CONTAINER" --container-mounts="$PWD:$PWD,$HOME/.ray:$HOME/.ray${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD"})

# Ray on every node, what is wrong with any of them in one table, and the recipe on the first; Ray ends with it.
# shellcheck disable=SC2016
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${container[@]}" bash -c '
  unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES # srun sets them again
  ulimit -c 0; ulimit -n 65536; ulimit -l unlimited || true
  RAY_TMPDIR=$(python -m actors.cluster.auth) || exit # every node needs the private directory of Ray: the others use the path of the head
  export RAY_TMPDIR
  address=$1 nodes=$2; shift 2
  exec ray symmetric-run --address "$address" --min-nodes "$nodes" --disable-usage-stats -- \
    env RAY_ADDRESS="$address" bash -c "python -m actors.preflight && exec python \"\$@\"" recipe "$@"
' node "$address" "$SLURM_JOB_NUM_NODES" "$@"
