//! Checkpoints and ranks: several ranks save their segments beside training, and any number reads what each needs of any checkpoint.

use crate::host::fetch;
use crate::run::Begin;
use crate::state::RunState;
use crate::step::Trainer;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use temper_checkpoint::store::{Committed, Request, Saver, own_ranges};
use temper_checkpoint::{Checkpoint, Class, Entry, Kind, Sidecar, Store, Traffic};
use temper_comm::{Comm, World};
use temper_model::declare;
use temper_tensor::{Tensor, View};

/// Most bytes of a snapshot that wait for the disk in host memory; what exceeds them is waited for.
const HOST_BYTES: u64 = 8 << 30;

/// What a rank needs to save and load with the others.
pub struct Together {
    saver: Saver,
    comm: Arc<dyn Comm>,
}

impl Together {
    /// For the checkpoints in `store`; `None` when there are no other ranks. Every rank calls this.
    pub fn new(world: &dyn World, store: Arc<Store>) -> Result<Option<Together>> {
        if world.size() == 1 {
            return Ok(None);
        }
        let everyone: Vec<usize> = (0..world.size()).collect();
        let comm = world.host_group("checkpoints", &everyone).map_err(temper_model::Error::Comm)?;
        Ok(Some(Together { saver: Saver::new(store, comm.clone(), HOST_BYTES), comm }))
    }

    /// Copies what this rank saves; the rest happens beside training. A save still under way is waited for, and told.
    pub fn save(&mut self, trainer: &Trainer, state: &RunState, sidecar: Sidecar) -> Result<Option<Committed>> {
        let before = self.saver.wait()?;
        let value = serde_json::to_value(state).map_err(|e| Error::Input(format!("checkpoint state: {e}")))?;
        let whole = declare(&trainer.model.arch);
        let mut snapshot = self.saver.begin(Request { step: state.step, whole: &whole, state: value, sidecar })?;
        let (ops, tp_rank) = (&*trainer.ops, trainer.ranks.mesh.tp.rank());
        for segment in trainer.optimizer.segments() {
            let param = &trainer.model.params[segment.param.0];
            let own = own_ranges(param, &segment.range, tp_rank);
            if own.is_empty() {
                continue;
            }
            let master = trainer.optimizer.master(ops, &trainer.weights, segment)?;
            let weight = trainer.weights.get(segment.param)?;
            let weight = weight.reshape(&[weight.numel()]).slice_rows(segment.range.clone());
            let [m, v] = trainer.optimizer.moments(segment);
            for (kind, data) in [(Kind::Weight, master.as_ref().map_or(weight, Tensor::view)), (Kind::ExpAvg, m), (Kind::ExpAvgSq, v)] {
                let copy = fetch(ops, data)?;
                let data = copy.as_ref().map_or(data, Tensor::view);
                for range in &own {
                    snapshot.add(Entry { kind, param, range: range.clone(), data: within(data, &segment.range, range) })?;
                }
            }
        }
        snapshot.finish()?;
        Ok(before)
    }

    /// The save that is done since the last look.
    pub fn poll(&mut self) -> Result<Option<Committed>> {
        Ok(self.saver.poll()?)
    }

    /// Waits for the save under way.
    pub fn wait(&mut self) -> Result<Option<Committed>> {
        Ok(self.saver.wait()?)
    }

    /// The group of all ranks for checkpoints.
    pub fn comm(&self) -> &dyn Comm {
        &*self.comm
    }
}

/// Elements `range` of a parameter, of which `data` holds `held`.
fn within<'a>(data: View<'a>, held: &Range<usize>, range: &Range<usize>) -> View<'a> {
    data.slice_rows(range.start - held.start..range.end - held.start)
}

/// A checkpoint that is in place.
pub(crate) struct Resumed {
    pub checkpoint: Checkpoint,
    /// How this rank's part came.
    pub loaded: Traffic,
    /// About checkpoints passed over.
    pub notices: Vec<String>,
}

/// Fills weights and moments from the newest checkpoint that every rank of `comm` can read, or from that of a step. Whatever layout
/// saved it, each rank reads what it holds, into its place. The checkpoint's state is the caller's to look at.
///
/// # Errors
/// The same on all ranks; when there is no checkpoint, `None`.
pub(crate) fn load(store: &Store, comm: &dyn Comm, trainer: &mut Trainer, begin: Begin) -> Result<Option<Resumed>> {
    let rank = comm.rank();
    let mut read = |checkpoint: &Checkpoint| {
        trainer.fill(true, &|slots| checkpoint.read(slots)).map_err(|e| match e {
            Error::Checkpoint(e) => e,
            other => temper_checkpoint::Error::OfRank { rank, class: Class::Failed, message: other.to_string() },
        })
    };
    if let Begin::Step(step) = begin {
        let (loaded, checkpoint) = store.resume_step(comm, step, read)?;
        return Ok(Some(Resumed { checkpoint, loaded, notices: Vec::new() }));
    }
    let found = store.resume(comm, &mut read)?;
    Ok(found.map(|(loaded, checkpoint, notices)| Resumed { checkpoint, loaded, notices }))
}
