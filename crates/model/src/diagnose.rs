//! Finding where a NaN or infinity came from: a second, slower pass that looks after every stage.

use crate::param::ParamId;
use crate::{Cx, Grads, Model, Objective, Recompute, Result, finish_aux};
use std::fmt;
use temper_tensor::{DType, View};

/// The first thing, in the order of computation, that is not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NonFinite {
    /// A weight was broken before the pass.
    Weight(String),
    /// An activation of the forward pass: the output of the named stage.
    Output(String),
    /// A gradient of an activation: with respect to the input of the named stage.
    InputGrad(String),
    /// A gradient of a parameter.
    WeightGrad(String),
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NonFinite::Weight(name) => write!(f, "weight {name}"),
            NonFinite::Output(stage) => write!(f, "output of {stage}"),
            NonFinite::InputGrad(stage) => write!(f, "gradient of the input of {stage}"),
            NonFinite::WeightGrad(name) => write!(f, "gradient of {name}"),
        }
    }
}

/// Names the first value that is not finite when a micro-batch runs forward and backward; `None` when all are finite.
/// `grads` is overwritten. Waits for the backend after every stage.
pub fn diagnose(model: &Model, cx: &Cx, grads: &mut Grads, objective: &Objective) -> Result<Option<NonFinite>> {
    for (i, param) in model.params.iter().enumerate() {
        if !is_finite(cx, cx.weights.get(ParamId(i))?)? {
            return Ok(Some(NonFinite::Weight(param.name.clone())));
        }
    }
    grads.clear(cx.ops)?;
    let mut stats = model.aux_stats(cx, &objective.aux)?;
    let mut x = model.embedding()?.forward(cx)?;
    if !is_finite(cx, x.view())? {
        return Ok(Some(NonFinite::Output("the embedding".into())));
    }
    let mut inputs = Vec::with_capacity(model.layers.len());
    for i in 0..model.layers.len() {
        let (y, kept) = model.forward_layers(cx, i..i + 1, x, stats.as_mut(), Recompute::Full)?;
        inputs.push(kept);
        if !is_finite(cx, y.view())? {
            return Ok(Some(NonFinite::Output(format!("layer {i}"))));
        }
        x = y;
    }
    let (losses, mut dx) = model.output()?.forward_backward(cx, &x, objective.loss_scale, grads)?;
    if !is_finite(cx, losses.view())? {
        return Ok(Some(NonFinite::Output("the head (loss)".into())));
    }
    if !is_finite(cx, dx.view())? {
        return Ok(Some(NonFinite::InputGrad("the head".into())));
    }
    if let Some(found) = weight_grads(model, cx, grads, |name| !name.starts_with("model.layers."))? {
        return Ok(Some(found));
    }
    let (_, aux_grad) = finish_aux(cx, stats, &objective.aux)?;
    for (i, kept) in inputs.into_iter().enumerate().rev() {
        dx = model.backward_layers(cx, i..i + 1, kept, dx, &aux_grad, grads)?;
        let prefix = format!("model.layers.{i}.");
        if let Some(found) = weight_grads(model, cx, grads, |name| name.starts_with(&prefix))? {
            return Ok(Some(found));
        }
        if !is_finite(cx, dx.view())? {
            return Ok(Some(NonFinite::InputGrad(format!("layer {i}"))));
        }
    }
    model.embedding()?.backward_weight(cx, &dx, grads)?;
    weight_grads(model, cx, grads, |name| !name.starts_with("model.layers."))
}

/// The last of the chosen parameters whose gradient is not finite: the backward pass reaches it first.
fn weight_grads(model: &Model, cx: &Cx, grads: &Grads, chosen: impl Fn(&str) -> bool) -> Result<Option<NonFinite>> {
    for (i, param) in model.params.iter().enumerate().rev().filter(|(_, p)| chosen(&p.name)) {
        if !is_finite(cx, grads.get(ParamId(i))?)? {
            return Ok(Some(NonFinite::WeightGrad(param.name.clone())));
        }
    }
    Ok(None)
}

fn is_finite(cx: &Cx, x: View) -> Result<bool> {
    let mut count = cx.ops.zeros(DType::I32, &[1])?;
    cx.ops.count_non_finite(count.view_mut(), x)?;
    let host = cx.ops.to_host(count.view())?;
    Ok(host.as_slice::<i32>().is_some_and(|n| n.iter().all(|n| *n == 0)))
}
