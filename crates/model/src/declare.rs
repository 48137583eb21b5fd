//! The declaration of every parameter of an architecture, and the way from a name on disk to its place in memory.
//!
//! Legend: H hidden size, V vocabulary, D head size, Nq query heads, Nk key/value heads, I intermediate size, E experts.

use crate::param::{Init, Param, ParamId, Piece, Shard};
use std::{collections::HashMap, ops::Range};
use temper_config::{Arch, Moe};

/// All parameters, in the order of the forward pass. A tied head has none of its own.
pub fn declare(arch: &Arch) -> Vec<Param> {
    let mut list = List { params: Vec::new(), normal: Init::Normal(arch.init_std) };
    list.matrix("model.embed_tokens.weight", &[arch.vocab, arch.hidden], Shard::TensorRows);
    for layer in 0..arch.layers {
        let prefix = format!("model.layers.{layer}");
        list.norm(&format!("{prefix}.input_layernorm.weight"), arch.hidden, Shard::Replicated);
        attention(&mut list, arch, &format!("{prefix}.self_attn"));
        list.norm(&format!("{prefix}.post_attention_layernorm.weight"), arch.hidden, Shard::Replicated);
        match &arch.moe {
            Some(moe) if arch.is_moe_layer(layer) => experts(&mut list, arch.hidden, moe, &format!("{prefix}.mlp")),
            _ => dense(&mut list, arch, &format!("{prefix}.mlp")),
        }
    }
    list.norm("model.norm.weight", arch.hidden, Shard::Shared);
    if !arch.tied {
        list.matrix("lm_head.weight", &[arch.vocab, arch.hidden], Shard::TensorRows);
    }
    list.params
}

/// `self_attn.*`: q, k and v lie in one matrix, so that one product makes all three.
fn attention(list: &mut List, arch: &Arch, at: &str) {
    let (q, kv) = (arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim);
    let rows = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
    let heads = [arch.heads, arch.kv_heads, arch.kv_heads];
    list.fused_rows(&format!("{at}.qkv_proj.weight"), at, &rows, Some(arch.hidden), Some(&heads));
    if arch.qkv_bias {
        list.fused_rows(&format!("{at}.qkv_proj.bias"), at, &rows, None, Some(&heads));
    }
    if arch.qk_norm {
        list.norm(&format!("{at}.q_norm.weight"), arch.head_dim, Shard::Shared);
        list.norm(&format!("{at}.k_norm.weight"), arch.head_dim, Shard::Shared);
    }
    list.matrix(&format!("{at}.o_proj.weight"), &[arch.hidden, q], Shard::TensorCols);
    if arch.out_bias {
        list.bias(&format!("{at}.o_proj.bias"), arch.hidden);
    }
}

/// `mlp.*` of a dense layer.
fn dense(list: &mut List, arch: &Arch, at: &str) {
    let rows = [("gate_proj", arch.intermediate), ("up_proj", arch.intermediate)];
    list.fused_rows(&format!("{at}.gate_up_proj.weight"), at, &rows, Some(arch.hidden), None);
    if arch.mlp_bias {
        list.fused_rows(&format!("{at}.gate_up_proj.bias"), at, &rows, None, None);
    }
    list.matrix(&format!("{at}.down_proj.weight"), &[arch.hidden, arch.intermediate], Shard::TensorCols);
    if arch.mlp_bias {
        list.bias(&format!("{at}.down_proj.bias"), arch.hidden);
    }
}

/// `mlp.*` of a layer of experts. In memory as transformers 5 holds them; on disk one matrix per expert, or fused.
fn experts(list: &mut List, hidden: usize, moe: &Moe, at: &str) {
    list.matrix(&format!("{at}.gate.weight"), &[moe.experts, hidden], Shard::Shared);
    let size = moe.intermediate;
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for e in 0..moe.experts {
        for proj in ["gate_proj", "up_proj"] {
            gate_up.push((format!("{at}.experts.{e}.{proj}.weight"), vec![size, hidden]));
        }
        down.push((format!("{at}.experts.{e}.down_proj.weight"), vec![hidden, size]));
    }
    let shape = vec![moe.experts, 2 * size, hidden];
    list.stacked(format!("{at}.experts.gate_up_proj"), shape, gate_up, Shard::ExpertRows);
    let shape = vec![moe.experts, hidden, size];
    list.stacked(format!("{at}.experts.down_proj"), shape, down, Shard::ExpertCols);
}

