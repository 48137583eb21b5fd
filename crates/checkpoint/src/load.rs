//! From a folder to the tensors of a model: plan, check everything, then allocate and read in parallel.

use crate::{
    Error, Result, WeightsFolder,
    convert::{host_dtype, zeros},
    error::some_of,
    safetensors::{File, TensorRef},
    store::Kind,
    transfer::{DataFile, Extent, Slot, Source, Traffic, fill},
};
use std::collections::{HashMap, HashSet};
use temper_model::param::{Param, Piece};
use temper_tensor::{DType, Tensor};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Bytes of a file read by one task: enough for any disk, and few enough for a cache to hold until they are converted.
const UNIT: u64 = 2 << 20;

/// Where the tensor of a piece lies.
struct Place {
    /// Number of the file.
    file: usize,
    /// Byte of the file at which the piece's tensor begins, whether it lies there by itself or within a fused one.
    at: u64,
    dtype: DType,
}

/// The places of the pieces of some parameters, by the parameters' names.
struct Places<'f> {
    folder: &'f WeightsFolder,
    by_param: HashMap<&'f str, Vec<Place>>,
}

impl WeightsFolder {
    /// Looks whether the folder has every tensor of a whole model, in its shape; nothing is read but headers. A parameter is there with
    /// its pieces or, where one of them is missing, with its fused spelling.
    ///
    /// Returns notices: tensors of the folder that the model has no use for, an output head that differs from the embedding it is tied
    /// to, leftovers beside the index.
    ///
    /// # Errors
    /// [`Error::Bad`]: missing tensors, shapes or element types that do not fit.
    pub fn check(&self, whole: &[Param]) -> Result<Vec<String>> {
        let mut used = HashSet::new();
        self.places(whole.iter(), &mut used)?;
        let mut notices = self.notices().to_vec();
        self.note_head(&used, &mut notices);
        self.note_unknown(&used, &mut notices);
        Ok(notices)
    }

    /// [`WeightsFolder::check`]s and reads a whole model, in the order of `params`, as host tensors of `dtype` (F32, F64, BF16 or F16).
    ///
    /// # Errors
    /// As there, before anything is allocated.
    pub fn load(&self, params: &[Param], dtype: DType) -> Result<(Vec<Tensor>, Vec<String>)> {
        let notices = self.check(params)?;
        if dtype == DType::I32 {
            return Err(Error::bad(self.dir(), "weights cannot be read as int32"));
        }
        let mut tensors: Vec<Tensor> = params.iter().map(|p| zeros(dtype, &p.shape)).collect();
        let slots = params.iter().zip(&mut tensors);
        let slots = slots.map(|(param, t)| Slot { kind: Kind::Weight, param, range: 0..param.numel(), into: t.view_mut() });
        let traffic = self.read(slots.collect())?;
        tracing::debug!("{}: {} bytes of weights at {:.2} GB/s", self.dir().display(), traffic.wanted, traffic.gb_per_s());
        Ok((tensors, notices))
    }

    /// Fills slots with parts of parameters, reading only the bytes that they need. The slots' kind is not looked at.
    ///
    /// # Errors
    /// As [`WeightsFolder::check`], of these parameters and before anything is read.
    pub fn read(&self, slots: Vec<Slot<'_>>) -> Result<Traffic> {
        let mut seen = HashSet::new();
        let params: Vec<&Param> = slots.iter().map(|s| s.param).filter(|p| seen.insert(p.name.as_str())).collect();
        let places = self.places(params.into_iter(), &mut HashSet::new())?;
        fill(&places, slots)
    }

    /// Finds the tensors of every parameter and checks them.
    fn places<'a>(&'a self, params: impl Iterator<Item = &'a Param>, used: &mut HashSet<&'a str>) -> Result<Places<'a>> {
        let mut missing = Vec::new();
        let mut by_param = HashMap::new();
        for param in params {
            let mut places = Vec::with_capacity(param.pieces.len());
            for (piece, spelling) in self.spelling(param) {
                match (self.tensor(&spelling.name), self.location(&spelling.name)) {
                    (Some(tensor), Some((file, at))) => {
                        used.insert(&spelling.name);
                        let dtype = self.dtype_in_shape(spelling, &tensor)?;
                        let first = piece.whole.start - spelling.whole.start;
                        places.push(Place { file, at: at + (first * dtype.size()) as u64, dtype });
                    }
                    _ => missing.push(spelling.name.as_str()),
                }
            }
            by_param.insert(param.name.as_str(), places);
        }
        if missing.is_empty() { Ok(Places { folder: self, by_param }) } else { Err(self.missing(&missing)) }
    }

    /// The pieces to read, each with the tensor that holds it: its own, or the fused one where one of its own is missing.
    fn spelling<'a>(&self, param: &'a Param) -> Vec<(&'a Piece, &'a Piece)> {
        let complete = param.pieces.iter().all(|p| self.tensor(&p.name).is_some());
        let fused = param.fused.as_ref().filter(|f| !complete && self.tensor(&f.name).is_some());
        let holds = |f: &Piece, p: &Piece| f.whole.start <= p.whole.start && p.whole.end <= f.whole.end;
        param.pieces.iter().map(|p| (p, fused.filter(|f| holds(f, p)).unwrap_or(p))).collect()
    }

    /// The element type of a tensor that has the shape it should have.
    fn dtype_in_shape(&self, piece: &Piece, tensor: &TensorRef) -> Result<DType> {
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

impl Source for Places<'_> {
    fn unit(&self) -> u64 {
        UNIT
    }

    fn extents(&self, _: Kind, param: &Param, index: usize) -> Result<Vec<Extent>> {
        let place = self.by_param.get(param.name.as_str()).and_then(|places| places.get(index));
        let len = param.pieces.get(index).map_or(0, |p| p.shape.iter().product());
        Ok(place.map(|Place { file, at, dtype }| Extent { file: *file, at: *at, dtype: *dtype, disk: 0, len }).into_iter().collect())
    }

    fn file(&self, file: usize) -> Result<DataFile<'_>> {
        let file = self.folder.files().get(file).ok_or_else(|| Error::bad(self.folder.dir(), "no such file"))?;
        Ok(DataFile { path: file.path(), file: file.handle(), bytes: file.len(), checks: None })
    }

    fn damaged(&self, file: usize, _: usize) -> Error {
        Error::bad(self.folder.files().get(file).map_or(self.folder.dir(), File::path), "is damaged")
    }

    fn absent(&self, _: Kind, param: &Param, _: usize, element: usize) -> Error {
        Error::bad(self.folder.dir(), format!("element {element} of {} lies nowhere", param.name))
    }
}
