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
    /// How many of them are of each kind of the network.
    pub(crate) kinds: Vec<usize>,
}

/// The stages of a layout, all chunks of a stage together.
///
/// # Errors
/// What [`Stages::new`] refuses; a layout that passes [`crate::check`] is not refused.
pub fn stages(network: &Network, layout: &Layout) -> Result<Vec<Stage>, Refusal> {
    let cut = Stages::new(network.arch.layers, layout.pp, layout.vpp, &layout.split)?;
    let stage = |index| {
        let chunks = || 0..cut.chunks();
        let mut kinds = vec![0; network.kinds.kinds.len()];
        for layer in chunks().flat_map(|chunk| cut.layers_of(index, chunk)) {
            if let Some(count) = network.kinds.of_layer.get(layer).and_then(|kind| kinds.get_mut(*kind)) {
                *count += 1;
            }
        }
        Stage {
            index,
            first: chunks().any(|chunk| cut.has_embedding(index, chunk)),
            last: chunks().any(|chunk| cut.has_head(index, chunk)),
            layers: kinds.iter().sum(),
            kinds,
        }
    };
    Ok((0..cut.stages()).map(stage).collect())
}
