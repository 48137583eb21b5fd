//! The whole network, assembled from stages that a pipeline can also call one by one: embedding, ranges of layers, head.
//!
//! Legend: T tokens, H hidden size, V vocabulary, B sequences.

use crate::aux::{AuxGrad, AuxLoss, AuxSettings, AuxStats};
use crate::decoder::{self, DecoderLayer};
use crate::param::{Block, EMBEDDING, Param};
use crate::recompute::Recompute;
use crate::{
    Act, CachedStep, Cx, Embedding, Error, Grads, Head, KvCache, Labels, Names, Ranks, Result, RopeTables, Seat, Weights, declare,
};
use std::ops::Range;
use temper_config::Arch;
use temper_tensor::{DType, Ops, Phase, Tensor};

/// A network, or the part of it that one rank holds. Holds no weights: those are in [`Weights`].
pub struct Model {
    /// The whole network's architecture.
    pub arch: Arch,
    /// The parameters here, in order.
    pub params: Vec<Param>,
    /// First stage, if it is here.
    pub embed: Option<Embedding>,
    /// The layers here, chunk after chunk.
    pub layers: Vec<DecoderLayer>,
    /// Their numbers in the whole network.
    pub numbers: Vec<usize>,
    /// The layers of each chunk, among those here. Between two chunks of a rank come other ranks' chunks.
    pub chunks: Vec<Range<usize>>,
    /// Last stage, if it is here.
    pub head: Option<Head>,
}

/// What one rank holds of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portion {
    /// Its part of each matrix.
    pub seat: Seat,
    /// The layers of its chunks, among those of the whole network.
    pub chunks: Vec<Range<usize>>,
    /// It has the embedding.
    pub embed: bool,
    /// It has the head.
    pub head: bool,
}

impl Portion {
    /// All of it.
    pub fn whole(arch: &Arch) -> Portion {
        Portion { seat: Seat::WHOLE, chunks: std::iter::once(0..arch.layers).collect(), embed: true, head: true }
    }

    /// Whether a parameter of the whole network is here.
    fn has(&self, param: &Param, tied: bool) -> bool {
        match param.layer() {
            Some(layer) => self.chunks.iter().any(|chunk| chunk.contains(&layer)),
            None if param.name == EMBEDDING => self.embed || (self.head && tied),
            None => self.head,
        }
    }
}

/// What one layer kept.
pub enum Kept {
    /// Its activations.
    Saved(Box<decoder::Saved>),
    /// Its input.
    Input(Act),
}

/// What to train on in one micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Objective {
    /// Factor on the weighted sum of token losses, for example 1 / trained tokens of the global batch.
    pub loss_scale: f64,
    /// Auxiliary losses; `None` neither trains on them nor reports them.
    pub aux: Option<AuxSettings>,
    /// What to keep.
    pub recompute: Recompute,
}

/// What a micro-batch reports. On the backend: reading it waits.
pub struct Outputs {
    /// Cross-entropy of every token, `[T]` in the stat dtype: minus the log-probability of its target; 0 where it has none.
    pub losses: Tensor,
    /// Values of the auxiliary losses.
    pub aux: Option<AuxLoss>,
}

impl Model {
    /// The whole network of an architecture.
    pub fn new(arch: &Arch) -> Result<Model> {
        Model::part(arch, &Portion::whole(arch))
    }

    /// What one rank holds of the network of an architecture.
    ///
    /// # Errors
    /// When heads or widths do not divide.
    pub fn part(arch: &Arch, portion: &Portion) -> Result<Model> {
        let here = portion.seat.arch(arch)?;
        let whole = declare(arch).into_iter().filter(|p| portion.has(p, arch.tied));
        let mut params: Vec<Param> = whole.map(|p| p.at(&portion.seat)).collect();
        // The last stage's copy of a tied embedding is the first stage's parameter.
        params.iter_mut().filter(|p| p.name == EMBEDDING && !portion.embed).for_each(|p| p.counted = false);
        let names = Names::new(&params);
        let layers = portion.chunks.iter().cloned().flatten().map(|i| DecoderLayer::new(&here, &names, i)).collect::<Result<_>>()?;
        let embed = || -> Result<Embedding> { Ok(Embedding { weight: names.id(EMBEDDING)?, hidden: arch.hidden }) };
        let mut end = 0;
        let chunks = portion.chunks.iter().map(|chunk| {
            end += chunk.len();
            end - chunk.len()..end
        });
        Ok(Model {
            arch: arch.clone(),
            chunks: chunks.collect(),
            numbers: portion.chunks.iter().cloned().flatten().collect(),
            embed: portion.embed.then(embed).transpose()?,
            layers,
            head: portion.head.then(|| Head::new(arch, &names, portion.seat.tp)).transpose()?,
            params,
        })
    }

