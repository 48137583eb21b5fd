//! What an operation must move and compute at least: the one place where floors are worked out.
//!
//! Bytes count every operand once: read, written, or both (`+=`). Tables of which only some rows are touched count those rows.
//! Work between registers is free, products count two FLOPs a multiply-add, and nothing that an algorithm adds (recomputed scores,
//! sorted copies, partial sums) counts.

use crate::{Beta, DType, GroupedGemm, PackedSeqs, RopeTable, Trans, View, ViewMut};

/// What a device reaches at best.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Memory traffic, bytes a second.
    pub bytes_per_s: f64,
    /// Matrix products, FLOPs a second.
    pub flops_per_s: f64,
}

/// One call of an operation: what it is and what it costs at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Name in [`Ops`](crate::Ops).
    pub name: &'static str,
    /// Which form of it, where there are several.
    pub form: &'static str,
    /// Type of its first operand.
    pub dtype: DType,
    /// Bytes to be moved at least.
    pub bytes: f64,
    /// FLOPs of its matrix products.
    pub flops: f64,
    dims: [usize; 4],
    rank: usize,
}

impl Call {
    /// A call that so far costs nothing, told apart by the shape and type of `x`.
    pub(crate) fn new(name: &'static str, x: View) -> Call {
        Call::shaped(name, x.dtype(), x.shape())
    }

    /// As [`Call::new`], with a shape of its own. More than four sizes are folded into the last.
    pub(crate) fn shaped(name: &'static str, dtype: DType, shape: &[usize]) -> Call {
        let mut dims = [1; 4];
        for (i, size) in shape.iter().enumerate() {
            dims[i.min(3)] *= size;
        }
        Call { name, form: "", dtype, bytes: 0.0, flops: 0.0, dims, rank: shape.len().min(4) }
    }

    /// Names the form.
    pub(crate) fn form(mut self, form: &'static str) -> Call {
        self.form = form;
        self
    }

    /// Reads an operand.
    pub(crate) fn read(self, x: View) -> Call {
        self.rows_read(x, x.rows())
    }

    /// Reads an operand, if it is there.
    pub(crate) fn read_some(self, x: Option<View>) -> Call {
        x.map_or(self, |x| self.read(x))
    }

    /// Reads so many rows of an operand.
    pub(crate) fn rows_read(mut self, x: View, rows: usize) -> Call {
        self.bytes += size(x) * share(rows, x.rows());
        self
    }

    /// Overwrites an operand.
    pub(crate) fn write(self, x: &ViewMut) -> Call {
        self.read(x.as_view())
    }

    /// Adds to (or changes) an operand.
    pub(crate) fn update(self, x: &ViewMut) -> Call {
        self.write(x).write(x)
    }

    /// Writes what its shape says.
    pub(crate) fn writes_shape(mut self) -> Call {
        self.bytes += (self.dims().iter().product::<usize>() * self.dtype.size()) as f64;
        self
    }

    /// Adds FLOPs.
    pub(crate) fn flops(mut self, flops: f64) -> Call {
        self.flops += flops;
        self
    }

    /// Rotary tables for `tokens` tokens.
    pub(crate) fn rope(self, rope: RopeTable, tokens: usize) -> Call {
        let rows = tokens.min(rope.cos.rows());
        self.rows_read(rope.cos, rows).rows_read(rope.sin, rows)
    }

    /// Sizes and type in words, with the form.
    pub fn shape(&self) -> String {
        let dims: Vec<String> = self.dims[..self.rank].iter().map(usize::to_string).collect();
        let space = if self.form.is_empty() { "" } else { " " };
        format!("{}{space}{} {}", dims.join("x"), self.form, self.dtype)
    }

    /// The sizes that tell it from other calls of its name.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Milliseconds that it takes at least.
    pub fn floor_ms(&self, rates: &Rates) -> f64 {
        (self.bytes / rates.bytes_per_s).max(self.flops / rates.flops_per_s) * 1e3
    }
}

fn size(x: View) -> f64 {
    (x.numel() * x.dtype().size()) as f64
}

fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// `c[m, n] = op(a) . op(b)`.
pub(crate) fn gemm(c: &ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Call {
    let (m, n) = (c.rows(), c.numel() / c.rows().max(1));
    let k = a.numel() / m.max(1);
    let form = match (ta, tb, beta) {
        (Trans::No, Trans::No, Beta::Zero) => "a b",
        (Trans::No, Trans::Yes, Beta::Zero) => "a bT",
        (Trans::Yes, Trans::No, Beta::Zero) => "aT b",
        (Trans::Yes, Trans::Yes, Beta::Zero) => "aT bT",
        (Trans::No, Trans::No, Beta::One) => "+= a b",
        (Trans::No, Trans::Yes, Beta::One) => "+= a bT",
        (Trans::Yes, Trans::No, Beta::One) => "+= aT b",
        (Trans::Yes, Trans::Yes, Beta::One) => "+= aT bT",
    };
    let call = Call::shaped("gemm", a.dtype(), &[m, n, k]).form(form).read(a).read(b).flops(2.0 * m as f64 * n as f64 * k as f64);
    if beta == Beta::One { call.update(c) } else { call.write(c) }
}

/// The three products of experts: S rows, experts [E, N, M].
pub(crate) fn grouped_gemm(kind: GroupedGemm, c: &ViewMut, a: View, b: View, offsets: View) -> Call {
    let of = |experts: &[usize]| if let [e, n, m] = experts { [*e, *n, *m] } else { [0; 3] };
    let (form, [e, n, m]) = match kind {
        GroupedGemm::Forward => ("forward", of(b.shape())),
        GroupedGemm::InputGrad => ("input grad", of(b.shape())),
        GroupedGemm::WeightGrad(Beta::Zero) => ("weight grad =", of(c.shape())),
        GroupedGemm::WeightGrad(Beta::One) => ("weight grad +=", of(c.shape())),
    };
    let s = a.rows();
    let call = Call::shaped("grouped_gemm", a.dtype(), &[s, e, n, m]).form(form).read(a).read(b).read(offsets);
    let call = call.flops(2.0 * s as f64 * n as f64 * m as f64);
    if kind == GroupedGemm::WeightGrad(Beta::One) { call.update(c) } else { call.write(c) }
}

/// Causal attention without its operands: `products` of one token's D numbers for every query and the keys it sees (forward 2, backward 5).
pub(crate) fn attention(name: &'static str, q: View, k: View, seqs: PackedSeqs, products: f64) -> Call {
    let (t, heads, d) = (q.rows(), q.shape().get(1).copied().unwrap_or(1), q.shape().last().copied().unwrap_or(1));
    let kv_heads = k.shape().get(1).copied().unwrap_or(1);
    let pairs = squares(t, seqs) / 2.0;
    Call::shaped(name, q.dtype(), &[t, heads, kv_heads, d]).flops(products * 2.0 * pairs * heads as f64 * d as f64)
}

/// Sum of the squared lengths of the sequences. Of lengths that lie on a device only the longest and their number are known: then it
/// is what they sum to at least, which is exact when all are equal.
fn squares(tokens: usize, seqs: PackedSeqs) -> f64 {
    if seqs.skip > 0 {
        // Of one sequence of S keys, T queries at its end see S^2 / 2 - skip^2 / 2 of them: the most there can be.
        return ((tokens + seqs.skip) as f64).powi(2) - (seqs.skip as f64).powi(2);
    }
    if let Some(cu) = seqs.cu.as_slice::<i32>() {
        return cu.windows(2).map(|w| f64::from(w[1] - w[0]).powi(2)).sum();
    }
    let (longest, others) = (seqs.longest as f64, seqs.cu.numel().saturating_sub(2) as f64);
    let rest = (tokens as f64 - longest).max(0.0);
    longest * longest + if others > 0.0 { rest * rest / others } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;
    use half::bf16;

    /// The bounds of `n` sequences, where the host cannot see them.
    struct Hidden(usize);

    impl crate::DeviceBuffer for Hidden {
        fn dtype(&self) -> DType {
            DType::I32
        }
        fn len(&self) -> usize {
            self.0 + 1
        }
        fn address(&self) -> u64 {
            0
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    const H200: Rates = Rates { bytes_per_s: 4.3e12, flops_per_s: 700e12 };

    fn zeros(shape: &[usize]) -> Tensor {
        Tensor::from_vec(vec![bf16::ZERO; shape.iter().product()], shape)
    }

    /// Worked by hand for 8192 x 4096 x 512: 34.36 GFLOP in 49 us, more than its 76 MB take.
    #[test]
    fn products_are_bound_by_flops_or_bytes() {
        let (a, b, mut c) = (zeros(&[8192, 512]), zeros(&[4096, 512]), zeros(&[8192, 4096]));
        let call = gemm(&c.view_mut(), a.view(), Trans::No, b.view(), Trans::Yes, Beta::Zero);
        assert_eq!(call.flops, 34_359_738_368.0);
        assert_eq!(call.bytes, 2.0 * (8192.0 * 512.0 + 4096.0 * 512.0 + 8192.0 * 4096.0));
        assert!((call.floor_ms(&H200) - 34.359_738_368 / 700.0).abs() < 1e-9);
        assert_eq!(call.shape(), "8192x4096x512 a bT bfloat16");
        // A weight gradient in f32, added to: read and written, and of little depth, so memory binds.
        let (dy, x, mut dw) = (zeros(&[64, 4096]), zeros(&[64, 512]), Tensor::from_vec(vec![0f32; 4096 * 512], &[4096, 512]));
        let call = gemm(&dw.view_mut(), dy.view(), Trans::Yes, x.view(), Trans::No, Beta::One);
        assert_eq!(call.dims(), [4096, 512, 64]);
        let bytes = 2.0 * 64.0 * (4096.0 + 512.0) + 2.0 * 4.0 * 4096.0 * 512.0;
        assert_eq!(call.bytes, bytes);
        assert_eq!(call.floor_ms(&H200), bytes / 4.3e12 * 1e3);
    }

    #[test]
    fn experts_count_every_row_once() {
        let (a, b, mut c) = (zeros(&[96, 32]), zeros(&[4, 48, 32]), zeros(&[96, 48]));
        let offsets = Tensor::from_vec(vec![0i32, 0, 90, 91, 96], &[5]);
        let call = grouped_gemm(GroupedGemm::Forward, &c.view_mut(), a.view(), b.view(), offsets.view());
        assert_eq!(call.flops, 2.0 * 96.0 * 48.0 * 32.0);
        assert_eq!(call.bytes, 2.0 * (96.0 * 32.0 + 4.0 * 48.0 * 32.0 + 96.0 * 48.0) + 20.0);
        let mut dw = zeros(&[4, 48, 32]);
        let grad = grouped_gemm(GroupedGemm::WeightGrad(Beta::One), &dw.view_mut(), c.view(), a.view(), offsets.view());
        assert_eq!((grad.flops, grad.dims()), (call.flops, &[96, 4, 48, 32][..]));
    }

    /// Two documents of 3 and 5 tokens: 9 + 25 halved, not 64 halved.
    #[test]
    fn attention_counts_what_each_document_sees() {
        let (q, k) = (zeros(&[8, 4, 16]), zeros(&[8, 2, 16]));
        let cu = Tensor::from_vec(vec![0i32, 3, 8], &[3]);
        let packed = PackedSeqs { cu: cu.view(), longest: 5, skip: 0 };
        let call = attention("attention", q.view(), k.view(), packed, 2.0);
        assert_eq!(call.flops, 2.0 * 2.0 * (9.0 + 25.0) / 2.0 * 4.0 * 16.0);
        // As DESIGN counts a layer: 2 * heads * head_dim * seq a token forward, and 2.5 times as much backward.
        let cu = Tensor::from_vec(vec![0i32, 8], &[2]);
        let whole = PackedSeqs { cu: cu.view(), longest: 8, skip: 0 };
        let forward = attention("attention", q.view(), k.view(), whole, 2.0).flops;
        assert_eq!(forward, 8.0 * 2.0 * 4.0 * 16.0 * 8.0);
        assert_eq!(attention("attention_grad", q.view(), k.view(), whole, 5.0).flops, 2.5 * forward);
    }

    /// Lengths on a device: equal ones exactly, others from below.
    #[test]
    fn unknown_lengths_are_bounded_from_below() {
        let hidden = |n: usize| Tensor::new(crate::Buffer::Device(Box::new(Hidden(n))), &[n + 1]);
        assert_eq!(squares(4096, PackedSeqs { cu: hidden(4).view(), longest: 1024, skip: 0 }), 4.0 * 1024.0 * 1024.0);
        assert_eq!(squares(10, PackedSeqs { cu: hidden(3).view(), longest: 6, skip: 0 }), 36.0 + 8.0);
        assert_eq!(squares(10, PackedSeqs { cu: hidden(1).view(), longest: 10, skip: 0 }), 100.0);
    }
}
