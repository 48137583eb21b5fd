//! Reads [`Arch`] from a Hugging Face `config.json`, with the names and defaults of transformers 4 and 5
//! (`configuration_{llama,qwen2,qwen3,qwen3_moe}.py` of 5.24) and a refusal, by name, of what temper does not run.

mod keys;
mod refuse;
mod rope;
mod shapes;

use crate::arch::{Arch, ModelType, Moe};
use crate::error::{Error, Result};
use keys::{Keys, shorten};
use serde_json::Value;
use std::path::Path;

/// Largest `config.json` that is read; real ones have a few kilobytes.
const MAX_BYTES: u64 = 16 << 20;
/// Most parameters that a config may describe; keeps every later product far inside 64 bits.
const MAX_PARAMS: u128 = 1 << 47;
/// Largest hidden size, vocabulary and so on: generous, and small enough that products of two fit.
const MAX_SIZE: usize = 1 << 24;

impl Arch {
    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// When the file cannot be read, is not JSON, or describes a network that temper does not run; the key is named.
    pub fn from_folder(dir: &Path) -> Result<Arch> {
        let path = dir.join("config.json");
        let io = Error::no_model(&path);
        let bytes = std::fs::metadata(&path).map_err(&io)?.len();
        if bytes > MAX_BYTES {
            let message = format!("{bytes} bytes; a model's config.json has at most {MAX_BYTES}");
            return Err(Error::Syntax { origin: path.display().to_string(), message });
        }
        let text = String::from_utf8(std::fs::read(&path).map_err(io)?).map_err(|e| Error::Syntax {
            origin: path.display().to_string(),
            message: format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to()),
        })?;
        Self::from_json(&text, &path)
    }

    /// Reads the text of a `config.json`; `origin` is what errors call it.
    ///
    /// # Errors
    /// As [`Arch::from_folder`].
    pub fn from_json(text: &str, origin: &Path) -> Result<Arch> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let value: Value = serde_json::from_str(text)
            .map_err(|e| Error::Syntax { origin: format!("{}:{}", origin.display(), e.line()), message: e.to_string() })?;
        let Value::Object(map) = &value else {
            let message = format!("found {}, expected the object of a config.json", shorten(&value));
            return Err(Error::Syntax { origin: origin.display().to_string(), message });
        };
        let keys = Keys::new(map, origin);
        let model_type = model_type(&keys)?;
        refuse::unsupported(&keys, model_type)?;
        Reader { keys: &keys, model_type, notices: Vec::new() }.arch()
    }
}

/// The families temper runs, by `model_type`.
const KNOWN: [(&str, ModelType); 4] =
    [("llama", ModelType::Llama), ("qwen2", ModelType::Qwen2), ("qwen3", ModelType::Qwen3), ("qwen3_moe", ModelType::Qwen3Moe)];

fn model_type(keys: &Keys) -> Result<ModelType> {
    let names = KNOWN.map(|(name, _)| name).join(", ");
    let Some(name) = keys.text("model_type")? else {
        return Err(keys.error("model_type", "missing", &format!("Give the family of the network, one of {names}.")));
    };
    if let Some((_, known)) = KNOWN.iter().find(|(k, _)| *k == name) {
        return Ok(*known);
    }
    // The hybrid families are on the way: say so rather than call them unknown.
    let soon = name == "qwen3_next" || name.starts_with("qwen3_5");
    let found = if soon { format!("\"{name}\" is not yet supported") } else { format!("unknown model_type \"{name}\"") };
    Err(keys.error("model_type", &found, &format!("temper runs {names}.")))
}

/// One pass over the keys; notices gather on the way.
struct Reader<'a> {
    keys: &'a Keys<'a>,
    model_type: ModelType,
    notices: Vec<String>,
}

