//! `--layout` of `temper verify`: from words to a layout that the model can be divided by.

use crate::exit::BadInput;
use crate::layout::{divides, of_engine, words};
use std::path::Path;
use temper_planner::{LayoutRequest, Network, Recompute};
use temper_train::layout::Layout;

/// Ranks that threads of one process may be.
const MOST_RANKS: usize = 1024;

/// A layout as it was asked for.
pub struct Wanted {
    /// The ranks.
    pub layout: Layout,
    /// What the forward pass keeps.
    pub recompute: Recompute,
    told: String,
}

impl Wanted {
    /// The layout that `text` names, for the model in `folder`; one rank without. Axes that it does not name are as in `[parallel]`; dp is
    /// the smallest that the experts fold into.
    ///
    /// # Errors
    /// Says which key is wrong, or which constraint of the model the layout breaks, with the nearest that do not.
    pub fn of(text: Option<&str>, folder: &Path) -> anyhow::Result<Wanted> {
        let Some(text) = text else {
            return Ok(Wanted { layout: Layout::single(), recompute: Recompute::None, told: "tp=1,pp=1,dp=1".into() });
        };
        let request = LayoutRequest::parse(text, ORIGIN)?;
        for (key, given) in [("mb", request.micro_batch.is_some()), ("offload", request.offload.is_some()), ("auto", request.auto)] {
            if given {
                return Err(BadInput(format!("{ORIGIN}: {key} changes nothing that is compared: leave it out")).into());
            }
        }
        let network = Network::from_folder(folder)?;
        let plan = request.alone(network.arch.moe.is_some(), ORIGIN)?;
        if plan.world() > MOST_RANKS {
            let found = format!("{ORIGIN}: {} ranks; as threads of one process there may be {MOST_RANKS}", plan.world());
            return Err(BadInput(format!("{found}. Take a smaller layout of the same kinds")).into());
        }
        divides(&network, &plan, ORIGIN)?;
        Ok(Wanted { layout: of_engine(&plan), recompute: plan.recompute, told: words(&plan, &network) })
    }

    /// As `--layout` takes it, with what was added.
    pub fn told(&self) -> &str {
        &self.told
    }
}

/// What errors call the argument.
const ORIGIN: &str = "--layout";
