//! The table of sizes: every operation in f32 and bf16 against the CPU backend in f32, on the same (rounded) inputs.

use crate::case::{Case, Random, Role, Values, for_cpu, host, values};
use crate::sequences::Heads;
use crate::{dense, experts, sequences};
use std::fmt::Write as _;
use temper_cuda::{AdamWTypes, Cuda};
use temper_tensor::{AdamW, AdamWState, DType, Ops, Result, Tensor, cpu::Cpu};

/// Largest relative error `|gpu - cpu| / |cpu|` (Frobenius) of an output.
const F32_TOLERANCE: f64 = 1e-5;
const BF16_TOLERANCE: f64 = 1e-2;

/// Odd sizes, empty, one token, many tokens; 128 and 256 experts; uneven routing; every head size in use.
fn table() -> Vec<Case> {
    let mut all = vec![];
    for n in [0, 1, 7, 4096, 1_000_003] {
        all.extend(dense::elementwise(n));
        all.extend(dense::optimizer(n));
    }
    for (m, n, k) in
        [(0, 8, 8), (1, 1, 1), (1, 576, 192), (7, 13, 5), (33, 0, 4), (5, 6, 0), (129, 257, 63), (512, 384, 1024), (49_152, 64, 96)]
    {
        all.extend(dense::gemm(m, n, k));
    }
    for (t, h) in [(0, 64), (1, 64), (3, 7), (257, 576), (1000, 1), (300, 4096), (49_152, 128)] {
        all.extend(dense::bias(t, h));
        all.extend(dense::norm(t, h));
        all.extend(dense::swiglu(t, h));
    }
    for (t, v, h) in [(0, 11, 8), (1, 11, 8), (33, 70_001, 7), (1000, 5, 64), (3000, 151_936, 32), (49_152, 1000, 64)] {
        all.extend(dense::embedding(t, v, h));
    }
    for (n, v) in [(0, 10), (1, 10), (3, 257), (40, 151_936), (9, 100_001), (11, 50_008), (49_152, 64)] {
        all.extend(dense::cross_entropy(n, v));
    }
    let heads = |nq, nk, d| Heads { nq, nk, d };
    for (lengths, h) in [
        (vec![1], heads(2, 1, 16)),
        (vec![5, 1, 30], heads(4, 2, 24)),
        (vec![33, 64, 100], heads(8, 2, 64)),
        (vec![17, 200], heads(3, 3, 96)),
        (vec![512, 1, 129], heads(8, 8, 128)),
        (vec![70, 130], heads(4, 2, 256)),
        (vec![40, 2], heads(2, 2, 10)),
        (vec![40, 2], heads(2, 1, 18)),
    ] {
        all.extend(sequences::qkv(&lengths, h));
        // The gradient of a single token is zero but for rounding, which has no relative error.
        let all_forms = sequences::attention(&lengths, h);
        all.extend(all_forms.into_iter().take(if lengths == [1] { 1 } else { 2 }));
    }
    all.extend(sequences::qkv(&[40_000, 9_152], heads(2, 1, 64)));
    all.extend(sequences::attention(&[0, 100, 0, 31], heads(4, 2, 64)));
    // 49,152 tokens in sequences that the CPU can follow.
    let many: Vec<usize> = (0..96).map(|i| 512 + (i % 7) * 8 - 24).collect();
    let rest = 49_152 - many.iter().sum::<usize>();
    all.extend(sequences::attention(&[many, vec![rest]].concat(), heads(2, 1, 128)));
    all.extend(sequences::attention(&[2048, 1000, 33], heads(32, 8, 128)));
    // One length for all: dense plans, and more lengths than get one.
    for (lengths, h) in [
        (vec![128; 3], heads(8, 2, 64)),
        (vec![768], heads(8, 8, 128)),
        (vec![384; 2], heads(4, 2, 256)),
        (vec![100; 2], heads(4, 2, 128)),
        (vec![256; 5], heads(4, 1, 128)),
        (vec![512], heads(4, 2, 128)),
    ] {
        all.extend(sequences::attention(&lengths, h));
    }
    for (context, new, block, h) in [
        (vec![1], 1, 16, heads(2, 1, 16)),
        (vec![5, 100, 33], 1, 16, heads(8, 2, 128)),
        (vec![64, 17, 300], 17, 8, heads(4, 4, 64)),
        (vec![40, 70], 3, 16, heads(4, 2, 256)),
        (vec![1, 3000, 257, 256], 1, 16, heads(16, 2, 128)),
        (vec![700, 5], 2, 5, heads(6, 1, 24)),
        (vec![90, 300], 4, 16, heads(3, 3, 10)),
        (vec![513, 2, 77], 2, 5, heads(20, 1, 64)),
        (vec![1000, 17], 1, 16, heads(40, 4, 128)),
    ] {
        all.extend(sequences::paged(&context, new, block, h));
    }
    for (t, e, k) in [(0, 8, 2), (1, 8, 2), (100, 4, 4), (33, 60, 4), (1000, 128, 8), (999, 256, 8), (500, 512, 10), (49_152, 128, 8)] {
        all.extend(experts::router(t, e, k));
    }
    for (t, e, k, h) in [(0, 8, 2, 16), (1, 8, 2, 16), (77, 8, 2, 7), (1000, 128, 8, 64), (3000, 256, 8, 48), (49_152, 128, 8, 32)] {
        all.extend(experts::routing(t, e, k, h));
    }
    for (rows, e, n, m) in [
        (0, 4, 16, 8),
        (1, 4, 16, 8),
        (37, 5, 7, 13),
        (500, 8, 96, 64),
        (4000, 128, 64, 96),
        (9000, 256, 48, 32),
        (3000, 16, 512, 256),
        (5000, 9, 264, 392),
        (700, 3, 1032, 520),
    ] {
        all.extend(experts::grouped(rows, e, n, m, true));
    }
    all.extend(experts::grouped(49_152, 128, 256, 128, false));
    all
}

