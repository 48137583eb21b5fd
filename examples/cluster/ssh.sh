#!/bin/bash
# No scheduler: temper starts a supervisor on every host of a hostfile by ssh, in this folder, with this binary. Both must be there on
# every host, under the same path. Ctrl-C stops the job after the step under way and a checkpoint.
#   examples/cluster/ssh.sh my.toml
set -eu
exec temper launch --hostfile "$(dirname "$0")/hosts" -- sft "$1" --restarts 3 "${@:2}"
