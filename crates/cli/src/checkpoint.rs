//! `temper checkpoint`

use crate::args::{Checkpoint, Dtype};
use crate::exit::Negative;
use crate::out::say;
use crate::table::Table;
use std::io;
use std::path::{Path, PathBuf};
use temper_checkpoint::store::{Fault, Located, verify};
use temper_checkpoint::{ExportOptions, Store, export_checkpoint};
use temper_tensor::DType;

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
    fault: Option<Fault>,
}

fn list(run: &Path, json: bool) -> anyhow::Result<()> {
    let entries = match Store::locate(run)? {
        Located::Step(path) => vec![verified(path)],
        Located::Run(store) => store.list()?.into_iter().map(|l| Entry { path: l.path, bytes: l.bytes, fault: l.fault }).collect(),
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

fn verified(path: PathBuf) -> Entry {
    match verify(&path) {
        Ok(bytes) => Entry { path, bytes, fault: None },
        Err(fault) => Entry { path, bytes: 0, fault: Some(fault) },
    }
}

fn print(entries: &[Entry], json: bool, good: &str) -> io::Result<()> {
    if json {
        let rows: Vec<_> = entries
            .iter()
            .map(|e| serde_json::json!({ "path": e.path, "bytes": e.bytes, good: e.fault.is_none(), "fault": e.fault.as_ref().map(ToString::to_string) }))
            .collect();
        return say(serde_json::Value::from(rows));
    }
    if entries.is_empty() {
        return say("no checkpoints");
    }
    let mut table = Table::new(&["checkpoint", "size", "state"]);
    for e in entries {
        let state = e.fault.as_ref().map_or_else(|| good.to_string(), ToString::to_string);
        table.row([e.path.display().to_string(), format!("{:.1} MB", e.bytes as f64 / 1e6), state]);
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
            verify(&dir).map_err(|fault| temper_checkpoint::Error::NotWhole { path: dir.clone(), fault })?;
            dir
        }
    };
    let dtype = dtype.map(|d| match d {
        Dtype::Bf16 => DType::BF16,
        Dtype::F32 => DType::F32,
    });
    export_checkpoint(&step_dir, out, &ExportOptions { dtype, overwrite, ..ExportOptions::default() })?;
    Ok(say(format_args!("{} -> {}", step_dir.display(), out.display()))?)
}
