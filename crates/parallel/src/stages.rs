//! [`Stages`]: which layers lie on which pipeline stage, and where embedding and head are.

use crate::refusal::{PipelineRule, Refusal};
use std::ops::Range;

/// The layers of a model over pipeline stages.
///
/// Virtual stages go round: chunk c of every stage lies before chunk c + 1 of any. The embedding is on the first global chunk,
/// the head on the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages {
    stages: usize,
    chunks: usize,
    /// Layer at which each global chunk begins, and the number of layers.
    starts: Vec<usize>,
}

impl Stages {
    /// `layers` over `pp` stages of `vpp` chunks: evenly, or with `split` layers on each stage when that is not empty.
    ///
    /// # Errors
    /// More chunks than layers, layers that do not divide when no split was asked for, a split that is not of these layers and
    /// stages, or one with a stage that does not divide into `vpp` equal chunks.
    pub fn new(layers: usize, pp: usize, vpp: usize, split: &[usize]) -> Result<Stages, Refusal> {
        let chunks = pp.saturating_mul(vpp);
        if chunks == 0 || chunks > layers {
            let found = format!("pp {pp} x vpp {vpp} stages for {layers} layers");
            let remedy = if chunks == 0 { "Give at least 1 of each." } else { "Take fewer stages: each needs a layer." };
            return Err(Refusal::new(PipelineRule::Stages, found, remedy.to_string()));
        }
        if !split.is_empty() {
            check_split(layers, pp, vpp, split)?;
        } else if !layers.is_multiple_of(chunks) {
            return Err(uneven(layers, pp, vpp));
        }
        let of_chunk = |stage: usize| split.get(stage).map_or(layers / chunks, |count| count / vpp);
        let mut starts = vec![0];
        let mut layer = 0;
        for global in 0..chunks {
            layer += of_chunk(global % pp);
            starts.push(layer);
        }
        Ok(Stages { stages: pp, chunks: vpp, starts })
    }

    /// Number of stages (pp).
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Chunks of each stage (vpp).
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// The layers of a chunk of a stage; none where there is no such chunk.
    pub fn layers_of(&self, stage: usize, chunk: usize) -> Range<usize> {
        if stage >= self.stages || chunk >= self.chunks {
            return 0..0;
        }
        let global = chunk * self.stages + stage;
        match self.starts.get(global..global + 2) {
            Some(&[start, end]) => start..end,
            _ => 0..0,
        }
    }

    /// Whether the embedding is there.
    pub fn has_embedding(&self, stage: usize, chunk: usize) -> bool {
        stage == 0 && chunk == 0
    }

    /// Whether the final norm and the head are there.
    pub fn has_head(&self, stage: usize, chunk: usize) -> bool {
        stage == self.stages - 1 && chunk == self.chunks - 1
    }
}

/// The most even split over stages. The first stage keeps the most micro-batches and the last has the head, so the stages
/// between them take what is left over, from the back.
pub fn balanced_split(layers: usize, pp: usize) -> Vec<usize> {
    let (each, extra) = (layers / pp.max(1), layers % pp.max(1));
    let order = (0..pp.saturating_sub(1)).rev().chain(std::iter::once(pp.saturating_sub(1)));
    let mut split = vec![each; pp];
    for stage in order.take(extra) {
        if let Some(count) = split.get_mut(stage) {
            *count += 1;
        }
    }
    split
}

fn check_split(layers: usize, pp: usize, vpp: usize, split: &[usize]) -> Result<(), Refusal> {
    let sum = split.iter().fold(0u128, |sum, count| sum + *count as u128);
    if split.len() != pp || sum != layers as u128 || split.contains(&0) {
        let found = format!("split gives {} stages with {sum} layers; pp is {pp} and the model has {layers}", split.len());
        let example = example(layers, pp, vpp).map_or_else(String::new, |split| format!(", e.g. {split}"));
        let remedy = format!("Give one count of at least 1 a stage, together all layers{example}.");
        return Err(Refusal::new(PipelineRule::Split, found, remedy));
    }
    if let Some((stage, count)) = split.iter().enumerate().find(|(_, count)| !count.is_multiple_of(vpp)) {
        let found = format!("the {count} layers of stage {stage} do not divide over vpp {vpp}");
        let example = example(layers, pp, vpp).unwrap_or_else(|| "other counts".to_string());
        return Err(Refusal::new(PipelineRule::Interleaving, found, format!("Take vpp=1, or {example}.")));
    }
    Ok(())
}

/// Layers that do not divide, with a split that would do and the nearest number of (virtual) stages that divides them.
fn uneven(layers: usize, pp: usize, vpp: usize) -> Refusal {
    let nearest = if vpp == 1 {
        let fewer = (1..pp).rev().find(|n| layers.is_multiple_of(*n));
        let more = (pp + 1..=layers).find(|n| layers.is_multiple_of(*n));
        let near: Vec<String> = fewer.into_iter().chain(more).map(|n| n.to_string()).collect();
        format!("pp={}", near.join(" or "))
    } else if layers.is_multiple_of(pp) {
        format!("vpp={}", (2..vpp).rev().find(|n| layers.is_multiple_of(pp * n)).unwrap_or(1))
    } else {
        "vpp=1 with an uneven split".to_string()
    };
    let remedy = match example(layers, pp, vpp) {
        Some(split) => format!("Ask for an uneven split, e.g. {split}, or take {nearest}."),
        None => format!("Take {nearest}."),
    };
    Refusal::new(PipelineRule::Split, format!("{layers} layers do not divide over pp {pp} x vpp {vpp}"), remedy)
}

/// The most even split whose stages divide into chunks, as one asks for it; `None` where there is none.
fn example(layers: usize, pp: usize, vpp: usize) -> Option<String> {
    let split = layers.is_multiple_of(vpp).then(|| balanced_split(layers / vpp, pp))?;
    let counts: Vec<String> = split.iter().map(|count| (count * vpp).to_string()).collect();
    Some(format!("split={}", counts.join("/")))
}
