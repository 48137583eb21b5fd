//! From a folder to the tensors of a model: plan, check everything, then allocate and convert in parallel.

use crate::{
    Error, Result, WeightsFolder,
    convert::{CHUNK, Float, decode, host_dtype},
    error::some_of,
    safetensors::TensorRef,
};
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::HashSet;
use temper_model::param::{Param, Piece};
use temper_tensor::{DType, Tensor};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// One tensor on disk, and what of it belongs where in a parameter.
struct Source<'a> {
    tensor: TensorRef<'a>,
    dtype: DType,
    piece: &'a Piece,
    /// Element of the tensor at which the piece begins: not 0 in a fused tensor.
    first: usize,
}

impl WeightsFolder {
    /// Reads the parameters, in the order of `params`, as host tensors of `dtype` (F32, F64, BF16 or F16).
    /// A parameter is read from its pieces or, where one of them is missing, from its fused spelling.
    ///
    /// Returns the tensors and notices: tensors of the folder that the model has no use for, an output head that
    /// differs from the embedding it is tied to, leftovers beside the index.
    ///
    /// # Errors
    /// [`Error::Bad`], before anything is allocated: missing tensors, shapes or element types that do not fit.
    pub fn load(&self, params: &[Param], dtype: DType) -> Result<(Vec<Tensor>, Vec<String>)> {
        let mut used = HashSet::new();
        let plan = self.plan(params, &mut used)?;
        let mut notices = self.notices().to_vec();
        self.note_head(&used, &mut notices);
        self.note_unknown(&used, &mut notices);
        let tensors = match dtype {
            DType::F64 => read::<f64>(params, &plan),
            DType::F32 => read::<f32>(params, &plan),
            DType::BF16 => read::<bf16>(params, &plan),
            DType::F16 => read::<f16>(params, &plan),
            DType::I32 => return Err(Error::bad(self.dir(), "weights cannot be read as int32")),
        };
        Ok((tensors, notices))
    }

