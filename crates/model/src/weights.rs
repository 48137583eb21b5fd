//! [`Weights`] and [`Grads`]: a tensor per parameter. They are two objects so that a layer can read one while it adds to the other.

use crate::param::{Init, Param, ParamId, Piece};
use crate::{Error, Result};
use temper_tensor::{Beta, DType, Ops, Rng, Tensor, View, ViewMut};

/// The weights of a model (or of the part of it that this rank holds).
pub struct Weights {
    dtype: DType,
    names: Vec<String>,
    tensors: Vec<Option<Tensor>>,
}

impl Weights {
    /// No tensors yet; fill with [`Weights::set`].
    pub fn empty(params: &[Param], dtype: DType) -> Weights {
        Weights { dtype, names: params.iter().map(|p| p.name.clone()).collect(), tensors: params.iter().map(|_| None).collect() }
    }

    /// Weights drawn from `seed`. A value depends on (seed, Hugging Face name, index in that tensor) only, so any
    /// sharding starts from the same model.
    pub fn random(params: &[Param], seed: u64, dtype: DType, ops: &dyn Ops) -> Result<Weights> {
        let mut weights = Weights::empty(params, dtype);
        for (i, host) in Weights::random_host(params, seed).into_iter().enumerate() {
            let mut tensor = ops.alloc(dtype, host.shape())?;
            ops.copy(tensor.view_mut(), ops.adopt(host)?.view())?;
            weights.set(ParamId(i), tensor);
        }
        Ok(weights)
    }

    /// The F32 values of [`Weights::random`] in host memory, one tensor per parameter.
    pub fn random_host(params: &[Param], seed: u64) -> Vec<Tensor> {
        params.iter().map(|param| Tensor::from_vec(draw(param, seed), &param.shape)).collect()
    }

    /// Weights from host tensors of type `dtype`, one per parameter and in its shape.
    ///
    /// # Errors
    /// Names the first parameter whose tensor is missing or has another shape or type.
    pub fn from_host(params: &[Param], tensors: Vec<Tensor>, dtype: DType, ops: &dyn Ops) -> Result<Weights> {
        let mut weights = Weights::empty(params, dtype);
        let mut tensors = tensors.into_iter();
        for (i, param) in params.iter().enumerate() {
            match tensors.next() {
                Some(t) if t.shape() == param.shape && t.dtype() == dtype => weights.set(ParamId(i), ops.adopt(t)?),
                _ => return Err(Error::MissingWeights(param.name.clone())),
            }
        }
        Ok(weights)
    }

    /// All tensors in declaration order.
    pub fn iter(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.iter().flatten()
    }

    /// All tensors in declaration order, for the optimizer.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.tensors.iter_mut().flatten()
    }

    /// Type of all weights and of the activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Puts a tensor in place.
    pub fn set(&mut self, id: ParamId, tensor: Tensor) {
        self.tensors[id.0] = Some(tensor);
    }

    /// The tensor of a parameter.
    pub fn get(&self, id: ParamId) -> Result<View<'_>> {
        self.tensors[id.0].as_ref().map(Tensor::view).ok_or_else(|| Error::MissingWeights(self.names[id.0].clone()))
    }

    /// The tensor of a parameter, for the optimizer and for loading.
    pub fn get_mut(&mut self, id: ParamId) -> Result<ViewMut<'_>> {
        let name = &self.names[id.0];
        self.tensors[id.0].as_mut().map(Tensor::view_mut).ok_or_else(|| Error::MissingWeights(name.clone()))
    }
}

