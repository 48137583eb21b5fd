#!/usr/bin/env bash
# Checks the CUDA backend on a machine with a GPU: every operation against the CPU backend, and its time against its floor.
# Nothing is built there: build here, carry the program, run it there.
#
#   scripts/gpu-check.sh build [FOLDER]   here: builds the program, stripped, into FOLDER (default: .carry)
#   scripts/gpu-check.sh run [FOLDER]     there: runs it; reports go to $OUT (default: the current folder)
#
# Exit code 0 when all operations agree.
set -euo pipefail

folder=${2:-.carry}

build() {
    cargo build --release -p temper-cuda --example gpu_check
    local target=${CARGO_TARGET_DIR:-target}
    mkdir -p "$folder"
    cp "$target/release/examples/gpu_check" "$folder/gpu_check"
    strip "$folder/gpu_check"
    cp "$0" "$folder/gpu-check.sh"
    ls -l "$folder"
}

run() {
    local out=${OUT:-.} bad=0
    chmod +x "$folder/gpu_check"
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.draw --format=csv || true
    for arguments in "conformance" "parity" "bench" "parity --no-cudnn --only attention" "bench --no-cudnn --only attention"; do
        echo "== gpu_check $arguments"
        # shellcheck disable=SC2086  # the words are separate arguments
        timeout "${LIMIT:-240}" "$folder/gpu_check" $arguments 2>&1 | tee -a "$out/gpu-check.txt" || bad=1
    done
    return $bad
}

case ${1:-} in
build) build ;;
run) run ;;
*)
    sed -n '2,9p' "$0"
    exit 2
    ;;
esac
