//! Refusals by name: features that would make another network than the one temper computes.

use super::keys::{Keys, shorten};
use crate::arch::ModelType;
use crate::error::Result;
use serde_json::Value;

/// Keys that must be absent, null, false, 0 or empty, and what they would switch on.
const OFF: [(&str, &str); 6] = [
    ("quantization_config", "quantised weights"),
    ("compression_config", "compressed weights"),
    ("rope_interleaved", "RoPE on interleaved pairs"),
    ("attn_output_gate", "gated attention"),
    ("shared_expert_intermediate_size", "a shared expert"),
    ("is_encoder_decoder", "an encoder"),
];

/// Everything that can be refused without knowing sizes.
pub(super) fn unsupported(keys: &Keys, model_type: ModelType) -> Result<()> {
    for (key, what) in OFF {
        if let Some(value) = keys.get(key)
            && !is_off(value)
        {
            let found = format!("{what} ({}) is not supported", shorten(value));
            return Err(keys.error(key, &found, "Use a model without it, e.g. the unquantised original."));
        }
    }
    if let Some(name) = keys.text("hidden_act")?
        && !["silu", "swish"].contains(&name)
    {
        let found = format!("activation \"{name}\" is not supported");
        return Err(keys.error("hidden_act", &found, &format!("temper runs silu in {model_type:?}.")));
    }
    partial_rotary(keys)
}

/// `partial_rotary_factor`, wherever it stands: only whole heads are turned.
pub(super) fn partial_rotary(keys: &Keys) -> Result<()> {
    match keys.get("partial_rotary_factor") {
        Some(value) if value.as_f64() != Some(1.0) => {
            let found = format!("RoPE on a part of the head ({}) is not supported", shorten(value));
            Err(keys.error("partial_rotary_factor", &found, "temper turns whole heads (1.0)."))
        }
        _ => Ok(()),
    }
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Null => true,
        Value::String(_) => false,
    }
}

/// Refuses a network in which some layer would attend through a sliding window.
///
/// As in transformers: `layer_types` decides when present; else Qwen layers from `max_window_layers` on (all of them in
/// qwen3_moe) slide when `use_sliding_window` is true and `sliding_window` is not null.
pub(super) fn sliding_window(keys: &Keys, model_type: ModelType, layers: usize) -> Result<()> {
    const REMEDY: &str = "temper runs full attention only; set it to null if the window is not meant to be used.";
    if let Some(types) = keys.list("layer_types")? {
        if types.len() != layers {
            let found = format!("{} entries for {layers} layers (num_hidden_layers)", types.len());
            return Err(keys.error("layer_types", &found, "Give one entry a layer, or none at all."));
        }
        if let Some(other) = types.iter().find(|t| t.as_str() != Some("full_attention")) {
            let found = format!("layers of type {} are not supported", shorten(other));
            return Err(keys.error("layer_types", &found, "temper runs \"full_attention\" only."));
        }
    }
    let window = keys.get("sliding_window");
    let used = keys.flag("use_sliding_window")?;
    let in_use = match model_type {
        // The class knows no window, but a file that gives one comes from a network that has it (Mistral).
        ModelType::Llama => used.unwrap_or(window.is_some()),
        // In these the default window is 4096 when only the switch is given.
        ModelType::Qwen3Moe => used == Some(true) && (window.is_some() || !keys.written("sliding_window")),
        ModelType::Qwen2 | ModelType::Qwen3 => {
            let first = keys.count("max_window_layers", 0..=1 << 16)?.unwrap_or(28);
            let here = keys.get("layer_types").is_none() && first < layers;
            used == Some(true) && (window.is_some() || !keys.written("sliding_window")) && here
        }
    };
    if in_use {
        let size = window.map_or("4096".to_string(), shorten);
        return Err(keys.error("sliding_window", &format!("a sliding window of {size} is in use and not supported"), REMEDY));
    }
    Ok(())
}
