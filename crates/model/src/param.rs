//! What a parameter is: declared once, and everything else (loading, saving, resharding, the optimizer, the
//! planner, the parameter count) derives from the declaration.

use std::ops::Range;
use temper_config::Arch;

/// Name of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";

/// Index of a parameter in the model's declaration order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// How a parameter is divided over the ranks of a mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shard {
    /// Whole on every rank. Its gradient comes from the tokens that the rank has: with sequence parallelism each tensor rank has a
    /// part of the sum, without it all of it.
    Replicated,
    /// Whole on every rank. Each tensor rank always has a part of the sum that is its gradient: from its heads, experts or vocabulary.
    Shared,
    /// Each piece divided on its dim 0 over the tensor axis (column-parallel: output features, vocabulary rows).
    TensorRows,
    /// Divided on the last dim over the tensor axis (row-parallel: input features).
    TensorCols,
    /// Expert dim over the expert axis; within an expert, each piece's rows over the expert-tensor axis.
    ExpertRows,
    /// Expert dim over the expert axis; within an expert, the last dim over the expert-tensor axis.
    ExpertCols,
}

impl Shard {
    /// Whether it is a part of experts, which have axes of their own.
    pub fn is_expert(self) -> bool {
        matches!(self, Shard::ExpertRows | Shard::ExpertCols)
    }
}

/// A part of the network whose gradients become complete together, in the backward pass of the last micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Block {
    /// The embedding, with a tied head.
    Embedding,
    /// A decoder layer of the whole network.
    Layer(usize),
    /// Final norm and head.
    Head,
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

/// A tensor as Hugging Face names it on disk, or the part of it that this rank holds, lying contiguously inside a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Name in the safetensors files, e.g. `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Its whole shape on disk.
    pub shape: Vec<usize>,
    /// The part held here; absent: all of it.
    pub part: Option<Part>,
    /// Its elements (those of the part) within the flattened parameter.
    pub range: Range<usize>,
    /// All its elements within the flattened parameter of a model that is not divided.
    pub whole: Range<usize>,
    /// Dim 0 is divided between units of equal size only: heads, else single rows.
    pub units: usize,
    /// Neighbouring tensor ranks that hold this very part, each with a part of the sum that is its gradient.
    pub copies: usize,
}

/// A part of a tensor on disk: some indices of one dim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The dim.
    pub dim: usize,
    /// Its indices.
    pub range: Range<usize>,
}

/// Elements that follow each other both on disk and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First element within the whole tensor on disk.
    pub disk: usize,
    /// First element within the flattened parameter.
    pub memory: usize,
    /// Number of elements.
    pub len: usize,
}

impl Piece {
    /// A whole tensor that begins at element `start` of its parameter.
    pub fn new(name: impl Into<String>, shape: &[usize], start: usize) -> Piece {
        let range = start..start + shape.iter().product::<usize>();
        let units = shape.first().copied().unwrap_or(1);
        Piece { name: name.into(), shape: shape.into(), part: None, range: range.clone(), whole: range, units, copies: 1 }
    }

    /// The shape of what is held here.
    pub fn local_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(Part { dim, range }) = &self.part {
            shape[*dim] = range.len();
        }
        shape
    }

    /// What is held here, as runs of elements in order.
    pub fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        let (dim, range) = match &self.part {
            Some(part) => (part.dim, part.range.clone()),
            None => (0, 0..self.shape.first().copied().unwrap_or(1)),
        };
        let row: usize = self.shape.iter().skip(dim + 1).product();
        let whole = self.shape.get(dim).copied().unwrap_or(1) * row;
        let (len, memory) = (range.len() * row, self.range.start);
        let count = self.range.len().checked_div(len).unwrap_or(0);
        (0..count).map(move |i| Run { disk: i * whole + range.start * row, memory: memory + i * len, len })
    }
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
    /// This rank counts it in norms over the whole model: of several ranks that hold the same, one does.
    pub counted: bool,
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
    /// A whole parameter of consecutive pieces.
    pub fn new(name: impl Into<String>, shape: &[usize], pieces: Vec<Piece>, shard: Shard, init: Init) -> Param {
        let decay = pieces.iter().any(|p| p.shape.len() >= 2);
        Param { name: name.into(), shape: shape.into(), pieces, counted: true, fused: None, shard, decay, init }
    }

    /// The decoder layer it belongs to.
    pub fn layer(&self) -> Option<usize> {
        self.name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
    }

    /// The part of the network it belongs to.
    pub fn block(&self) -> Block {
        match self.layer() {
            Some(layer) => Block::Layer(layer),
            None if self.name == EMBEDDING => Block::Embedding,
            None => Block::Head,
        }
    }

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
        .filter(|p| p.shard.is_expert())
        .map(|p| {
            let experts = arch.moe.as_ref().map_or(1, |m| m.experts);
            let used = arch.moe.as_ref().map_or(1, |m| m.top_k);
            p.numel() / experts * (experts - used)
        })
        .sum();
    (total as u64, (total - idle) as u64)
}
