#!/usr/bin/env bash
# The whole loop on one machine, small: launch/debug.sh [override …], e.g. launch/debug.sh trainer.steps=5 rollout.max_staleness=0
# On two GPUs or more it uses them all (launch/plan/one_node.py); on one, or none, it takes the CPU.
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
