#!/usr/bin/env bash
# One run on the nodes of one Slurm job (docs/slurm.md):
#
#   sbatch launch/kestrel_256.sh [override …]                                the job of 256 GPUs
#   sbatch --nodes=4 launch/kestrel_256.sh experiment=debug [override …]     the same, small
#   sbatch launch/kestrel_256.sh resume=outputs/NAME                         resume a run
#
# Differences between clusters are settings (cluster.setup, cluster.container, cluster.trainer_python, …) or options of
# sbatch (--partition, --account, --time). Options on the command line take precedence over the #SBATCH lines.
#SBATCH --job-name=kestrel
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=kestrel-%j.log
#
# --signal: ten minutes before the time limit the trainer saves and exits, and the job requeues itself to go on.
# --no-kill: a lost node does not end the job; the launcher goes on without it.
set -euo pipefail
if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "kestrel_256.sh is for Slurm: sbatch launch/kestrel_256.sh [override …]" >&2
  exit 2
fi
export SLURM_EXPORT_ENV=ALL # after `sbatch --export=NONE` the steps still need the environment of this script
told=
trap 'told=yes' USR1 # the request to save is passed on to the launcher below

# Slurm runs a copy of this script, and knows the path of the original. The path may hold spaces, and the overrides follow it:
# the path is the longest beginning that is a file.
script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
while [[ ! -f $script && $script == *" "* ]]; do script=${script% *}; done
project=$(dirname "$(dirname "$(realpath -m "$script")")")
if [[ ! -f $script || ! -f $project/launch/__main__.py ]]; then
  echo "kestrel_256.sh is no longer where it was submitted ($script): submit the file by sbatch, and do not move it" >&2
  exit 2
fi

# The launcher's own Python needs no torch. Trainer and fleet use cluster.trainer_python and cluster.rollout_python.
python=${KESTREL_PYTHON:-$project/.venv/bin/python}
[[ -x $python ]] || python=python3
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH}

case " $*" in
  *" experiment="* | *" resume="*) ;;
  *) set -- experiment=kestrel_256 "$@" ;;
esac

# The launcher replaces this shell, so that Slurm's signals reach it. A request to save is blocked until the launcher can take it.
# Between the trap and the block the signal is ignored for some hundredths of a second, or it would kill the job.
hold='import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
if sys.argv[1]:
    os.kill(os.getpid(), signal.SIGUSR1)
os.execvp(sys.argv[2], sys.argv[2:])'
trap '' USR1
exec "$python" -S -c "$hold" "$told" "$python" -m launch cluster.kind=slurm "$@"
