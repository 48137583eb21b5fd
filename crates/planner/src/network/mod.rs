//! [`Network`]: the model of a plan, read from a Hugging Face `config.json`, with every parameter as `temper_model` declares it.
//!
//! The planner counts more networks than temper trains today: those that the engine refuses are read with the features that
//! change no size left out (RoPE scaling, sliding windows, quantised copies), hybrid families by [`hybrid`]. Why the engine
//! refuses is kept in [`Network::refused`] and told with the plan.

mod builtin;
mod hybrid;
mod json;
mod vision;

use crate::error::{Error, Result};
use crate::shard::{Kinds, Place};
use serde_json::{Map, Value};
use std::path::Path;
use temper_config::Arch;
use temper_model::{declare, param::Param};

pub use builtin::BUILTIN;
pub use hybrid::Hybrid;

/// Largest `config.json` that is read; real ones have a few kilobytes.
const MAX_BYTES: u64 = 16 << 20;
/// Most experts of all layers together: each has names of its own in the declaration.
const MAX_EXPERTS: usize = 1 << 18;
/// Most parameters of a network; keeps every later product inside 64 bits.
const MAX_PARAMS: u64 = 1 << 47;
/// Keys that make another network to compute with, but none of another size.
const SIZELESS: [&str; 12] = [
    "rope_scaling",
    "rope_parameters",
    "rope_interleaved",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "quantization_config",
    "compression_config",
    "hidden_act",
    "rope_theta",
];

/// A model to plan for.
#[derive(Clone, Debug)]
pub struct Network {
    /// What the user called it.
    pub name: String,
    /// `model_type` of the file.
    pub family: String,
    /// Sizes of the transformer.
    pub arch: Arch,
    /// What the hybrid families have beside them.
    pub hybrid: Option<Hybrid>,
    /// Every parameter, in the order of the forward pass; the vision tower last.
    pub params: Vec<Param>,
    /// All parameters.
    pub total: u64,
    /// Parameters used for one token of text.
    pub active: u64,
    /// Why temper does not train this model today, in the engine's words.
    pub refused: Option<String>,
    /// Things worth telling that are not errors.
    pub notices: Vec<String>,
    /// The parameters, grouped for sharding.
    pub(crate) kinds: Kinds,
}

impl Network {
    /// A model that ships with temper, by name, e.g. `Qwen3-235B-A22B`; an owner before the name and capitals do not matter.
    pub fn builtin(name: &str) -> Option<Result<Network>> {
        let (known, text) = builtin::find(name)?;
        Some(Network::from_json(&text, Path::new(known)).map(|network| network.called(known)))
    }

    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// When the file cannot be read, is not JSON, or describes a network that temper cannot count; the key is named.
    pub fn from_folder(dir: &Path) -> Result<Network> {
        Network::from_file(&dir.join("config.json"))
    }

    /// Reads a `config.json` under any name.
    ///
    /// # Errors
    /// As [`Network::from_folder`].
    pub fn from_file(path: &Path) -> Result<Network> {
        let io = |source| Error::Config(temper_config::Error::no_model(path)(source));
        let bytes = std::fs::metadata(path).map_err(io)?.len();
        let syntax = |message| Error::Config(temper_config::Error::Syntax { origin: path.display().to_string(), message });
        if bytes > MAX_BYTES {
            return Err(syntax(format!("{bytes} bytes; a model's config.json has at most {MAX_BYTES}")));
        }
        let text = String::from_utf8(std::fs::read(path).map_err(io)?)
            .map_err(|e| syntax(format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))?;
        let network = Network::from_json(&text, path)?;
        Ok(network.called(&name_of(path)))
    }

    /// Reads the text of a `config.json`; `origin` is what errors call it.
    ///
    /// # Errors
    /// As [`Network::from_folder`].
    pub fn from_json(text: &str, origin: &Path) -> Result<Network> {
        let refusal = match Arch::from_json(text, origin) {
            Ok(arch) => return Network::new(arch, None, None, origin),
            Err(error) => error,
        };
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let Ok(Value::Object(map)) = serde_json::from_str::<Value>(text) else {
            return Err(refusal.into());
        };
        let family = map.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let why = Some(refusal.to_string());
        if hybrid::is_hybrid(family) {
            let (arch, hybrid) = hybrid::read(&map, family, origin)?;
            return Network::new(arch, Some(hybrid), why, origin);
        }
        match Arch::from_json(&Value::Object(without_sizeless(&map)).to_string(), origin) {
            Ok(arch) => Network::new(arch, None, why, origin),
            Err(_) => Err(refusal.into()),
        }
    }

