//! Material that lies next to the repository on some machines only.

use std::path::PathBuf;

/// `../shared/NAME` seen from the repository, or a printed reason why the test does nothing.
pub fn shared(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).join(name);
    if path.exists() {
        return Some(path);
    }
    println!("SKIPPED: {} is not on this machine", path.display());
    None
}

/// Files below `root` whose name satisfies `wanted`, sorted.
pub fn files(root: &PathBuf, wanted: fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, wanted));
        } else if wanted(path.file_name().unwrap().to_str().unwrap()) {
            found.push(path);
        }
    }
    found.sort();
    found
}
