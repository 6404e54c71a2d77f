#!/usr/bin/env bash
# Installs the GPU environment into an existing one: requirements/install_cuda.sh PYTHON
# It needs nvcc (CUDA 13) and a C++ compiler, and no GPU: Transformer Engine is compiled against the torch that it will run with.
# NVTE_CUDA_ARCHS: the GPUs to compile for; 90 is Hopper, 80 is Ampere, 100 is Blackwell. MAX_JOBS: compilers at a time.
set -euo pipefail
python=$1
here=$(cd "$(dirname "$0")" && pwd)
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS:-90} MAX_JOBS=${MAX_JOBS:-$(nproc)}
if [[ ! -x $CUDA_HOME/bin/nvcc ]]; then
  echo "install_cuda.sh: no nvcc at $CUDA_HOME/bin: install the CUDA 13 toolkit, or set CUDA_HOME" >&2
  exit 1
fi
install=("$python" -m pip install -q --disable-pip-version-check --no-compile)
"${install[@]}" -r "$here/cuda.txt" -c "$here/cuda-constraints.txt"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/nvidia
export CPATH=$packages/cudnn/include:$packages/cu13/include:$packages/nccl/include${CPATH:+:$CPATH}
"${install[@]}" --no-deps --no-build-isolation -r "$here/cuda-nodeps.txt"
"$python" -m pip check --disable-pip-version-check
