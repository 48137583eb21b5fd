//! [`Weights`] and [`Grads`]: two objects, so that a layer can read one while it adds to the other.

use crate::buckets::{Slots, Tensors};
use crate::param::{Init, Param, ParamId, Piece};
use crate::{Error, Result};
use std::sync::Arc;
use temper_comm::Pending;
use temper_tensor::{Beta, DType, Ops, Rng, Tensor, View, ViewMut};

/// The weights of a model (or of the part of it that this rank holds).
pub struct Weights {
    dtype: DType,
    tensors: Tensors,
}

impl Weights {
    /// No tensors yet; fill with [`Weights::set`].
    pub fn empty(params: &[Param], dtype: DType) -> Weights {
        Weights { dtype, tensors: Tensors::empty(Arc::new(Slots::apart(params))) }
    }

    /// Unspecified weights that lie as `slots` says.
    pub fn alloc(slots: Arc<Slots>, dtype: DType, ops: &dyn Ops) -> Result<Weights> {
        Ok(Weights { dtype, tensors: Tensors::filled(slots, |shape| ops.alloc(dtype, shape))? })
    }

    /// Weights drawn from `seed`. A value depends on (seed, Hugging Face name, index in that tensor) only, so any
    /// sharding starts from the same model.
    pub fn random(params: &[Param], seed: u64, dtype: DType, ops: &dyn Ops) -> Result<Weights> {
        let mut weights = Weights::empty(params, dtype);
        for (i, host) in Weights::random_host(params, seed).into_iter().enumerate() {
            let mut tensor = ops.alloc(dtype, host.shape())?;
            ops.copy(tensor.view_mut(), ops.adopt(host)?.view())?;
            weights.set(ops, ParamId(i), tensor)?;
        }
        Ok(weights)
    }

    /// The F32 values of [`Weights::random`] in host memory, one tensor per parameter.
    pub fn random_host(params: &[Param], seed: u64) -> Vec<Tensor> {
        params.iter().map(|param| Weights::draw(param, seed)).collect()
    }

    /// Those of one parameter.
    pub fn draw(param: &Param, seed: u64) -> Tensor {
        Tensor::from_vec(draw(param, seed), &param.shape)
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
                Some(t) if t.shape() == param.shape && t.dtype() == dtype => weights.set(ops, ParamId(i), ops.adopt(t)?)?,
                _ => return Err(Error::MissingWeights(param.name.clone())),
            }
        }
        Ok(weights)
    }

    /// Type of all weights and of the activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How the weights lie in memory.
    pub fn slots(&self) -> &Arc<Slots> {
        self.tensors.slots()
    }

    /// Sets a parameter to a tensor of its shape: takes it over where the parameter has a bucket of its own, else copies it.
    pub fn set(&mut self, ops: &dyn Ops, id: ParamId, tensor: Tensor) -> Result<()> {
        match self.tensors.replace(id, tensor) {
            None => Ok(()),
            Some(tensor) => Ok(ops.copy(self.tensors.get_mut(id)?, tensor.view())?),
        }
    }

    /// The tensor of a parameter.
    pub fn get(&self, id: ParamId) -> Result<View<'_>> {
        self.tensors.get(id)
    }

    /// The tensor of a parameter, for the optimizer and for loading.
    pub fn get_mut(&mut self, id: ParamId) -> Result<ViewMut<'_>> {
        self.tensors.get_mut(id)
    }

    /// The elements of all parameters at once, in the order of declaration: to be filled from files.
    pub fn all_mut(&mut self) -> Result<Vec<ViewMut<'_>>> {
        self.tensors.all_mut()
    }

    /// Begins an operation between ranks on the weights of a bucket, such as gathering what each has updated. Who next uses one of
    /// them waits for it.
    pub fn exchange(&mut self, bucket: usize, start: impl for<'a> FnOnce(ViewMut<'a>) -> temper_comm::Result<Pending<'a>>) -> Result<()> {
        self.tensors.exchange(bucket, start)
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
    tensors: Tensors,
    sums: Vec<Sum>,
}

