//! Runs the micro-batches of a step through the part of the model that this rank holds, in the order of a schedule.
//!
//! A rank without a pipeline runs the same way: its one chunk begins with the embedding and ends with the head.
//!
//! Legend: T tokens of a micro-batch as this rank has them between layers, H hidden size.

mod diagnose;

pub use diagnose::{NonFinite, diagnose};

use crate::schedule::Step;
use std::{collections::HashMap, sync::Arc};
use temper_comm::{Line, Pending};
use temper_model::aux::AuxGrad;
use temper_model::param::Block;
use temper_model::{
    Act, AuxStats, Batch, Cx, Error, Grads, Kept, Model, Objective, Outputs, Ranks, Result, RopeTables, Weights, finish_aux,
};
use temper_tensor::{Ops, Phase, Tensor};

/// What every pass reads.
#[derive(Clone, Copy)]
pub struct Stage<'a> {
    /// The backend.
    pub ops: &'a dyn Ops,
    /// This rank's part of the model.
    pub model: &'a Model,
    /// Its weights.
    pub weights: &'a Weights,
    /// Rotary tables.
    pub rope: &'a RopeTables,
    /// The ranks.
    pub ranks: &'a Ranks,
}

/// Told of a block of the network whose gradients are complete.
pub type Ready<'r> = &'r mut dyn FnMut(Block, &mut Grads) -> Result<()>;

/// A micro-batch and what to train on in it.
pub struct Micro {
    /// Its tokens, the same on every rank that shares it.
    pub batch: Batch,
    /// What to minimise.
    pub objective: Objective,
}

/// What a pass through a chunk leaves for the backward pass.
struct Flight {
    kept: Vec<Kept>,
    /// Of the last chunk: the output of the last layer, and what the routers counted.
    end: Option<(Act, Option<AuxStats>)>,
}