impl Reader<'_> {
    fn arch(mut self) -> Result<Arch> {
        let keys = self.keys;
        let layers = keys.required("num_hidden_layers", 1..=10_000)?;
        let hidden = keys.required("hidden_size", 1..=1 << 20)?;
        let heads = keys.required("num_attention_heads", 1..=1 << 16)?;
        let vocab = keys.required("vocab_size", 1..=MAX_SIZE)?;
        let (kv_heads, head_dim) = (self.kv_heads(heads)?, self.head_dim(hidden, heads)?);
        refuse::sliding_window(keys, self.model_type, layers)?;
        let moe = if self.model_type == ModelType::Qwen3Moe { Some(self.moe(layers)?) } else { None };
        let (qkv_bias, out_bias, mlp_bias) = self.biases()?;
        let arch = Arch {
            model_type: self.model_type,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            intermediate: keys.required("intermediate_size", 1..=MAX_SIZE)?,
            vocab,
            norm_eps: self.or_default("rms_norm_eps", keys.float("rms_norm_eps", f64::MIN_POSITIVE..=1.0)?, 1e-6),
            rope_theta: rope::theta(keys, &mut self.notices)?,
            max_positions: self.max_positions()?,
            tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias,
            out_bias,
            mlp_bias,
            qk_norm: matches!(self.model_type, ModelType::Qwen3 | ModelType::Qwen3Moe),
            moe,
            init_std: keys.float("initializer_range", 0.0..=1e3)?.unwrap_or(0.02),
            dtype: self.dtype()?,
            bos: self.bos(vocab)?,
            eos: self.eos(vocab)?,
            notices: Vec::new(),
        };
        check_size(keys, &arch)?;
        Ok(Arch { notices: self.notices, ..arch })
    }

    /// The value read, or transformers' default with a notice.
    fn or_default<T: std::fmt::Display>(&mut self, key: &str, read: Option<T>, default: T) -> T {
        read.unwrap_or_else(|| {
            self.notices.push(format!("{key} is absent: {default}, transformers' default"));
            default
        })
    }

    fn kv_heads(&mut self, heads: usize) -> Result<usize> {
        let read = self.keys.count("num_key_value_heads", 1..=1 << 16)?;
        // A key that is there but null means as many as query heads; the class default is for absent keys.
        let default = match self.model_type {
            _ if self.keys.written("num_key_value_heads") => heads,
            ModelType::Llama => heads,
            ModelType::Qwen2 | ModelType::Qwen3 => 32,
            ModelType::Qwen3Moe => 4,
        };
        let kv_heads = self.or_default("num_key_value_heads", read, default);
        if !heads.is_multiple_of(kv_heads) {
            let found = format!("{kv_heads} key/value heads do not divide {heads} query heads (num_attention_heads)");
            return Err(self.keys.error("num_key_value_heads", &found, "Correct the one that is wrong."));
        }
        Ok(kv_heads)
    }

    fn head_dim(&mut self, hidden: usize, heads: usize) -> Result<usize> {
        let head_dim = match self.keys.count("head_dim", 1..=1 << 14)? {
            Some(given) => given,
            // transformers' Qwen3Config, alone of the four, has a class default; null is not absent.
            None if self.model_type == ModelType::Qwen3 && !self.keys.written("head_dim") => self.or_default("head_dim", None, 128),
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let found = format!("absent, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}");
                return Err(self.keys.error("head_dim", &found, "Give head_dim."));
            }
        };
        if !head_dim.is_multiple_of(2) {
            let found = format!("{head_dim} is odd, and rotary embeddings turn pairs");
            return Err(self.keys.error("head_dim", &found, "head_dim (or hidden_size / num_attention_heads) must be even."));
        }
        Ok(head_dim)
    }

    /// Bias on (q, k, v), on the output projection and in the MLP: fixed for Qwen2, `attention_bias` governs all four projections elsewhere.
    fn biases(&self) -> Result<(bool, bool, bool)> {
        if self.model_type == ModelType::Qwen2 {
            return Ok((true, false, false));
        }
        let attention = self.keys.flag("attention_bias")?.unwrap_or(false);
        let mlp = self.model_type == ModelType::Llama && self.keys.flag("mlp_bias")?.unwrap_or(false);
        Ok((attention, attention, mlp))
    }

    fn max_positions(&mut self) -> Result<usize> {
        let read = self.keys.count("max_position_embeddings", 1..=1 << 30)?;
        let default = if self.model_type == ModelType::Llama { 2048 } else { 32768 };
        Ok(self.or_default("max_position_embeddings", read, default))
    }

    fn moe(&mut self, layers: usize) -> Result<Moe> {
        let keys = self.keys;
        let experts = self.experts()?;
        let top_k = keys.count("num_experts_per_tok", 1..=1 << 16)?;
        let top_k = self.or_default("num_experts_per_tok", top_k, 8);
        if top_k > experts {
            let found = format!("{top_k} experts per token of {experts} experts");
            return Err(keys.error("num_experts_per_tok", &found, "It can be at most the number of experts."));
        }
        Ok(Moe {
            experts,
            top_k,
            intermediate: keys.required("moe_intermediate_size", 1..=MAX_SIZE)?,
            normalise: self.or_default("norm_topk_prob", keys.flag("norm_topk_prob")?, false),
            sparse_step: keys.count("decoder_sparse_step", 1..=1 << 16)?.unwrap_or(1),
            dense_layers: self.dense_layers(layers)?,
            aux_coef: keys.float("router_aux_loss_coef", 0.0..=1e6)?.unwrap_or(0.001),
            aux_in_loss: keys.flag("output_router_logits")?.unwrap_or(false),
        })
    }

    /// `num_experts` (transformers 4) or `num_local_experts` (5); both only when they agree.
    fn experts(&self) -> Result<usize> {
        const RANGE: std::ops::RangeInclusive<usize> = 1..=1 << 16;
        match (self.keys.count("num_experts", RANGE)?, self.keys.count("num_local_experts", RANGE)?) {
            (Some(old), Some(new)) if old != new => {
                let found = format!("num_experts is {old} but num_local_experts is {new}");
                Err(self.keys.error("num_experts", &found, "They are two names of one value: keep the right one."))
            }
            (Some(n), _) | (_, Some(n)) => Ok(n),
            (None, None) => Err(self.keys.error("num_experts", "missing, and so is num_local_experts", "Give one of them.")),
        }
    }

    fn dense_layers(&mut self, layers: usize) -> Result<Vec<usize>> {
        let mut dense = Vec::new();
        for item in self.keys.list("mlp_only_layers")?.into_iter().flatten() {
            match item.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(i) if i < layers => dense.push(i),
                Some(i) => self.notices.push(format!("mlp_only_layers names layer {i}, but there are {layers} layers: ignored")),
                None => return Err(self.keys.wrong("mlp_only_layers", item, "a list of layer numbers")),
            }
        }
        dense.sort_unstable();
        dense.dedup();
        Ok(dense)
    }

    fn dtype(&mut self) -> Result<Option<String>> {
        let strip = |name: &str| name.strip_prefix("torch.").unwrap_or(name).to_string();
        let new = self.keys.text("dtype")?.map(strip);
        let old = self.keys.text("torch_dtype")?.map(strip);
        if let (Some(new), Some(old)) = (&new, &old)
            && new != old
        {
            self.notices.push(format!("dtype is {new} but torch_dtype is {old}: {new} is taken"));
        }
        Ok(new.or(old))
    }

    fn bos(&mut self, vocab: usize) -> Result<Option<u32>> {
        match self.keys.get("bos_token_id") {
            Some(value) => self.token("bos_token_id", value, vocab),
            None => Ok(self.llama_default("bos_token_id", 1)),
        }
    }

    fn eos(&mut self, vocab: usize) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        match self.keys.get("eos_token_id") {
            Some(Value::Array(items)) => {
                for item in items {
                    ids.extend(self.token("eos_token_id", item, vocab)?);
                }
            }
            Some(value) => ids.extend(self.token("eos_token_id", value, vocab)?),
            None => ids.extend(self.llama_default("eos_token_id", 2)),
        }
        let mut seen = std::collections::HashSet::new();
        ids.retain(|id| seen.insert(*id));
        Ok(ids)
    }

    /// LlamaConfig has ids for absent keys (null still means none).
    fn llama_default(&self, key: &str, id: u32) -> Option<u32> {
        (self.model_type == ModelType::Llama && !self.keys.written(key)).then_some(id)
    }

    /// A token id; one outside the vocabulary can never occur and is left out with a notice.
    fn token(&mut self, key: &str, value: &Value, vocab: usize) -> Result<Option<u32>> {
        let Some(id) = value.as_i64() else {
            return Err(self.keys.wrong(key, value, "a token id or a list of them"));
        };
        match u32::try_from(id).ok().filter(|id| (*id as usize) < vocab) {
            Some(id) => Ok(Some(id)),
            None => {
                self.notices.push(format!("{key} {id} is outside the vocabulary of {vocab}: ignored"));
                Ok(None)
            }
        }
    }
}

/// Refuses sizes that no machine could hold before any code multiplies them.
fn check_size(keys: &Keys, arch: &Arch) -> Result<()> {
    let wide = |n: usize| n as u128;
    let attention = 2 * wide(arch.hidden) * wide(arch.head_dim) * (wide(arch.heads) + wide(arch.kv_heads));
    let mut mlp = 3 * wide(arch.hidden) * wide(arch.intermediate);
    if let Some(moe) = &arch.moe {
        mlp = mlp.max(wide(moe.experts) * wide(arch.hidden) * (3 * wide(moe.intermediate) + 1));
    }
    let params = wide(arch.layers) * (attention + mlp) + 2 * wide(arch.vocab) * wide(arch.hidden);
    if params > MAX_PARAMS {
        let found = format!("the sizes describe up to {:.1e} parameters", params as f64);
        let remedy =
            format!("At most {:.1e} are accepted: check hidden_size, num_hidden_layers and the intermediate sizes.", MAX_PARAMS as f64);
        return Err(keys.error("hidden_size", &found, &remedy));
    }
    Ok(())
}
