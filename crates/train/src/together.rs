//! Checkpoints of a run of several ranks: each rank saves its segments beside training, and reads what it needs of any checkpoint.

use crate::host::fetch;
use crate::state::RunState;
use crate::step::Trainer;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use temper_checkpoint::store::{Committed, Request, Saver, own_ranges};
use temper_checkpoint::{Checkpoint, Entry, Kind, Sidecar, Slot, Store};
use temper_comm::{Comm, World};
use temper_model::declare;
use temper_tensor::{Tensor, View};

/// Most bytes of a snapshot that wait for the disk in host memory; what exceeds them is waited for.
const HOST_BYTES: u64 = 8 << 30;

/// What a rank needs to save and load with the others.
pub struct Together {
    saver: Saver,
    comm: Arc<dyn Comm>,
    store: Arc<Store>,
}

impl Together {
    /// For the checkpoints in `store`; `None` when there are no other ranks. Every rank calls this.
    pub fn new(world: &dyn World, store: Arc<Store>) -> Result<Option<Together>> {
        if world.size() == 1 {
            return Ok(None);
        }
        let everyone: Vec<usize> = (0..world.size()).collect();
        let comm = world.host_group("checkpoints", &everyone).map_err(temper_model::Error::Comm)?;
        Ok(Some(Together { saver: Saver::new(store.clone(), comm.clone(), HOST_BYTES), comm, store }))
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

    /// Fills weights and moments from the newest checkpoint that every rank can read, or from that of `step`. Whatever layout saved it.
    ///
    /// # Errors
    /// The same on all ranks; when there is no checkpoint, `None`.
    pub fn load(&self, trainer: &mut Trainer, step: Option<usize>) -> Result<Option<(Checkpoint, Vec<String>)>> {
        let read = |checkpoint: &Checkpoint| Values::read(checkpoint, trainer);
        let (values, checkpoint, notices) = match step {
            Some(step) => {
                let (values, checkpoint) = self.store.resume_step(&*self.comm, step, read)?;
                (values, checkpoint, Vec::new())
            }
            None => match self.store.resume(&*self.comm, read)? {
                Some(found) => found,
                None => return Ok(None),
            },
        };
        values.place(trainer)?;
        Ok(Some((checkpoint, notices)))
    }
}

/// Elements `range` of a parameter, of which `data` holds `held`.
fn within<'a>(data: View<'a>, held: &Range<usize>, range: &Range<usize>) -> View<'a> {
    data.slice_rows(range.start - held.start..range.end - held.start)
}

/// What a rank reads of a checkpoint: whole parameters as it holds them, and the moments of its segments.
struct Values {
    weights: Vec<Tensor>,
    moments: Vec<[Tensor; 2]>,
}

impl Values {
    fn read(checkpoint: &Checkpoint, trainer: &Trainer) -> temper_checkpoint::Result<Values> {
        let params = &trainer.model.params;
        let segments = trainer.optimizer.segments();
        let zeros = |shape: &[usize]| Tensor::from_vec(vec![0f32; shape.iter().product()], shape);
        let mut weights: Vec<Tensor> = params.iter().map(|p| zeros(&p.shape)).collect();
        let mut moments: Vec<[Tensor; 2]> = segments.iter().map(|s| [zeros(&[s.range.len()]), zeros(&[s.range.len()])]).collect();
        let mut slots: Vec<Slot> = Vec::with_capacity(params.len() + 2 * segments.len());
        for (param, weight) in params.iter().zip(&mut weights) {
            let numel = param.numel();
            slots.push(Slot { kind: Kind::Weight, param, range: 0..numel, into: weight.view_mut().reshape(&[numel]) });
        }
        for (segment, [m, v]) in segments.iter().zip(&mut moments) {
            let param = &params[segment.param.0];
            for (kind, into) in [(Kind::ExpAvg, m), (Kind::ExpAvgSq, v)] {
                slots.push(Slot { kind, param, range: segment.range.clone(), into: into.view_mut() });
            }
        }
        let traffic = checkpoint.read(slots)?;
        tracing::info!(gb_per_s = traffic.gb_per_s(), bytes = traffic.read, "read the checkpoint");
        Ok(Values { weights, moments })
    }

    fn place(self, trainer: &mut Trainer) -> Result<()> {
        trainer.set_weights(self.weights)?;
        let ops = trainer.ops.clone();
        let segments = trainer.optimizer.segments().to_vec();
        for (segment, [m, v]) in segments.iter().zip(self.moments) {
            let (m, v) = (ops.adopt(m)?, ops.adopt(v)?);
            trainer.optimizer.set_moments(&*ops, segment, m.view(), v.view())?;
        }
        Ok(())
    }
}
