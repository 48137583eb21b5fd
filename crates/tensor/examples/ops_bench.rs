//! Speed of the CPU operations at the shapes of SmolLM2-135M, against peaks measured on the same machine:
//! `cargo run --release -p temper-tensor --example ops_bench [THREADS]`.
//!
//! Products are given in GFLOP/s, the rest in GB/s of the bytes that must be moved. Best of several runs.

#![allow(clippy::print_stdout)]

use std::{hint::black_box, time::Instant};
use temper_tensor::{AdamW, AdamWState, Beta, DType, Ops, PackedSeqs, Result, RopeTable, Tensor, Trans, cpu::Cpu};

/// Tokens, hidden size, intermediate size, vocabulary, query heads, key heads, head size.
const T: usize = 512;
const H: usize = 576;
const I: usize = 1536;
const V: usize = 49_152;
const NQ: usize = 9;
const NK: usize = 3;
const D: usize = 64;
/// Rows of the logits in one chunk of the loss.
const CHUNK: usize = 512;

/// Seconds of the best of several runs.
fn best(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    let (mut best, start) = (f64::MAX, Instant::now());
    let mut runs = 0;
    while runs < 5 || start.elapsed().as_secs_f64() < 0.5 {
        let t = Instant::now();
        f()?;
        best = best.min(t.elapsed().as_secs_f64());
        runs += 1;
    }
    Ok(best)
}

/// Chains of independent multiply-adds that stay in registers: what `threads` cores can do at most.
fn peak_gflops(threads: usize) -> f64 {
    const ROUNDS: usize = 2_000_000;
    struct Chains;
    impl pulp::WithSimd for Chains {
        type Output = f64;
        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, simd: S) -> f64 {
            let (a, b) = (simd.splat_f32s(black_box(0.999)), simd.splat_f32s(black_box(0.001)));
            let mut sums = [b; 12];
            for _ in 0..ROUNDS {
                for s in &mut sums {
                    *s = simd.mul_add_f32s(*s, a, b);
                }
            }
            sums.iter().for_each(|&s| {
                black_box(simd.reduce_sum_f32s(s));
            });
            (ROUNDS * 12 * 2 * S::F32_LANES) as f64
        }
    }
    let run = || {
        let t = Instant::now();
        let flops = pulp::Arch::new().dispatch(Chains);
        flops / t.elapsed().as_secs_f64() / 1e9
    };
    (0..5)
        .map(|_| {
            std::thread::scope(|s| (0..threads).map(|_| s.spawn(run)).collect::<Vec<_>>().into_iter().filter_map(|h| h.join().ok()).sum())
        })
        .fold(0.0, f64::max)
}

struct Bench {
    cpu: Cpu,
    peak_gflops: f64,
    peak_gbs: f64,
}

impl Bench {
    fn randn(&self, shape: &[usize]) -> Result<Tensor> {
        let rng = temper_tensor::Rng::new(1, shape.iter().sum::<usize>() as u64);
        let n = shape.iter().product::<usize>();
        Ok(Tensor::from_vec((0..n as u64).map(|i| rng.normal_at(i) as f32).collect(), shape))
    }

    fn flops(&self, name: &str, flops: f64, f: impl FnMut() -> Result<()>) -> Result<()> {
        let s = best(f)?;
        let rate = flops / s / 1e9;
        println!("{name:34} {:9.3} ms {rate:8.1} GFLOP/s {:4.0} %", s * 1e3, 100.0 * rate / self.peak_gflops);
        Ok(())
    }

    /// `floats` is the number of f32 that must be read or written.
    fn bytes(&self, name: &str, floats: usize, f: impl FnMut() -> Result<()>) -> Result<()> {
        let s = best(f)?;
        let rate = 4.0 * floats as f64 / s / 1e9;
        println!("{name:34} {:9.3} ms {rate:8.1} GB/s    {:4.0} %", s * 1e3, 100.0 * rate / self.peak_gbs);
        Ok(())
    }

    fn gemm(&self, name: &str, [m, n, k]: [usize; 3], ta: Trans, tb: Trans, beta: Beta) -> Result<()> {
        let shape = |t, rows, cols| if t == Trans::No { [rows, cols] } else { [cols, rows] };
        let (a, b) = (self.randn(&shape(ta, m, k))?, self.randn(&shape(tb, k, n))?);
        let mut c = self.cpu.zeros(DType::F32, &[m, n])?;
        let name = format!("gemm {name} [{m},{n},{k}]");
        self.flops(&name, 2.0 * (m * n * k) as f64, || self.cpu.gemm(c.view_mut(), a.view(), ta, b.view(), tb, beta))
    }

    fn products(&self) -> Result<()> {
        for (name, out, inn) in [("qkv", (NQ + 2 * NK) * D, H), ("out", H, NQ * D), ("gate_up", 2 * I, H), ("down", H, I)] {
            self.gemm(&format!("{name} y"), [T, out, inn], Trans::No, Trans::Yes, Beta::Zero)?;
            self.gemm(&format!("{name} dx"), [T, inn, out], Trans::No, Trans::No, Beta::Zero)?;
            self.gemm(&format!("{name} dw"), [out, inn, T], Trans::Yes, Trans::No, Beta::One)?;
        }
        self.gemm("head y", [CHUNK, V, H], Trans::No, Trans::Yes, Beta::Zero)?;
        self.gemm("head dx", [CHUNK, H, V], Trans::No, Trans::No, Beta::Zero)?;
        self.gemm("head dw", [V, H, CHUNK], Trans::Yes, Trans::No, Beta::One)?;
        self.gemm("head, one token", [1, V, H], Trans::No, Trans::Yes, Beta::Zero)
    }

