//! What a rank runs with, compared between ranks before the first of them waits for another.

use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// Files up to this size are hashed whole, of larger ones only the size, the first and the last megabyte.
const WHOLE: u64 = 64 << 20;
/// The part of a large file that is hashed at either end.
const PART: u64 = 1 << 20;

/// Variables that lawfully differ between hosts or only change what NCCL prints: a difference is told but does not end the job.
const MAY_DIFFER: [&str; 9] = [
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_TOPO_FILE",
    "NCCL_HOSTID",
    "LD_LIBRARY_PATH",
];

/// Named facts about what a rank runs with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint(BTreeMap<String, Fact>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Fact {
    value: String,
    /// A difference ends the job.
    binding: bool,
}

impl Fingerprint {
    /// That of this process: the program's hash and version, and the variables that libraries of the data plane heed.
    pub fn of_process(version: &str) -> Fingerprint {
        let mut print = Fingerprint::default();
        print.must("temper version", version);
        print.must("temper binary", std::env::current_exe().and_then(|path| digest(&path)).unwrap_or_else(|e| format!("unreadable: {e}")));
        for (name, value) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("NCCL_") || name == "LD_LIBRARY_PATH" {
                let value = value.to_string_lossy();
                if MAY_DIFFER.contains(&&*name) { print.should(&name, value) } else { print.must(&name, value) }
            }
        }
        print
    }

    /// Adds a fact in which all ranks must agree.
    pub fn must(&mut self, name: &str, value: impl ToString) {
        self.0.insert(name.into(), Fact { value: value.to_string(), binding: true });
    }

    /// Adds a fact in which ranks should agree: a difference is told, no more.
    pub fn should(&mut self, name: &str, value: impl ToString) {
        self.0.insert(name.into(), Fact { value: value.to_string(), binding: false });
    }

    /// Adds a file by size and content (of files over 64 MiB the first and last MiB). Its time does not count: copies differ in it.
    pub fn file(&mut self, name: &str, path: &Path) {
        self.must(name, digest(path).unwrap_or_else(|e| format!("{e} ({})", path.display())));
    }

    /// What must agree, in few characters.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (name, fact) in self.0.iter().filter(|(_, fact)| fact.binding) {
            hasher.update(format!("{name}={}\n", fact.value).as_bytes());
        }
        hasher.finalize().to_hex().chars().take(16).collect()
    }

    /// Adds every value of a JSON tree under its dotted key, so that a difference is told by key.
    pub fn tree(&mut self, name: &str, tree: &serde_json::Value) {
        match tree {
            serde_json::Value::Object(map) if !map.is_empty() => {
                map.iter().for_each(|(key, value)| self.tree(&format!("{name}.{key}"), value))
            }
            leaf => self.must(name, leaf),
        }
    }
}

/// Size and hash, in few characters.
fn digest(path: &Path) -> io::Result<String> {
    let mut file = fs::File::open(path)?;
    let size = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    if size <= WHOLE {
        hasher.update_reader(file)?;
    } else {
        hasher.update_reader((&mut file).take(PART))?;
        file.seek(SeekFrom::End(-(PART as i64)))?;
        hasher.update_reader(file)?;
    }
    Ok(format!("{size} bytes, {}", &hasher.finalize().to_hex()[..12]))
}

/// A fact in which ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its name.
    pub name: String,
    /// Whether it ends the job.
    pub binding: bool,
    /// The values, that of the most ranks first; `None` where a rank does not know the fact.
    pub values: Vec<(Option<String>, Vec<usize>)>,
}

/// Where the ranks' fingerprints, in the order of ranks, differ.
pub fn differences(ranks: &[&Fingerprint]) -> Vec<Difference> {
    let mut names: BTreeMap<&str, bool> = BTreeMap::new();
    for print in ranks {
        for (name, fact) in &print.0 {
            *names.entry(name).or_default() |= fact.binding;
        }
    }
    let mut found = vec![];
    for (name, binding) in names {
        let mut values: Vec<(Option<String>, Vec<usize>)> = vec![];
        for (rank, print) in ranks.iter().enumerate() {
            let value = print.0.get(name).map(|fact| fact.value.clone());
            match values.iter_mut().find(|(v, _)| *v == value) {
                Some((_, with)) => with.push(rank),
                None => values.push((value, vec![rank])),
            }
        }
        if values.len() > 1 {
            values.sort_by_key(|(_, with)| std::cmp::Reverse(with.len()));
            found.push(Difference { name: name.into(), binding, values });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_told_by_key_with_the_odd_rank_last() {
        let print = |lr: f64, iface: Option<&str>| {
            let mut print = Fingerprint::default();
            print.tree("config", &serde_json::json!({ "optim": { "lr": lr, "eps": 1e-8 } }));
            if let Some(iface) = iface {
                print.should("NCCL_SOCKET_IFNAME", iface);
            }
            print
        };
        let ranks = [print(2e-5, Some("eth0")), print(1e-5, None), print(1e-5, Some("eth0"))];
        let found = differences(&ranks.iter().collect::<Vec<_>>());
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].name.as_str(), found[0].binding), ("NCCL_SOCKET_IFNAME", false));
        assert_eq!(found[0].values, [(Some("eth0".into()), vec![0, 2]), (None, vec![1])]);
        assert_eq!((found[1].name.as_str(), found[1].binding), ("config.optim.lr", true));
        assert_eq!(found[1].values, [(Some("0.00001".into()), vec![1, 2]), (Some("0.00002".into()), vec![0])]);
    }

    #[test]
    fn a_large_file_is_told_apart_by_either_end() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        for (path, last) in [(&a, b"x"), (&b, b"y")] {
            let mut file = fs::File::create(path).unwrap();
            file.set_len(WHOLE + 10).unwrap(); // sparse
            file.seek(SeekFrom::End(-1)).unwrap();
            io::Write::write_all(&mut file, last).unwrap();
        }
        let (a, b) = (digest(&a).unwrap(), digest(&b).unwrap());
        assert_ne!(a, b);
        assert!(a.starts_with("67108874 bytes, "), "{a}");
    }
}
