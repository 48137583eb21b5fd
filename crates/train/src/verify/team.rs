//! Ranks that are threads of this process, sharing its memory and cores.

use crate::layout::Layout;
use crate::{Error, Result};
use std::time::Duration;
use temper_comm::{World, threads};

/// How long a rank may be silent: others compute on the same cores meanwhile.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs `work` on every rank of a layout; what each found, in the order of ranks. One rank alone is the calling thread.
///
/// # Errors
/// The error of the rank that failed by itself, of several the first: not that of one which the others left.
pub(crate) fn team<T: Send>(layout: &Layout, work: impl Fn(&dyn World) -> Result<T> + Sync) -> Result<Vec<T>> {
    let worlds = threads(layout.axes.world(), PATIENCE);
    if let [world] = &worlds[..] {
        return Ok(vec![work(world)?]);
    }
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let work = &work;
        let rank = |world: temper_comm::HostWorld| move || work(&world).inspect_err(|e| world.give_up(&e.to_string()));
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(rank(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let (mut found, mut failed) = (Vec::with_capacity(results.len()), Vec::new());
    for result in results {
        match result {
            Ok(result) => found.push(result),
            Err(error) => failed.push(error),
        }
    }
    let own = failed.iter().position(|e| !matches!(e, Error::Model(temper_model::Error::Comm(_))));
    match failed.is_empty() {
        true => Ok(found),
        false => Err(failed.swap_remove(own.unwrap_or(0))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use temper_comm::Axes;

    #[test]
    fn the_first_failure_is_told_and_not_those_that_follow() {
        let layout = Layout { axes: Axes { dp: 4, ..Axes::default() }, sequence: false, vpp: 1, split: Vec::new() };
        let ranks = team(&layout, |world| Ok(world.rank())).unwrap();
        assert_eq!(ranks, [0, 1, 2, 3]);
        let error = team(&layout, |world| match world.rank() {
            2 => Err(Error::Input("no such thing".into())),
            _ => {
                let everyone = world.group("all", &[0, 1, 2, 3]).map_err(temper_model::Error::Comm)?;
                Ok(everyone.barrier().map_err(temper_model::Error::Comm)?)
            }
        });
        assert_eq!(error.unwrap_err().to_string(), "no such thing");
    }
}
