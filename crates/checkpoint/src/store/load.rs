//! Finding a checkpoint: only what its manifest vouches for.

use super::{Listed, Store, manifest, save, verify};
use crate::{Error, Result, sidecar::float_named};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use temper_tensor::DType;

#[derive(Deserialize)]
pub(super) struct StateFile {
    format: u32,
    pub(super) step: usize,
    base_dtype: Option<String>,
    pub(super) state: Value,
}

impl StateFile {
    pub(super) fn read(step_dir: &Path) -> Result<StateFile> {
        let path = step_dir.join(save::STATE);
        let text = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let file: StateFile = serde_json::from_slice(&text).map_err(|e| Error::bad(&path, format!("not a checkpoint's state: {e}")))?;
        match file.format {
            manifest::FORMAT => Ok(file),
            other => Err(Error::bad(&path, format!("format {other}, this version of temper reads {}", manifest::FORMAT))),
        }
    }
}

/// The type that the model had before it was trained, if its config named one.
pub(crate) fn base_dtype(step_dir: &Path) -> Result<Option<DType>> {
    Ok(StateFile::read(step_dir)?.base_dtype.as_deref().and_then(float_named))
}

impl Store {
    /// The newest whole checkpoint's folder, every byte of it checked, with notices about newer ones passed over.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] when there are checkpoints and not one is whole (nothing is deleted); [`Error::Bad`] when there is none.
    pub fn latest_whole(&self) -> Result<(PathBuf, Vec<String>)> {
        let found = self.newest(|listed| whole(&listed).map(|()| listed.path))?;
        found.ok_or_else(|| Error::bad(&self.dir(), "no checkpoints"))
    }

    /// The checkpoint of a step as listed.
    pub(super) fn ensure_step(&self, step: usize) -> Result<Listed> {
        let mut listed = self.list()?;
        if let Some(i) = listed.iter().position(|l| l.step == step) {
            return Ok(listed.swap_remove(i));
        }
        let steps: Vec<String> = listed.iter().map(|l| l.step.to_string()).collect();
        let there = if steps.is_empty() { "there are none".to_string() } else { format!("there are {}", steps.join(", ")) };
        Err(Error::bad(&self.dir(), format!("no checkpoint of step {step}; {there}")))
    }

    /// What `take` makes of the newest checkpoint that it finds whole, and notices about those that it does not.
    fn newest<T>(&self, take: impl Fn(Listed) -> Result<T>) -> Result<Option<(T, Vec<String>)>> {
        let mut bad = Vec::new();
        for listed in self.list()?.into_iter().rev() {
            let path = listed.path.clone();
            match take(listed) {
                Ok(value) => return Ok(Some((value, bad))),
                Err(Error::NotWhole { fault, .. }) => bad.push(format!("checkpoint {} is passed over, {fault}", path.display())),
                Err(e) => return Err(e),
            }
        }
        if bad.is_empty() { Ok(None) } else { Err(Error::NoneWhole { dir: self.dir(), checkpoints: bad }) }
    }

    /// A line for each leftover of a save that was cut short.
    pub(super) fn leftover_notices(&self) -> Result<Vec<String>> {
        Ok(self.leftovers()?.iter().map(|p| format!("{}: left behind by a save that was cut short; ignored", p.display())).collect())
    }
}

/// Checks every byte, after a quick look which spares reading gigabytes of a checkpoint that is plainly broken.
fn whole(listed: &Listed) -> Result<()> {
    let fault = match &listed.fault {
        Some(fault) => fault.clone(),
        None => match verify(&listed.path) {
            Ok(_) => return Ok(()),
            Err(fault) => fault,
        },
    };
    Err(Error::NotWhole { path: listed.path.clone(), fault })
}