    fn attention(&self) -> Result<()> {
        let (q, k, v) = (self.randn(&[T, NQ, D])?, self.randn(&[T, NK, D])?, self.randn(&[T, NK, D])?);
        let (mut o, mut lse) = (self.randn(&[T, NQ, D])?, self.randn(&[T, NQ])?);
        let cu = Tensor::from_vec(vec![0, T as i32], &[2]);
        let seqs = PackedSeqs { cu: cu.view(), longest: T, skip: 0 };
        let (scale, causal) = (1.0 / (D as f64).sqrt(), (T * T * NQ * D) as f64);
        self.flops("attention (causal flops)", 2.0 * causal, || {
            self.cpu.attention(o.view_mut(), lse.view_mut(), q.view(), k.view(), v.view(), seqs, scale)
        })?;
        let (mut dq, mut dk, mut dv) = (self.randn(&[T, NQ, D])?, self.randn(&[T, NK, D])?, self.randn(&[T, NK, D])?);
        let dout = self.randn(&[T, NQ, D])?;
        self.flops("attention_grad (causal flops)", 5.0 * causal, || {
            let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
            self.cpu.attention_grad(dq, dk, dv, dout.view(), o.view(), lse.view(), q.view(), k.view(), v.view(), seqs, scale)
        })
    }

    fn rows(&self) -> Result<()> {
        let (a, b, w) = (self.randn(&[T, H])?, self.randn(&[T, H])?, self.randn(&[H])?);
        let (mut sum, mut y, mut rstd, mut dw) = (self.randn(&[T, H])?, self.randn(&[T, H])?, self.randn(&[T])?, self.randn(&[H])?);
        self.bytes("add_rms_norm", 4 * T * H, || {
            self.cpu.add_rms_norm(sum.view_mut(), y.view_mut(), rstd.view_mut(), a.view(), b.view(), w.view(), 1e-5)
        })?;
        self.bytes("rms_norm_grad_input", 4 * T * H, || {
            self.cpu.rms_norm_grad_input(y.view_mut(), a.view(), sum.view(), w.view(), rstd.view(), Some(b.view()))
        })?;
        self.bytes("rms_norm_grad_weight", 2 * T * H, || self.cpu.rms_norm_grad_weight(dw.view_mut(), a.view(), b.view(), rstd.view()))?;
        let (x, dy) = (self.randn(&[T, 2 * I])?, self.randn(&[T, I])?);
        let (mut y, mut dx) = (self.randn(&[T, I])?, self.randn(&[T, 2 * I])?);
        self.bytes("swiglu", 3 * T * I, || self.cpu.swiglu(y.view_mut(), x.view()))?;
        self.bytes("swiglu_grad", 5 * T * I, || self.cpu.swiglu_grad(dx.view_mut(), dy.view(), x.view()))?;
        let width = (NQ + 2 * NK) * D;
        let (qkv, table) = (self.randn(&[T, width])?, self.randn(&[T, D / 2])?);
        let (mut q, mut k, mut v) = (self.randn(&[T, NQ, D])?, self.randn(&[T, NK, D])?, self.randn(&[T, NK, D])?);
        let positions = Tensor::from_vec((0..T as i32).collect(), &[T]);
        let rope = RopeTable { cos: table.view(), sin: table.view() };
        self.bytes("qkv_prepare", 2 * T * width, || {
            self.cpu.qkv_prepare(q.view_mut(), k.view_mut(), v.view_mut(), None, qkv.view(), None, rope, positions.view())
        })
    }

    fn vocabulary_and_optimizer(&self) -> Result<()> {
        let (mut logits, mut losses) = (self.randn(&[CHUNK, V])?, self.randn(&[CHUNK])?);
        let (targets, weights) = (Tensor::from_vec(vec![7; CHUNK], &[CHUNK]), self.randn(&[CHUNK])?);
        self.bytes("cross_entropy with gradient", 2 * CHUNK * V, || {
            self.cpu.cross_entropy(losses.view_mut(), logits.view_mut(), targets.view(), Some(weights.view()))
        })?;
        let n = V * H;
        let (mut w, mut m, mut v, g) = (self.randn(&[n])?, self.randn(&[n])?, self.cpu.zeros(DType::F32, &[n])?, self.randn(&[n])?);
        let step = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };
        let clip = Tensor::from_vec(vec![1f32], &[1]);
        self.bytes("adamw", 7 * n, || {
            let state = AdamWState { weight: w.view_mut(), remainder: None, m: m.view_mut(), v: v.view_mut() };
            self.cpu.adamw(state, g.view(), clip.view(), step)
        })?;
        let mut out = self.cpu.zeros(DType::F64, &[1])?;
        self.bytes("sum_squares", n, || self.cpu.sum_squares(out.view_mut(), g.view()))?;
        let mut out = self.cpu.zeros(DType::I32, &[1])?;
        self.bytes("count_non_finite", n, || self.cpu.count_non_finite(out.view_mut(), g.view()))
    }
}

fn main() -> Result<()> {
    let cpu = Cpu::new(std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(0));
    let mut bench = Bench { peak_gflops: peak_gflops(cpu.threads()), peak_gbs: 0.0, cpu };
    let (x, mut y) = (bench.cpu.zeros(DType::F32, &[V * H])?, bench.cpu.zeros(DType::F32, &[V * H])?);
    bench.peak_gbs = 8.0 * (V * H) as f64 / best(|| bench.cpu.copy(y.view_mut(), x.view()))? / 1e9;
    println!("{}: peak {:.1} GFLOP/s (f32), copy {:.1} GB/s", bench.cpu.name(), bench.peak_gflops, bench.peak_gbs);
    bench.products()?;
    bench.attention()?;
    bench.rows()?;
    bench.vocabulary_and_optimizer()
}
