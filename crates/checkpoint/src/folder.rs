//! A Hugging Face model folder open for reading: one `model.safetensors`, or an index and the shards it names.
//! No other file of the folder is ever read as weights.

use crate::{
    Error, Result,
    error::some_of,
    safetensors::{File, TensorRef},
};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    path::{Component, Path, PathBuf},
};
use temper_model::param::Param;
use temper_tensor::DType;

/// Name of the only weights file of an unsharded model.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Name of the file that says which shard holds which tensor.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// An index larger than this is not one (that of a 235B model has 4 MB).
const MAX_INDEX: u64 = 100_000_000;

/// The weights of a model folder, mapped and checked against each other; no tensor has been read yet.
pub struct WeightsFolder {
    dir: PathBuf,
    files: Vec<File>,
    /// Which of `files` holds a tensor.
    place: HashMap<String, usize>,
    /// Tensors that lie in a shard but that the index does not list.
    unlisted: BTreeMap<String, usize>,
    notices: Vec<String>,
}

impl WeightsFolder {
    /// Opens a folder. Where an index exists it decides, and a `model.safetensors` that it does not name is left
    /// alone with a notice.
    ///
    /// # Errors
    /// No weights, or only in PyTorch's pickle format; a malformed index; a shard that is missing, malformed, or
    /// named outside the folder; a tensor that is not in the shard where the index places it.
    pub fn open(dir: &Path) -> Result<WeightsFolder> {
        WeightsFolder::open_stem(dir, "model")
    }

    /// As [`WeightsFolder::open`], for `STEM.safetensors` in place of `model.safetensors`.
    pub(crate) fn open_stem(dir: &Path, stem: &str) -> Result<WeightsFolder> {
        if !dir.is_dir() {
            return Err(Error::bad(dir, "no such folder"));
        }
        let single = dir.join(format!("{stem}.safetensors"));
        let index = dir.join(format!("{stem}.safetensors.index.json"));
        if index.exists() {
            return WeightsFolder::open_sharded(dir, &index, &single);
        }
        if !single.exists() {
            return Err(no_weights(dir));
        }
        let file = File::open(&single)?;
        let place = file.names().into_iter().map(|n| (n.to_string(), 0)).collect();
        Ok(WeightsFolder { dir: dir.to_path_buf(), files: vec![file], place, unlisted: BTreeMap::new(), notices: Vec::new() })
    }

    fn open_sharded(dir: &Path, index_path: &Path, single: &Path) -> Result<WeightsFolder> {
        let index = Index::read(index_path)?;
        let shards: BTreeSet<&String> = index.weight_map.values().collect();
        check_shards(dir, index_path, &shards)?;
        let mut files = Vec::with_capacity(shards.len());
        let mut number = HashMap::new();
        for shard in shards {
            number.insert(shard, files.len());
            files.push(File::open(&dir.join(shard))?);
        }
        let place: HashMap<String, usize> = index.weight_map.iter().map(|(name, shard)| (name.clone(), number[shard])).collect();
        let mut folder = WeightsFolder { dir: dir.to_path_buf(), files, place, unlisted: BTreeMap::new(), notices: Vec::new() };
        folder.check_places(index_path)?;
        folder.note_leftovers(&index, single);
        Ok(folder)
    }

    /// Every tensor must lie where the index places it.
    fn check_places(&mut self, index_path: &Path) -> Result<()> {
        for (i, file) in self.files.iter().enumerate() {
            for name in file.names() {
                if !self.place.contains_key(name) {
                    self.unlisted.insert(name.to_string(), i);
                }
            }
        }
        let mut lost: Vec<&String> = self.place.iter().filter(|(name, i)| !self.files[**i].contains(name)).map(|(name, _)| name).collect();
        lost.sort();
        let Some(first) = lost.first() else { return Ok(()) };
        let shard = file_name(&self.files[self.place[*first]]);
        let elsewhere = match self.files.iter().find(|f| f.contains(first)) {
            Some(f) => format!("{} holds it instead; correct the index", file_name(f)),
            None => "no other shard holds it; download the folder again".to_string(),
        };
        let others = if lost.len() > 1 { format!(" ({} tensors are misplaced in all)", lost.len()) } else { String::new() };
        Err(Error::bad(index_path, format!("{first} is not in {shard}, where the index places it: {elsewhere}{others}")))
    }

