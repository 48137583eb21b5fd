//! The nearest known key for one that is not known.

use crate::section::Key;
use crate::tree::Value;

/// Names that other trainers give to keys of ours, where the letters alone would mislead.
const ELSEWHERE: &[(&str, &str)] = &[
    ("adam_beta1", "optim.betas"),
    ("adam_beta2", "optim.betas"),
    ("adam_epsilon", "optim.eps"),
    ("assistant_only_loss", "data.loss"),
    ("base_model", "model.path"),
    ("bf16", "precision.dtype"),
    ("clip_grad", "optim.clip"),
    ("cutoff_len", "data.seq_len"),
    ("dataset", "data.train"),
    ("dtype", "precision.dtype"),
    ("effective_batch_size", "train.global_batch"),
    ("gradient_accumulation_steps", "train.global_batch"),
    ("gradient_checkpointing", "memory.recompute"),
    ("gradient_clipping", "optim.clip"),
    ("learning_rate", "optim.lr"),
    ("logging_steps", "log.every"),
    ("lr_scheduler_type", "optim.schedule"),
    ("max_grad_norm", "optim.clip"),
    ("max_length", "data.seq_len"),
    ("max_seq_length", "data.seq_len"),
    ("max_steps", "train.steps"),
    ("model_name_or_path", "model.path"),
    ("num_epochs", "train.epochs"),
    ("num_train_epochs", "train.epochs"),
    ("output_dir", "log.dir"),
    ("per_device_train_batch_size", "train.micro_batch"),
    ("recompute_granularity", "memory.recompute"),
    ("save_every", "checkpoint.every"),
    ("save_freq", "checkpoint.every"),
    ("save_interval", "checkpoint.every"),
    ("save_steps", "checkpoint.every"),
    ("save_total_limit", "checkpoint.keep_last"),
    ("sequence_len", "data.seq_len"),
    ("sequence_length", "data.seq_len"),
    ("train_iters", "train.steps"),
    ("warmup_ratio", "optim.warmup"),
    ("warmup_steps", "optim.warmup"),
    ("world_size", "parallel.dp"),
];

/// The remedy for an unknown key of a known section.
pub(crate) fn key(section: &str, name: &str, keys: &[Key]) -> String {
    let of_section = keys.iter().filter(|key| key.section == section).map(|key| key.name).collect::<Vec<_>>().join(", ");
    let meant = nearest(Some(section), name, keys).map_or_else(String::new, |key| format!("Did you mean {key}? "));
    format!("{meant}[{section}] has {of_section}.")
}

/// The remedy for an unknown section, or for a key outside any section.
pub(crate) fn section(name: &str, value: &Value, keys: &[Key]) -> String {
    let mut sections: Vec<&str> = keys.iter().map(|key| key.section).collect();
    sections.dedup();
    if !matches!(value, Value::Table(_)) {
        return match nearest(None, name, keys) {
            Some(key) => {
                let (section, _) = key.split_once('.').unwrap_or((&key, ""));
                format!("Did you mean {key}? Keys stand below their section, here [{section}].")
            }
            None => format!("Keys stand below their section; the sections are {}.", sections.join(", ")),
        };
    }
    let near = |section: &str| strsim::jaro_winkler(section, name);
    let nearest = sections.iter().filter(|section| near(section) >= NEAR).max_by(|a, b| near(a).total_cmp(&near(b)));
    let meant = nearest.map_or_else(String::new, |section| format!("Did you mean [{section}]? "));
    format!("{meant}The sections are {}.", sections.join(", "))
}

/// Below this likeness of letters (of 1) a name is not meant.
const NEAR: f64 = 0.7;

/// The key that is meant, if any is near.
fn nearest(section: Option<&str>, name: &str, keys: &[Key]) -> Option<String> {
    let lower = name.to_lowercase().replace('-', "_");
    if let Some((_, ours)) = ELSEWHERE.iter().find(|(theirs, _)| *theirs == lower) {
        return Some(ours.to_string());
    }
    // A right name in the wrong section beats a similar name in the right one; among equals the section decides.
    let letters = |key: &Key| strsim::jaro_winkler(key.name, &lower).max(strsim::normalized_damerau_levenshtein(key.name, &lower));
    let score = |key: &Key| letters(key) + if section == Some(key.section) { 0.1 } else { 0.0 };
    keys.iter().filter(|key| letters(key) >= NEAR).max_by(|a, b| score(a).total_cmp(&score(b))).map(Key::path)
}
