//! What lies on each pipeline stage, by the cut that the engine makes ([`Stages`]).

use crate::layout::Layout;
use crate::network::Network;
use temper_parallel::{Refusal, Stages};

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
    /// Of each chunk the kinds of its layers in order.
    pub(crate) chunks: Vec<Vec<usize>>,
    /// How many of them are of each kind of the network.
    pub(crate) kinds: Vec<usize>,
    /// For each kind how many layers of each come after its last layer: their backward passes are over when that one's begins.
    pub(crate) after: Vec<Vec<usize>>,
}

/// The stages of a layout, all chunks of a stage together.
///
/// # Errors
/// What [`Stages::new`] refuses; a layout that passes [`crate::check`] is not refused.
pub fn stages(network: &Network, layout: &Layout) -> Result<Vec<Stage>, Refusal> {
    let cut = Stages::new(network.arch.layers, layout.pp, layout.vpp, &layout.split)?;
    let kinds_of = |index, chunk| cut.layers_of(index, chunk).filter_map(|layer| network.kinds.of_layer.get(layer).copied()).collect();
    let stage = |index| {
        let count = network.kinds.kinds.len();
        let chunks: Vec<Vec<usize>> = (0..cut.chunks()).map(|chunk| kinds_of(index, chunk)).collect();
        let (mut kinds, mut after) = (vec![0; count], vec![vec![0; count]; count]);
        for &kind in chunks.iter().flatten() {
            kinds[kind] += 1;
            after[kind].fill(0);
            for (_, later) in after.iter_mut().enumerate().filter(|(other, _)| *other != kind) {
                later[kind] += 1;
            }
        }
        Stage {
            index,
            first: (0..cut.chunks()).any(|chunk| cut.has_embedding(index, chunk)),
            last: (0..cut.chunks()).any(|chunk| cut.has_head(index, chunk)),
            layers: kinds.iter().sum(),
            chunks,
            kinds,
            after,
        }
    };
    Ok((0..cut.stages()).map(stage).collect())
}
