//! Models that can be planned by name, without a folder: the sizes that their publishers state, in files of our own.

/// Name and `config.json` of each model.
const MODELS: [(&str, &str); 17] = [
    ("Qwen3-0.6B", include_str!("../../models/qwen3-0.6b.json")),
    ("Qwen3-1.7B", include_str!("../../models/qwen3-1.7b.json")),
    ("Qwen3-4B", include_str!("../../models/qwen3-4b.json")),
    ("Qwen3-8B", include_str!("../../models/qwen3-8b.json")),
    ("Qwen3-14B", include_str!("../../models/qwen3-14b.json")),
    ("Qwen3-32B", include_str!("../../models/qwen3-32b.json")),
    ("Qwen3-30B-A3B", include_str!("../../models/qwen3-30b-a3b.json")),
    ("Qwen3-235B-A22B", include_str!("../../models/qwen3-235b-a22b.json")),
    ("Qwen3-Next-80B-A3B", include_str!("../../models/qwen3-next-80b-a3b.json")),
    ("Qwen3.5-27B", include_str!("../../models/qwen3.5-27b.json")),
    ("Qwen3.5-35B-A3B", include_str!("../../models/qwen3.5-35b-a3b.json")),
    ("Qwen3.5-397B-A17B", include_str!("../../models/qwen3.5-397b-a17b.json")),
    ("Qwen3.6-35B-A3B", include_str!("../../models/qwen3.5-35b-a3b.json")),
    ("Llama-3-8B", include_str!("../../models/llama-3-8b.json")),
    ("Llama-3.1-8B", include_str!("../../models/llama-3-8b.json")),
    ("Llama-3.1-70B", include_str!("../../models/llama-3-70b.json")),
    ("SmolLM2-135M", include_str!("../../models/smollm2-135m.json")),
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
pub(super) fn find(name: &str) -> Option<(&'static str, &'static str)> {
    let bare = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let bare = bare.strip_prefix("meta-").unwrap_or(&bare);
    let bare = ["-instruct", "-thinking", "-base"].iter().fold(bare, |name, suffix| name.strip_suffix(suffix).unwrap_or(name));
    MODELS.iter().find(|(known, _)| known.to_lowercase() == bare).copied()
}
