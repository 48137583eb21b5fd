//! Where NVIDIA's libraries are looked for.
//!
//! In this order: folders in `TEMPER_CUDA_LIBS`; pip's `nvidia/*/lib` folders of the active Python; `CUDA_HOME` and
//! `CUDA_PATH`; the loader's own path. pip's come before the system's because they are released as a matching set.

use crate::{Error, Result};
use libloading::Library;
use std::path::{Path, PathBuf};

/// A library to look for.
pub struct Spec {
    /// Name for messages.
    pub name: &'static str,
    /// File names, most wanted first.
    pub files: &'static [&'static str],
    /// What to install.
    pub remedy: &'static str,
    /// Whether pip and `CUDA_HOME` may hold it (not the driver).
    pub in_folders: bool,
}

/// An open library.
pub struct Found {
    library: Library,
    /// The path, or the bare file name when the loader found it.
    pub path: String,
}

impl Found {
    /// Looks a function up; `name` ends in a NUL.
    ///
    /// # Safety
    /// `F` must be the function's type.
    #[allow(unsafe_code)]
    pub unsafe fn symbol<F: Copy>(&self, name: &'static str, spec: &Spec) -> Result<F> {
        unsafe { self.library.get::<F>(name.as_bytes()) }.map(|s| *s).map_err(|_| Error::Symbol {
            library: spec.name,
            path: self.path.clone(),
            symbol: name.trim_end_matches('\0'),
            remedy: spec.remedy,
        })
    }
}

/// Opens the first copy of a library that loads.
pub fn find(spec: &Spec) -> Result<Found> {
    let mut failures = vec![];
    let folders = if spec.in_folders { folders() } else { vec![] };
    for folder in &folders {
        for file in spec.files {
            let path = folder.join(file);
            if path.exists() {
                open_companions(folder, file);
                match open(path.as_os_str()) {
                    Ok(library) => return Ok(Found { library, path: path.display().to_string() }),
                    Err(e) => failures.push(e.to_string()),
                }
            }
        }
    }
    for file in spec.files {
        match open(file.as_ref()) {
            Ok(library) => return Ok(Found { library, path: (*file).to_string() }),
            Err(e) => failures.push(e.to_string()),
        }
    }
    let looked = format!("{} folders of pip, CUDA_HOME and TEMPER_CUDA_LIBS and on the loader's path", folders.len());
    let last = failures.first().map(|e| format!(" ({e})")).unwrap_or_default();
    Err(Error::Missing { missing: vec![format!("{} was not found in {looked}{last}: {}", spec.name, spec.remedy)] })
}

/// Opens a library so that other libraries which ask for it by name get this copy (cuDNN asks for NVRTC and cuBLASLt).
#[allow(unsafe_code)]
fn open(name: &std::ffi::OsStr) -> std::result::Result<Library, libloading::Error> {
    use libloading::os::unix::{Library as Unix, RTLD_GLOBAL, RTLD_LAZY};
    // SAFETY: NVIDIA's libraries run no code of the user in their initialisers.
    unsafe { Unix::open(Some(name), RTLD_LAZY | RTLD_GLOBAL) }.map(Library::from)
}

/// NVRTC looks for its builtins by bare name, which fails outside the loader's path unless they are open already.
fn open_companions(folder: &Path, file: &str) {
    let Some(version) = file.strip_prefix("libnvrtc.so.") else { return };
    for path in children(folder, &format!("libnvrtc-builtins.so.{version}")) {
        if let Ok(library) = open(path.as_os_str()) {
            std::mem::forget(library); // for the whole process, as NVRTC may ask at any time
        }
    }
}

/// All folders outside the loader's path that may hold a library, in order.
fn folders() -> Vec<PathBuf> {
    let mut all = vec![];
    if let Some(list) = std::env::var_os("TEMPER_CUDA_LIBS") {
        all.extend(std::env::split_paths(&list));
    }
    for root in python_roots() {
        for python in children(&root.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = python.join(packages).join("nvidia");
                all.extend(children(&nvidia, "").into_iter().map(|d| d.join("lib")));
            }
        }
    }
    for key in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(key) {
            all.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|l| Path::new(&home).join(l)));
        }
    }
    all.retain(|f| f.is_dir());
    let mut seen = std::collections::HashSet::new();
    all.retain(|f| seen.insert(f.clone()));
    all
}

/// Prefixes of Python installations: the active environment, then those whose `python3` is on `PATH`.
fn python_roots() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    for bin in std::env::split_paths(&path).filter(|b| b.join("python3").exists()) {
        roots.extend(bin.parent().map(Path::to_path_buf));
    }
    roots
}

/// Entries of `dir` whose name starts with `prefix`, sorted.
fn children(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect();
    found.sort();
    found
}