/// Worst error of an operation so far.
struct Row {
    op: String,
    cases: usize,
    worst: [f64; 2],
}

/// Runs the table; returns the report and whether all is well.
pub fn run(gpu: &Cuda, cpu: &Cpu, only: Option<&str>) -> (String, bool) {
    let mut report = String::from("parity: largest relative error against the CPU backend in f32\n");
    let mut rows: Vec<Row> = vec![];
    let mut failures = vec![];
    for case in table().iter().filter(|c| only.is_none_or(|w| w.split(',').any(|w| c.name.contains(w)))) {
        for (i, (dtype, tolerance)) in [(DType::F32, F32_TOLERANCE), (DType::BF16, BF16_TOLERANCE)].into_iter().enumerate() {
            let op = case.name.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default().trim().to_string();
            let at = rows.iter().position(|r| r.op == op).unwrap_or_else(|| {
                rows.push(Row { op, cases: 0, worst: [0.0; 2] });
                rows.len() - 1
            });
            rows[at].cases += 1;
            match compare(case, gpu, cpu, dtype) {
                Ok(Outcome { error, repeats }) => {
                    rows[at].worst[i] = rows[at].worst[i].max(error);
                    if error.is_nan() || error > tolerance {
                        failures.push(format!("{} in {dtype}: error {error:.2e}, allowed {tolerance:.0e}", case.name));
                    }
                    if let Some(output) = repeats {
                        failures.push(format!("{} in {dtype}: output {output} differs in a second run", case.name));
                    }
                }
                Err(e) => failures.push(format!("{} in {dtype}: {e}", case.name)),
            }
        }
    }
    for r in &rows {
        let _ = writeln!(report, "  {:44} {:3} runs  f32 {:.1e}  bf16 {:.1e}", r.op, r.cases, r.worst[0], r.worst[1]);
    }
    match master_weights(gpu, cpu) {
        Ok(text) => report += &text,
        Err(e) => failures.push(format!("exact f32 masters: {e}")),
    }
    let _ = writeln!(report, "{} failures", failures.len());
    for f in &failures {
        let _ = writeln!(report, "  FAILED {f}");
    }
    (report, failures.is_empty())
}

struct Outcome {
    error: f64,
    /// The first output whose bits differ in a second run.
    repeats: Option<usize>,
}

fn compare(case: &Case, gpu: &Cuda, cpu: &Cpu, dtype: DType) -> Result<Outcome> {
    let mut random = Random(42);
    let inputs: Vec<Tensor> = case.inputs.iter().map(|i| host(&mut random, i.role, &i.shape, &i.values, dtype)).collect();
    let poison = Values::Uniform(f32::NAN, f32::NAN);
    let starts: Vec<Tensor> = case
        .outputs
        .iter()
        .map(|o| match (&o.starts, o.role) {
            (Some(v), _) => host(&mut random, o.role, &o.shape, v, dtype),
            (None, Role::Int) => Tensor::from_vec(vec![-77i32; o.shape.iter().product()], &o.shape),
            (None, _) => host(&mut random, o.role, &o.shape, &poison, dtype),
        })
        .collect();
    let on_gpu = |t: &Tensor| gpu.from_host(t.view());
    let gpu_inputs: Vec<Tensor> = inputs.iter().map(on_gpu).collect::<Result<_>>()?;
    let mut results = vec![];
    for _ in 0..2 {
        let mut outputs: Vec<Tensor> = starts.iter().map(on_gpu).collect::<Result<_>>()?;
        (case.run)(gpu, &gpu_inputs, &mut outputs)?;
        results.push(outputs.iter().map(|t| Ok(values(&gpu.to_host(t.view())?))).collect::<Result<Vec<_>>>()?);
    }
    let cpu_inputs: Vec<Tensor> = inputs.iter().map(for_cpu).collect();
    let mut want: Vec<Tensor> = starts.iter().map(for_cpu).collect();
    (case.run)(cpu, &cpu_inputs, &mut want)?;
    let mut error = 0.0f64;
    for ((got, want), out) in results[0].iter().zip(&want).zip(&case.outputs) {
        let off = distance(got, &values(want));
        // Integers are right or wrong.
        error = error.max_nan(if out.role == Role::Int && off > 0.0 { f64::INFINITY } else { off });
    }
    let same = |a: &Vec<f64>, b: &Vec<f64>| a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
    let differs = (0..results[0].len()).find(|i| !same(&results[0][*i], &results[1][*i]));
    // cuDNN's attention backward adds dQ with atomics.
    let excused = case.name.starts_with("attention and grad") && dtype == DType::BF16 && gpu.attention_library() != "own kernels";
    Ok(Outcome { error, repeats: differs.filter(|_| !excused) })
}

