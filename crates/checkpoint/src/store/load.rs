//! Loading a checkpoint: only what its manifest vouches for.

use super::{Checkpoint, Kind, Listed, Store, manifest, save, verify};
use crate::{Error, Result, Slot, Traffic, convert::zeros, sidecar::float_named};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use temper_model::param::Param;
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
    /// Bytes of the three, and how fast they came.
    pub traffic: Traffic,
}

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
    /// The newest checkpoint that is whole, every byte of it checked; older ones are tried when newer ones are not, each of
    /// which is named by a notice. `None` when the run has no checkpoint at all. Whoever saved it, it is read whole.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] when there are checkpoints and not one is whole (nothing is deleted); [`Error::Bad`] when a whole one
    /// does not fit the parameters.
    pub fn load_latest(&self, params: &[Param]) -> Result<Option<(Loaded, Vec<String>)>> {
        let mut notices = self.leftover_notices()?;
        match self.newest(|listed| load(&listed, params))? {
            Some((loaded, passed_over)) => {
                notices.extend(passed_over);
                Ok(Some((loaded, notices)))
            }
            None => Ok(None),
        }
    }

    /// The newest whole checkpoint's folder, every byte of it checked, with notices about newer ones passed over.
    ///
    /// # Errors
    /// As [`Store::load_latest`]; [`Error::Bad`] when there is none.
    pub fn latest_whole(&self) -> Result<(PathBuf, Vec<String>)> {
        let found = self.newest(|listed| whole(&listed).map(|()| listed.path))?;
        found.ok_or_else(|| Error::bad(&self.dir(), "no checkpoints"))
    }

    /// The checkpoint of a step, every byte of it checked.
    ///
    /// # Errors
    /// [`Error::Bad`] when there is none or it does not fit the parameters, [`Error::NotWhole`] when it is damaged.
    pub fn load(&self, step: usize, params: &[Param]) -> Result<Loaded> {
        load(&self.ensure_step(step)?, params)
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

/// Reads all of a checkpoint, each tensor in the type it was saved in.
fn load(listed: &Listed, params: &[Param]) -> Result<Loaded> {
    // A checkpoint of several ranks is checked block by block as it is read.
    if listed.fault.is_some() || !manifest::Manifest::is_sharded(&listed.path) {
        whole(listed)?;
    }
    let checkpoint = Checkpoint::open(&listed.path)?;
    let mut tensors = Kind::ALL.map(|kind| {
        let dtype = checkpoint.dtype(kind, params).unwrap_or(DType::F32);
        params.iter().map(|p| zeros(dtype, &p.shape)).collect::<Vec<_>>()
    });
    let slots = Kind::ALL.into_iter().zip(&mut tensors).flat_map(|(kind, tensors)| {
        params.iter().zip(tensors).map(move |(param, t)| Slot { kind, param, range: 0..param.numel(), into: t.view_mut() })
    });
    let traffic = checkpoint.read(slots.collect())?;
    let [weights, exp_avg, exp_avg_sq] = tensors;
    let (step, path, state) = (checkpoint.step(), listed.path.clone(), checkpoint.state().clone());
    Ok(Loaded { step, path, weights, exp_avg, exp_avg_sq, state, traffic })
}