/// Messages handed over and not yet known to be gone; their tensors stay alive until then.
#[derive(Default)]
struct Sent(Vec<(Arc<Tensor>, Pending<'static>)>);

impl Sent {
    fn settle(&mut self) -> Result<()> {
        self.0.drain(..).try_for_each(|(_, pending)| Ok(pending.wait()?))
    }

    /// Hands tensors over after those before have gone: one message at a time is under way, which every schedule can do with.
    fn send(&mut self, line: &Line, tensors: Vec<Arc<Tensor>>) -> Result<()> {
        self.settle()?;
        for x in tensors {
            let pending = line.send(x.view())?.detach();
            self.0.push((x, pending));
        }
        Ok(())
    }
}

/// One step of a rank.
pub struct Pipeline<'a> {
    stage: Stage<'a>,
    place: usize,
    stages: usize,
    flights: HashMap<(usize, usize), Flight>,
    forward: Sent,
    backward: Sent,
}

impl<'a> Pipeline<'a> {
    /// An empty pipeline.
    pub fn new(stage: Stage<'a>) -> Pipeline<'a> {
        let mesh = &stage.ranks.mesh;
        Pipeline {
            stage,
            place: mesh.stage(),
            stages: mesh.axes.pp,
            flights: HashMap::new(),
            forward: Sent::default(),
            backward: Sent::default(),
        }
    }

    /// Runs `steps` over the micro-batches, adds their gradients up and returns what the last stage found out, by micro-batch.
    /// `ready` is told of each block whose last gradient of the step was added.
    pub fn train(mut self, steps: &[Step], micro: &'a [Micro], grads: &mut Grads, ready: Ready) -> Result<Vec<Option<Outputs>>> {
        let chunks = self.stage.model.chunks.len();
        let last_of = |chunk: usize| steps.iter().rposition(|s| matches!(s, Step::Backward { chunk: c, .. } if *c == chunk));
        let last: Vec<Option<usize>> = (0..chunks).map(last_of).collect();
        let mut outputs: Vec<Option<Outputs>> = micro.iter().map(|_| None).collect();
        for (i, &step) in steps.iter().enumerate() {
            match step {
                Step::Forward { micro: m, chunk } => {
                    self.stage.ops.phase(Phase::Forward)?;
                    self.forward(step, &micro[m], m, chunk)?;
                }
                Step::Backward { micro: m, chunk } => {
                    let ready: Ready = if last[chunk] == Some(i) { ready } else { &mut |_, _| Ok(()) };
                    if let Some(found) = self.backward(step, &micro[m], m, chunk, grads, ready)? {
                        outputs[m] = Some(found);
                    }
                }
            }
        }
        self.settle()?;
        Ok(outputs)
    }

    /// Losses of a micro-batch without gradients; on the last stage.
    pub fn evaluate(self, batch: &'a Batch) -> Result<Option<Outputs>> {
        let (model, cx) = (self.stage.model, self.cx(batch));
        let Some(x) = self.forward_only(batch)? else { return Ok(None) };
        Ok(Some(Outputs { losses: model.output()?.forward(&cx, &x)?, aux: None }))
    }

    /// Logits [T, V] of all tokens of a micro-batch that the tensor ranks share, for this rank's classes; on the last stage. They exist
    /// whole: for verification and short inputs.
    pub fn logits(self, batch: &'a Batch) -> Result<Option<Tensor>> {
        let (model, cx) = (self.stage.model, self.cx(batch));
        let Some(x) = self.forward_only(batch)? else { return Ok(None) };
        Ok(Some(model.output()?.forward_logits(&cx, &x, None)?))
    }

    /// The output of the last layer, [T, H], keeping nothing; on the last stage.
    fn forward_only(mut self, batch: &'a Batch) -> Result<Option<Act>> {
        let cx = self.cx(batch);
        let chunks = self.stage.model.chunks.len();
        let mut found = None;
        for chunk in 0..chunks {
            let step = Step::Forward { micro: 0, chunk };
            let x = match step.source(self.place, self.stages, chunks) {
                None => self.stage.model.embedding()?.forward(&cx)?,
                Some(_) => self.receive_act(&cx, &self.stage.ranks.mesh.forward)?,
            };
            let x = self.stage.model.forward_only(&cx, self.stage.model.chunks[chunk].clone(), x)?;
            match step.target(self.place, self.stages, chunks) {
                None => found = Some(x),
                Some(_) => self.forward.send(&self.stage.ranks.mesh.forward, vec![x])?,
            }
        }
        self.forward.settle()?;
        Ok(found)
    }

    fn cx(&self, batch: &'a Batch) -> Cx<'a> {
        let Stage { ops, weights, rope, ranks, .. } = self.stage;
        Cx { ops, weights, rope, batch, ranks }
    }

    fn forward(&mut self, step: Step, micro: &'a Micro, m: usize, chunk: usize) -> Result<()> {
        let (cx, model) = (self.cx(&micro.batch), self.stage.model);
        let (x, mut stats) = self.input(&cx, step, micro)?;
        let layers = model.chunks[chunk].clone();
        let (y, kept) = model.forward_layers(&cx, layers, x, stats.as_mut(), micro.objective.recompute)?;
        let end = self.output(step, y, stats)?;
        self.flights.insert((m, chunk), Flight { kept, end });
        Ok(())
    }

    /// What a chunk begins with: the embedding, or what the stage before hands on.
    fn input(&self, cx: &Cx, step: Step, micro: &Micro) -> Result<(Act, Option<AuxStats>)> {
        let (model, line) = (self.stage.model, &self.stage.ranks.mesh.forward);
        let mut stats = model.aux_stats(cx, &micro.objective.aux)?;
        if step.source(self.place, self.stages, model.chunks.len()).is_none() {
            return Ok((model.embedding()?.forward(cx)?, stats));
        }
        let x = self.receive_act(cx, line)?;
        for counted in stats.iter_mut().flat_map(AuxStats::tensors_mut) {
            line.recv(counted.view_mut())?.wait()?;
        }
        Ok((x, stats))
    }

    /// Hands on what a chunk ends with; the last of all keeps it.
    fn output(&mut self, step: Step, y: Act, stats: Option<AuxStats>) -> Result<Option<(Act, Option<AuxStats>)>> {
        if step.target(self.place, self.stages, self.stage.model.chunks.len()).is_none() {
            return Ok(Some((y, stats)));
        }
        let counted = stats.into_iter().flat_map(AuxStats::into_tensors).map(Arc::new);
        self.forward.send(&self.stage.ranks.mesh.forward, std::iter::once(y).chain(counted).collect())?;
        Ok(None)
    }

    fn backward(
        &mut self,
        step: Step,
        micro: &'a Micro,
        m: usize,
        chunk: usize,
        grads: &mut Grads,
        ready: Ready,
    ) -> Result<Option<Outputs>> {
        let (cx, model) = (self.cx(&micro.batch), self.stage.model);
        let Some(Flight { kept, end }) = self.flights.remove(&(m, chunk)) else { return Err(Error::Incomplete) };
        let (dx, aux_grad, found) = self.output_grad(&cx, micro, end, grads, ready)?;
        cx.ops.phase(Phase::Backward)?;
        let dx = model.backward_layers_telling(&cx, model.chunks[chunk].clone(), kept, dx, &aux_grad, grads, ready)?;
        self.input_grad(&cx, step, dx, aux_grad, grads, ready)?;
        Ok(found)
    }

    /// The gradient of what a chunk ended with: by the head, or from the stage after.
    fn output_grad(
        &self,
        cx: &Cx,
        micro: &Micro,
        end: Option<(Act, Option<AuxStats>)>,
        grads: &mut Grads,
        ready: Ready,
    ) -> Result<(Act, AuxGrad, Option<Outputs>)> {
        let (model, line) = (self.stage.model, &self.stage.ranks.mesh.backward);
        let Some((x, stats)) = end else {
            let dx = self.receive_act(cx, line)?;
            let mut aux_grad = model.aux_grad(cx, &micro.objective.aux)?;
            if let Some(balance) = &mut aux_grad.balance {
                line.recv(balance.view_mut())?.wait()?;
            }
            return Ok((dx, aux_grad, None));
        };
        cx.ops.phase(Phase::Head)?;
        let (losses, dx) = model.output()?.forward_backward(cx, &x, micro.objective.loss_scale, grads)?;
        ready(Block::Head, grads)?;
        let (aux, aux_grad) = finish_aux(cx, stats, &micro.objective.aux)?;
        Ok((dx, aux_grad, Some(Outputs { losses, aux })))
    }

    /// Hands back the gradient of what a chunk began with; the first of all ends at the embedding.
    fn input_grad(&mut self, cx: &Cx, step: Step, dx: Act, aux_grad: AuxGrad, grads: &mut Grads, ready: Ready) -> Result<()> {
        let model = self.stage.model;
        if step.target(self.place, self.stages, model.chunks.len()).is_none() {
            model.embedding()?.backward_weight(cx, &dx, grads)?;
            return ready(Block::Embedding, grads);
        }
        let AuxGrad { balance, .. } = aux_grad;
        self.backward.send(&self.stage.ranks.mesh.backward, std::iter::once(dx).chain(balance.map(Arc::new)).collect())
    }

    fn settle(&mut self) -> Result<()> {
        self.forward.settle()?;
        self.backward.settle()
    }

    /// `[T, H]` from another stage.
    fn receive_act(&self, cx: &Cx, line: &Line) -> Result<Act> {
        let mut x = cx.alloc(&[cx.rows(), self.stage.model.arch.hidden])?;
        line.recv(x.view_mut())?.wait()?;
        Ok(Arc::new(x))
    }
}