/// The maximum that keeps NaN.
trait MaxNan {
    /// See the trait.
    fn max_nan(self, other: f64) -> f64;
}
impl MaxNan for f64 {
    fn max_nan(self, other: f64) -> f64 {
        if self.is_nan() || other.is_nan() { f64::NAN } else { self.max(other) }
    }
}

/// `|a - b| / |b|`; an expected NaN must be met by a NaN.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        if y.is_finite() || !(x == y || (x.is_nan() && y.is_nan())) {
            off += (x - y) * (x - y);
            size += y * y;
        }
    }
    if off == 0.0 { 0.0 } else { (off / size.max(1e-30)).sqrt() }
}

/// Three steps on 16+16-bit masters must equal three steps in f32 on the CPU.
fn master_weights(gpu: &Cuda, cpu: &Cpu) -> Result<String> {
    let n = 100_003;
    let mut text = String::new();
    for types in AdamWTypes::ALL {
        let mut random = Random(5);
        let mut make = |v: Values, d: DType| host(&mut random, if d == DType::BF16 { Role::Act } else { Role::Stat }, &[n], &v, d);
        let start = make(Values::Normal(1.0), DType::F32);
        let (m, v) = (make(Values::Normal(0.0), types.moments), make(Values::Normal(0.0), types.moments));
        let grad = make(Values::Normal(1.0), types.grad);
        let mut weight = gpu.alloc(DType::BF16, &[n])?;
        let mut remainder = gpu.alloc(DType::F16, &[n])?;
        gpu.master_split(weight.view_mut(), remainder.view_mut(), gpu.from_host(start.view())?.view())?;
        let (mut gm, mut gv, gg) = (gpu.from_host(m.view())?, gpu.from_host(v.view())?, gpu.from_host(grad.view())?);
        let mut cw = for_cpu(&start);
        let (mut cm, mut cv, cg) = (for_cpu(&m), for_cpu(&v), for_cpu(&grad));
        // The clipping factor comes from the device.
        let mut squares = gpu.zeros(DType::F64, &[1])?;
        gpu.sum_squares(squares.view_mut(), gg.view())?;
        let mut factor = gpu.alloc(DType::F32, &[1])?;
        let guard = gpu.zeros(DType::F64, &[1])?;
        gpu.clip_factor(factor.view_mut(), squares.view(), guard.view(), 1.0)?;
        let norm = values(&cg).iter().map(|x| x * x).sum::<f64>().sqrt();
        let clip = Tensor::from_vec(vec![(1.0 / (norm + 1e-6)).min(1.0) as f32], &[1]);
        for step in 1..=3 {
            let s = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
            let remainder = Some(remainder.view_mut());
            let state = AdamWState { weight: weight.view_mut(), remainder, m: gm.view_mut(), v: gv.view_mut() };
            gpu.adamw(state, gg.view(), factor.view(), s)?;
            let state = AdamWState { weight: cw.view_mut(), remainder: None, m: cm.view_mut(), v: cv.view_mut() };
            cpu.adamw(state, cg.view(), clip.view(), s)?;
        }
        let mut joined = gpu.alloc(DType::F32, &[n])?;
        gpu.master_join(joined.view_mut(), weight.view(), remainder.view())?;
        let error = distance(&values(&gpu.to_host(joined.view())?), &values(&cw));
        let rounded = distance(&values(&gpu.to_host(weight.view())?), &values(&cw));
        let _ = writeln!(
            text,
            "  exact f32 masters, moments {}, gradient {}: {error:.1e} (bf16 weights {rounded:.1e})",
            types.moments, types.grad
        );
        let allowed = if types.moments == DType::F32 { 1e-6 } else { 1e-4 };
        if error.is_nan() || error > allowed {
            return Err(temper_tensor::Error::Backend(format!("{types:?}: error {error:.2e}, allowed {allowed:.0e}")));
        }
    }
    Ok(text)
}