    /// The first stage.
    ///
    /// # Errors
    /// When another rank has it.
    pub fn embedding(&self) -> Result<&Embedding> {
        self.embed.as_ref().ok_or(Error::OtherStage("embedding"))
    }

    /// The last stage.
    ///
    /// # Errors
    /// When another rank has it.
    pub fn output(&self) -> Result<&Head> {
        self.head.as_ref().ok_or(Error::OtherStage("head"))
    }

    /// One micro-batch forward and backward. Gradients of `loss_scale * sum_t weight_t * loss_t + auxiliary losses` are added to `grads`.
    pub fn forward_backward(&self, cx: &Cx, grads: &mut Grads, objective: &Objective) -> Result<Outputs> {
        let all = 0..self.layers.len();
        let mut stats = self.aux_stats(cx, &objective.aux)?;
        let x = self.embedding()?.forward(cx)?;
        let (x, kept) = self.forward_layers(cx, all.clone(), x, stats.as_mut(), objective.recompute)?;
        cx.ops.phase(Phase::Head)?;
        let (losses, dx) = self.output()?.forward_backward(cx, &x, objective.loss_scale, grads)?;
        drop(x);
        cx.ops.phase(Phase::Backward)?;
        let (aux, aux_grad) = finish_aux(cx, stats, &objective.aux)?;
        let dx = self.backward_layers(cx, all, kept, dx, &aux_grad, grads)?;
        self.embedding()?.backward_weight(cx, &dx, grads)?;
        Ok(Outputs { losses, aux })
    }

    /// The same losses without gradients, for evaluation and for log-probabilities (`-losses`).
    pub fn forward_loss(&self, cx: &Cx, aux: &Option<AuxSettings>) -> Result<Outputs> {
        let mut stats = self.aux_stats(cx, aux)?;
        let x = self.forward_hidden(cx, stats.as_mut())?;
        let losses = self.output()?.forward(cx, &x)?;
        let (aux, _) = finish_aux(cx, stats, aux)?;
        Ok(Outputs { losses, aux })
    }

    /// Logits of every token, [T, V]. They exist whole: for verification and short inputs.
    pub fn forward_logits(&self, cx: &Cx) -> Result<Tensor> {
        let x = self.forward_hidden(cx, None)?;
        self.output()?.forward_logits(cx, &x, None)
    }

