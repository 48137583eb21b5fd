//! The table of operations that every backend has to pass. A backend's tests include this folder (`#[path]`) and call
//! [`check`] or [`compare`].
//!
//! A case makes its inputs, runs one operation and states the result with a naive reference in f64, written apart from
//! any backend; gradients are stated as finite differences of the naive forward.

mod attention;
mod dense;
mod moe;
mod norm;
mod table;

use temper_tensor::{DType, Element, FromSlice, Ops, Rng, Tensor, View, ViewOf};

pub use table::cases;

/// One operation at one shape.
pub struct Case {
    /// Operation and shape, for messages.
    pub name: String,
    /// Makes inputs, runs the operation, states the result.
    pub run: Box<dyn Fn(&mut Bench)>,
}

/// An input: on the backend, and the same values in f64.
pub struct Input {
    /// On the backend.
    pub tensor: Tensor,
    /// The same values.
    pub host: Vec<f64>,
}

impl Input {
    /// All elements.
    pub fn view(&self) -> View<'_> {
        self.tensor.view()
    }
}

/// An output, read back.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Its name in the operation.
    pub name: &'static str,
    /// Its values; every backend dtype converts to f64 without loss.
    pub values: Vec<f64>,
}

/// Where a case runs.
pub struct Bench<'a> {
    /// The backend.
    pub ops: &'a dyn Ops,
    /// Dtype of activations and weights.
    pub dtype: DType,
    /// Inputs are rounded to this dtype, so that backends of different dtype can be compared.
    rounding: DType,
    /// Tolerance of the check against the naive reference; none to skip it.
    tolerance: Option<f64>,
    case: String,
    draws: u64,
    outputs: Vec<Output>,
}

