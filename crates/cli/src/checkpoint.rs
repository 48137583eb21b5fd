//! `temper checkpoint`

use crate::args::{Checkpoint, Dtype};
use crate::exit::{BadInput, Negative};
use crate::out::say;
use crate::table::Table;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use temper_checkpoint::store::{Fault, Listed, Located, look, verify};
use temper_checkpoint::{Error, ExportOptions, Store, export_checkpoint};
use temper_monitor::size;
use temper_tensor::DType;
use temper_train::run_dir::is_of_the_path;

/// Runs one of the checkpoint commands.
pub fn run(args: &Checkpoint) -> anyhow::Result<()> {
    match args {
        Checkpoint::List { run, json } => list(run, *json),
        Checkpoint::Verify { path, json } => check(path, *json),
        Checkpoint::Export { path, out, dtype, overwrite } => export(path, out, *dtype, *overwrite),
    }
}

/// A checkpoint and its fault, as listed and as verified.
struct Entry {
    path: PathBuf,
    bytes: u64,
    /// How many ranks saved it, where its manifest tells.
    ranks: Option<usize>,
    fault: Option<Fault>,
    /// How long it took to read every byte of it.
    took: Option<Duration>,
}

impl Entry {
    fn gb_per_s(&self) -> Option<f64> {
        self.took.map(|t| self.bytes as f64 / 1e9 / t.as_secs_f64().max(1e-9))
    }
}

fn list(run: &Path, json: bool) -> anyhow::Result<()> {
    let entries = match Store::locate(run)? {
        Located::Step(path) => vec![verified(path)],
        Located::Run(store) => store.list()?.into_iter().map(listed).collect(),
    };
    Ok(print(&entries, json, "whole")?)
}

fn check(path: &Path, json: bool) -> anyhow::Result<()> {
    let entries: Vec<Entry> = match Store::locate(path)? {
        Located::Step(path) => vec![verified(path)],
        Located::Run(store) => store.list()?.into_iter().map(|l| verified(l.path)).collect(),
    };
    print(&entries, json, "good")?;
    if entries.is_empty() || entries.iter().any(|e| e.fault.is_some()) { Err(Negative.into()) } else { Ok(()) }
}

fn listed(l: Listed) -> Entry {
    Entry { path: l.path, bytes: l.bytes, ranks: l.ranks, fault: l.fault, took: None }
}

fn verified(path: PathBuf) -> Entry {
    let Listed { path, bytes, ranks, .. } = look(path);
    let start = Instant::now();
    match verify(&path) {
        Ok(bytes) => Entry { path, bytes, ranks, fault: None, took: Some(start.elapsed()) },
        Err(fault) => Entry { path, bytes, ranks, fault: Some(fault), took: None },
    }
}

fn print(entries: &[Entry], json: bool, good: &str) -> io::Result<()> {
    if json {
        let rows: Vec<_> = entries
            .iter()
            .map(|e| {
                let fault = e.fault.as_ref().map(ToString::to_string);
                serde_json::json!({ "path": e.path, "bytes": e.bytes, "ranks": e.ranks, good: e.fault.is_none(), "fault": fault, "gb_per_s": e.gb_per_s() })
            })
            .collect();
        return say(serde_json::Value::from(rows));
    }
    if entries.is_empty() {
        return say("no checkpoints");
    }
    let mut table = Table::new(&["checkpoint", "size", "ranks", "state"]);
    for e in entries {
        let rate = e.gb_per_s().map_or_else(String::new, |r| format!(", read at {r:.2} GB/s"));
        let state = e.fault.as_ref().map_or_else(|| format!("{good}{rate}"), ToString::to_string);
        table.row([e.path.display().to_string(), size(e.bytes), e.ranks.map_or("?".into(), |n| n.to_string()), state]);
    }
    say(table)
}

fn export(path: &Path, out: &Path, dtype: Option<Dtype>, overwrite: bool) -> anyhow::Result<()> {
    let step_dir = match Store::locate(path)? {
        Located::Run(store) => {
            let (dir, notices) = store.latest_whole()?;
            for notice in notices {
                crate::out::tell(format_args!("note: {notice}"));
            }
            dir
        }
        Located::Step(dir) => {
            // What several ranks saved is checked as it is read, and of it the weights only are.
            if look(dir.clone()).ranks.is_none_or(|ranks| ranks == 1) {
                verify(&dir).map_err(|fault| temper_checkpoint::Error::NotWhole { path: dir.clone(), fault })?;
            }
            dir
        }
    };
    let start = Instant::now();
    let dtype = dtype.map(|d| match d {
        Dtype::Bf16 => DType::BF16,
        Dtype::F32 => DType::F32,
    });
    let options = ExportOptions { dtype, overwrite, ..ExportOptions::default() };
    let bytes = export_checkpoint(&step_dir, out, &options).map_err(|e| match &e {
        Error::Io { path, cause, .. } if is_of_the_path(cause) && !path.starts_with(&step_dir) => {
            BadInput(format!("--out {}: {e}. Choose another folder", out.display())).into()
        }
        _ => anyhow::Error::from(e),
    })?;
    let rate = bytes as f64 / 1e9 / start.elapsed().as_secs_f64().max(1e-9);
    Ok(say(format_args!("{} -> {} ({} of weights at {rate:.2} GB/s)", step_dir.display(), out.display(), size(bytes)))?)
}
