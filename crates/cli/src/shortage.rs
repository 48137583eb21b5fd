//! What the plan says of a rank, beside the error that its memory ran out.

use crate::args::{Cli, Sft};
use crate::backend::ranks_here;
use crate::layout::{as_planned, job, place, settle};
use temper_config::Config;
use temper_planner::memory::{Memory, Question, rank_memory};
use temper_planner::{Network, stages};
use temper_train::layout::Layout as Mesh;
use temper_train::setup::find_source;

const GIB: f64 = (1u64 << 30) as f64;

/// The error as it is; where memory ran out, with the plan's figure for the rank beside what was held and asked for.
pub fn beside_plan(error: anyhow::Error, plan: impl FnOnce() -> anyhow::Result<Planned>) -> anyhow::Error {
    let Some(found) = error.downcast_ref::<temper_train::Error>().and_then(|e| e.out_of_memory()) else { return error };
    let needed = (found.held_total() + found.wanted) as f64;
    let told = match plan() {
        Ok(planned) => planned.against(needed, found.total as f64),
        Err(why) => format!("There is no plan to compare with: {why}"),
    };
    anyhow::anyhow!("{error}\n{told}")
}

/// The plan of a rank.
pub struct Planned {
    /// The rank.
    pub rank: usize,
    /// Its layout.
    pub layout: String,
    /// Its peak.
    pub memory: Memory,
}

impl Planned {
    /// The plan in words, against what was needed when memory ran out and what there is.
    fn against(&self, needed: f64, capacity: f64) -> String {
        let gib = |bytes: f64| format!("{:.2} GiB", bytes / GIB);
        let parts: Vec<String> = self.memory.parts().map(|(purpose, bytes)| format!("{} {}", purpose.name(), gib(bytes))).collect();
        let peak = self.memory.total();
        let verdict = match (peak > capacity && capacity > 0.0, needed > peak) {
            (true, _) => "the plan does not fit either: temper plan shows what would",
            (false, true) => "more than planned: routing is uneven, or the plan is wrong",
            (false, false) => "the plan would fit: something else holds memory, or may not have it",
        };
        format!(
            "The plan for rank {} of {} is a peak of {} ({}); held and asked for are {}; {verdict}.",
            self.rank,
            self.layout,
            gib(peak),
            parts.join(", "),
            gib(needed)
        )
    }
}

/// The plan of a rank of a training run.
pub fn of_run(args: &Sft, cli: &Cli, rank: usize, ranks: usize) -> anyhow::Result<Planned> {
    let mut resolved = Config::load(&args.config, &args.sets)?;
    let place = place(cli, ranks_here().unwrap_or(ranks))?;
    settle(&mut resolved, ranks, &place)?;
    let network = Network::from_folder(&find_source(&resolved)?.model_dir)?;
    let mesh = Mesh::new(&resolved.config.parallel, ranks, network.arch.moe.is_some())?;
    let layout = as_planned(&mesh, &resolved.config, &place);
    let stages = stages(&network, &layout).map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
    let job = job(&resolved.config, &place);
    let question = Question { network: &network, job: &job, layout: &layout, overheads: place.overheads };
    let memory = rank_memory(&question, &stages, rank, 1.0).unwrap_or_default();
    Ok(planned(rank, layout.told(network.arch.moe.is_some()), memory))
}

/// The plan of a rank of a layout, as it is told.
pub fn planned(rank: usize, layout: String, memory: Memory) -> Planned {
    Planned { rank, layout, memory }
}

#[cfg(test)]
mod tests {
    use super::*;
    use temper_tensor::{OutOfMemory, Purpose};

    fn shortage(total: usize) -> anyhow::Error {
        let held = [1 << 30, 1 << 30, 1 << 31, 1 << 30, 0, 0];
        let found = OutOfMemory { of: "GPU", purpose: Purpose::Activations, wanted: 1 << 30, total, free: Some(0), held, largest: None };
        temper_train::Error::Model(temper_model::Error::Tensor(temper_tensor::Error::OutOfMemory(Box::new(found)))).into()
    }

    fn plan(peak: f64) -> anyhow::Result<Planned> {
        let network = Network::builtin("Qwen3-0.6B").unwrap()?;
        let layout = temper_planner::LayoutRequest::parse("tp=2", "")?.over(None, false, "")?;
        let question = Question {
            network: &network,
            job: &temper_planner::Job::new(peak as usize, 1),
            layout: &layout,
            overheads: temper_planner::memory::Overheads::NONE,
        };
        let memory = rank_memory(&question, &stages(&network, &layout).map_err(|e| anyhow::anyhow!("{e}"))?, 1, 1.0).unwrap_or_default();
        Ok(planned(1, layout.told(false), memory))
    }

    #[test]
    fn the_plan_stands_beside_what_was_held() {
        for (tokens, total, verdict) in
            [(128.0, 6 << 30, "more than planned"), (65_536.0, 6 << 30, "does not fit either"), (65_536.0, 900 << 30, "would fit")]
        {
            let text = beside_plan(shortage(total), || plan(tokens)).to_string();
            for part in ["out of GPU memory", "rank 1 of tp=2", "held and asked for are 6.00 GiB", "weights 0.56 GiB", verdict] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let text = beside_plan(shortage(0), || anyhow::bail!("no config.json")).to_string();
        assert!(text.contains("no plan to compare with: no config.json"), "{text}");
    }

    #[test]
    fn other_errors_stay_what_they_are() {
        let error = beside_plan(temper_train::Error::Input("x".into()).into(), || anyhow::bail!("not asked"));
        assert!(error.downcast_ref::<temper_train::Error>().is_some_and(temper_train::Error::is_bad_input));
    }
}