impl<'a> Bench<'a> {
    fn new(ops: &'a dyn Ops, dtype: DType, rounding: DType, tolerance: Option<f64>, case: &str) -> Bench<'a> {
        Bench { ops, dtype, rounding, tolerance, case: case.to_string(), draws: 0, outputs: Vec::new() }
    }

    fn rounded(&self, x: f64, dtype: DType) -> f64 {
        match dtype {
            DType::F64 => x,
            DType::F32 => x as f32 as f64,
            DType::BF16 => half::bf16::from_f64(x).to_f64(),
            other => panic!("no tests in {other}"),
        }
    }

    /// Normal values times `spread`, of the compute dtype.
    pub fn randn(&mut self, shape: &[usize], spread: f64) -> Input {
        self.draws += 1;
        let rng = Rng::new(7, self.draws);
        let n = shape.iter().product::<usize>();
        self.input(shape, (0..n as u64).map(|i| spread * rng.normal_at(i)).collect())
    }

    /// The given values, rounded, of the compute dtype.
    pub fn input(&mut self, shape: &[usize], values: Vec<f64>) -> Input {
        self.typed_input(self.dtype, self.rounding, shape, values)
    }

    /// The given values of the dtype of statistics.
    pub fn stat(&mut self, shape: &[usize], values: Vec<f64>) -> Input {
        self.typed_input(self.dtype.stat(), self.rounding.stat(), shape, values)
    }

    /// Normal values of the dtype of statistics.
    pub fn stat_randn(&mut self, shape: &[usize], spread: f64) -> Input {
        let values = self.randn(shape, spread).host;
        self.stat(shape, values)
    }

    /// The given values, rounded to `rounding`, of a type of their own.
    pub fn typed_input(&self, dtype: DType, rounding: DType, shape: &[usize], values: Vec<f64>) -> Input {
        let host: Vec<f64> = values.into_iter().map(|x| self.rounded(x, rounding)).collect();
        let on_host = Tensor::from_vec(host.clone(), shape);
        let mut tensor = self.ops.alloc(dtype, shape).unwrap();
        let source = self.ops.from_host(on_host.view()).unwrap();
        self.ops.copy(tensor.view_mut(), source.view()).unwrap();
        Input { tensor, host }
    }

    /// Indices.
    pub fn indices(&self, shape: &[usize], values: &[usize]) -> Tensor {
        let values: Vec<i32> = values.iter().map(|&v| v as i32).collect();
        self.raw_indices(shape, values)
    }

    /// Indices, negative ones included.
    pub fn raw_indices(&self, shape: &[usize], values: Vec<i32>) -> Tensor {
        self.ops.from_host(View::host(&values, shape)).unwrap()
    }

    /// Random indices below `limit`.
    pub fn random_indices(&mut self, n: usize, limit: usize) -> Vec<usize> {
        self.draws += 1;
        let mut rng = Rng::new(11, self.draws);
        (0..n).map(|_| rng.below(limit)).collect()
    }

    /// An output of the compute dtype, full of something that must not survive.
    pub fn output(&self, shape: &[usize]) -> Tensor {
        self.dirty(self.dtype, shape)
    }

    /// An output of the dtype of statistics.
    pub fn stat_output(&self, shape: &[usize]) -> Tensor {
        self.dirty(self.dtype.stat(), shape)
    }

    /// An output of indices.
    pub fn index_output(&self, shape: &[usize]) -> Tensor {
        self.dirty(DType::I32, shape)
    }

    fn dirty(&self, dtype: DType, shape: &[usize]) -> Tensor {
        let mut t = self.ops.alloc(dtype, shape).unwrap();
        self.ops.fill(t.view_mut(), 777.0).unwrap();
        t
    }

    /// Records an output and checks it against `expected`.
    pub fn check(&mut self, name: &'static str, got: &Tensor, expected: impl FnOnce() -> Vec<f64>) {
        self.check_within(1.0, name, got, expected);
    }

    /// As `check`, for a gradient stated by finite differences, which are good to about 1e-8.
    pub fn check_grad(&mut self, name: &'static str, got: &Tensor, expected: impl FnOnce() -> Vec<f64>) {
        self.check_within(1e3, name, got, expected);
    }

    fn check_within(&mut self, slack: f64, name: &'static str, got: &Tensor, expected: impl FnOnce() -> Vec<f64>) {
        let values = read(self.ops, got);
        if let Some(tolerance) = self.tolerance {
            assert_close(&format!("{} {name}", self.case), &values, &expected(), tolerance * slack);
        }
        self.outputs.push(Output { name, values });
    }
}

fn read(ops: &dyn Ops, t: &Tensor) -> Vec<f64> {
    fn of<T: Element + FromSlice + ViewOf>(t: &Tensor, f: impl Fn(T) -> f64) -> Vec<f64> {
        t.as_slice::<T>().unwrap().iter().map(|&x| f(x)).collect()
    }
    let host = ops.to_host(t.view()).unwrap();
    match host.dtype() {
        DType::F64 => of::<f64>(&host, |x| x),
        DType::F32 => of::<f32>(&host, f64::from),
        DType::I32 => of::<i32>(&host, f64::from),
        DType::BF16 => of::<half::bf16>(&host, |x| x.to_f64()),
        DType::F16 => of::<half::f16>(&host, |x| x.to_f64()),
    }
}

/// Fails unless the largest difference is within `tolerance` of the largest expected value.
pub fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: number of elements");
    let largest = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let error = (g - e).abs();
        assert!(error <= tolerance * largest.max(1e-3), "{what}[{i}]: {g} instead of {e} (largest {largest}, error {error:e})");
    }
}

/// The gradient of `f` at `x` by central differences.
pub fn numeric_grad(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let (old, step) = (x[i], 1e-5);
            x[i] = old + step;
            let up = f(&x);
            x[i] = old - step;
            let down = f(&x);
            x[i] = old;
            (up - down) / (2.0 * step)
        })
        .collect()
}

/// Inner product, for losses of gradient tests.
pub fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Element-wise sum.
pub fn plus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Runs every case and checks it against its naive reference.
pub fn check(ops: &dyn Ops, dtype: DType, tolerance: f64) {
    for case in cases() {
        (case.run)(&mut Bench::new(ops, dtype, dtype, Some(tolerance), &case.name));
    }
}

/// Runs every case on both backends, on inputs that both can hold, and compares the outputs; with tolerance 0, bit by bit.
pub fn compare(ops: &dyn Ops, dtype: DType, reference: &dyn Ops, reference_dtype: DType, tolerance: f64) {
    for case in cases() {
        let outputs = |ops, own| {
            let mut bench = Bench::new(ops, own, dtype, None, &case.name);
            (case.run)(&mut bench);
            bench.outputs
        };
        for (got, expected) in outputs(ops, dtype).iter().zip(&outputs(reference, reference_dtype)) {
            assert_close(&format!("{} {}", case.name, got.name), &got.values, &expected.values, tolerance);
        }
    }
}
