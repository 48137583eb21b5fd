//! A checkpoint open for reading, whoever wrote it: from the parts that its ranks had to those that this rank wants.

use super::{
    super::{
        Fault, Kind, Manifest,
        load::StateFile,
        manifest,
        save::{OPTIMIZER, STATE},
    },
    BLOCK, TENSORS, data_name,
    record::{Index, Record, TensorEntry},
    record_name, verify,
};
use crate::{
    Error, Result, WeightsFolder,
    sidecar::float_named,
    transfer::{DataFile, Extent, Slot, Source, Traffic, fill},
};
use serde_json::Value;
use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    sync::OnceLock,
};
use temper_model::param::{Param, Piece};
use temper_tensor::DType;

/// A checkpoint open for reading.
pub struct Checkpoint {
    path: PathBuf,
    step: usize,
    bytes: u64,
    state: Value,
    content: Content,
}

enum Content {
    /// Of one rank: two folders of safetensors.
    Whole {
        weights: WeightsFolder,
        moments: WeightsFolder,
    },
    Sharded(Shards),
}

/// The files of several ranks.
struct Shards {
    dir: PathBuf,
    manifest: Manifest,
    tensors: Vec<TensorEntry>,
    places: HashMap<Kind, HashMap<String, usize>>,
    /// Files in use, opened when first wanted.
    open: Vec<OnceLock<OpenShard>>,
}

struct OpenShard {
    path: PathBuf,
    file: File,
    record: Record,
    checks: Vec<blake3::Hash>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder. Of several ranks' checkpoint the indexes and the state are checked here and tensors when they are
    /// read; of one rank's nothing is but sizes ([`crate::store::verify`] reads it all).
    ///
    /// # Errors
    /// [`Error::NotWhole`] when it is incomplete or damaged.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let not_whole = |fault| Error::NotWhole { path: path.to_path_buf(), fault };
        let manifest = Manifest::check(path).map_err(not_whole)?;
        let content = if manifest.shards.is_empty() {
            Content::Whole { weights: WeightsFolder::open(path)?, moments: WeightsFolder::open_stem(path, OPTIMIZER)? }
        } else {
            vouched(path, &manifest, &[TENSORS, STATE])?;
            Content::Sharded(Shards::open(path, &manifest)?)
        };
        let state = StateFile::read(path)?;
        Ok(Checkpoint { path: path.to_path_buf(), step: state.step, bytes: manifest.bytes(), state: state.state, content })
    }

    /// Its step.
    pub fn step(&self) -> usize {
        self.step
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What its save was given to go on from.
    pub fn state(&self) -> &Value {
        &self.state
    }

    /// The ranks that wrote it.
    pub fn ranks(&self) -> usize {
        if let Content::Sharded(shards) = &self.content { shards.open.len() } else { 1 }
    }

    /// The type in which it holds weights or moments, by the first of these parameters.
    pub fn dtype(&self, kind: Kind, params: &[Param]) -> Option<DType> {
        match &self.content {
            Content::Whole { weights, .. } if kind == Kind::Weight => weights.dtype_of(params),
            Content::Whole { moments, .. } => moments.dtype_of(&prefixed(params.iter(), kind)),
            Content::Sharded(shards) => {
                let piece = params.iter().flat_map(|p| &p.pieces).next()?;
                shards.find(kind, &piece.name).and_then(|t| float_named(&t.dtype))
            }
        }
    }

    /// Fills the slots, bit for bit where they have the type of the checkpoint. Only what they need is read (of a checkpoint of
    /// several ranks in blocks of 4 MiB, each checked).
    ///
    /// # Errors
    /// [`Error::NotWhole`] naming file and tensors when a block is damaged; [`Error::Bad`] when the checkpoint is that of another model.
    pub fn read(&self, slots: Vec<Slot<'_>>) -> Result<Traffic> {
        let (weights, moments) = match &self.content {
            Content::Sharded(shards) => return fill(shards, slots),
            Content::Whole { weights, moments } => (weights, moments),
        };
        let mut traffic = Traffic::default();
        let mut by_kind: HashMap<Kind, Vec<Slot<'_>>> = HashMap::new();
        for slot in slots {
            by_kind.entry(slot.kind).or_default().push(slot);
        }
        for (kind, slots) in by_kind {
            if kind == Kind::Weight {
                traffic += weights.read(slots)?;
                continue;
            }
            let params = prefixed(slots.iter().map(|s| s.param), kind);
            let slots = slots.into_iter().zip(&params).map(|(slot, param)| Slot { param, ..slot });
            traffic += moments.read(slots.collect())?;
        }
        Ok(traffic)
    }

    /// Names and shapes of the weights, in the order of the model; `None` for a checkpoint of one rank.
    pub(crate) fn sharded_weights(&self) -> Option<Vec<(&str, &[usize], DType)>> {
        let Content::Sharded(shards) = &self.content else { return None };
        let weights = shards.tensors.iter().filter(|t| t.kind == Kind::Weight);
        weights.map(|t| Some((t.name.as_str(), t.shape.as_slice(), float_named(&t.dtype)?))).collect()
    }
}

