//! `--layout` of `temper verify`: from words to a layout that the model can be divided by.

use crate::exit::BadInput;
use crate::layout::{NEAREST, of_engine, refusal};
use std::path::Path;
use temper_config::devices;
use temper_planner::{Cluster, Job, LayoutRequest, Network, Recompute, check, nearest};
use temper_train::layout::Layout;

/// Ranks that threads of one process may be.
const MOST_RANKS: usize = 1024;

/// A layout as it was asked for.
pub struct Wanted {
    /// The ranks.
    pub layout: Layout,
    /// What the forward pass keeps.
    pub recompute: Recompute,
    plan: temper_planner::Layout,
}

impl Wanted {
    /// The layout that `text` names, for the model in `folder`. Axes that it does not name are 1, as in `[parallel]`; dp is the smallest
    /// that the experts fold into.
    ///
    /// # Errors
    /// Says which key is wrong, or which constraint of the model the layout breaks, with the nearest that do not.
    pub fn of(text: Option<&str>, folder: &Path) -> anyhow::Result<Wanted> {
        let request = LayoutRequest::parse(text.unwrap_or_default(), "--layout")?;
        for (key, given) in [("mb", request.micro_batch.is_some()), ("offload", request.offload.is_some())] {
            if given {
                return Err(BadInput(format!("--layout: {key} changes nothing that is compared: leave it out")).into());
            }
        }
        let one = |n: Option<usize>| n.unwrap_or(1);
        let (experts, ranks) = (one(request.ep).saturating_mul(one(request.etp)), one(request.tp).saturating_mul(one(request.cp)));
        let dp = request.dp.unwrap_or(experts / common(experts, ranks));
        let plan = LayoutRequest { etp: Some(one(request.etp)), dp: Some(dp), ..request }.complete(1, true);
        if plan.world() > MOST_RANKS {
            let found = format!("--layout: {} ranks; as threads of one process there may be {MOST_RANKS}", plan.world());
            return Err(BadInput(format!("{found}. Take a smaller layout of the same kinds")).into());
        }
        if text.is_some() {
            fits(&plan, folder)?;
        }
        Ok(Wanted { layout: of_engine(&plan), recompute: plan.recompute, plan })
    }

    /// As `--layout` takes it, with what was added.
    pub fn told(&self) -> String {
        words(&self.plan)
    }
}

/// Whether the model can be divided so: the constraints of `temper plan`, but for those of a batch, which fits any layout here.
fn fits(plan: &temper_planner::Layout, folder: &Path) -> anyhow::Result<()> {
    let network = Network::from_folder(folder)?;
    let device = devices()?.into_iter().next().ok_or_else(|| anyhow::anyhow!("there is no device in the table"))?;
    let cluster = Cluster { device, gpus: plan.world(), per_node: plan.world() };
    let (tokens, micro_batches) = (plan.tp.saturating_mul(plan.cp) * 2, plan.dp.saturating_mul(plan.pp));
    let job = Job::new(tokens, micro_batches);
    let problems = check(&network, &cluster, &job, plan);
    if problems.is_empty() {
        return Ok(());
    }
    let legal: Vec<String> = nearest(&network, &cluster, &job, plan, NEAREST).iter().map(words).collect();
    Err(refusal(&format!("--layout {} does not fit {}", words(plan), network.name), &problems, &legal).into())
}

/// As `--layout` takes it; micro-batches are given.
fn words(plan: &temper_planner::Layout) -> String {
    plan.to_string().replace(",mb=1", "")
}

/// Greatest common divisor.
fn common(a: usize, b: usize) -> usize {
    if b == 0 { a.max(1) } else { common(b, a % b) }
}
