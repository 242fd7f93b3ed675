#!/usr/bin/env bash
# deploy/venv.sh TARGET PYTHON FOLDER: the virtual environment that `make setup` fills.
# Where this Python has vLLM already, as in vLLM's images, the environment lies over it and sees what it has.
set -euo pipefail
target=$1 python=$2 folder=$3
if [ "$target" != cpu ] && "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("vllm"))'; then
  exec "$python" -m venv --system-site-packages "$folder"
fi
if [ "$target" = rocm ]; then
  echo "TARGET=rocm: $python has no vLLM; torch and vLLM for ROCm come from vLLM's image alone:" >&2
  echo "docker build -f deploy/docker/rocm.Dockerfile -t rstar-ray:rocm ." >&2
  exit 1
fi
if ! version=$("$python" -c 'import sys; v = sys.version_info; print(*v[:2], sep="."); sys.exit(not (3, 11) <= v < (3, 14))'); then
  echo "PYTHON: Python 3.11 to 3.13 is needed (got ${version:-none}, $python). Hint: make setup PYTHON=python3.12" >&2
  exit 1
fi
exec "$python" -m venv "$folder"
