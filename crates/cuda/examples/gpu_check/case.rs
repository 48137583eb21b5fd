//! One operation at one size: its inputs, its outputs, how to run it, and what it must cost at least.

use temper_tensor::{DType, Error, Ops, Result, Tensor};

/// The type of a tensor, by its role.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    /// Activations and weights: the dtype under test on the GPU, f32 on the CPU.
    Act,
    /// Statistics and gradients of weights: f32 on both.
    Stat,
    /// Sums in f64.
    Wide,
    /// Integers.
    Int,
}

/// An input.
pub struct In {
    /// Role.
    pub role: Role,
    /// Shape.
    pub shape: Vec<usize>,
    /// Values.
    pub values: Values,
}

/// How the values of an input are made.
pub enum Values {
    /// Normal, times this.
    Normal(f32),
    /// Uniform in these bounds.
    Uniform(f32, f32),
    /// Normal times two, rounded to multiples of 1/64, so that ties happen and near ties do not.
    Coarse,
    /// Given.
    Ints(Vec<i32>),
    /// Given.
    Floats(Vec<f32>),
}

/// An output.
pub struct Out {
    /// Role.
    pub role: Role,
    /// Shape.
    pub shape: Vec<usize>,
    /// Starts from random values instead of NaN: it is accumulated or changed in place.
    pub starts: Option<Values>,
}

/// Runs the operation on a backend.
pub type Run = Box<dyn Fn(&dyn Ops, &[Tensor], &mut [Tensor]) -> Result<()>>;

/// An operation at a size.
pub struct Case {
    /// Operation and sizes.
    pub name: String,
    /// Inputs.
    pub inputs: Vec<In>,
    /// Outputs.
    pub outputs: Vec<Out>,
    /// How to run it.
    pub run: Run,
    /// Floating-point operations of matrix products.
    pub flops: f64,
    /// Bytes it must move, by element size of activations; none: all inputs and outputs once.
    pub bytes: Option<Box<dyn Fn(usize) -> f64>>,
}

impl Case {
    /// A case that moves its inputs and outputs once.
    pub fn new(name: impl Into<String>, run: impl Fn(&dyn Ops, &[Tensor], &mut [Tensor]) -> Result<()> + 'static) -> Case {
        Case { name: name.into(), inputs: vec![], outputs: vec![], run: Box::new(run), flops: 0.0, bytes: None }
    }
    /// Adds an activation input, normal times `spread`.
    pub fn act(self, shape: &[usize], spread: f32) -> Case {
        self.input(Role::Act, shape, Values::Normal(spread))
    }
    /// Adds an f32 input, normal times `spread`.
    pub fn stat(self, shape: &[usize], spread: f32) -> Case {
        self.input(Role::Stat, shape, Values::Normal(spread))
    }
    /// Adds an integer input.
    pub fn ints(self, shape: &[usize], values: Vec<i32>) -> Case {
        self.input(Role::Int, shape, Values::Ints(values))
    }
    /// Adds an input.
    pub fn input(mut self, role: Role, shape: &[usize], values: Values) -> Case {
        self.inputs.push(In { role, shape: shape.to_vec(), values });
        self
    }
    /// Adds an output that is overwritten.
    pub fn out(mut self, role: Role, shape: &[usize]) -> Case {
        self.outputs.push(Out { role, shape: shape.to_vec(), starts: None });
        self
    }
    /// Adds an output that starts from normal values and is added to or changed.
    pub fn adds(self, role: Role, shape: &[usize]) -> Case {
        self.changes(role, shape, Values::Normal(1.0))
    }
    /// Adds an output that starts from these values.
    pub fn changes(mut self, role: Role, shape: &[usize], starts: Values) -> Case {
        self.outputs.push(Out { role, shape: shape.to_vec(), starts: Some(starts) });
        self
    }
    /// States the matrix work.
    pub fn flops(mut self, flops: f64) -> Case {
        self.flops = flops;
        self
    }
    /// States the bytes, given the size of an activation.
    pub fn bytes(mut self, bytes: impl Fn(usize) -> f64 + 'static) -> Case {
        self.bytes = Some(Box::new(bytes));
        self
    }
    /// Bytes that must be moved.
    pub fn least_bytes(&self, act: usize) -> f64 {
        if let Some(f) = &self.bytes {
            return f(act);
        }
        let size = |role: Role, shape: &[usize]| {
            let one = match role {
                Role::Act => act,
                Role::Stat | Role::Int => 4,
                Role::Wide => 8,
            };
            (shape.iter().product::<usize>() * one) as f64
        };
        let read: f64 = self.inputs.iter().map(|i| size(i.role, &i.shape)).sum();
        let written: f64 = self.outputs.iter().map(|o| size(o.role, &o.shape) * if o.starts.is_some() { 2.0 } else { 1.0 }).sum();
        read + written
    }
}

