//! A model as a Hugging Face folder. The whole folder is made beside its final place, synced, and put there in one step,
//! so that whoever looks sees the old model or the new one and never a mixture, wherever a kill falls.

use crate::{
    Error, Result, Sidecar, Store, WeightsFolder,
    convert::stored_dtype,
    disk::{Disk, Hook, list, sibling},
    safetensors::{Data, Far, Item, TensorRef, Want, write_sharded},
    sidecar::is_model_file,
    store::{Checkpoint, Kind, Manifest, base_dtype},
    transfer::Slot,
};
use std::path::{Path, PathBuf};
use temper_model::param::{Init, Param, Piece, Shard};
use temper_tensor::{DType, View};

/// How to export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Type of the weights (F32, BF16, F16); none is the one that the model came in (`dtype` of its config.json), or else F32.
    pub dtype: Option<DType>,
    /// Most bytes of tensors in one file; 5 GB, as transformers.
    pub max_shard_bytes: u64,
    /// Replace the model in a folder that is not empty. Files that belong to no model are kept.
    pub overwrite: bool,
    /// For tests: called before every change to the disk.
    pub hook: Option<Hook>,
}

impl Default for ExportOptions {
    fn default() -> Self {
        ExportOptions { dtype: None, max_shard_bytes: 5_000_000_000, overwrite: false, hook: None }
    }
}

/// Writes the parameters with their config, tokenizer and generation config as a folder that transformers loads.
///
/// # Errors
/// [`Error::Bad`] when the folder is not empty and `overwrite` is not set (it is left untouched), or the side files cannot be
/// used; [`Error::Io`] when the disk refuses, with the target as it was.
pub fn export(out: &Path, params: &[Param], weights: &[View<'_>], sidecar: &Sidecar, options: &ExportOptions) -> Result<()> {
    let items = items_of("", params, weights, out)?;
    write_folder(out, &items, sidecar, options).map(|_| ())
}

/// Exports the weights of a step checkpoint, whoever saved it. Needs nothing but its folder. Weights pass through buffers of fixed
/// size. Those of several ranks are checked as they are read; those of one rank the caller has verified. Returns the bytes of weights
/// written.
///
/// # Errors
/// As [`export`] and [`Checkpoint::open`].
pub fn export_checkpoint(step_dir: &Path, out: &Path, options: &ExportOptions) -> Result<u64> {
    let checkpoint = Checkpoint::open(step_dir)?;
    let dtype = match options.dtype {
        Some(dtype) => Some(dtype),
        None => base_dtype(step_dir)?,
    };
    let options = ExportOptions { dtype, ..options.clone() };
    let sidecar = Sidecar::of_folder(step_dir);
    if let Some(weights) = checkpoint.sharded_weights() {
        let items = weights.into_iter().map(|(name, shape, dtype)| Item {
            name: name.into(),
            dtype: stored_dtype(dtype),
            shape: shape.into(),
            data: Data::Far(&checkpoint),
        });
        return write_folder(out, &items.collect::<Vec<_>>(), &sidecar, &options);
    }
    let folder = WeightsFolder::open(step_dir)?;
    let names: Vec<String> = folder.files().iter().flat_map(|f| f.names_in_order()).map(str::to_string).collect();
    let items = names.into_iter().filter_map(|name| Some(Item::new(name.clone(), folder.tensor(&name)?))).collect::<Vec<_>>();
    write_folder(out, &items, &sidecar, &options)
}

impl Far for Checkpoint {
    fn fetch(&self, wants: Vec<Want<'_>>) -> Result<()> {
        // To a reader, a whole tensor on disk is a parameter of one piece.
        let whole = |w: &Want<'_>| Param::new(w.name, w.shape, vec![Piece::new(w.name, w.shape, 0)], Shard::Replicated, Init::Zeros);
        let params: Vec<Param> = wants.iter().map(whole).collect();
        let slots = wants.into_iter().zip(&params).map(|(w, param)| Slot { kind: Kind::Weight, param, range: w.range, into: w.into });
        self.read(slots.collect()).map(|_| ())
    }
}

/// The pieces of the parameters under their names on disk, with a prefix.
pub(crate) fn items_of<'a>(prefix: &str, params: &[Param], tensors: &[View<'a>], at: &Path) -> Result<Vec<Item<'a>>> {
    if params.len() != tensors.len() {
        return Err(Error::bad(at, format!("{} tensors for {} parameters (a fault of this program)", tensors.len(), params.len())));
    }
    let mut items = Vec::new();
    for (param, tensor) in params.iter().zip(tensors) {
        for piece in &param.pieces {
            let tensor = TensorRef::of_view(*tensor, piece.range.clone(), &piece.shape);
            let tensor = tensor
                .ok_or_else(|| Error::bad(at, format!("{}: not in host memory or too short (a fault of this program)", piece.name)))?;
            items.push(Item::new(format!("{prefix}{}", piece.name), tensor));
        }
    }
    Ok(items)
}

