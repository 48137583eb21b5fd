//! Tensors between host memory, where files are read and written, and the backend, where they are used.

use crate::step::Trainer;
use crate::{Error, Result};
use temper_model::{Weights, param::ParamId};
use temper_tensor::{DType, Ops, Slice, Tensor, View};

/// Tensors in host memory: as they lie there, or copied from a device.
pub(crate) struct OnHost<'t> {
    tensors: Vec<View<'t>>,
    copies: Vec<Option<Tensor>>,
}

impl<'t> OnHost<'t> {
    /// Tensors as they are.
    pub fn new(ops: &dyn Ops, tensors: impl Iterator<Item = &'t Tensor>) -> Result<OnHost<'t>> {
        let tensors: Vec<View> = tensors.map(Tensor::view).collect();
        let copies = tensors.iter().map(|t| Ok(fetch(ops, *t)?)).collect::<Result<_>>()?;
        Ok(OnHost { tensors, copies })
    }

    /// One view per tensor.
    pub fn views(&self) -> Vec<View<'_>> {
        self.tensors.iter().zip(&self.copies).map(|(t, copy)| copy.as_ref().map_or(*t, Tensor::view)).collect()
    }
}

/// A device's elements in host memory; `None` where they are there already.
pub(crate) fn fetch(ops: &dyn Ops, t: View) -> temper_tensor::Result<Option<Tensor>> {
    matches!(t.data, Slice::Device(..)).then(|| ops.to_host(t)).transpose()
}

impl Trainer {
    /// The exact weights of a single rank, whose segments are the parameters: F32 masters where weights are bf16.
    pub(crate) fn masters(&self) -> Result<OnHost<'_>> {
        let (ops, segments) = (&*self.ops, self.optimizer.segments());
        let (mut tensors, mut copies) = (Vec::with_capacity(segments.len()), Vec::with_capacity(segments.len()));
        for (segment, param) in segments.iter().zip(&self.model.params) {
            let weight = self.weights.get(segment.param)?;
            copies.push(match self.optimizer.master(ops, &self.weights, segment)? {
                Some(master) => Some(fetch(ops, master.view())?.unwrap_or(master).reshape(&param.shape)),
                None => fetch(ops, weight)?,
            });
            tensors.push(weight);
        }
        Ok(OnHost { tensors, copies })
    }

    /// Sets weights (and masters) to host values of any float type, one tensor per parameter and in its shape.
    pub fn set_weights(&mut self, values: Vec<Tensor>) -> Result<()> {
        values.into_iter().enumerate().try_for_each(|(i, values)| self.set_weight(ParamId(i), values))
    }

    /// Sets all weights to the starting values that their declarations and `seed` give, one parameter after another.
    pub(crate) fn draw(&mut self, seed: u64) -> Result<()> {
        for i in 0..self.model.params.len() {
            let values = Weights::draw(&self.model.params[i], seed);
            self.set_weight(ParamId(i), values)?;
        }
        Ok(())
    }

    fn set_weight(&mut self, id: ParamId, values: Tensor) -> Result<()> {
        let (ops, param) = (&*self.ops, &self.model.params[id.0]);
        if values.shape() != param.shape {
            return Err(Error::Model(temper_model::Error::MissingWeights(param.name.clone())));
        }
        let values = in_f32(ops, values)?;
        Ok(self.optimizer.set_master(ops, &mut self.weights, id, &(0..param.numel()), values.view())?)
    }
}

/// Host values on the backend in F32.
fn in_f32(ops: &dyn Ops, values: Tensor) -> Result<Tensor> {
    let there = ops.adopt(values)?;
    if there.dtype() == DType::F32 {
        return Ok(there);
    }
    let mut out = ops.alloc(DType::F32, there.shape())?;
    ops.copy(out.view_mut(), there.view())?;
    Ok(out)
}
