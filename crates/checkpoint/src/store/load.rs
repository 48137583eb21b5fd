//! Loading a checkpoint: only what its manifest vouches for.

use super::{Listed, Store, manifest, save, verify};
use crate::{Error, Result, WeightsFolder, sidecar::float_named};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use temper_model::param::{Param, Piece};
use temper_tensor::{DType, Tensor};

/// A checkpoint read back, every tensor bit for bit as it was saved.
pub struct Loaded {
    /// Its step.
    pub step: usize,
    /// Its folder.
    pub path: PathBuf,
    /// Weights in the order of the parameters.
    pub weights: Vec<Tensor>,
    /// First moments.
    pub exp_avg: Vec<Tensor>,
    /// Second moments.
    pub exp_avg_sq: Vec<Tensor>,
    /// The caller's state.
    pub state: Value,
}

#[derive(Deserialize)]
struct StateFile {
    format: u32,
    step: usize,
    base_dtype: Option<String>,
    state: Value,
}

impl StateFile {
    fn read(step_dir: &Path) -> Result<StateFile> {
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
    /// The newest checkpoint that is whole, every byte of it checked; older ones are tried when newer ones are not, each of
    /// which is named by a notice. `None` when the run has no checkpoint at all.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] when there are checkpoints and not one is whole (nothing is deleted); [`Error::Bad`] when a whole one
    /// does not fit the parameters.
    pub fn load_latest(&self, params: &[Param]) -> Result<Option<(Loaded, Vec<String>)>> {
        let mut notices: Vec<String> =
            self.leftovers()?.iter().map(|p| format!("{}: left behind by a save that was cut short; ignored", p.display())).collect();
        let mut bad = Vec::new();
        for listed in self.list()?.into_iter().rev() {
            match check(&listed) {
                Ok(()) => {
                    notices.extend(bad);
                    return Ok(Some((load(&listed.path, params)?, notices)));
                }
                Err(why) => bad.push(format!("checkpoint {} is passed over, {why}", listed.path.display())),
            }
        }
        if bad.is_empty() { Ok(None) } else { Err(Error::NoneWhole { dir: self.dir(), checkpoints: bad }) }
    }

    /// The newest whole checkpoint's folder, every byte of it checked, with notices about newer ones passed over.
    ///
    /// # Errors
    /// As [`Store::load_latest`]; [`Error::Bad`] when there is none.
    pub fn latest_whole(&self) -> Result<(PathBuf, Vec<String>)> {
        let mut bad = Vec::new();
        for listed in self.list()?.into_iter().rev() {
            match check(&listed) {
                Ok(()) => return Ok((listed.path, bad)),
                Err(why) => bad.push(format!("checkpoint {} is passed over, {why}", listed.path.display())),
            }
        }
        if bad.is_empty() {
            Err(Error::bad(&self.dir(), "no checkpoints"))
        } else {
            Err(Error::NoneWhole { dir: self.dir(), checkpoints: bad })
        }
    }

    /// The checkpoint of a step, every byte of it checked.
    ///
    /// # Errors
    /// [`Error::Bad`] when there is none or it does not fit the parameters, [`Error::NotWhole`] when it is damaged.
    pub fn load(&self, step: usize, params: &[Param]) -> Result<Loaded> {
        let path = self.step_dir(step);
        if !path.is_dir() {
            let steps: Vec<String> = self.list()?.iter().map(|l| l.step.to_string()).collect();
            let there = if steps.is_empty() { "there are none".to_string() } else { format!("there are {}", steps.join(", ")) };
            return Err(Error::bad(&self.dir(), format!("no checkpoint of step {step}; {there}")));
        }
        verify(&path).map_err(|fault| Error::NotWhole { path: path.clone(), fault })?;
        load(&path, params)
    }
}

/// A quick look first, which spares reading gigabytes of a checkpoint that is plainly broken.
fn check(listed: &Listed) -> std::result::Result<(), String> {
    match &listed.fault {
        Some(fault) => Err(fault.to_string()),
        None => verify(&listed.path).map(|_| ()).map_err(|fault| fault.to_string()),
    }
}

fn load(path: &Path, params: &[Param]) -> Result<Loaded> {
    let file = StateFile::read(path)?;
    let weights = tensors(&WeightsFolder::open(path)?, params)?;
    let optimizer = WeightsFolder::open_stem(path, save::OPTIMIZER)?;
    let [exp_avg, exp_avg_sq] = save::MOMENTS.map(|prefix| tensors(&optimizer, &prefixed(params, prefix)));
    Ok(Loaded { step: file.step, path: path.to_path_buf(), weights, exp_avg: exp_avg?, exp_avg_sq: exp_avg_sq?, state: file.state })
}

/// Reads the parameters in the type they were saved in.
fn tensors(folder: &WeightsFolder, params: &[Param]) -> Result<Vec<Tensor>> {
    let dtype = folder.dtype_of(params).unwrap_or(DType::F32);
    Ok(folder.load(params, dtype)?.0)
}

fn prefixed(params: &[Param], prefix: &str) -> Vec<Param> {
    let rename = |p: &Piece| Piece { name: format!("{prefix}{}", p.name), ..p.clone() };
    params.iter().map(|p| Param { pieces: p.pieces.iter().map(rename).collect(), fused: None, ..p.clone() }).collect()
}
