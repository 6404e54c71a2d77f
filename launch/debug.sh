#!/usr/bin/env bash
# The whole loop on one machine, small: launch/debug.sh [override …], e.g. launch/debug.sh trainer.steps=5 rollout.max_staleness=0
# With two GPUs or more it uses all of them (launch/plan/one_node.py); with fewer it uses the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[[ -x $python ]] || python=python3
layout=()
if [[ -d /proc/driver/nvidia/gpus ]]; then
  said=$("$python" -m launch.plan.one_node "$@")
  [[ -z $said ]] || mapfile -t layout <<<"$said"
fi
exec "$python" -m launch experiment=debug "${layout[@]}" "$@"
