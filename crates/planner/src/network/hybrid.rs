//! The hybrid families (Qwen3-Next, Qwen3.5, Qwen3.6): Gated DeltaNet layers among attention layers, gated attention, a shared
//! expert, a vision tower. Read and declared here until the engine runs them.
//!
//! Shapes as in transformers' `modeling_qwen3_next.py` and `modeling_qwen3_5{,_moe}.py`.
//!
//! Legend: H hidden size, Nk key heads and Nv value heads of a linear layer, Dk and Dv their sizes, C width of the convolution.

use super::json::{MAX_SIZE, Object, found};
use super::vision::{self, Vision};
use super::without_sizeless;
use crate::error::Result;
use serde_json::{Map, Value, json};
use std::path::Path;
use temper_config::Arch;
use temper_model::param::{Init, Param, Piece, Shard};

/// What a hybrid network has beside [`Arch`].
#[derive(Clone, Debug, PartialEq)]
pub struct Hybrid {
    /// `model_type` of the file.
    pub family: String,
    /// For each layer, whether it is a Gated DeltaNet layer.
    pub linear: Vec<bool>,
    /// Key (and query) heads Nk of a linear layer.
    pub key_heads: usize,
    /// Value heads Nv of a linear layer; a multiple of Nk.
    pub value_heads: usize,
    /// Size Dk of a key head.
    pub key_dim: usize,
    /// Size Dv of a value head.
    pub value_dim: usize,
    /// Width C of the causal convolution.
    pub conv: usize,
    /// Attention layers multiply their output by a gate, which doubles the rows of q.
    pub gated: bool,
    /// Intermediate size of the shared expert.
    pub shared_expert: Option<usize>,
    /// Vision tower.
    pub vision: Option<Vision>,
    /// Layers for multi-token prediction, not counted.
    pub mtp_layers: usize,
}

