//! `temper verify`

use crate::{
    args::Verify,
    exit::{BadInput, Negative},
    out::say,
    table::Table,
};
use std::{io, path::Path, sync::Arc};
use temper_checkpoint::resolve_model;
use temper_tensor::Ops;
use temper_train::verify::{Report, verify};

/// Compares and prints; fails past the tolerance.
pub fn run(args: &Verify, ops: Arc<dyn Ops>) -> anyhow::Result<()> {
    if !(f64::MIN_POSITIVE..1.0).contains(&args.tol) {
        return Err(BadInput(format!("--tol {}: give a relative error between 0 and 1", args.tol)).into());
    }
    std::fs::metadata(&args.golden).map_err(|e| BadInput(format!("--golden {}: {e}", args.golden.display())))?;
    let folder = resolve_model(&args.model, Path::new(""), "main", true)?;
    let report = verify(&folder, &args.golden, args.dtype.on(&*ops)?, ops)?;
    if args.json {
        say(serde_json::json!({ "passes": report.passes(args.tol), "tol": args.tol, "items": report.items, "notices": report.notices }))?;
    } else {
        print(&report, args.tol)?;
    }
    if report.passes(args.tol) { Ok(()) } else { Err(Negative.into()) }
}

fn print(report: &Report, tol: f64) -> io::Result<()> {
    for notice in &report.notices {
        say(format_args!("note: {notice}"))?;
    }
    let mut table = Table::new(&["item", "values", "largest relative error", ""]);
    for item in &report.items {
        let verdict = if item.error <= tol { "ok" } else { "DIFFERS" };
        table.row([item.name.clone(), item.values.to_string(), format!("{:.2e}", item.error), verdict.to_string()]);
    }
    say(table)?;
    let failed = report.items.iter().filter(|i| i.error.is_nan() || i.error > tol).count();
    match (report.items.len(), failed) {
        (0, _) => say("nothing to compare: the golden file holds none of the known items"),
        (n, 0) => say(format_args!("all {n} items within {tol:.0e}")),
        (n, failed) => say(format_args!("{failed} of {n} items beyond {tol:.0e}")),
    }
}
