//! `temper verify`

mod layout;

use crate::{
    args::{Cli, Device, Verify},
    backend,
    exit::{BadInput, Negative},
    out::say,
    table::Table,
    weights,
};
use layout::Wanted;
use std::{io, path::Path, sync::Arc};
use temper_checkpoint::resolve_model;
use temper_tensor::{Ops, cpu::Cpu};
use temper_train::verify::{Report, Subject};

/// Largest relative error against values of another program, and of a layout against one rank.
const TOLERANCES: (f64, f64) = (1e-4, 1e-5);

/// Compares and prints; fails past the tolerance.
pub fn run(args: &Verify, cli: &Cli) -> anyhow::Result<()> {
    let tol = args.tol.unwrap_or(if args.golden.is_some() { TOLERANCES.0 } else { TOLERANCES.1 });
    if !(f64::MIN_POSITIVE..1.0).contains(&tol) {
        return Err(BadInput(format!("--tol {tol}: give a relative error between 0 and 1")).into());
    }
    if let Some(golden) = &args.golden {
        std::fs::metadata(golden).map_err(|e| {
            BadInput(format!(
                "--golden {}: {e}. Give a safetensors file of another program's values, or leave it out with --layout",
                golden.display()
            ))
        })?;
    }
    let folder = resolve_model(&args.model, Path::new(""), "main", true)?;
    let wanted = Wanted::of(args.layout.as_deref(), &folder)?;
    weights::must_be_in(&folder)?;
    let ops = ops(cli, &wanted)?;
    let subject =
        Subject { folder: &folder, dtype: args.dtype.on(&*ops)?, layout: wanted.layout.clone(), recompute: wanted.recompute, ops };
    let report = match &args.golden {
        Some(golden) => subject.against_golden(golden)?,
        None => subject.against_one_rank()?,
    };
    let passes = report.passes(tol);
    if args.json {
        let ranks = wanted.layout.axes.world();
        let Report { items, notices } = &report;
        say(
            serde_json::json!({ "passes": passes, "tol": tol, "layout": wanted.told(), "ranks": ranks, "items": items, "notices": notices }),
        )?;
    } else {
        print(args, &wanted, &report, tol)?;
    }
    if passes { Ok(()) } else { Err(Negative.into()) }
}

/// The backend: of several ranks the processor, for a process has one GPU.
fn ops(cli: &Cli, wanted: &Wanted) -> anyhow::Result<Arc<dyn Ops>> {
    match (wanted.layout.axes.world(), cli.device) {
        (1, _) => Ok(backend::open(cli, false, 0)?.ops),
        (ranks, Device::Cuda) => Err(BadInput(format!(
            "--device cuda: verify runs the {ranks} ranks of --layout as threads on the processor, not on GPUs. Leave --device out to compare \
             the layout there; without --layout one GPU is compared"
        ))
        .into()),
        _ => Ok(Arc::new(Cpu::new(cli.threads.into()))),
    }
}

fn print(args: &Verify, wanted: &Wanted, report: &Report, tol: f64) -> io::Result<()> {
    if args.layout.is_some() {
        let with = if args.golden.is_some() { "golden values" } else { "one rank" };
        let ranks = wanted.layout.axes.world();
        let place = if ranks > 1 { ", threads on the processor," } else { "," };
        say(format_args!("layout {}: {ranks} ranks{place} compared with {with}", wanted.told()))?;
    }
    for notice in &report.notices {
        say(format_args!("note: {notice}"))?;
    }
    let mut table = Table::new(&["item", "values", "largest relative error", "beyond the noise", ""]);
    for item in &report.items {
        let verdict = if item.error <= tol { "ok" } else { "DIFFERS" };
        let (difference, error) = (format!("{:.2e}", item.difference), format!("{:.2e}", item.error));
        table.row([item.name.clone(), item.values.to_string(), difference, error, verdict.to_string()]);
    }
    say(table)?;
    let failed = report.items.iter().filter(|i| i.error.is_nan() || i.error > tol).count();
    match (report.items.len(), failed) {
        (0, _) => say("nothing to compare: the golden file holds none of the known items"),
        (n, 0) => say(format_args!("all {n} items within {tol:.0e} beyond the noise")),
        (n, failed) => say(format_args!("{failed} of {n} items off by more than {tol:.0e} beyond the noise")),
    }
}