    /// One step of generation, prefill and decode alike: adds the keys and values of the step's tokens to `cache` and
    /// returns the logits of the last token of each sequence, [B, V].
    pub fn forward_cached(
        &self,
        ops: &dyn Ops,
        weights: &Weights,
        rope: &RopeTables,
        step: &CachedStep,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let cx = Cx { ops, weights, rope, batch: &step.batch, ranks: Ranks::single() };
        let mut x = self.embedding()?.forward(&cx)?;
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward_cached(&cx, &x, step, cache, i)?;
        }
        self.output()?.forward_logits(&cx, &x, Some(step.last.view()))
    }

    /// Layers `range` forward: their output and what they kept.
    pub fn forward_layers(
        &self,
        cx: &Cx,
        range: Range<usize>,
        mut x: Act,
        mut stats: Option<&mut AuxStats>,
        recompute: Recompute,
    ) -> Result<(Act, Vec<Kept>)> {
        let mut kept = Vec::with_capacity(range.len());
        for layer in &self.layers[range] {
            let (y, saved) = layer.forward(cx, &x)?;
            count(cx, layer, &saved, stats.as_deref_mut())?;
            kept.push(match recompute {
                Recompute::None => Kept::Saved(Box::new(saved)),
                Recompute::Selective(parts) => Kept::Saved(Box::new(saved.without(parts))),
                Recompute::Full => Kept::Input(x),
            });
            x = y;
        }
        Ok((x, kept))
    }

    /// Layers `range` backward: consumes what they kept, adds their weight gradients and returns the gradient of their input.
    pub fn backward_layers(&self, cx: &Cx, range: Range<usize>, kept: Vec<Kept>, dx: Act, aux: &AuxGrad, grads: &mut Grads) -> Result<Act> {
        self.backward_layers_telling(cx, range, kept, dx, aux, grads, &mut |_, _| Ok(()))
    }

    /// As [`Model::backward_layers`]; `done` is told of each layer whose weight gradients were added.
    pub fn backward_layers_telling(
        &self,
        cx: &Cx,
        range: Range<usize>,
        kept: Vec<Kept>,
        mut dx: Act,
        aux: &AuxGrad,
        grads: &mut Grads,
        done: &mut dyn FnMut(Block, &mut Grads) -> Result<()>,
    ) -> Result<Act> {
        for ((i, layer), kept) in range.clone().zip(&self.layers[range]).zip(kept).rev() {
            let saved = match kept {
                Kept::Saved(saved) => layer.complete(cx, *saved)?,
                Kept::Input(x) => layer.forward(cx, &x)?.1,
            };
            let (d, work) = layer.backward_input(cx, saved, &dx, aux, grads)?;
            layer.backward_weight(cx, work, grads)?;
            done(Block::Layer(self.numbers[i]), grads)?;
            dx = d;
        }
        Ok(dx)
    }

    /// Statistics for the auxiliary losses, if they are wanted and the model has experts.
    pub fn aux_stats(&self, cx: &Cx, aux: &Option<AuxSettings>) -> Result<Option<AuxStats>> {
        if aux.is_some() { AuxStats::new(cx, &self.arch) } else { Ok(None) }
    }

    /// What the last stage will say the auxiliary losses add to the gradients, its values to be received.
    pub fn aux_grad(&self, cx: &Cx, aux: &Option<AuxSettings>) -> Result<AuxGrad> {
        aux.as_ref().map_or_else(|| Ok(AuxGrad::default()), |settings| AuxGrad::expected(cx, &self.arch, settings))
    }

    /// Output of layers `range`, [T, H], keeping nothing.
    pub fn forward_only(&self, cx: &Cx, range: Range<usize>, x: Act) -> Result<Act> {
        self.layers[range].iter().try_fold(x, |x, layer| Ok(layer.forward(cx, &x)?.0))
    }

    /// Output of the last layer of all, [T, H], keeping nothing.
    fn forward_hidden(&self, cx: &Cx, mut stats: Option<&mut AuxStats>) -> Result<Act> {
        let mut x = self.embedding()?.forward(cx)?;
        for layer in &self.layers {
            let (y, saved) = layer.forward(cx, &x)?;
            count(cx, layer, &saved, stats.as_deref_mut())?;
            x = y;
        }
        Ok(x)
    }
}

fn count(cx: &Cx, layer: &DecoderLayer, saved: &decoder::Saved, stats: Option<&mut AuxStats>) -> Result<()> {
    match (stats, layer.aux_row(), saved.routing()) {
        (Some(stats), Some(row), Some(routing)) => stats.count(cx.ops, row, routing, cx.real_rows()),
        _ => Ok(()),
    }
}

/// The auxiliary losses of the whole micro-batch, and their gradient (nothing when they are off).
pub fn finish_aux(cx: &Cx, stats: Option<AuxStats>, aux: &Option<AuxSettings>) -> Result<(Option<AuxLoss>, AuxGrad)> {
    match (stats, aux) {
        (Some(mut stats), Some(settings)) => {
            stats.sum(&*cx.ranks.mesh.tokens)?;
            let (loss, grad) = stats.finish(cx.ops, cx.batch.all_tokens, settings)?;
            Ok((Some(loss), grad))
        }
        _ => Ok((None, AuxGrad::default())),
    }
}

/// `sum_t weight_t * loss_t` in f64. Waits for the backend.
pub fn loss_sum(ops: &dyn Ops, losses: &Tensor, labels: &Labels) -> Result<f64> {
    let losses = read_floats(ops, losses)?;
    Ok(losses.iter().zip(&labels.host_weights).map(|(l, w)| if *w == 0.0 { 0.0 } else { l * f64::from(*w) }).sum())
}

/// A float tensor on the host in f64, elements in order. Waits for the backend.
pub fn read_floats(ops: &dyn Ops, x: &Tensor) -> Result<Vec<f64>> {
    if x.dtype() == DType::F64 {
        let host = ops.to_host(x.view())?;
        return Ok(host.as_slice::<f64>().unwrap_or_default().to_vec());
    }
    let mut single = ops.alloc(DType::F32, x.shape())?;
    ops.copy(single.view_mut(), x.view())?;
    let host = ops.to_host(single.view())?;
    Ok(host.as_slice::<f32>().unwrap_or_default().iter().map(|v| f64::from(*v)).collect())
}
