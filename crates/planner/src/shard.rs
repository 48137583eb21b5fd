//! Parameters of one rank: each declared parameter divided by its `Shard` rule.
//!
//! Key and value heads are the exception that the rule alone does not tell: with more tensor ranks than such heads, temper gives
//! each rank one whole head (copies, whose gradients are summed over the copies); Megatron divides the rows all the same and
//! gathers the activations (`attention.py`, "num_query_groups < world_size").

use crate::job::Account;
use crate::layout::Layout;
use crate::network::Network;
use crate::stages::Stage;
use serde::Serialize;
use temper_config::Arch;
use temper_model::param::{Param, Shard};

/// Where in the pipeline a parameter lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// First stage, beside the embedding.
    Vision,
    /// First stage.
    Embedding,
    /// The stage of this layer.
    Layer(usize),
    /// Last stage: final norm and output matrix.
    Head,
}

impl Place {
    /// The place of a parameter by its name in memory.
    pub fn of(name: &str) -> Place {
        if name.starts_with("model.visual.") {
            return Place::Vision;
        }
        if name == "model.embed_tokens.weight" {
            return Place::Embedding;
        }
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        layer.map_or(Place::Head, Place::Layer)
    }
}

/// Rows of a parameter that are divided together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    rows: usize,
    cols: usize,
    /// Key/value heads that the rows consist of, where they are keys or values.
    kv_heads: Option<usize>,
}

/// A parameter as far as sharding needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weight {
    shard: Shard,
    blocks: Vec<Block>,
    /// Size of the last dim, and how many such rows there are.
    last: usize,
    rows: usize,
    experts: usize,
}

impl Weight {
    fn new(arch: &Arch, param: &Param) -> Weight {
        let last = param.shape.last().copied().unwrap_or(1);
        let block = |shape: &[usize], name: &str| {
            let rows = shape.first().copied().unwrap_or(1);
            let is_kv = [".self_attn.k_proj.", ".self_attn.v_proj."].iter().any(|at| name.contains(at));
            Block { rows, cols: shape.iter().skip(1).product(), kv_heads: is_kv.then_some(arch.kv_heads) }
        };
        // The pieces of expert parameters are whole experts: the shape says enough, and there may be thousands of them.
        let blocks = match param.shard {
            Shard::TensorRows => param.pieces.iter().map(|p| block(&p.shape, &p.name)).collect(),
            _ => Vec::new(),
        };
        let experts = param.shape.first().copied().unwrap_or(1);
        Weight { shard: param.shard, blocks, last, rows: param.numel() / last.max(1), experts }
    }

    /// Elements on one rank. Rows that do not divide are padded.
    fn local(&self, layout: &Layout, account: Account) -> u64 {
        let tp = layout.tp;
        let elements = match self.shard {
            Shard::Replicated | Shard::Shared => self.rows * self.last,
            Shard::TensorCols => self.rows * self.last.div_ceil(tp),
            Shard::TensorRows => self.blocks.iter().map(|b| b.rows.div_ceil(divisor(b, tp, account)) * b.cols).sum(),
            Shard::ExpertRows | Shard::ExpertCols => {
                let one = self.rows / self.experts.max(1) * self.last;
                self.experts.div_ceil(layout.ep) * one.div_ceil(layout.etp)
            }
        };
        elements as u64
    }
}

/// Into how many parts the rows of a block are divided.
fn divisor(block: &Block, tp: usize, account: Account) -> usize {
    match (block.kv_heads, account) {
        (Some(heads), Account::Temper) => tp.min(heads).max(1),
        _ => tp,
    }
}

/// A layer's weights, shared by all layers that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Mixes tokens by linear attention.
    pub linear: bool,
    /// Has experts.
    pub experts: bool,
    weights: Vec<Weight>,
}

/// All weights of a network, by place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kinds {
    vision: Vec<Weight>,
    embedding: Vec<Weight>,
    head: Vec<Weight>,
    /// The output matrix is the embedding's.
    tied: bool,
    /// The kinds of layer.
    pub kinds: Vec<Kind>,
    /// The kind of each layer.
    pub of_layer: Vec<usize>,
}

