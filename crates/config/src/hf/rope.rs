//! RoPE: `rope_parameters` of transformers 5, `rope_theta` with `rope_scaling` of transformers 4.

use super::keys::{Keys, shorten};
use crate::error::Result;

/// transformers' base where a config gives none.
const DEFAULT_THETA: f64 = 10_000.0;
/// The objects that may hold RoPE values, the one that wins first.
const OBJECTS: [(&str, &str); 2] = [("rope_parameters", "rope_parameters."), ("rope_scaling", "rope_scaling.")];

/// The RoPE base; anything but plain RoPE is refused by name.
pub(super) fn theta(keys: &Keys, notices: &mut Vec<String>) -> Result<f64> {
    let mut found: Vec<(String, f64)> = Vec::new();
    for (name, prefix) in OBJECTS {
        if let Some(object) = keys.object(name, prefix)? {
            plain(keys, name, &object)?;
            found.extend(read(&object)?.map(|theta| (format!("{prefix}rope_theta"), theta)));
        }
    }
    found.extend(read(keys)?.map(|theta| ("rope_theta".to_string(), theta)));
    let Some((name, theta)) = found.first() else {
        notices.push(format!("rope_theta is absent: {DEFAULT_THETA}, transformers' default"));
        return Ok(DEFAULT_THETA);
    };
    for (other, value) in found.iter().filter(|(_, value)| value != theta) {
        notices.push(format!("{name} is {theta} but {other} is {value}: {theta} is taken, as transformers does"));
    }
    Ok(*theta)
}

fn read(keys: &Keys) -> Result<Option<f64>> {
    keys.float("rope_theta", 1.0..=1e12)
}

/// Refuses RoPE scaling (`rope_type`, or `type` in old files), values per layer type, and partial rotation.
fn plain(keys: &Keys, name: &str, object: &Keys) -> Result<()> {
    for key in ["rope_type", "type"] {
        if let Some(kind) = object.text(key)?
            && kind != "default"
        {
            let found = format!("RoPE type \"{kind}\" is not supported");
            return Err(object.error(key, &found, "temper runs plain RoPE (rope_type \"default\") only."));
        }
    }
    if let Some(layer_type) = object.names().find(|key| object.get(key).is_some_and(|v| v.is_object())) {
        let found = format!("values of its own for layers of type \"{layer_type}\" are not supported");
        return Err(keys.error(name, &found, "temper runs one RoPE for all layers."));
    }
    // A scaling factor without a type would change positions unseen.
    for key in ["factor", "short_factor", "long_factor", "attention_factor"] {
        if let Some(value) = object.get(key)
            && value.as_f64() != Some(1.0)
        {
            let found = format!("RoPE scaling by {} is not supported", shorten(value));
            return Err(object.error(key, &found, "temper runs plain RoPE (rope_type \"default\") only."));
        }
    }
    super::refuse::partial_rotary(object)
}