    fn note_leftovers(&mut self, index: &Index, single: &Path) {
        if single.exists() && !self.files.iter().any(|f| f.path() == single) {
            self.notices.push(format!("{}: not named by the index beside it and not read", single.display()));
        }
        let total = self.files.iter().map(|f| f.data_len() as u64).sum::<u64>();
        if index.total_size.is_some_and(|t| t != total) {
            let said = index.total_size.unwrap_or_default();
            self.notices.push(format!("{}: the index gives total_size {said}, the shards hold {total} bytes", self.dir.display()));
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files that hold the weights.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.place.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// A tensor by name, to be read whole or by rows ([`TensorRef::rows`]).
    pub fn tensor(&self, name: &str) -> Option<TensorRef<'_>> {
        self.files.get(*self.place.get(name)?)?.tensor(name)
    }

    /// Number of the file that holds a tensor, and the byte of it at which the tensor begins.
    pub(crate) fn location(&self, name: &str) -> Option<(usize, u64)> {
        let file = *self.place.get(name)?;
        Some((file, self.files.get(file)?.offset(name)?))
    }

    /// The host type of the first of these parameters' tensors that is there.
    pub(crate) fn dtype_of(&self, params: &[Param]) -> Option<DType> {
        let first = params.iter().flat_map(|p| &p.pieces).find_map(|p| self.tensor(&p.name))?;
        crate::convert::host_dtype(first.dtype)
    }

    /// Name of the file that holds a tensor although the index does not list it.
    pub(crate) fn unlisted(&self, name: &str) -> Option<&str> {
        self.unlisted.get(name).map(|i| file_name(&self.files[*i]))
    }

    /// Names of tensors that lie in the shards but that the index does not list.
    pub(crate) fn unlisted_names(&self) -> impl Iterator<Item = &str> {
        self.unlisted.keys().map(String::as_str)
    }

    /// Things about the folder worth telling that are not errors.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }
}

fn file_name(file: &File) -> &str {
    file.path().file_name().and_then(|n| n.to_str()).unwrap_or("?")
}

fn no_weights(dir: &Path) -> Error {
    let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"].into_iter().find(|n| dir.join(n).exists());
    match pickled {
        Some(name) => Error::bad(
            dir,
            format!(
                "the weights are only in {name}, a format that can run code when read. Convert them to safetensors first, e.g. in Python: \
                 AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            ),
        ),
        None if dir.join("tensors.json").exists() => Error::bad(
            dir,
            "a checkpoint of several ranks, which is no model folder by itself. Make one of it with `temper checkpoint export`",
        ),
        None => Error::bad(dir, format!("no {SINGLE} and no {INDEX} in this folder. Download the weights, or set model.init = \"random\"")),
    }
}

/// Shard names must be plain file names.
fn check_names(index_path: &Path, shards: &BTreeSet<&String>) -> Result<()> {
    for shard in shards {
        let mut parts = Path::new(shard.as_str()).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) && !shard.contains(['/', '\\', '\0']);
        if !plain {
            return Err(Error::bad(index_path, format!("shard {shard:?} is not the plain name of a file in this folder")));
        }
    }
    Ok(())
}

fn check_shards(dir: &Path, index_path: &Path, shards: &BTreeSet<&String>) -> Result<()> {
    check_names(index_path, shards)?;
    let missing: Vec<&str> = shards.iter().map(|s| s.as_str()).filter(|s| !dir.join(s).is_file()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let message = format!("{} of {} shards missing: {}. Download the folder again", missing.len(), shards.len(), some_of(&missing));
    Err(Error::bad(dir, message))
}

/// Names of the shards in an index, sorted and checked to be plain file names.
pub(crate) fn shards_named_by(index_path: &Path) -> Result<Vec<String>> {
    let index = Index::read(index_path)?;
    let shards: BTreeSet<&String> = index.weight_map.values().collect();
    check_names(index_path, &shards)?;
    Ok(shards.into_iter().cloned().collect())
}

/// `model.safetensors.index.json`.
struct Index {
    /// `metadata.total_size`, when it is a number.
    total_size: Option<u64>,
    /// Shard by tensor name.
    weight_map: HashMap<String, String>,
}

impl Index {
    fn read(path: &Path) -> Result<Index> {
        let length = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
        if length > MAX_INDEX {
            return Err(Error::bad(path, format!("{length} bytes are too many for an index (the limit is {MAX_INDEX})")));
        }
        let text = std::fs::read(path).map_err(Error::io("read", path))?;
        Index::parse(&text).map_err(|message| Error::bad(path, message))
    }

    fn parse(text: &[u8]) -> std::result::Result<Index, String> {
        #[derive(Deserialize)]
        struct Raw {
            #[serde(default)]
            metadata: serde_json::Value,
            weight_map: UniqueMap,
        }
        let raw: Raw = serde_json::from_slice(text).map_err(|e| format!("not a valid index: {e}. Download the file again"))?;
        if raw.weight_map.0.is_empty() {
            return Err("weight_map is empty".to_string());
        }
        // transformers has written both integers and floats here.
        let total = raw.metadata.get("total_size");
        let total_size = total.and_then(|t| t.as_u64().or_else(|| t.as_f64().map(|f| f as u64)));
        Ok(Index { total_size, weight_map: raw.weight_map.0 })
    }
}

/// A map of strings in which no key comes twice.
struct UniqueMap(HashMap<String, String>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = UniqueMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of shard names by tensor name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<UniqueMap, A::Error> {
                let mut pairs = HashMap::new();
                while let Some((name, shard)) = map.next_entry::<String, String>()? {
                    if pairs.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("{name} is given twice")));
                    }
                    pairs.insert(name, shard);
                }
                Ok(UniqueMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
