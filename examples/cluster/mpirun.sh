#!/bin/bash
# Open MPI: one supervisor a node, which starts and watches eight ranks.
#   HOSTS=gpu-1,gpu-2 examples/cluster/mpirun.sh my.toml
set -eu
first=${HOSTS%%,*}
count=$(tr ',' '\n' <<<"$HOSTS" | wc -l)
# Every process learns where rank 0 listens; the first supervisor listens on the next port. Variables must be alike on all hosts.
exec mpirun -np "$count" --host "$HOSTS" --map-by ppr:1:node --bind-to none \
    -x MASTER_ADDR="$first" -x MASTER_PORT=29500 -x LD_LIBRARY_PATH -x PATH \
    temper sft "$1" --ranks-per-node 8 "${@:2}"
