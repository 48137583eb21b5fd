//! The time of each operation at training sizes against its floor: bytes at 4.3 TB/s or FLOPs at 700 TFLOP/s, whichever is longer
//! (both measured on an H200 with library calls).

use crate::case::{Case, Random, Role, Values, host};
use crate::sequences::Heads;
use crate::{dense, experts, sequences};
use std::fmt::Write as _;
use temper_cuda::Cuda;
use temper_tensor::{DType, Ops, Result, Tensor};

const BYTES_PER_S: f64 = 4.3e12;
const FLOP_PER_S: f64 = 700e12;

/// Sizes of Qwen3-8B (width 4096, 32/8 heads of 128, MLP 12288) at 8192 tokens, and of Qwen3-30B-A3B's experts.
fn table() -> Vec<Case> {
    let t = 8192;
    let heads = Heads { nq: 32, nk: 8, d: 128 };
    // As many elements as a norm's, q, k and v's, and an MLP's activation have.
    let mut all = vec![dense::copy(t * 4096), dense::copy(t * 6144), dense::copy(t * 12_288)];
    all.extend(dense::elementwise(t * 12_288));
    all.extend(dense::norm(t, 4096));
    all.extend(dense::bias(t, 6144));
    all.extend(dense::swiglu(t, 12_288));
    all.extend(dense::embedding(t, 151_936, 4096));
    all.extend(dense::cross_entropy(2048, 151_936));
    all.extend(dense::optimizer(200_000_000));
    all.extend(dense::gemm(t, 4096, 4096));
    all.extend(dense::gemm(t, 24_576, 4096));
    all.extend(dense::gemm(4096, 12_288, t));
    all.extend(sequences::qkv(&[4096, 4096], heads));
    all.extend(sequences::attention(&[4096, 4096], heads));
    all.extend(sequences::attention(&[16_384], heads));
    all.extend(sequences::attention(&[1000, 3092, 512, 3588], heads));
    all.extend(sequences::attention(&[4096], Heads { nq: 16, nk: 2, d: 256 }));
    all.extend(sequences::paged(&[1024; 64], 1, 16, heads));
    all.extend(sequences::paged(&[8192; 64], 1, 16, heads));
    all.extend(sequences::paged(&[8192], 1, 16, heads));
    all.extend(experts::router(t, 128, 8));
    all.extend(dense::router_products(t, 128, 2048));
    all.extend(experts::routing(t, 128, 8, 2048));
    all.extend(experts::grouped(65_536, 128, 1536, 2048, false));
    all.extend(experts::grouped(65_536, 128, 1536, 2048, true));
    all.extend(experts::grouped(65_536, 128, 2048, 768, false));
    all.extend(experts::grouped(65_536, 128, 3072, 4096, false));
    all
}

/// Times the table in bf16.
pub fn run(gpu: &Cuda, only: Option<&str>) -> String {
    let mut text = String::from("time in bf16 against the floor (4.3 TB/s, 700 TFLOP/s)\n");
    for case in table().iter().filter(|c| only.is_none_or(|w| w.split(',').any(|w| c.name.contains(w)))) {
        let bytes = case.least_bytes(DType::BF16.size());
        let floor = (bytes / BYTES_PER_S).max(case.flops / FLOP_PER_S) * 1e6;
        let _ = match time(gpu, case) {
            Ok(us) => {
                let rate = if case.flops > 0.0 {
                    format!("{:6.0} TFLOP/s", case.flops / us / 1e6)
                } else {
                    format!("{:6.2} TB/s", bytes / us / 1e6)
                };
                writeln!(text, "  {:72} {us:9.1} us  floor {floor:9.1} us  {:5.1} %  {rate}", case.name, 100.0 * floor / us)
            }
            Err(e) => writeln!(text, "  {:72} FAILED {e}", case.name),
        };
    }
    text
}

/// A tensor on the GPU. Large ones repeat a block of values, as making them one by one would take longer than the test.
fn upload(gpu: &Cuda, random: &mut Random, role: Role, shape: &[usize], values: &Values) -> Result<Tensor> {
    const BLOCK: usize = 1 << 22;
    let n: usize = shape.iter().product();
    if n <= 2 * BLOCK || matches!(values, Values::Ints(_) | Values::Floats(_)) {
        return gpu.from_host(host(random, role, shape, values, DType::BF16).view());
    }
    let block = gpu.from_host(host(random, role, &[BLOCK], values, DType::BF16).view())?;
    let mut out = gpu.alloc(block.dtype(), &[n])?;
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        gpu.copy(out.view_mut().slice_rows(start..end), block.view().slice_rows(0..end - start))?;
    }
    Ok(out.reshape(shape))
}

/// Median microseconds of a run, each of several between two events.
fn time(gpu: &Cuda, case: &Case) -> Result<f64> {
    let mut random = Random(9);
    let inputs: Vec<Tensor> = case.inputs.iter().map(|i| upload(gpu, &mut random, i.role, &i.shape, &i.values)).collect::<Result<_>>()?;
    let start = Values::Normal(1.0);
    let mut outputs: Vec<Tensor> = case
        .outputs
        .iter()
        .map(|o| match (&o.starts, o.role) {
            (Some(v), _) => upload(gpu, &mut random, o.role, &o.shape, v),
            (None, Role::Int) => gpu.zeros(DType::I32, &o.shape),
            (None, _) => upload(gpu, &mut random, o.role, &o.shape, &start),
        })
        .collect::<Result<_>>()?;
    let mut once = || (case.run)(gpu, &inputs, &mut outputs);
    for _ in 0..2 {
        once()?;
    }
    gpu.device().synchronize()?;
    let mut times = vec![];
    for _ in 0..7 {
        let (a, b) = (gpu.device().event()?, gpu.device().event()?);
        a.record()?;
        for _ in 0..3 {
            once()?;
        }
        b.record()?;
        b.wait()?;
        times.push(b.since(&a)? * 1e3 / 3.0);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