/// The starting values of a parameter, drawn on all cores.
fn draw(param: &Param, seed: u64) -> Vec<f32> {
    const CHUNK: usize = 1 << 16;
    let mut host = vec![0f32; param.numel()];
    let mut rest = host.as_mut_slice();
    let mut jobs = Vec::new();
    for piece in &param.pieces {
        for run in piece.runs() {
            let (own, tail) = std::mem::take(&mut rest).split_at_mut(run.len);
            jobs.extend(own.chunks_mut(CHUNK).enumerate().map(|(i, out)| (piece, (run.disk + i * CHUNK) as u64, out)));
            rest = tail;
        }
    }
    let threads = if jobs.len() < 4 { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
    let queue = std::sync::Mutex::new(jobs);
    let work = || {
        loop {
            let job = queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
            let Some((piece, first, out)) = job else { return };
            init_piece(out, piece, first, param.init, seed);
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    host
}

/// Fills `out` with the starting values of elements `first..first + out.len()` of a Hugging Face tensor.
pub fn init_piece(out: &mut [f32], piece: &Piece, first: u64, init: Init, seed: u64) {
    match init {
        Init::Ones => out.fill(1.0),
        Init::Zeros => out.fill(0.0),
        Init::Normal(std) => {
            let rng = Rng::new(seed, name_stream(&piece.name));
            for (i, x) in out.iter_mut().enumerate() {
                *x = (std * rng.normal_at(first + i as u64)) as f32;
            }
        }
    }
}

/// FNV-1a, 64 bit (Fowler, Noll, Vo): a stable stream number for a name.
fn name_stream(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Gradients of the weights; every backward step adds to them.
///
/// A new sum costs no pass of zeros over memory: [`Grads::begin`] only notes it, and the first addition overwrites.
pub struct Grads {
    tensors: Vec<Tensor>,
    /// Whether the tensor holds part of the present sum; until then its contents count as zero.
    begun: Vec<bool>,
}

impl Grads {
    /// Zeros for every parameter, in `dtype`.
    pub fn zeros(params: &[Param], dtype: DType, ops: &dyn Ops) -> Result<Grads> {
        let tensors = params.iter().map(|p| ops.zeros(dtype, &p.shape)).collect::<temper_tensor::Result<_>>()?;
        Ok(Grads { tensors, begun: vec![true; params.len()] })
    }

    /// Begins a new sum. Gradients may be read again after [`Grads::settle`].
    pub fn begin(&mut self) {
        self.begun.fill(false);
    }

    /// Sets to zero what nothing was added to since [`Grads::begin`].
    pub fn settle(&mut self, ops: &dyn Ops) -> Result<()> {
        for id in 0..self.tensors.len() {
            self.add_to(ops, ParamId(id))?;
        }
        Ok(())
    }

    /// Sets all to zero.
    pub fn clear(&mut self, ops: &dyn Ops) -> Result<()> {
        self.begin();
        self.settle(ops)
    }

    /// All gradients in declaration order.
    pub fn iter(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.iter()
    }

    /// The gradient of a parameter.
    pub fn get(&self, id: ParamId) -> View<'_> {
        self.tensors[id.0].view()
    }

    /// The gradient of a parameter for a product that adds to it, or overwrites it if it is the first of the sum.
    pub fn sum_into(&mut self, id: ParamId) -> (ViewMut<'_>, Beta) {
        let beta = if std::mem::replace(&mut self.begun[id.0], true) { Beta::One } else { Beta::Zero };
        (self.tensors[id.0].view_mut(), beta)
    }

    /// The gradient of a parameter, to add to.
    pub fn add_to(&mut self, ops: &dyn Ops, id: ParamId) -> Result<ViewMut<'_>> {
        let (mut grad, beta) = self.sum_into(id);
        if beta == Beta::Zero {
            ops.fill(grad.reborrow(), 0.0)?;
        }
        Ok(grad)
    }

    /// Gradients of two different parameters at once, to add to.
    pub fn add_to_pair(&mut self, ops: &dyn Ops, a: ParamId, b: ParamId) -> Result<(ViewMut<'_>, ViewMut<'_>)> {
        self.add_to(ops, a)?;
        self.add_to(ops, b)?;
        match self.tensors.get_disjoint_mut([a.0, b.0]) {
            Ok([x, y]) => Ok((x.view_mut(), y.view_mut())),
            Err(_) => Err(Error::Undeclared(format!("pair {} and {}", a.0, b.0))),
        }
    }
}
