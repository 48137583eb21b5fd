//! The small files beside the weights that make a folder a model: config, generation config, tokenizer, template.

use crate::{Error, Result, disk::Disk, disk::Written, folder::INDEX};
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;
use std::{
    fmt,
    path::{Path, PathBuf},
};
use temper_tensor::DType;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const GENERATION: &str = "generation_config.json";

/// Files that belong to a tokenizer, in every spelling that transformers reads.
pub(crate) const TOKENIZER: [&str; 13] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "additional_chat_templates",
];

/// No side file is larger (the largest tokenizers have 40 MB).
const MAX_SIDE: u64 = 1 << 30;

/// Where the side files of a model come from.
#[derive(Clone, Debug)]
pub struct Sidecar {
    /// Folder with config.json and perhaps generation_config.json. Need not hold weights.
    pub model_dir: PathBuf,
    /// Folder with the tokenizer files; the same one, or the tokenizer that was used in place of the model's own.
    pub tokenizer_dir: PathBuf,
    /// Token ids that end a turn and must be in `eos_token_id` of generation_config.json, besides those already there.
    pub extra_eos: Vec<u32>,
}

impl Sidecar {
    /// The files of a folder that has them all, unchanged.
    pub fn of_folder(dir: &Path) -> Sidecar {
        Sidecar { model_dir: dir.to_path_buf(), tokenizer_dir: dir.to_path_buf(), extra_eos: Vec::new() }
    }

    /// The element type that config.json names, if it is one of the four float types.
    pub fn dtype(&self) -> Result<Option<DType>> {
        let path = self.model_dir.join(CONFIG);
        let config = Object::parse(&path, &read(&path)?)?;
        let named = config.get("dtype").or_else(|| config.get("torch_dtype")).and_then(|v| serde_json::from_str::<String>(v).ok());
        Ok(named.and_then(|n| float_named(n.trim_start_matches("torch."))))
    }

    /// Writes the files to `dir`, config.json naming `dtype` as the type of the weights.
    pub(crate) fn write(&self, disk: &Disk, dir: &Path, dtype: DType) -> Result<Vec<Written>> {
        let mut written = vec![disk.write(&dir.join(CONFIG), &self.config(dtype)?)?];
        if let Some(text) = self.generation_config()? {
            written.push(disk.write(&dir.join(GENERATION), &text)?);
        }
        for name in TOKENIZER {
            let from = self.tokenizer_dir.join(name);
            if from.is_file() {
                written.push(disk.write(&dir.join(name), &read(&from)?)?);
            } else if from.is_dir() {
                written.extend(self.write_templates(disk, &from, &dir.join(name), name)?);
            }
        }
        Ok(written)
    }

    /// Named templates lie in a folder of their own.
    fn write_templates(&self, disk: &Disk, from: &Path, to: &Path, prefix: &str) -> Result<Vec<Written>> {
        disk.create_dir(to)?;
        let mut written = Vec::new();
        for file in crate::disk::list(from)? {
            let Some(name) = file.file_name().filter(|_| file.is_file()) else { continue };
            let mut entry = disk.write(&to.join(name), &read(&file)?)?;
            entry.name = format!("{prefix}/{}", entry.name);
            written.push(entry);
        }
        disk.sync_dir(to)?;
        Ok(written)
    }

    /// config.json as it stands but for the type of the weights.
    fn config(&self, dtype: DType) -> Result<Vec<u8>> {
        let path = self.model_dir.join(CONFIG);
        let mut config = Object::parse(&path, &read(&path)?)?;
        let value = format!("\"{}\"", dtype.name());
        // transformers 4 writes torch_dtype, 5 writes dtype; both read the former.
        let present: Vec<&str> = ["dtype", "torch_dtype"].into_iter().filter(|k| config.get(k).is_some()).collect();
        for key in if present.is_empty() { vec!["torch_dtype"] } else { present } {
            config.set(key, value.clone());
        }
        Ok(config.text())
    }