    fn new(arch: Arch, hybrid: Option<Hybrid>, refused: Option<String>, origin: &Path) -> Result<Network> {
        let experts = arch.moe.as_ref().map_or(0, |m| m.experts);
        if arch.layers.saturating_mul(experts) > MAX_EXPERTS {
            let found = format!("{experts} experts in each of {} layers", arch.layers);
            let remedy = format!("At most {MAX_EXPERTS} experts in all are counted: check num_experts and num_hidden_layers.");
            return Err(Error::key(&origin.display().to_string(), "num_experts", found, remedy));
        }
        let params = match &hybrid {
            Some(hybrid) => hybrid::declare(&arch, hybrid),
            None => declare(&arch),
        };
        let kinds = Kinds::new(&arch, &params);
        let total: u128 = params.iter().map(|p| p.numel() as u128).sum();
        let Some(total) = u64::try_from(total).ok().filter(|n| *n <= MAX_PARAMS) else {
            let found = format!("the sizes describe {:.1e} parameters", total as f64);
            let remedy = format!("At most {:.1e} are accepted: check the sizes.", MAX_PARAMS as f64);
            return Err(Error::key(&origin.display().to_string(), "hidden_size", found, remedy));
        };
        let active = active(&arch, &params);
        // A default of RoPE changes no size.
        let mut notices: Vec<String> = arch.notices.iter().filter(|n| !n.starts_with("rope_theta")).cloned().collect();
        if let Some(n) = hybrid.as_ref().map(|h| h.mtp_layers).filter(|n| *n > 0) {
            notices.push(format!("{n} layer(s) for multi-token prediction (mtp.*) are not counted: fine-tuning leaves them out"));
        }
        let family = hybrid.as_ref().map_or_else(|| format!("{:?}", arch.model_type).to_lowercase(), |h| h.family.clone());
        Ok(Network { name: origin.display().to_string(), family, arch, hybrid, params, total, active, refused, notices, kinds })
    }

    /// The network of an architecture that the engine trains.
    ///
    /// # Errors
    /// When there are more parameters or experts than can be counted.
    pub fn of(arch: Arch, name: &str) -> Result<Network> {
        Network::new(arch, None, None, Path::new(name))
    }

    /// The same model under another name.
    pub fn called(self, name: &str) -> Network {
        Network { name: name.to_string(), ..self }
    }

    /// Whether layer `i` mixes tokens by linear attention instead of attention.
    pub fn is_linear(&self, i: usize) -> bool {
        self.hybrid.as_ref().is_some_and(|h| h.linear.get(i).copied().unwrap_or(false))
    }

    /// Number of layers with attention over all earlier tokens.
    pub fn attention_layers(&self) -> usize {
        (0..self.arch.layers).filter(|i| !self.is_linear(*i)).count()
    }
}

/// Parameters that one token of text meets: of the experts only those chosen, and no vision tower.
fn active(arch: &Arch, params: &[Param]) -> u64 {
    let share = |p: &Param| match (p.shard.is_expert(), &arch.moe) {
        (true, Some(moe)) => p.numel() as u64 / moe.experts as u64 * moe.top_k as u64,
        _ => p.numel() as u64,
    };
    params.iter().filter(|p| Place::of(&p.name) != Place::Vision).map(share).sum()
}

/// The object without the keys that change no size.
fn without_sizeless(map: &Map<String, Value>) -> Map<String, Value> {
    map.iter().filter(|(key, _)| !SIZELESS.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// The name of the model of a file: its folder's for a `config.json`, else what the file itself is called.
fn name_of(path: &Path) -> String {
    let text = |name: &std::ffi::OsStr| name.to_string_lossy().into_owned();
    let own = path.file_name().map_or_else(|| path.display().to_string(), text);
    match own.trim_end_matches(".json").trim_end_matches(".config") {
        "config" | "" => path.parent().and_then(Path::file_name).map_or(own, text),
        stem => stem.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_a_name_that_says_which_model_it_is() {
        for (path, name) in [
            ("/models/Qwen3-8B/config.json", "Qwen3-8B"),
            ("configs/Qwen3-8B.config.json", "Qwen3-8B"),
            ("mine.json", "mine"),
            ("config.json", "config.json"),
        ] {
            assert_eq!(name_of(Path::new(path)), name);
        }
    }
}