/// The declaration while it grows.
struct List {
    params: Vec<Param>,
    normal: Init,
}

impl List {
    fn push(&mut self, name: String, shape: Vec<usize>, parts: Vec<(String, Vec<usize>)>, shard: Shard, init: Init) {
        let mut end = 0;
        let pieces = parts.into_iter().map(|(name, shape)| {
            let piece = Piece::new(name, &shape, end);
            end = piece.range.end;
            piece
        });
        self.params.push(Param::new(name, &shape, pieces.collect(), shard, init));
    }

    fn single(&mut self, name: &str, shape: &[usize], shard: Shard, init: Init) {
        self.push(name.into(), shape.into(), vec![(name.into(), shape.into())], shard, init);
    }

    fn matrix(&mut self, name: &str, shape: &[usize], shard: Shard) {
        self.single(name, shape, shard, self.normal);
    }

    fn norm(&mut self, name: &str, size: usize, shard: Shard) {
        self.single(name, &[size], shard, Init::Ones);
    }

    /// The bias of a row-parallel product: added once, after the sum over ranks.
    fn bias(&mut self, name: &str, size: usize) {
        self.single(name, &[size], Shard::Replicated, Init::Zeros);
    }

    /// Several column-parallel matrices (or, without `cols`, biases) stacked by rows, divided between heads where there are any.
    fn fused_rows(&mut self, name: &str, at: &str, rows: &[(&str, usize)], cols: Option<usize>, heads: Option<&[usize]>) {
        let (suffix, init) = if cols.is_some() { ("weight", self.normal) } else { ("bias", Init::Zeros) };
        let shape = |n: usize| std::iter::once(n).chain(cols).collect::<Vec<_>>();
        let parts = rows.iter().map(|(proj, n)| (format!("{at}.{proj}.{suffix}"), shape(*n))).collect();
        let total = rows.iter().map(|(_, n)| n).sum();
        self.push(name.into(), shape(total), parts, Shard::TensorRows, init);
        if let (Some(param), Some(heads)) = (self.params.last_mut(), heads) {
            param.pieces.iter_mut().zip(heads).for_each(|(piece, heads)| piece.units = *heads);
        }
    }

    /// Experts stacked on dim 0; the fused spelling on disk is the name and shape in memory.
    fn stacked(&mut self, name: String, shape: Vec<usize>, parts: Vec<(String, Vec<usize>)>, shard: Shard) {
        let fused = Piece::new(name.clone(), &shape, 0);
        self.push(name, shape, parts, shard, self.normal);
        if let Some(param) = self.params.last_mut() {
            param.fused = Some(fused);
        }
    }
}

/// Where a named tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The parameter it belongs to.
    pub id: ParamId,
    /// Its elements within the flattened parameter.
    pub range: Range<usize>,
    /// Its shape under this name.
    pub shape: Vec<usize>,
}

/// Finds tensors by any of their names: a piece on disk, the fused spelling, or the name in memory.
pub struct Names {
    places: HashMap<String, Place>,
}

impl Names {
    /// The names of a declaration.
    pub fn new(params: &[Param]) -> Names {
        let mut places = HashMap::new();
        for (i, param) in params.iter().enumerate() {
            let whole = Piece::new(param.name.clone(), &param.shape, 0);
            for piece in param.pieces.iter().chain(&param.fused).chain([&whole]) {
                let place = Place { id: ParamId(i), range: piece.range.clone(), shape: piece.shape.clone() };
                places.insert(piece.name.clone(), place);
            }
        }
        Names { places }
    }

    /// Where `name` lies; `None` when the architecture has no such tensor.
    pub fn find(&self, name: &str) -> Option<&Place> {
        self.places.get(name)
    }

    /// The parameter whose name in memory (or on disk) is `name`.
    pub(crate) fn id(&self, name: &str) -> crate::Result<ParamId> {
        self.find(name).map(|p| p.id).ok_or_else(|| crate::Error::Undeclared(name.into()))
    }
}