/// The manifest must vouch for these files, and they must be as it says.
fn vouched(dir: &Path, manifest: &Manifest, names: &[&str]) -> Result<()> {
    if let Some(name) = names.iter().find(|name| !manifest.files.iter().any(|f| f.name == **name)) {
        return Err(Error::bad(&dir.join(manifest::NAME), format!("does not list {name}")));
    }
    let wrong = manifest.wrong_files(dir, |name| names.contains(&name));
    if wrong.is_empty() { Ok(()) } else { Err(Error::NotWhole { path: dir.to_path_buf(), fault: Fault::Damaged(wrong) }) }
}

/// The parameters under the names that their moments have in files of one rank.
pub(crate) fn prefixed<'a>(params: impl Iterator<Item = &'a Param>, kind: Kind) -> Vec<Param> {
    let rename = |p: &Piece| Piece { name: format!("{}{}", kind.prefix(), p.name), ..p.clone() };
    params.map(|p| Param { pieces: p.pieces.iter().map(rename).collect(), fused: None, ..p.clone() }).collect()
}

impl Shards {
    fn open(dir: &Path, manifest: &Manifest) -> Result<Shards> {
        let sizes: Vec<u64> = manifest.shards.iter().map(|s| s.bytes).collect();
        if let Some(other) = manifest.shards.iter().enumerate().find(|(rank, s)| s.name != data_name(*rank)) {
            return Err(Error::bad(&dir.join(manifest::NAME), format!("lists {} in place of {}", other.1.name, data_name(other.0))));
        }
        let Index { tensors, .. } = Index::read(dir, manifest.step, &sizes)?;
        let mut places: HashMap<Kind, HashMap<String, usize>> = HashMap::new();
        for (i, tensor) in tensors.iter().enumerate() {
            places.entry(tensor.kind).or_default().insert(tensor.name.clone(), i);
        }
        let open = sizes.iter().map(|_| OnceLock::new()).collect();
        Ok(Shards { dir: dir.to_path_buf(), manifest: manifest.clone(), tensors, places, open })
    }

    fn find(&self, kind: Kind, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(*self.places.get(&kind)?.get(name)?)
    }

    fn shard(&self, rank: usize) -> Result<&OpenShard> {
        let path = self.dir.join(data_name(rank));
        let Some(place) = self.open.get(rank) else { return Err(Error::bad(&path, "no such rank")) };
        if let Some(open) = place.get() {
            return Ok(open);
        }
        vouched(&self.dir, &self.manifest, &[&record_name(rank)])?;
        let record = Record::read(&self.dir, self.manifest.step, rank, self.open.len())?;
        let checks = record.checks(&self.dir)?;
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        Ok(place.get_or_init(|| OpenShard { path, file, record, checks }))
    }
}

impl Source for Shards {
    fn unit(&self) -> u64 {
        BLOCK as u64
    }

    fn extents(&self, kind: Kind, param: &Param, index: usize) -> Result<Vec<Extent>> {
        let Some(piece) = param.pieces.get(index) else { return Ok(Vec::new()) };
        let bad = |what: String| Err(Error::bad(&self.dir, format!("{kind} of {}: {what}", piece.name)));
        let Some(tensor) = self.find(kind, &piece.name) else {
            return bad("it is not in this checkpoint, which was saved from another model".into());
        };
        if tensor.shape != piece.shape {
            return bad(format!("shape {:?} in the checkpoint, {:?} in this model", tensor.shape, piece.shape));
        }
        let dtype = tensor.dtype()?;
        let mut extents: Vec<Extent> = Vec::with_capacity(tensor.fragments.len());
        for fragment in &tensor.fragments {
            let (file, start) = (fragment.rank, fragment.at);
            let at = |run: temper_model::param::Run| start + (run.memory * dtype.size()) as u64;
            extents.extend(fragment.runs(&tensor.shape).map(|run| Extent { file, at: at(run), dtype, disk: run.disk, len: run.len }));
        }
        extents.sort_unstable_by_key(|x| x.disk);
        Ok(extents)
    }

    fn file(&self, file: usize) -> Result<DataFile<'_>> {
        let OpenShard { path, file, record, checks } = self.shard(file)?;
        Ok(DataFile { path, file, bytes: record.bytes, checks: Some(checks) })
    }

    fn damaged(&self, file: usize, unit: usize) -> Error {
        match self.shard(file) {
            Ok(shard) => {
                let fault = Fault::Damaged(vec![verify::damage(&shard.path, &shard.record, &[unit])]);
                Error::NotWhole { path: self.dir.clone(), fault }
            }
            Err(e) => e,
        }
    }

    fn absent(&self, kind: Kind, param: &Param, index: usize, element: usize) -> Error {
        let name = param.pieces.get(index).map_or("", |p| p.name.as_str());
        let fault = Fault::Damaged(vec![format!("{}: element {element} of {kind} of {name} lies nowhere", self.dir.display())]);
        Error::NotWhole { path: self.dir.clone(), fault }
    }
}