    /// Finds the sources of every parameter and checks them.
    fn plan<'a>(&'a self, params: &'a [Param], used: &mut HashSet<&'a str>) -> Result<Vec<Vec<Source<'a>>>> {
        let mut missing = Vec::new();
        let mut plan = Vec::with_capacity(params.len());
        for param in params {
            let mut sources = Vec::with_capacity(param.pieces.len());
            for (piece, spelling) in self.spelling(param) {
                match self.tensor(&spelling.name) {
                    Some(tensor) => {
                        used.insert(&spelling.name);
                        let first = piece.whole.start - spelling.whole.start;
                        sources.push(Source { dtype: self.check(spelling, &tensor)?, tensor, piece, first });
                    }
                    None => missing.push(spelling.name.as_str()),
                }
            }
            plan.push(sources);
        }
        if missing.is_empty() { Ok(plan) } else { Err(self.missing(&missing)) }
    }

    /// The pieces to read, each with the tensor that holds it: its own, or the fused one where one of its own is missing.
    fn spelling<'a>(&self, param: &'a Param) -> Vec<(&'a Piece, &'a Piece)> {
        let complete = param.pieces.iter().all(|p| self.tensor(&p.name).is_some());
        let fused = param.fused.as_ref().filter(|f| !complete && self.tensor(&f.name).is_some());
        let holds = |f: &Piece, p: &Piece| f.whole.start <= p.whole.start && p.whole.end <= f.whole.end;
        param.pieces.iter().map(|p| (p, fused.filter(|f| holds(f, p)).unwrap_or(p))).collect()
    }

    /// The element type of a tensor that has the shape it should have.
    fn check(&self, piece: &Piece, tensor: &TensorRef) -> Result<DType> {
        let name = &piece.name;
        if tensor.shape != piece.shape {
            let hint = self.shape_hint(name);
            let (found, wanted) = (&tensor.shape, &piece.shape);
            return Err(Error::bad(self.dir(), format!("{name} has shape {found:?}, the config asks for {wanted:?}; {hint}")));
        }
        host_dtype(tensor.dtype).ok_or_else(|| {
            let message =
                format!("{name} has dtype {}; BF16, F16, F32 and F64 can be read (quantised weights must be converted)", tensor.dtype);
            Error::bad(self.dir(), message)
        })
    }

    fn missing(&self, names: &[&str]) -> Error {
        let first = names.first().copied().unwrap_or_default();
        let remedy = match self.unlisted(first) {
            Some(shard) => format!("{shard} holds it, but the index does not list it; correct the index"),
            None if first == HEAD => {
                "the config does not tie it to the embedding (tie_word_embeddings); check that key, or download the folder again".into()
            }
            None => "the folder is incomplete or its config.json belongs to another model".into(),
        };
        let message = match names.len() {
            1 => format!("tensor {first} is missing: {remedy}"),
            n => format!("{n} tensors are missing: {}; {remedy}", some_of(names)),
        };
        Error::bad(self.dir(), message)
    }

    /// The keys of config.json that decide the shape of a tensor, as they stand there.
    fn shape_hint(&self, name: &str) -> String {
        let keys: &[&str] = if name.contains("self_attn") {
            &["head_dim", "num_attention_heads", "num_key_value_heads", "hidden_size"]
        } else if name.contains("experts") || name.contains("mlp.gate.") {
            &["num_experts", "num_local_experts", "moe_intermediate_size", "hidden_size"]
        } else if name.contains("mlp") {
            &["intermediate_size", "hidden_size"]
        } else {
            &["vocab_size", "hidden_size"]
        };
        let config = std::fs::read(self.dir().join("config.json")).ok();
        let config: Option<serde_json::Value> = config.and_then(|text| serde_json::from_slice(&text).ok());
        let Some(config) = config else { return format!("check {}", keys.join(", ")) };
        let said: Vec<String> = keys.iter().filter_map(|k| config.get(k).map(|v| format!("{k} {v}"))).collect();
        let unset: Vec<&str> = keys.iter().copied().filter(|k| config.get(k).is_none()).collect();
        let unset = if unset.is_empty() { String::new() } else { format!(" ({} not given there)", unset.join(", ")) };
        format!("check config.json, which says {}{unset}", said.join(", "))
    }

    /// A tied model's file may still hold the head (Qwen3-0.6B): nothing to say unless it differs.
    fn note_head<'a>(&'a self, used: &HashSet<&'a str>, notices: &mut Vec<String>) {
        if used.contains(HEAD) || !used.contains(EMBEDDING) {
            return;
        }
        if let (Some(head), Some(embedding)) = (self.tensor(HEAD), self.tensor(EMBEDDING))
            && head != embedding
        {
            notices.push(format!(
                "{}: {HEAD} differs from {EMBEDDING} but the config ties them (tie_word_embeddings); it was not read",
                self.dir().display()
            ));
        }
    }

    fn note_unknown(&self, used: &HashSet<&str>, notices: &mut Vec<String>) {
        let known = |n: &str| used.contains(n) || n.ends_with(".rotary_emb.inv_freq") || (n == HEAD && used.contains(EMBEDDING));
        let mut unknown: Vec<&str> = self.names().into_iter().chain(self.unlisted_names()).filter(|n| !known(n)).collect();
        unknown.sort_unstable();
        if !unknown.is_empty() {
            let n = unknown.len();
            notices.push(format!(
                "{}: {n} tensors have no place in this model and were not read: {}",
                self.dir().display(),
                some_of(&unknown)
            ));
        }
    }
}

/// Allocates and fills all parameters, a few thousand elements of one of them to a task.
fn read<T: Float>(params: &[Param], plan: &[Vec<Source<'_>>]) -> Vec<Tensor> {
    let mut data: Vec<Vec<T>> = params.iter().map(|p| vec![T::default(); p.numel()]).collect();
    let mut tasks: Vec<(DType, &[u8], &mut [T])> = Vec::new();
    for (whole, sources) in data.iter_mut().zip(plan) {
        let mut rest = whole.as_mut_slice();
        let mut at = 0;
        for s in sources {
            let size = s.dtype.size();
            for run in s.piece.runs() {
                let (_, tail) = std::mem::take(&mut rest).split_at_mut(run.memory - at);
                let (dst, tail) = tail.split_at_mut(run.len);
                (rest, at) = (tail, run.memory + run.len);
                let bytes = &s.tensor.bytes[(s.first + run.disk) * size..(s.first + run.disk + run.len) * size];
                tasks.extend(dst.chunks_mut(CHUNK).zip(bytes.chunks(CHUNK * size)).map(|(d, b)| (s.dtype, b, d)));
            }
        }
    }
    tasks.into_par_iter().for_each(|(dtype, bytes, dst)| decode(dtype, bytes, dst));
    data.into_iter().zip(params).map(|(d, p)| Tensor::from_vec(d, &p.shape)).collect()
}