impl Hybrid {
    /// Rows of q or k of a linear layer.
    pub fn key_rows(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Rows of v or z of a linear layer.
    pub fn value_rows(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

/// Whether `model_type` names a hybrid family.
pub(super) fn is_hybrid(family: &str) -> bool {
    family == "qwen3_next" || family.starts_with("qwen3_5")
}

/// Reads a hybrid `config.json`: the sizes that it shares with Qwen3 through [`Arch`], the rest here.
pub(super) fn read(map: &Map<String, Value>, family: &str, origin: &Path) -> Result<(Arch, Hybrid)> {
    let top = Object { map, origin: origin.display().to_string(), prefix: "" };
    let nested = top.object("text_config", "text_config.")?;
    let text = nested.as_ref().unwrap_or(&top);
    let arch = Arch::from_json(&as_qwen3(text, &top).to_string(), origin)?;
    const HEADS: usize = 1 << 12;
    let (key_heads, value_heads) =
        (text.count("linear_num_key_heads", HEADS, Some(16))?, text.count("linear_num_value_heads", HEADS, Some(32))?);
    if !value_heads.is_multiple_of(key_heads) {
        let found = format!("{value_heads} value heads are not a multiple of {key_heads} key heads (linear_num_key_heads)");
        return Err(text.error("linear_num_value_heads", found, "Correct the one that is wrong."));
    }
    let vision = top.object("vision_config", "vision_config.")?.map(|object| vision::read(&object)).transpose()?;
    let shared_expert = match (&arch.moe, text.get("shared_expert_intermediate_size")) {
        (Some(_), Some(_)) => Some(text.count("shared_expert_intermediate_size", MAX_SIZE, None)?),
        _ => None,
    };
    let hybrid = Hybrid {
        family: family.to_string(),
        linear: linear_layers(text, arch.layers)?,
        key_heads,
        value_heads,
        key_dim: text.count("linear_key_head_dim", HEADS, Some(128))?,
        value_dim: text.count("linear_value_head_dim", HEADS, Some(128))?,
        conv: text.count("linear_conv_kernel_dim", 64, Some(4))?,
        gated: text.flag("attn_output_gate", true)?,
        shared_expert,
        vision,
        mtp_layers: text.get("mtp_num_hidden_layers").and_then(Value::as_u64).map_or(0, |n| n.min(64) as usize),
    };
    Ok((arch, hybrid))
}

/// The text part as a Qwen3 config, so that sizes are read and checked in one place.
fn as_qwen3(text: &Object, top: &Object) -> Value {
    let mut map = without_sizeless(text.map);
    let experts = ["num_experts", "num_local_experts"].iter().any(|key| text.get(key).is_some());
    map.insert("model_type".into(), json!(if experts { "qwen3_moe" } else { "qwen3" }));
    for key in ["attn_output_gate", "shared_expert_intermediate_size"] {
        map.remove(key);
    }
    if let (true, None, Some(size)) = (experts, text.get("intermediate_size"), text.get("moe_intermediate_size")) {
        map.insert("intermediate_size".into(), size.clone()); // every layer has experts: no layer uses it
    }
    if let (None, Some(tied)) = (text.get("tie_word_embeddings"), top.get("tie_word_embeddings")) {
        map.insert("tie_word_embeddings".into(), tied.clone());
    }
    Value::Object(map)
}

/// `layer_types`, else every layer but each `full_attention_interval`-th.
fn linear_layers(text: &Object, layers: usize) -> Result<Vec<bool>> {
    let Some(types) = text.list("layer_types")? else {
        let every = text.count("full_attention_interval", 1 << 16, Some(4))?;
        return Ok((1..=layers).map(|i| !i.is_multiple_of(every)).collect());
    };
    if types.len() != layers {
        let found = format!("{} entries for {layers} layers (num_hidden_layers)", types.len());
        return Err(text.error("layer_types", found, "Give one entry a layer, or none at all."));
    }
    let kind = |value: &Value| match value.as_str() {
        Some("linear_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(text.error("layer_types", found(value), "Expected \"linear_attention\" or \"full_attention\".")),
    };
    types.iter().map(kind).collect()
}

/// The parameters: those that `temper_model` declares for the Qwen3 of the same sizes, changed where the families differ.
pub(super) fn declare(arch: &Arch, hybrid: &Hybrid) -> Vec<Param> {
    let mut out = Vec::new();
    for mut param in temper_model::declare(arch) {
        let layer = param.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')?.0.parse::<usize>().ok());
        if layer.is_some_and(|i| hybrid.linear.get(i) == Some(&true)) && param.name.contains(".self_attn.") {
            if let Some(at) = param.name.strip_suffix(".self_attn.qkv_proj.weight") {
                out.extend(linear_attention(arch.hidden, hybrid, &format!("{at}.linear_attn")));
            }
            continue;
        }
        if hybrid.gated && param.name.contains(".self_attn.qkv_proj.") {
            double_first_piece(&mut param);
        }
        let shared = param.name.strip_suffix(".experts.down_proj").map(str::to_string).zip(hybrid.shared_expert);
        out.push(param);
        if let Some((at, size)) = shared {
            out.extend(shared_expert(arch.hidden, size, &at));
        }
    }
    if let Some(vision) = &hybrid.vision {
        out.extend(vision::declare(vision));
    }
    out
}

/// `linear_attn.*` of one layer.
fn linear_attention(hidden: usize, h: &Hybrid, at: &str) -> Vec<Param> {
    let (k, v, heads) = (h.key_rows(), h.value_rows(), h.value_heads);
    let matrix = |name: &str, rows: &[usize]| rows_param(&format!("{at}.{name}.weight"), rows, Some(hidden));
    let mut params = match h.family.as_str() {
        "qwen3_next" => vec![matrix("in_proj_qkvz", &[k, k, v, v]), matrix("in_proj_ba", &[heads, heads])],
        _ => {
            vec![matrix("in_proj_qkv", &[k, k, v]), matrix("in_proj_z", &[v]), matrix("in_proj_b", &[heads]), matrix("in_proj_a", &[heads])]
        }
    };
    params.extend([
        rows_param(&format!("{at}.conv1d.weight"), &[k, k, v], Some(h.conv)),
        rows_param(&format!("{at}.dt_bias"), &[heads], None),
        rows_param(&format!("{at}.A_log"), &[heads], None),
        param(&format!("{at}.norm.weight"), &[h.value_dim], Shard::Replicated),
        param(&format!("{at}.out_proj.weight"), &[hidden, v], Shard::TensorCols),
    ]);
    params
}

/// `shared_expert.*`: a dense SwiGLU and its gate.
fn shared_expert(hidden: usize, size: usize, at: &str) -> Vec<Param> {
    vec![
        rows_param(&format!("{at}.shared_expert.gate_up_proj.weight"), &[size, size], Some(hidden)),
        param(&format!("{at}.shared_expert.down_proj.weight"), &[hidden, size], Shard::TensorCols),
        param(&format!("{at}.shared_expert_gate.weight"), &[1, hidden], Shard::Replicated),
    ]
}

/// q of gated attention is, per head, the query and its gate.
fn double_first_piece(param: &mut Param) {
    let Some(first) = param.pieces.first_mut() else { return };
    let extra = first.range.len();
    if let Some(rows) = first.shape.first_mut() {
        *rows *= 2;
    }
    first.range.end += extra;
    first.whole = first.range.clone();
    for piece in param.pieces.iter_mut().skip(1) {
        piece.range = piece.range.start + extra..piece.range.end + extra;
        piece.whole = piece.range.clone();
    }
    let rows: usize = param.pieces.iter().filter_map(|p| p.shape.first()).sum();
    if let Some(first) = param.shape.first_mut() {
        *first = rows;
    }
}

/// One tensor.
pub(super) fn param(name: &str, shape: &[usize], shard: Shard) -> Param {
    let piece = Piece::new(name, shape, 0);
    let init = if shape.len() >= 2 { Init::Normal(0.02) } else { Init::Ones };
    Param::new(name, shape, vec![piece], shard, init)
}

/// Blocks of rows, each divided over the tensor axis on its own.
pub(super) fn rows_param(name: &str, blocks: &[usize], cols: Option<usize>) -> Param {
    let shape = |n: usize| std::iter::once(n).chain(cols).collect::<Vec<_>>();
    let mut whole = param(name, &shape(blocks.iter().sum()), Shard::TensorRows);
    let mut end = 0;
    let piece = |n: &usize| {
        let piece = Piece::new(name, &shape(*n), end);
        end = piece.range.end;
        piece
    };
    whole.pieces = blocks.iter().map(piece).collect();
    whole
}
