//! Which layers lie on which pipeline stage.

use crate::layout::Layout;
use crate::network::Network;

/// A pipeline stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Its number, from 0.
    pub index: usize,
    /// Holds the embedding.
    pub first: bool,
    /// Holds the head.
    pub last: bool,
    /// Its layers.
    pub layers: usize,
    /// How many of them are of each kind of the network.
    pub(crate) kinds: Vec<usize>,
}

/// Layers of each stage: as the layout says, else even, else as even as they go.
pub(crate) fn split(layout: &Layout, layers: usize) -> Vec<usize> {
    match layout.split.is_empty() {
        true => balanced_split(layers, layout.pp),
        false => layout.split.clone(),
    }
}

/// The most even split. The first stage keeps the most micro-batches and the last has the head, so the stages between them take
/// what is left over, from the back.
pub(crate) fn balanced_split(layers: usize, pp: usize) -> Vec<usize> {
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

/// The stages of a layout that passes [`crate::check`].
///
/// Virtual stages go round: chunk c of every stage lies before chunk c + 1 of any.
pub fn stages(network: &Network, layout: &Layout) -> Vec<Stage> {
    let split = split(layout, network.arch.layers);
    let mut stages: Vec<Stage> = (0..layout.pp)
        .map(|index| Stage { index, first: index == 0, last: index + 1 == layout.pp, layers: 0, kinds: vec![0; network.kinds.kinds.len()] })
        .collect();
    let mut layer = 0;
    for chunk in 0..layout.vpp {
        for (stage, count) in stages.iter_mut().zip(&split) {
            let end = count * (chunk + 1) / layout.vpp - count * chunk / layout.vpp + layer;
            for kind in network.kinds.of_layer.iter().take(end).skip(layer) {
                if let Some(n) = stage.kinds.get_mut(*kind) {
                    *n += 1;
                    stage.layers += 1;
                }
            }
            layer = end;
        }
    }
    stages
}
