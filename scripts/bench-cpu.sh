#!/usr/bin/env bash
# SFT speed on the CPU, temper and transformers in one run, on the same machine with the same number of threads.
# usage: scripts/bench-cpu.sh SMOLLM2_DIR [STEPS]      (PYTHON: an interpreter with torch and transformers, default python3)
# Both train every token of 512-token sequences, one sequence an optimizer step, f32, AdamW, gradient clipping.
set -euo pipefail
model=$(realpath "$1"); steps=${2:-12}; python=${PYTHON:-python3}; threads=${THREADS:-2}
root=$(cd "$(dirname "$0")/.." && pwd); shared=$root/../shared; tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
[ -e "$shared/peers/hf_cpu_sft.py" ] || { echo "skipped: $shared/peers is absent"; exit 0; }
cargo build --release --manifest-path "$root/Cargo.toml" -q
cat >"$tmp/bench.toml" <<T
[model]
path = "$model"
[data]
train = ["$shared/data/alpaca_en_demo.json"]
seq_len = 512
packing = true
loss = "all"
[train]
steps = $steps
global_batch = 1
micro_batch = 1
[optim]
lr = 1e-5
[checkpoint]
export = false
keep_last = 1
[log]
dir = "$tmp/run"
T
for round in 1 2; do
  echo "-- round $round: temper"
  /usr/bin/env time -f 'peak %M KiB, wall %e s' "$root/target/release/temper" --threads "$threads" sft "$tmp/bench.toml" | tail -3
  "$python" - "$tmp/run/events.jsonl" <<'P'
import json, sys
rows = [json.loads(l) for l in open(sys.argv[1])]
start = next(r for r in rows if r['event'] == 'start')
s = [r for r in rows if r['event'] == 'step'][1:]
t = sorted(s, key=lambda r: r['wall_s'] / r['tokens'])[len(s) // 2]
print(f"RESULT temper {t['tokens']} tokens {t['wall_s']:.2f} s/step {t['tokens']/t['wall_s']:.0f} tok/s  {t['model_tflops']*1000:.0f} GFLOP/s  peak {max(r['mem_peak_bytes'] for r in s)/2**20:.0f} MiB  start {start['startup_s']:.2f} s")
P
  echo "-- round $round: transformers"
  T=$threads /usr/bin/env time -f 'peak %M KiB, wall %e s' "$python" "$shared/peers/hf_cpu_sft.py" "$model" 512 "$steps"
done
"$python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