/// How far the sum that is a gradient has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sum {
    /// The contents count as zero.
    Empty,
    /// Micro-batches are being added up.
    Open,
    /// The sum over ranks was begun: nothing may be added any more.
    Closed,
}

impl Grads {
    /// Zeros for every parameter, in `dtype`.
    pub fn zeros(params: &[Param], dtype: DType, ops: &dyn Ops) -> Result<Grads> {
        Grads::zeros_in(Arc::new(Slots::apart(params)), dtype, ops)
    }

    /// Zeros that lie as `slots` says.
    pub fn zeros_in(slots: Arc<Slots>, dtype: DType, ops: &dyn Ops) -> Result<Grads> {
        Ok(Grads { sums: vec![Sum::Open; slots.len()], tensors: Tensors::filled(slots, |shape| ops.zeros(dtype, shape))? })
    }

    /// Begins a new sum. Gradients may be read again after [`Grads::settle`].
    pub fn begin(&mut self) {
        self.sums.fill(Sum::Empty);
    }

    /// Sets to zero what nothing was added to since [`Grads::begin`].
    pub fn settle(&mut self, ops: &dyn Ops) -> Result<()> {
        (0..self.sums.len()).try_for_each(|id| self.settle_one(ops, ParamId(id)))
    }

    /// Sets a gradient to zero if nothing was added to it since [`Grads::begin`].
    pub fn settle_one(&mut self, ops: &dyn Ops, id: ParamId) -> Result<()> {
        if self.sums[id.0] == Sum::Empty {
            self.add_to(ops, id)?;
        }
        Ok(())
    }

    /// Sets all to zero.
    pub fn clear(&mut self, ops: &dyn Ops) -> Result<()> {
        self.begin();
        self.settle(ops)
    }

    /// The gradient of a parameter.
    pub fn get(&self, id: ParamId) -> Result<View<'_>> {
        self.tensors.get(id)
    }

    /// The gradient of a parameter for a product that adds to it, or overwrites it if it is the first of the sum.
    ///
    /// # Errors
    /// When its sum over ranks was begun already.
    pub fn sum_into(&mut self, id: ParamId) -> Result<(ViewMut<'_>, Beta)> {
        let beta = self.open(id)?;
        Ok((self.tensors.get_mut(id)?, beta))
    }

    /// The gradient of a parameter, to add to.
    pub fn add_to(&mut self, ops: &dyn Ops, id: ParamId) -> Result<ViewMut<'_>> {
        let (mut grad, beta) = self.sum_into(id)?;
        if beta == Beta::Zero {
            ops.fill(grad.reborrow(), 0.0)?;
        }
        Ok(grad)
    }

    /// Gradients of two different parameters at once, to add to.
    pub fn add_to_pair(&mut self, ops: &dyn Ops, a: ParamId, b: ParamId) -> Result<(ViewMut<'_>, ViewMut<'_>)> {
        self.add_to(ops, a)?;
        self.add_to(ops, b)?;
        self.tensors.get_pair_mut(a, b)
    }

    /// What happens to the old contents of a gradient that is added to now.
    fn open(&mut self, id: ParamId) -> Result<Beta> {
        match std::mem::replace(&mut self.sums[id.0], Sum::Open) {
            Sum::Empty => Ok(Beta::Zero),
            Sum::Open => Ok(Beta::One),
            Sum::Closed => Err(Error::ClosedSum(self.tensors.slots().slot(id).name().to_string())),
        }
    }

    /// All elements of a bucket of gradients, to be summed over ranks: nothing is added to them any more until [`Grads::begin`].
    pub fn close(&mut self, bucket: usize) -> Result<ViewMut<'_>> {
        self.tensors.slots().in_bucket(bucket).for_each(|id| self.sums[id.0] = Sum::Closed);
        self.tensors.bucket_mut(bucket)
    }

    /// Begins an operation between ranks on the gradients of a closed bucket. Who next uses one of them waits for it.
    pub fn exchange(&mut self, bucket: usize, start: impl for<'a> FnOnce(ViewMut<'a>) -> temper_comm::Result<Pending<'a>>) -> Result<()> {
        self.tensors.exchange(bucket, start)
    }
}
