//! What a parameter is: declared once, and everything else (loading, saving, resharding, the optimizer, the
//! planner, the parameter count) derives from the declaration.

use std::ops::Range;
use temper_config::Arch;

/// Index of a parameter in the model's declaration order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// How a parameter is divided over the ranks of a mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shard {
    /// Whole on every rank.
    Replicated,
    /// Each piece divided on its dim 0 over the tensor axis (column-parallel: output features, vocabulary rows).
    TensorRows,
    /// Divided on the last dim over the tensor axis (row-parallel: input features).
    TensorCols,
    /// Expert dim over the expert axis; within an expert, each piece's rows over the expert-tensor axis.
    ExpertRows,
    /// Expert dim over the expert axis; within an expert, the last dim over the expert-tensor axis.
    ExpertCols,
}

/// Starting values when a model is initialised from its config alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// All ones (norm weights).
    Ones,
    /// All zeros (biases).
    Zeros,
}

/// A tensor as Hugging Face names it on disk, lying contiguously inside a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Name in the safetensors files, e.g. `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Its shape on disk.
    pub shape: Vec<usize>,
    /// Its elements within the flattened parameter.
    pub range: Range<usize>,
}

/// Declaration of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name in memory. Equal to the piece's name when there is one piece, else e.g. `model.layers.0.self_attn.qkv_proj.weight`.
    pub name: String,
    /// Shape in memory.
    pub shape: Vec<usize>,
    /// What it consists of on disk, in order and without gaps.
    pub pieces: Vec<Piece>,
    /// Another spelling on disk that holds several pieces at once (fused experts, transformers 5), tried when a piece is missing.
    pub fused: Option<Piece>,
    /// Division over ranks.
    pub shard: Shard,
    /// Whether weight decay applies (tensors of two or more dims on disk).
    pub decay: bool,
    /// Initialisation.
    pub init: Init,
}

impl Param {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Number of parameters of an architecture, all of them and those used for one token.
pub fn count(arch: &Arch, params: &[Param]) -> (u64, u64) {
    let total: usize = params.iter().map(Param::numel).sum();
    let idle: usize = params
        .iter()
        .filter(|p| matches!(p.shard, Shard::ExpertRows | Shard::ExpertCols))
        .map(|p| {
            let experts = arch.moe.as_ref().map_or(1, |m| m.experts);
            let used = arch.moe.as_ref().map_or(1, |m| m.top_k);
            p.numel() / experts * (experts - used)
        })
        .sum();
    (total as u64, (total - idle) as u64)
}
