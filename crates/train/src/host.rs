//! Tensors between host memory, where files are read and written, and the backend, where they are used.

use crate::step::Trainer;
use crate::{Error, Result};
use temper_model::Weights;
use temper_tensor::{Buffer, DType, Ops, Purpose, Tensor, View};

/// Tensors in host memory: as they lie there, or copied from a device.
pub(crate) struct OnHost<'t> {
    tensors: Vec<&'t Tensor>,
    copies: Vec<Option<Tensor>>,
}

impl<'t> OnHost<'t> {
    /// Tensors as they are.
    pub fn new(ops: &dyn Ops, tensors: impl Iterator<Item = &'t Tensor>) -> Result<OnHost<'t>> {
        let tensors: Vec<&Tensor> = tensors.collect();
        let copies = tensors.iter().map(|t| Ok(fetch(ops, t)?)).collect::<Result<_>>()?;
        Ok(OnHost { tensors, copies })
    }

    /// One view per tensor.
    pub fn views(&self) -> Vec<View<'_>> {
        self.tensors.iter().zip(&self.copies).map(|(t, copy)| copy.as_ref().unwrap_or(t).view()).collect()
    }
}

fn fetch(ops: &dyn Ops, t: &Tensor) -> temper_tensor::Result<Option<Tensor>> {
    matches!(t.buffer(), Buffer::Device(_)).then(|| ops.to_host(t.view())).transpose()
}

impl Trainer {
    /// The exact weights: F32 masters where weights are bf16.
    pub(crate) fn masters(&self) -> Result<OnHost<'_>> {
        let tensors: Vec<&Tensor> = self.weights.iter().collect();
        let mut copies = Vec::with_capacity(tensors.len());
        for (i, t) in tensors.iter().enumerate() {
            copies.push(match self.optimizer.master(&*self.ops, i, t.view())? {
                Some(master) => fetch(&*self.ops, &master)?.or(Some(master)),
                None => fetch(&*self.ops, t)?,
            });
        }
        Ok(OnHost { tensors, copies })
    }

    /// Sets weights (and masters) to host values of any float type, one tensor per parameter and in its shape.
    pub fn set_weights(&mut self, values: Vec<Tensor>) -> Result<()> {
        let ops = &*self.ops;
        if self.weights.dtype() == DType::F32 && values.iter().all(|t| t.dtype() == DType::F32) {
            // Taken over as they are: on the CPU without a copy. What was allocated goes first.
            self.weights = Weights::empty(&self.model.params, DType::F32);
            let before = ops.account(Purpose::Weights);
            self.weights = Weights::from_host(&self.model.params, values, DType::F32, ops)?;
            ops.account(before);
            return Ok(());
        }
        let params = self.model.params.iter();
        for (i, ((weight, values), param)) in self.weights.iter_mut().zip(values).zip(params).enumerate() {
            if values.shape() != param.shape {
                return Err(Error::Model(temper_model::Error::MissingWeights(param.name.clone())));
            }
            let values = single(ops, values)?;
            self.optimizer.set_master(ops, i, weight, values.view())?;
        }
        Ok(())
    }
}

/// Host values on the backend in F32.
fn single(ops: &dyn Ops, values: Tensor) -> Result<Tensor> {
    let there = ops.adopt(values)?;
    if there.dtype() == DType::F32 {
        return Ok(there);
    }
    let mut out = ops.alloc(DType::F32, there.shape())?;
    ops.copy(out.view_mut(), there.view())?;
    Ok(out)
}

/// Host values of any float type into tensors of the backend; where type and place agree they are taken over.
pub(crate) fn place(ops: &dyn Ops, into: &mut [Tensor], values: Vec<Tensor>) -> Result<()> {
    for (to, values) in into.iter_mut().zip(values) {
        let there = ops.adopt(values)?;
        if there.dtype() == to.dtype() && !matches!(there.buffer(), Buffer::Device(_)) {
            *to = there;
        } else {
            ops.copy(to.view_mut(), there.view())?;
        }
    }
    Ok(())
}