impl Kinds {
    pub fn new(arch: &Arch, params: &[Param]) -> Kinds {
        let mut all = Kinds {
            vision: Vec::new(),
            embedding: Vec::new(),
            head: Vec::new(),
            tied: arch.tied,
            kinds: Vec::new(),
            of_layer: Vec::with_capacity(arch.layers),
        };
        let mut layers: Vec<Kind> = vec![Kind { linear: false, experts: false, weights: Vec::new() }; arch.layers];
        for param in params {
            let weight = Weight::new(arch, param);
            match Place::of(&param.name) {
                Place::Vision => all.vision.push(weight),
                Place::Embedding => all.embedding.push(weight),
                Place::Head => all.head.push(weight),
                Place::Layer(i) => {
                    if let Some(layer) = layers.get_mut(i) {
                        layer.linear |= param.name.contains(".linear_attn.");
                        layer.experts |= param.shard.is_expert();
                        layer.weights.push(weight);
                    }
                }
            }
        }
        for layer in layers {
            let at = all.kinds.iter().position(|kind| *kind == layer).unwrap_or_else(|| {
                all.kinds.push(layer);
                all.kinds.len() - 1
            });
            all.of_layer.push(at);
        }
        all
    }
}

/// Parameters of one rank, by what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankParams {
    /// Embedding, vision tower, and the embedding's copy where a tied output matrix sits on another stage.
    pub embedding: u64,
    /// Layers without their routed experts.
    pub layers: u64,
    /// Routed experts.
    pub experts: u64,
    /// Final norm and output matrix.
    pub head: u64,
}

impl RankParams {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.dense() + self.experts
    }

    /// All but the routed experts: what the ranks of tp x cp x dp share out.
    pub fn dense(&self) -> u64 {
        self.embedding + self.layers + self.head
    }

    /// Parameters whose optimizer state this rank keeps: the dense ones over dp x cp, the experts over their replicas (ZeRO-1).
    pub fn optimizer_shard(&self, layout: &Layout) -> u64 {
        let dp = layout.dp.saturating_mul(layout.cp).max(1) as u64;
        self.dense().div_ceil(dp) + self.experts.div_ceil(layout.expert_dp().max(1) as u64)
    }
}

/// What a rank handles of one parameter at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Largest {
    /// Elements of its largest parameter.
    pub param: u64,
    /// Elements of the largest piece of a parameter that it updates, at most: a bucket's share, or a parameter where that is smaller.
    pub segment: u64,
}

/// The largest of a rank of a stage. Buckets are those of `temper_parallel::Buckets`: a block of the network, its experts apart.
pub(crate) fn largest(network: &Network, layout: &Layout, stage: &Stage, account: Account) -> Largest {
    let all = &network.kinds;
    let mut largest = Largest::default();
    let mut bucket = |weights: &mut dyn Iterator<Item = &Weight>, replicas: usize| {
        let sizes: Vec<u64> = weights.map(|w| w.local(layout, account)).collect();
        let most = sizes.iter().copied().max().unwrap_or(0);
        let share = sizes.iter().sum::<u64>().div_ceil(replicas.max(1) as u64);
        largest = Largest { param: largest.param.max(most), segment: largest.segment.max(share.min(most)) };
    };
    let dp = layout.dp.saturating_mul(layout.cp);
    for (kind, _) in all.kinds.iter().zip(&stage.kinds).filter(|(_, count)| **count > 0) {
        bucket(&mut kind.weights.iter().filter(|w| !w.shard.is_expert()), dp);
        bucket(&mut kind.weights.iter().filter(|w| w.shard.is_expert()), layout.expert_dp());
    }
    if stage.first {
        bucket(&mut all.embedding.iter().chain(&all.vision), dp);
    }
    if stage.last {
        bucket(&mut all.head.iter(), dp);
        if all.tied && !stage.first {
            bucket(&mut all.embedding.iter(), dp);
        }
    }
    largest
}

/// Parameters of a rank of a stage; all ranks of a stage hold as many.
pub fn rank_params(network: &Network, layout: &Layout, stage: &Stage, account: Account) -> RankParams {
    let all = &network.kinds;
    let sum = |weights: &[Weight]| weights.iter().map(|w| w.local(layout, account)).sum::<u64>();
    let mut params = RankParams::default();
    for (kind, count) in all.kinds.iter().zip(&stage.kinds) {
        for weight in &kind.weights {
            let here = weight.local(layout, account) * *count as u64;
            match weight.shard.is_expert() {
                true => params.experts += here,
                false => params.layers += here,
            }
        }
    }
    if stage.first {
        params.embedding += sum(&all.embedding) + sum(&all.vision);
    }
    if stage.last {
        params.head += sum(&all.head);
        if all.tied && !stage.first {
            params.embedding += sum(&all.embedding);
        }
    }
    params
}
