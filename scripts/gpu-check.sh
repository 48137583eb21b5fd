#!/usr/bin/env bash
# Checks and measures temper on a machine with a GPU: every operation against the CPU backend, the time of operations and of whole
# steps, and PyTorch's step beside it where Python has torch and transformers. Nothing is built there: build here, carry, run there.
#
#   scripts/gpu-check.sh build [FOLDER]          here: builds the programs, stripped, into FOLDER (default: .carry)
#   scripts/gpu-check.sh run [FOLDER] [PART...]  there: runs parts (default: all); the report is gpu-check.txt in $OUT (default: here)
#
# Parts: parity (operations against the CPU), kernels (each operation's time against its floor), steps (`temper bench step` at the
# shapes of docs/BENCHMARKS-cuda.md), ops (where the time of those steps goes), peers (transformers at the same shapes), sanitize
# (compute-sanitizer, where the CUDA toolkit is: memory and races of the experts' products; SANITIZER names it).
# Every command has a time limit of its own: LIMIT seconds (default 240). Exit code 0 when all operations agree and all steps ran.
set -euo pipefail

folder=${2:-.carry}
limit=${LIMIT:-240}

# Arguments of `temper bench step`, a row of the table each; then the same work for peers/hf_train.py.
steps=(
    "qwen3-8b --layers 6 --seq 4096 --micro-batch 2 --accumulate 1"
    "qwen3-8b --layers 6 --seq 4096 --micro-batch 2 --accumulate 8"
    "qwen3-8b --layers 6 --seq 4096 --micro-batch 2 --accumulate 1 --grads bf16 --moments bf16"
    "qwen3-30b-a3b --layers 8 --seq 4096 --micro-batch 2 --accumulate 1"
    "qwen3-30b-a3b --layers 8 --seq 4096 --micro-batch 2 --accumulate 8"
    "qwen3-235b-a22b --layers 2 --seq 4096 --micro-batch 2 --accumulate 1"
    "qwen3-235b-a22b --layers 2 --seq 4096 --micro-batch 2 --accumulate 8"
    "qwen3-8b --layers 6 --seq 49152 --micro-batch 1 --recompute full"
)
peers=(
    "8b 6 4096 2 compile"
    "8b 6 4096 2 liger"
    "8b 6 4096 2 compile accum8"
    "8b 6 4096 2 liger accum8"
    "30b 8 4096 2 grouped"
    "30b 8 4096 2 grouped accum8"
    "235b 2 4096 2 grouped"
    "235b 2 4096 2 grouped accum8"
    "8b 6 49152 1 liger ckpt"
)

build() {
    cargo build --release -p temper-cuda --example gpu_check
    cargo build --release -p temper-cli
    local target=${CARGO_TARGET_DIR:-target}
    mkdir -p "$folder"
    cp "$target/release/examples/gpu_check" "$target/release/temper" "$folder/"
    strip "$folder/gpu_check" "$folder/temper"
    cp "$0" "$(dirname "$0")/peers/hf_train.py" "$folder/"
    ls -l "$folder"
}

# Runs a command under the limit, with its words above it; a failure is counted, not fatal.
try() {
    echo "== $*"
    timeout "$limit" "$@" 2>&1 || { echo "FAILED ($?): $*"; bad=$((bad + 1)); }
}

parity() {
    try "$folder/gpu_check" conformance
    try "$folder/gpu_check" parity
    try "$folder/gpu_check" parity --no-cudnn --only attention
}

kernels() {
    try "$folder/gpu_check" bench
    try "$folder/gpu_check" bench --no-cudnn --only attention
}

sanitize() {
    local tool=${SANITIZER:-/usr/local/cuda/bin/compute-sanitizer}
    if [ ! -x "$tool" ]; then
        echo "== sanitize: left out, there is no $tool (SANITIZER=... names another)"
        return
    fi
    try "$tool" --tool memcheck --error-exitcode 9 "$folder/gpu_check" parity --only "3000 rows,700 rows"
    try "$tool" --tool racecheck --error-exitcode 9 "$folder/gpu_check" parity --only "3000 rows"
}

bench() {
    local row
    for row in "${steps[@]}"; do
        # shellcheck disable=SC2086  # the words are separate arguments
        try "$folder/temper" bench step $row "$@"
    done
}

run_peers() {
    if ! python3 -c 'import torch, transformers' 2>/dev/null; then
        echo "== peers: left out, python3 has no torch and transformers here"
        return
    fi
    local row
    for row in "${peers[@]}"; do
        # shellcheck disable=SC2086
        try python3 "$folder/hf_train.py" $row
    done
}

run() {
    bad=0
    chmod +x "$folder/gpu_check" "$folder/temper"
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit --format=csv || true
    local part
    for part in "$@"; do
        case $part in
        parity) parity ;;
        kernels) kernels ;;
        steps) bench ;;
        ops) bench --ops --steps 2 ;;
        peers) run_peers ;;
        sanitize) sanitize ;;
        *) echo "no such part: $part" && bad=$((bad + 1)) ;;
        esac
    done
    echo "== done, $bad failed"
    return $((bad > 0))
}

case ${1:-} in
build) build ;;
run)
    parts=("${@:3}")
    [ ${#parts[@]} -gt 0 ] || parts=(parity kernels steps ops peers)
    run "${parts[@]}" | tee "${OUT:-.}/gpu-check.txt"
    ;;
*)
    sed -n '2,10p' "$0"
    exit 2
    ;;
esac
