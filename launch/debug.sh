#!/usr/bin/env bash
# The whole loop on one machine, small: launch/debug.sh [override …], e.g. launch/debug.sh trainer.steps=5 rollout.max_staleness=0
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[[ -x $python ]] || python=python3
exec "$python" -m launch experiment=debug "$@"
