//! The two files, each replaced whole or not at all.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::dialogue::Turn;
use super::report::RoleplayReport;
use super::select::Sample;
use super::split::Split;
use crate::Error;

/// Where the parts go.
pub(super) struct Paths {
    train: PathBuf,
    validation: PathBuf,
}

impl Paths {
    /// `x.jsonl` and, beside it, `x.val.jsonl`.
    pub fn of(out: &Path) -> Result<Self, Error> {
        let stem =
            out.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".jsonl")).filter(|stem| !stem.is_empty());
        let Some(stem) = stem else {
            return Err(Error::file(out, "the output is JSON lines", "give it a name that ends in .jsonl"));
        };
        Ok(Self { train: out.to_path_buf(), validation: out.with_file_name(format!("{stem}.val.jsonl")) })
    }
}

/// One line of the output.
#[derive(Serialize)]
struct Line<'a> {
    id: String,
    overall: f64,
    messages: Vec<Message<'a>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: &'a str,
}

/// Writes both parts; both are complete on disk before either takes its name. Without a validation part an older
/// validation file of that name goes, and the report says so.
pub(super) fn write(paths: &Paths, split: &Split, report: &mut RoleplayReport) -> Result<(), Error> {
    let refused = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Io { path, action: "cannot write the role-play data", source }
    };
    if let Some(folder) = paths.train.parent() {
        fs::create_dir_all(folder).map_err(refused(folder))?;
    }
    let train = Staged::new(&paths.train, &split.train).map_err(refused(&paths.train))?;
    if split.validation.is_empty() {
        match fs::remove_file(&paths.validation) {
            Ok(()) => report.warnings.push(format!("{}: from an earlier build, removed", paths.validation.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refused(&paths.validation)(error)),
        }
    } else {
        let staged = Staged::new(&paths.validation, &split.validation).map_err(refused(&paths.validation))?;
        staged.publish().map_err(refused(&paths.validation))?;
        report.validation_file = Some(paths.validation.clone());
    }
    train.publish().map_err(refused(&paths.train))?;
    report.train_file = paths.train.clone();
    Ok(())
}

/// A file written under a temporary name, removed again unless it is published.
struct Staged {
    temporary: PathBuf,
    path: PathBuf,
}

impl Staged {
    fn new(path: &Path, samples: &[Sample]) -> io::Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let staged = Self { temporary: path.with_file_name(format!(".{name}.{}.tmp", std::process::id())), path: path.to_path_buf() };
        let mut file = BufWriter::new(File::create(&staged.temporary)?);
        for sample in samples {
            serde_json::to_writer(&mut file, &line(sample))?;
            file.write_all(b"\n")?;
        }
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        Ok(staged)
    }

    fn publish(self) -> io::Result<()> {
        fs::rename(&self.temporary, &self.path)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Gone already where it was published.
        let _ = fs::remove_file(&self.temporary);
    }
}

fn line(sample: &Sample) -> Line<'_> {
    let system = Message { role: "system", content: &sample.system };
    let turns = sample.turns.iter().map(|Turn { role, content }| Message { role, content });
    Line { id: sample.id(), overall: sample.overall, messages: std::iter::once(system).chain(turns).collect() }
}
