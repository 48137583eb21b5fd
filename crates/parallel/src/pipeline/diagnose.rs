//! Finding where a NaN or infinity came from: a second, slower pass that looks after every stage, on all ranks together.

use super::{Micro, Pipeline, Stage};
use crate::schedule::Step;
use std::fmt;
use temper_comm::Reduce;
use temper_config::Arch;
use temper_model::param::ParamId;
use temper_model::{Act, AuxStats, Grads, Kept, Recompute, Result, declare};
use temper_tensor::{DType, Ops, View};

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

const EMBEDDING: &str = "the embedding";
const HEAD: &str = "the head";
const LOSS: &str = "the head (loss)";

fn layer(number: usize) -> String {
    format!("layer {number}")
}

/// Whatever may be found, in the order of computation: the same list on all ranks, which speak of places in it.
fn places(arch: &Arch) -> Vec<NonFinite> {
    let params = declare(arch);
    let weight_grads =
        |layer: Option<usize>| params.iter().rev().filter(move |p| p.layer() == layer).map(|p| NonFinite::WeightGrad(p.name.clone()));
    let mut places: Vec<NonFinite> = params.iter().map(|p| NonFinite::Weight(p.name.clone())).collect();
    places.push(NonFinite::Output(EMBEDDING.into()));
    places.extend((0..arch.layers).map(|n| NonFinite::Output(layer(n))));
    places.extend([NonFinite::Output(LOSS.into()), NonFinite::InputGrad(HEAD.into())]);
    places.extend(weight_grads(None));
    for n in (0..arch.layers).rev() {
        places.extend(weight_grads(Some(n)));
        places.push(NonFinite::InputGrad(layer(n)));
    }
    places
}

/// What this rank has found so far.
struct Search {
    places: Vec<NonFinite>,
    first: Option<usize>,
}

impl Search {
    fn look(&mut self, ops: &dyn Ops, x: View, place: NonFinite) -> Result<()> {
        let earlier = self.places.iter().take(self.first.unwrap_or(self.places.len())).position(|p| *p == place);
        if let Some(found) = earlier
            && !is_finite(ops, x)?
        {
            self.first = Some(found);
        }
        Ok(())
    }

    /// The parameters of a layer, or those of none.
    fn look_at_grads(&mut self, stage: &Stage, grads: &Grads, of: Option<usize>) -> Result<()> {
        for (i, param) in stage.model.params.iter().enumerate().filter(|(_, p)| p.layer() == of) {
            self.look(stage.ops, grads.get(ParamId(i))?, NonFinite::WeightGrad(param.name.clone()))?;
        }
        Ok(())
    }

    /// The first of what all ranks found.
    fn agree(mut self, stage: &Stage) -> Result<Option<NonFinite>> {
        let own = [self.first.map_or(f64::NEG_INFINITY, |i| -(i as f64))];
        let mut all = stage.ops.from_host(View::host(&own, &[1]))?;
        stage.ranks.mesh.world.all_reduce(all.view_mut(), Reduce::Max)?.wait()?;
        let all = stage.ops.to_host(all.view())?;
        let first = all.as_slice::<f64>().and_then(|x| x.first()).filter(|x| x.is_finite()).map(|x| -x as usize);
        Ok(first.filter(|i| *i < self.places.len()).map(|i| self.places.swap_remove(i)))
    }
}

/// What a pass through a chunk leaves: what each layer kept, and on the last stage the output.
struct Seen {
    kept: Vec<Vec<Kept>>,
    end: Option<(Act, Option<AuxStats>)>,
}

/// Names the first value that is not finite when a micro-batch runs forward and backward; `None` when all are finite. All ranks call
/// this with the same micro-batch, do all of it whatever they find, and are told the same. `grads` is overwritten. Waits for the
/// backend after every stage.
pub fn diagnose(stage: Stage, micro: &Micro, grads: &mut Grads) -> Result<Option<NonFinite>> {
    let Stage { ops, model, weights, .. } = stage;
    let mut search = Search { places: places(&model.arch), first: None };
    for (i, param) in model.params.iter().enumerate() {
        search.look(ops, weights.get(ParamId(i))?, NonFinite::Weight(param.name.clone()))?;
    }
    grads.clear(ops)?;
    let mut pipeline = Pipeline::new(stage);
    let chunks = 0..model.chunks.len();
    let seen = chunks.clone().map(|chunk| pipeline.look_forward(micro, chunk, &mut search)).collect::<Result<Vec<_>>>()?;
    for (chunk, seen) in chunks.zip(seen).rev() {
        pipeline.look_backward(micro, chunk, seen, grads, &mut search)?;
    }
    pipeline.settle()?;
    search.agree(&stage)
}

impl<'a> Pipeline<'a> {
    fn look_forward(&mut self, micro: &'a Micro, chunk: usize, search: &mut Search) -> Result<Seen> {
        let (cx, model, step) = (self.cx(&micro.batch), self.stage.model, Step::Forward { micro: 0, chunk });
        let (mut x, mut stats) = self.input(&cx, step, micro)?;
        if step.source(self.place, self.stages, model.chunks.len()).is_none() {
            search.look(cx.ops, x.view(), NonFinite::Output(EMBEDDING.into()))?;
        }
        let mut kept = Vec::new();
        for i in model.chunks[chunk].clone() {
            let (y, of_layer) = model.forward_layers(&cx, i..i + 1, x, stats.as_mut(), Recompute::Full)?;
            search.look(cx.ops, y.view(), NonFinite::Output(layer(model.numbers[i])))?;
            kept.push(of_layer);
            x = y;
        }
        Ok(Seen { kept, end: self.output(step, x, stats)? })
    }

    fn look_backward(&mut self, micro: &'a Micro, chunk: usize, seen: Seen, grads: &mut Grads, search: &mut Search) -> Result<()> {
        let (cx, stage, step) = (self.cx(&micro.batch), self.stage, Step::Backward { micro: 0, chunk });
        let (mut dx, aux_grad, found) = self.output_grad(&cx, micro, seen.end, grads, &mut |_, _| Ok(()))?;
        if let Some(outputs) = found {
            search.look(cx.ops, outputs.losses.view(), NonFinite::Output(LOSS.into()))?;
            search.look(cx.ops, dx.view(), NonFinite::InputGrad(HEAD.into()))?;
            search.look_at_grads(&stage, grads, None)?;
        }
        for (i, kept) in stage.model.chunks[chunk].clone().zip(seen.kept).rev() {
            let number = stage.model.numbers[i];
            dx = stage.model.backward_layers(&cx, i..i + 1, kept, dx, &aux_grad, grads)?;
            search.look_at_grads(&stage, grads, Some(number))?;
            search.look(cx.ops, dx.view(), NonFinite::InputGrad(layer(number)))?;
        }
        self.input_grad(&cx, step, dx, aux_grad, grads, &mut |_, _| Ok(()))?;
        search.look_at_grads(&stage, grads, None)
    }
}

fn is_finite(ops: &dyn Ops, x: View) -> Result<bool> {
    let mut count = ops.zeros(DType::I32, &[1])?;
    ops.count_non_finite(count.view_mut(), x)?;
    let host = ops.to_host(count.view())?;
    Ok(host.as_slice::<i32>().is_some_and(|n| n.iter().all(|n| *n == 0)))
}