    /// generation_config.json with the extra end tokens; `None` when there is none and none is needed.
    fn generation_config(&self) -> Result<Option<Vec<u8>>> {
        let path = self.model_dir.join(GENERATION);
        let old = if path.is_file() { Some(read(&path)?) } else { None };
        if self.extra_eos.is_empty() {
            return Ok(old);
        }
        let config_path = self.model_dir.join(CONFIG);
        let config = Object::parse(&config_path, &read(&config_path)?)?;
        let mut generation = match &old {
            Some(text) => Object::parse(&path, text)?,
            None => {
                Object::of(["bos_token_id", "pad_token_id"].into_iter().filter_map(|k| Some((k, config.get(k).filter(|v| *v != "null")?))))
            }
        };
        let said = generation.get("eos_token_id").filter(|v| *v != "null").or_else(|| config.get("eos_token_id"));
        let mut eos = said
            .map_or(Ok(Vec::new()), ids)
            .map_err(|found| Error::bad(&path, format!("eos_token_id is {found}; a token id or a list of them is needed")))?;
        let before = eos.len();
        for id in &self.extra_eos {
            if !eos.contains(id) {
                eos.push(*id);
            }
        }
        if let (Some(text), true) = (old, eos.len() == before && generation.get("eos_token_id").is_some_and(|v| v != "null")) {
            return Ok(Some(text));
        }
        let list = eos.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        generation.set("eos_token_id", if eos.len() == 1 { list } else { format!("[{list}]") });
        Ok(Some(generation.text()))
    }
}

/// The float type of a name such as `bfloat16`.
pub(crate) fn float_named(name: &str) -> Option<DType> {
    [DType::F32, DType::BF16, DType::F16, DType::F64].into_iter().find(|d| d.name() == name)
}

/// One id, several, or none.
fn ids(value: &str) -> std::result::Result<Vec<u32>, String> {
    let one = serde_json::from_str::<u32>(value).map(|id| vec![id]);
    let several = one.or_else(|_| serde_json::from_str::<Vec<u32>>(value));
    several.or_else(|e| if value == "null" { Ok(Vec::new()) } else { Err(e) }).map_err(|_| value.to_string())
}

/// Whether a file belongs to a model: replaced by an export that overwrites, never kept beside new weights.
pub(crate) fn is_model_file(name: &str) -> bool {
    let whole = [CONFIG, GENERATION, INDEX, "adapter_config.json", "tf_model.h5", "flax_model.msgpack"];
    let weights = ["pytorch_model", "adapter_model", "consolidated"]
        .iter()
        .any(|stem| name.starts_with(stem) && [".bin", ".bin.index.json", ".pt", ".pth"].iter().any(|end| name.ends_with(end)));
    whole.contains(&name)
        || TOKENIZER.contains(&name)
        || weights
        || name.ends_with(".safetensors")
        || name.ends_with(".safetensors.index.json")
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let length = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
    if length > MAX_SIDE {
        return Err(Error::bad(path, format!("{length} bytes are too many for this file (the limit is {MAX_SIDE})")));
    }
    std::fs::read(path).map_err(Error::io("read", path))
}

/// A JSON object whose values are kept as the text they were given in.
struct Object {
    pairs: Vec<(String, String)>,
}

impl Object {
    fn parse(path: &Path, text: &[u8]) -> Result<Object> {
        serde_json::from_slice(text).map_err(|e| Error::bad(path, format!("not a JSON object: {e}")))
    }

    fn of<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Object {
        Object { pairs: pairs.map(|(k, v)| (k.to_string(), v.to_string())).collect() }
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.pairs.iter().find(|p| p.0 == key).map(|p| p.1.as_str())
    }

    fn set(&mut self, key: &str, value: String) {
        match self.pairs.iter_mut().find(|p| p.0 == key) {
            Some(pair) => pair.1 = value,
            None => self.pairs.push((key.to_string(), value)),
        }
    }

    fn text(&self) -> Vec<u8> {
        let lines: Vec<String> = self.pairs.iter().map(|(k, v)| format!("  {}: {v}", serde_json::Value::from(k.as_str()))).collect();
        format!("{{\n{}\n}}\n", lines.join(",\n")).into_bytes()
    }
}

impl<'de> serde::Deserialize<'de> for Object {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Object;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Object, A::Error> {
                let mut object = Object { pairs: Vec::new() };
                while let Some((key, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    object.set(&key, value.get().to_string());
                }
                Ok(object)
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
