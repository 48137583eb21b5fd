//! Runs every operation on the GPU against the CPU backend, and times it against its floor.
//!
//! `gpu_check [conformance] [parity] [bench] [--no-cudnn] [--deterministic] [--only WORD,WORD] [--out FOLDER]`; exit code 1 when anything is off. Needs no cargo and no
//! Python on the GPU machine: see `scripts/gpu-check.sh`.

mod bench;
mod case;
#[path = "../../../tensor/tests/conformance/mod.rs"]
#[allow(dead_code, clippy::all)] // kept by temper-tensor, whose checks against naive references are not needed here
mod conformance;
mod dense;
mod experts;
mod parity;
mod sequences;

use std::fmt::Write as _;
use temper_cuda::{Cuda, Options};
use temper_tensor::{DType, Ops, cpu::Cpu};

/// What was asked for.
struct Arguments {
    conformance: bool,
    parity: bool,
    bench: bool,
    only: Option<String>,
    out: Option<String>,
    options: Options,
}

fn arguments() -> Result<Arguments, String> {
    let mut a = Arguments { conformance: false, parity: false, bench: false, only: None, out: None, options: Options::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "conformance" => a.conformance = true,
            "parity" => a.parity = true,
            "bench" => a.bench = true,
            "--no-cudnn" => a.options.no_cudnn = true,
            "--deterministic" => a.options.deterministic = true,
            "--only" => a.only = Some(value()?),
            "--out" => a.out = Some(value()?),
            other => return Err(format!("unknown argument {other}")),
        }
    }
    if !a.conformance && !a.parity && !a.bench {
        (a.conformance, a.parity, a.bench) = (true, true, true);
    }
    Ok(a)
}

fn run() -> Result<bool, String> {
    let a = arguments()?;
    let start = std::time::Instant::now();
    let gpu = Cuda::open(a.options).map_err(|e| e.to_string())?;
    println!("{} opened in {:.2} s; attention by {}", gpu.name(), start.elapsed().as_secs_f64(), gpu.attention_library());
    println!("{}", loaded_libraries());
    let mut report = String::new();
    let mut good = true;
    if a.conformance {
        let cpu = Cpu::new(0);
        conformance::compare(&gpu, DType::F32, &cpu, DType::F64, 1e-5);
        conformance::compare(&gpu, DType::BF16, &cpu, DType::F32, 1e-2);
        let _ = writeln!(report, "conformance: {} cases agree in f32 (1e-5) and bf16 (1e-2)", conformance::cases().len());
    }
    if a.parity {
        let cpu = Cpu::new(0);
        let (text, ok) = parity::run(&gpu, &cpu, a.only.as_deref());
        good &= ok;
        report += &text;
    }
    if a.bench {
        report += &bench::run(&gpu, a.only.as_deref());
    }
    let m = gpu.memory().unwrap_or_default();
    let _ = writeln!(report, "memory: peak {} MiB, reserved {} MiB, {} growths", m.peak_total >> 20, m.reserved >> 20, m.growths);
    println!("{report}");
    if let Some(folder) = a.out {
        let name = if a.options.no_cudnn { "gpu_check_own.txt" } else { "gpu_check.txt" };
        std::fs::write(format!("{folder}/{name}"), &report).map_err(|e| format!("{folder}/{name}: {e}"))?;
    }
    Ok(good)
}

/// NVIDIA's libraries in this process: two versions of one would be a defect.
fn loaded_libraries() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let known = ["libcudnn", "libcublas", "libnvrtc", "libcuda.so"];
    let mut found: Vec<&str> =
        maps.lines().filter_map(|l| l.split_whitespace().nth(5)).filter(|p| known.iter().any(|k| p.contains(k))).collect();
    found.sort_unstable();
    found.dedup();
    found.join("\n")
}

fn main() {
    match run() {
        Ok(true) => {}
        Ok(false) => std::process::exit(1),
        Err(e) => {
            eprintln!("{e}");
            std::process::exit(2);
        }
    }
}
