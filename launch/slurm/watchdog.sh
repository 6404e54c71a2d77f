#!/usr/bin/env bash
# launch/slurm/watchdog.sh JOB NODE RESTARTS REQUEUES: requeues the job when the node of its batch script is lost, or cancels the job
# when no REQUEUES are left. RESTARTS is how often the job was requeued; after another requeue this watchdog leaves.
#
# With --no-kill Slurm (22.05) keeps such a job running without a launcher, its nodes idle until the time limit. The watchdog runs
# as a step on other nodes of the job, and outlives the srun that started it.
set -uo pipefail
job=$1 batch_node=$2 restarts=$3 requeues=$4
remedy=(scontrol requeue "$job")
((requeues > 0)) || remedy=(scancel "$job")

while sleep "${WATCHDOG_POLL_S:-15}"; do
  said=$(scontrol show job --oneliner "$job") || continue
  [[ $said =~ \ Restarts=([0-9]+) ]] || continue
  ((BASH_REMATCH[1] == restarts)) || exit 0
  [[ $said =~ \ NodeList=([^\ ]+) && ${BASH_REMATCH[1]} != "(null)" ]] || continue
  # Without a pipe: grep -q may exit before the end of a long list, which would make scontrol fail.
  names=$(scontrol show hostnames "${BASH_REMATCH[1]}") || continue
  grep --quiet --line-regexp --fixed-strings -- "$batch_node" <<<"$names" || { "${remedy[@]}" && exit; }
done
