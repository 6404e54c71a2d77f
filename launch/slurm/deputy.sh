#!/usr/bin/env bash
# launch/slurm/deputy.sh JOB NODE RESTARTS REQUEUES: has the job start again when the node of its batch script is lost, or ends it
# when no REQUEUES are left. RESTARTS tells this life of the job from others, which have deputies of their own.
#
# With --no-kill Slurm (22.05) lets such a job run on with nobody in charge, its nodes idle until the time limit. This runs as
# a step on other nodes of the job, and outlives the srun that started it.
set -uo pipefail
job=$1 batch_node=$2 restarts=$3 requeues=$4
remedy=(scontrol requeue "$job")
((requeues > 0)) || remedy=(scancel "$job")

while sleep "${DEPUTY_POLL_S:-15}"; do
  said=$(scontrol show job --oneliner "$job") || continue
  [[ $said =~ \ Restarts=([0-9]+) ]] || continue
  ((BASH_REMATCH[1] == restarts)) || exit 0
  [[ $said =~ \ NodeList=([^\ ]+) && ${BASH_REMATCH[1]} != "(null)" ]] || continue
  # No pipe: grep may leave before the end of a long list, and that scontrol was cut short is no reason to requeue.
  names=$(scontrol show hostnames "${BASH_REMATCH[1]}") || continue
  grep --quiet --line-regexp --fixed-strings -- "$batch_node" <<<"$names" || { "${remedy[@]}" && exit; }
done