/// Fast pseudo-random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// In 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }
    /// In 0..1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }
    /// Roughly normal: a sum of four uniform 16-bit numbers.
    fn normal(&mut self) -> f32 {
        let x = self.bits();
        ((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) as f32 * (1.0 / 37837.0) - 131_070.0 / 37_837.0
    }
    /// Values of an input or output, as f32 (integers separately).
    pub fn make(&mut self, values: &Values, n: usize) -> Vec<f32> {
        match values {
            Values::Normal(spread) => (0..n).map(|_| self.normal() * spread).collect(),
            Values::Uniform(a, b) => (0..n).map(|_| a + (b - a) * self.unit()).collect(),
            Values::Coarse => (0..n).map(|_| (self.normal() * 128.0).round() / 64.0).collect(),
            Values::Floats(v) => v.clone(),
            Values::Ints(_) => vec![],
        }
    }
}

/// A host tensor of a role: activations become `act`.
pub fn host(random: &mut Random, role: Role, shape: &[usize], values: &Values, act: DType) -> Tensor {
    if let Values::Ints(v) = values {
        return Tensor::from_vec(v.clone(), shape);
    }
    let data = random.make(values, shape.iter().product());
    match role {
        Role::Act if act == DType::BF16 => Tensor::from_vec(data.into_iter().map(half::bf16::from_f32).collect(), shape),
        Role::Wide => Tensor::from_vec(data.into_iter().map(f64::from).collect(), shape),
        Role::Int => Tensor::from_vec(data.into_iter().map(|x| x as i32).collect(), shape),
        _ => Tensor::from_vec(data, shape),
    }
}

/// The same values for the CPU backend, which computes in f32.
pub fn for_cpu(t: &Tensor) -> Tensor {
    match t.as_slice::<half::bf16>() {
        Some(s) => Tensor::from_vec(s.iter().map(|x| x.to_f32()).collect(), t.shape()),
        None => copy(t),
    }
}

/// A copy of a host tensor.
fn copy(t: &Tensor) -> Tensor {
    let shape = t.shape();
    if let Some(s) = t.as_slice::<f32>() {
        Tensor::from_vec(s.to_vec(), shape)
    } else if let Some(s) = t.as_slice::<i32>() {
        Tensor::from_vec(s.to_vec(), shape)
    } else {
        Tensor::from_vec(t.as_slice::<f64>().unwrap_or_default().to_vec(), shape)
    }
}

/// The values of a host tensor.
pub fn values(t: &Tensor) -> Vec<f64> {
    if let Some(s) = t.as_slice::<f32>() {
        s.iter().map(|x| *x as f64).collect()
    } else if let Some(s) = t.as_slice::<half::bf16>() {
        s.iter().map(|x| x.to_f64()).collect()
    } else if let Some(s) = t.as_slice::<i32>() {
        s.iter().map(|x| *x as f64).collect()
    } else {
        t.as_slice::<f64>().unwrap_or_default().to_vec()
    }
}

/// The outputs as an array.
pub fn take<const N: usize>(outputs: &mut [Tensor]) -> Result<&mut [Tensor; N]> {
    let found = outputs.len();
    outputs.try_into().map_err(|_| Error::Backend(format!("the case has {found} outputs, not {N}")))
}
