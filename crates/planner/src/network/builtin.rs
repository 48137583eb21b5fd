//! Models that can be planned by name, without a folder: the sizes that their publishers state, in files of our own.

use temper_config::Arch;

/// Name of each model, and its `config.json` where temper cannot train it under that name (else it is [`Arch::shape`]'s).
const MODELS: [(&str, Option<&str>); 17] = [
    ("Qwen3-0.6B", None),
    ("Qwen3-1.7B", None),
    ("Qwen3-4B", None),
    ("Qwen3-8B", None),
    ("Qwen3-14B", None),
    ("Qwen3-32B", None),
    ("Qwen3-30B-A3B", None),
    ("Qwen3-235B-A22B", None),
    ("Qwen3-Next-80B-A3B", Some(include_str!("../../models/qwen3-next-80b-a3b.json"))),
    ("Qwen3.5-27B", Some(include_str!("../../models/qwen3.5-27b.json"))),
    ("Qwen3.5-35B-A3B", Some(include_str!("../../models/qwen3.5-35b-a3b.json"))),
    ("Qwen3.5-397B-A17B", Some(include_str!("../../models/qwen3.5-397b-a17b.json"))),
    ("Qwen3.6-35B-A3B", Some(include_str!("../../models/qwen3.5-35b-a3b.json"))),
    ("Llama-3-8B", Some(include_str!("../../models/llama-3-8b.json"))),
    ("Llama-3.1-8B", Some(include_str!("../../models/llama-3-8b.json"))),
    ("Llama-3.1-70B", Some(include_str!("../../models/llama-3-70b.json"))),
    ("SmolLM2-135M", None),
];

/// Names of the models that [`crate::Network::builtin`] knows.
pub const BUILTIN: [&str; MODELS.len()] = {
    let mut names = [""; MODELS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = MODELS[i].0;
        i += 1;
    }
    names
};

/// The model of a name: without its owner, in any case, and for chat models without their suffix.
pub(super) fn find(name: &str) -> Option<(&'static str, String)> {
    let bare = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let bare = bare.strip_prefix("meta-").unwrap_or(&bare);
    let bare = ["-instruct", "-thinking", "-base"].iter().fold(bare, |name, suffix| name.strip_suffix(suffix).unwrap_or(name));
    let (known, own) = MODELS.iter().find(|(known, _)| known.to_lowercase() == bare)?;
    Some((known, own.map(str::to_string).or_else(|| Arch::shape(bare))?))
}