/// Returns the bytes of weights.
fn write_folder(out: &Path, items: &[Item<'_>], sidecar: &Sidecar, options: &ExportOptions) -> Result<u64> {
    let out = target(out, options.overwrite)?;
    let dtype = match options.dtype {
        Some(dtype) => dtype,
        None => sidecar.dtype()?.unwrap_or(DType::F32),
    };
    let disk = Disk { hook: options.hook.clone() };
    let fresh = sibling(&out, "new");
    if fresh.exists() {
        disk.remove(&fresh)?;
    }
    let result = fill(&disk, &fresh, items, sidecar, dtype, options.max_shard_bytes)
        .and_then(|bytes| keep_unrelated(&disk, &out, &fresh).map(|()| bytes))
        .and_then(|bytes| disk.sync_dir(&fresh).map(|()| bytes))
        .and_then(|bytes| disk.replace_dir(&fresh, &out).map(|()| bytes));
    if result.is_err() && fresh.exists() {
        // Best effort: the error to report is the first one.
        let _ = disk.remove(&fresh);
    }
    result
}

/// The real path of the target, checked.
fn target(out: &Path, overwrite: bool) -> Result<PathBuf> {
    if !out.exists() {
        let name = out.file_name().ok_or_else(|| Error::bad(out, "not a folder that can be made"))?;
        let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        let path = parent.canonicalize().map_err(Error::io("find", parent))?.join(name);
        refuse_run(&path)?;
        return Ok(path);
    }
    if !out.is_dir() {
        return Err(Error::bad(out, "is a file; name a folder to export to"));
    }
    let real = out.canonicalize().map_err(Error::io("find", out))?;
    refuse_run(&real)?;
    let entries = list(out)?;
    if !entries.is_empty() && !overwrite {
        let held = entries.len();
        return Err(Error::bad(
            out,
            format!("the folder is not empty ({held} entries). Name a new folder, or give --overwrite to replace the model in it"),
        ));
    }
    Ok(real)
}

/// An export must never replace a checkpoint, or scatter a model over a run. `path` is real.
fn refuse_run(path: &Path) -> Result<()> {
    let in_checkpoint = path.ancestors().any(Manifest::is_in);
    let is_run = !Store::new(path).list()?.is_empty();
    let is_checkpoints = match path.parent() {
        Some(run) if Store::new(run).dir() == path => !Store::new(run).list()?.is_empty(),
        _ => false,
    };
    if in_checkpoint || is_run || is_checkpoints {
        return Err(Error::bad(path, "belongs to a run and its checkpoints; name another folder to export to"));
    }
    Ok(())
}

fn fill(disk: &Disk, dir: &Path, items: &[Item<'_>], sidecar: &Sidecar, dtype: DType, max_shard: u64) -> Result<u64> {
    disk.create_dir(dir)?;
    sidecar.write(disk, dir, dtype)?;
    let written = write_sharded(disk, dir, "model", items, Some(dtype), max_shard)?;
    Ok(written.iter().filter(|w| w.name.ends_with(".safetensors")).map(|w| w.bytes).sum())
}

/// Gives the files of `old` that belong to no model a second name in `new`.
fn keep_unrelated(disk: &Disk, old: &Path, new: &Path) -> Result<()> {
    if !old.exists() {
        return Ok(());
    }
    for entry in list(old)? {
        let Some(name) = entry.file_name() else { continue };
        if !is_model_file(&name.to_string_lossy()) {
            link_tree(disk, &entry, &new.join(name))?;
        }
    }
    Ok(())
}

fn link_tree(disk: &Disk, from: &Path, to: &Path) -> Result<()> {
    if from.is_symlink() || !from.is_dir() {
        return disk.link(from, to);
    }
    disk.create_dir(to)?;
    for entry in list(from)? {
        let Some(name) = entry.file_name() else { continue };
        link_tree(disk, &entry, &to.join(name))?;
    }
    disk.sync_dir(to)
}
