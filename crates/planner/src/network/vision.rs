//! The vision tower of Qwen3.5 and Qwen3.6 (`model.visual.*`, transformers' `Qwen3_5VisionModel`). It is loaded, trained and
//! saved with the rest; text does not pass through it.

use super::hybrid::{param, rows_param};
use super::json::Object;
use crate::error::Result;
use temper_model::param::{Param, Shard};

/// Sizes of a vision tower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vision {
    depth: usize,
    hidden: usize,
    intermediate: usize,
    /// Elements of a patch: channels x frames x height x width.
    patch: usize,
    positions: usize,
    /// Width of the model that it feeds.
    out: usize,
    /// Patches merged into one token.
    merged: usize,
    /// Mergers of inner layers.
    deepstack: usize,
}

pub(super) fn read(object: &Object) -> Result<Vision> {
    const SIDE: usize = 1 << 10;
    let hidden = object.count("hidden_size", 1 << 16, None)?;
    let patch = object.count("patch_size", SIDE, Some(16))?;
    let merge = object.count("spatial_merge_size", 16, Some(2))?;
    Ok(Vision {
        depth: object.count("depth", 1 << 10, None)?,
        hidden,
        intermediate: object.count("intermediate_size", 1 << 18, None)?,
        patch: object.count("in_channels", 64, Some(3))? * object.count("temporal_patch_size", 64, Some(2))? * patch * patch,
        positions: object.count("num_position_embeddings", 1 << 20, Some(2304))?,
        out: object.count("out_hidden_size", 1 << 16, None)?,
        merged: merge * merge,
        deepstack: object.list("deepstack_visual_indexes")?.map_or(0, |items| items.len().min(1 << 10)),
    })
}

pub(super) fn declare(v: &Vision) -> Vec<Param> {
    let mut params = Vec::new();
    let linear = |name: String, blocks: &[usize], cols: usize, shard: Shard| {
        let rows: usize = blocks.iter().sum();
        match shard {
            Shard::TensorRows => {
                [rows_param(&format!("{name}.weight"), blocks, Some(cols)), rows_param(&format!("{name}.bias"), blocks, None)]
            }
            _ => [param(&format!("{name}.weight"), &[rows, cols], shard), param(&format!("{name}.bias"), &[rows], Shard::Replicated)],
        }
    };
    let norm = |name: String, size: usize| ["weight", "bias"].map(|part| param(&format!("{name}.{part}"), &[size], Shard::Replicated));
    let at = "model.visual";
    params.extend(linear(format!("{at}.patch_embed.proj"), &[v.hidden], v.patch, Shard::Replicated));
    params.push(param(&format!("{at}.pos_embed.weight"), &[v.positions, v.hidden], Shard::Replicated));
    for i in 0..v.depth {
        let at = format!("{at}.blocks.{i}");
        params.extend(norm(format!("{at}.norm1"), v.hidden));
        params.extend(norm(format!("{at}.norm2"), v.hidden));
        params.extend(linear(format!("{at}.attn.qkv"), &[v.hidden; 3], v.hidden, Shard::TensorRows));
        params.extend(linear(format!("{at}.attn.proj"), &[v.hidden], v.hidden, Shard::TensorCols));
        params.extend(linear(format!("{at}.mlp.linear_fc1"), &[v.intermediate], v.hidden, Shard::TensorRows));
        params.extend(linear(format!("{at}.mlp.linear_fc2"), &[v.hidden], v.intermediate, Shard::TensorCols));
    }
    let width = v.hidden * v.merged;
    let mut merger = |at: String, norm_size: usize| {
        params.extend(norm(format!("{at}.norm"), norm_size));
        params.extend(linear(format!("{at}.linear_fc1"), &[width], width, Shard::TensorRows));
        params.extend(linear(format!("{at}.linear_fc2"), &[v.out], width, Shard::TensorCols));
    };
    merger(format!("{at}.merger"), v.hidden);
    for i in 0..v.deepstack {
        merger(format!("{at}.deepstack_merger_list.{i}"), width);
    }
    params
}
