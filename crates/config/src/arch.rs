//! [`Arch`]: what a Hugging Face `config.json` says about a network. Read by `hf`, checked there.

use serde::Serialize;

/// Families of decoder that temper runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelType {
    /// Llama (1 to 3 without RoPE scaling), SmolLM2.
    Llama,
    /// Qwen2 and Qwen2.5: bias on q, k, v.
    Qwen2,
    /// Qwen3 dense: RMSNorm on the heads of q and k.
    Qwen3,
    /// Qwen3 mixture of experts.
    Qwen3Moe,
}

/// The mixture-of-experts part of an architecture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moe {
    /// Number of experts E.
    pub experts: usize,
    /// Experts per token K.
    pub top_k: usize,
    /// Intermediate size of one expert.
    pub intermediate: usize,
    /// Whether the K weights are divided by their sum.
    pub normalise: bool,
    /// Layer i is sparse when (i + 1) is a multiple of this.
    pub sparse_step: usize,
    /// Layers that stay dense whatever `sparse_step` says.
    pub dense_layers: Vec<usize>,
    /// `router_aux_loss_coef` of the file.
    pub aux_coef: f64,
    /// `output_router_logits`: Hugging Face adds the auxiliary loss only when set.
    pub aux_in_loss: bool,
}

/// A decoder-only transformer, parsed and checked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arch {
    /// Family.
    pub model_type: ModelType,
    /// Hidden size H.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Query heads Nq.
    pub heads: usize,
    /// Key/value heads Nk; divides `heads`.
    pub kv_heads: usize,
    /// Head size D; even.
    pub head_dim: usize,
    /// Intermediate size of dense layers.
    pub intermediate: usize,
    /// Rows of the embedding V.
    pub vocab: usize,
    /// RMSNorm epsilon.
    pub norm_eps: f64,
    /// RoPE base.
    pub rope_theta: f64,
    /// Longest position the model was made for.
    pub max_positions: usize,
    /// Head shares the embedding's weight.
    pub tied: bool,
    /// Bias on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the output projection of attention.
    pub out_bias: bool,
    /// Bias on gate, up, down of dense layers.
    pub mlp_bias: bool,
    /// RMSNorm over the head dim of q and k.
    pub qk_norm: bool,
    /// Experts, for mixture-of-experts models.
    pub moe: Option<Moe>,
    /// Standard deviation of random initialisation.
    pub init_std: f64,
    /// `dtype` or `torch_dtype` of the file, as written there ("bfloat16").
    pub dtype: Option<String>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`, one or several.
    pub eos: Vec<u32>,
    /// Things worth telling the user that are not errors (a key that lost to another, a default taken).
    pub notices: Vec<String>,
}

impl Arch {
    /// Whether layer `i` has experts.
    pub fn is_moe_layer(&self, i: usize) -> bool {
        self.moe.as_ref().is_some_and(|m| !m.dense_layers.contains(&i) && (i + 1).is_multiple_of(m.sparse_step))
    }
}
