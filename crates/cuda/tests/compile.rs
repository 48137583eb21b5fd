//! Every kernel compiles for every architecture in use, without a GPU, and none spills registers unless it is listed here.
//! Needs NVRTC (`pip install nvidia-cuda-nvrtc`, or a CUDA toolkit in `CUDA_HOME`); without it the test says so and ends.

use std::sync::Mutex;
use temper_cuda::kernels::{Compiled, Compiler, SOURCES, Source, Variant};
use temper_cuda::{Error, sys::nvrtc::Nvrtc};

/// Kernels that are known to spill, with the reason.
const SPILLS: &[(&str, &str)] = &[];

/// What is compiled: everything for Hopper; for the portable path, all that is not for one architecture only.
const ARCHITECTURES: &[&str] = &["sm_90a", "sm_80"];

#[test]
fn kernels_compile_and_do_not_spill() {
    let mut lines = vec![];
    let mut wrong = vec![];
    for arch in ARCHITECTURES {
        let compiler = match Nvrtc::load() {
            Ok(nvrtc) => Compiler::new(nvrtc, (*arch).to_string()).expect("NVRTC answers"),
            Err(e @ Error::Missing { .. }) => {
                eprintln!("SKIPPED: kernels were not compiled: {e}");
                return;
            }
            Err(e) => panic!("{e}"),
        };
        for (source, variant, result) in compile_all(&compiler) {
            let place = format!("{arch} {} {variant:?}", source.file);
            match result {
                Err(e) => wrong.push(format!("{place}: {e}")),
                Ok(compiled) => {
                    if compiled.resources.is_empty() {
                        wrong.push(format!("{place}: no kernel was reported"));
                    }
                    wrong.extend(compiled.losses.iter().map(|l| format!("{place}: {l}")));
                    for r in compiled.resources {
                        let text = format!("{place} {}: {} registers, {} bytes stack", r.kernel, r.registers, r.stack);
                        if r.spill_stores + r.spill_loads > 0 && !SPILLS.iter().any(|s| s.0 == r.kernel) {
                            wrong.push(format!("{text}, spills {} + {} bytes", r.spill_stores, r.spill_loads));
                        }
                        lines.push(text);
                    }
                }
            }
        }
    }
    lines.sort();
    println!("{} kernels compiled\n{}", lines.len(), lines.join("\n"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

type Result1 = Result<Compiled, Error>;

/// Compiles every source in every variant, on all cores.
fn compile_all(compiler: &Compiler) -> Vec<(&'static Source, Variant, Result1)> {
    let sources = SOURCES.iter().filter(|s| s.only.is_none_or(|a| a == compiler.arch));
    let all: Vec<_> = sources.flat_map(|s| s.variants().into_iter().map(move |v| (s, v))).collect();
    let (queue, done) = (Mutex::new(all.into_iter()), Mutex::new(vec![]));
    let next = || queue.lock().expect("no thread panicked").next();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some((source, variant)) = next() {
                    let result = compiler.compile(source, variant);
                    done.lock().expect("no thread panicked").push((source, variant, result));
                }
            });
        }
    });
    done.into_inner().expect("no thread panicked")
}
