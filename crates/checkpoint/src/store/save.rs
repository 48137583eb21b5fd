//! Saving a checkpoint: everything into a temporary folder, synced, then one rename.

use super::{Kind, Manifest, Store, manifest};
use crate::{
    Result, Sidecar,
    disk::{Disk, Written},
    export::items_of,
    safetensors::{Item, write_sharded},
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use temper_model::param::Param;
use temper_tensor::{DType, View};

/// Files of weights and moments are split at this size.
const MAX_SHARD: u64 = 5_000_000_000;

pub(super) const STATE: &str = "state.json";
pub(super) const OPTIMIZER: &str = "optimizer";

/// A committed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its step.
    pub step: usize,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
}

impl Store {
    /// Saves a checkpoint: weights and AdamW's moments (host tensors in the order of `params`, kept bit for bit), the files
    /// that make the folder a model, and the caller's state. When it returns, the checkpoint is on disk to stay; a
    /// checkpoint of the same step that was there before has been replaced.
    ///
    /// # Errors
    /// [`crate::Error::Io`] naming the file and the system's reason (disk full, file too large). The temporary folder is removed and
    /// earlier checkpoints are as they were.
    pub fn save(
        &self,
        step: usize,
        params: &[Param],
        weights: &[View<'_>],
        exp_avg: &[View<'_>],
        exp_avg_sq: &[View<'_>],
        state: &Value,
        sidecar: &Sidecar,
    ) -> Result<Saved> {
        let path = self.step_dir(step);
        let model = items_of("", params, weights, &path)?;
        let mut moments = items_of(Kind::ExpAvg.prefix(), params, exp_avg, &path)?;
        moments.extend(items_of(Kind::ExpAvgSq.prefix(), params, exp_avg_sq, &path)?);
        let dtype = weights.first().map_or(DType::F32, |w| w.dtype());

        let temporary = self.temporary(step);
        self.disk.create_dir(&self.dir())?;
        if temporary.exists() {
            self.disk.remove(&temporary)?;
        }
        let result = self.fill(&temporary, step, &model, &moments, state, sidecar, dtype).and_then(|bytes| {
            self.disk.replace_dir(&temporary, &path)?;
            Ok(bytes)
        });
        if result.is_err() && temporary.exists() {
            // Best effort: the error to report is the first one, and the next save tries again.
            let _ = self.disk.remove(&temporary);
        }
        let bytes = result?;
        self.note_saved(step);
        Ok(Saved { step, path, bytes })
    }

    fn fill(
        &self,
        dir: &Path,
        step: usize,
        model: &[Item<'_>],
        moments: &[Item<'_>],
        state: &Value,
        sidecar: &Sidecar,
        dtype: DType,
    ) -> Result<u64> {
        let disk = &self.disk;
        disk.create_dir(dir)?;
        let mut files = sidecar.write(disk, dir, dtype)?;
        files.extend(write_sharded(disk, dir, "model", model, None, MAX_SHARD)?);
        files.extend(write_sharded(disk, dir, OPTIMIZER, moments, None, MAX_SHARD)?);
        files.push(write_state(disk, dir, step, sidecar, state)?);
        let bytes = |files: &[Written]| files.iter().map(|f| f.bytes).sum::<u64>();
        let total = bytes(&files);
        let last = Manifest::new(step, files).write(disk, dir)?;
        disk.sync_dir(dir)?;
        Ok(total + last.bytes)
    }
}

/// Writes `state.json`.
pub(super) fn write_state(disk: &Disk, dir: &Path, step: usize, sidecar: &Sidecar, state: &Value) -> Result<Written> {
    // config.json names the type of these weights; an export goes back to the type that the model came in.
    let base = sidecar.dtype()?.map(DType::name);
    let state = json!({ "format": manifest::FORMAT, "step": step, "base_dtype": base, "state": state });
    disk.write(&dir.join(STATE), format!("{state:#}\n").as_bytes())
}
