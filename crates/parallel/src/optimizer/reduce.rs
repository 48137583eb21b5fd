//! The sum of gradients over ranks: what each rank updates becomes the gradient that one rank alone would have.
//!
//! | gradient | is summed over |
//! |---|---|
//! | of a parameter that every tensor rank holds whole and has a part of the sum of | tensor ranks |
//! | of key and value heads that several tensor ranks hold copies of | those |
//! | of experts | the ranks that hold the same slices of the same experts |
//! | of everything else | context and data ranks |
//! | of an embedding that is also the head of the last stage | first and last stage |

use super::Optimizer;
use temper_comm::Reduce;
use temper_model::param::Block;
use temper_model::{Error, Grads, Result};
use temper_tensor::Ops;

impl Optimizer {
    /// Begins the sums over ranks of the gradients of a block of the network, to which nothing is added any more in this step. All
    /// ranks call this in the same order, or leave it to [`Optimizer::reduce`].
    pub fn ready(&mut self, ops: &dyn Ops, grads: &mut Grads, block: Block) -> Result<()> {
        let own: Vec<usize> = (0..self.begun.len()).filter(|b| self.buckets.list[*b].block == block).collect();
        own.into_iter().rev().try_for_each(|bucket| self.begin(ops, grads, bucket))
    }

    /// Begins the sums over ranks of all other gradients, and ends all.
    pub fn reduce(&mut self, ops: &dyn Ops, grads: &mut Grads) -> Result<()> {
        for bucket in (0..self.begun.len()).rev() {
            self.begin(ops, grads, bucket)?;
        }
        for (bucket, plan) in self.buckets.list.iter().enumerate().filter(|(_, plan)| plan.at_ends) {
            let part = grads.close(bucket)?.slice_rows(plan.part.clone());
            self.buckets.mesh.ends.all_reduce(part, Reduce::Sum)?.wait()?;
        }
        self.begun.fill(false);
        Ok(())
    }

    fn begin(&mut self, ops: &dyn Ops, grads: &mut Grads, bucket: usize) -> Result<()> {
        if std::mem::replace(&mut self.begun[bucket], true) {
            return Ok(());
        }
        let (plan, mesh) = (&self.buckets.list[bucket], &self.buckets.mesh);
        plan.params.iter().try_for_each(|id| grads.settle_one(ops, *id))?;
        if mesh.axes.world() == 1 {
            return Ok(());
        }
        let mut sums = grads.close(bucket)?;
        if !plan.tensor_sum.is_empty() {
            mesh.tp.all_reduce(sums.reborrow().slice_rows(plan.tensor_sum.clone()), Reduce::Sum)?.wait()?;
        }
        for (count, range) in &plan.copied {
            let copies = mesh.copies(*count).ok_or(Error::NoGroup(*count))?;
            copies.all_reduce(sums.reborrow().slice_rows(range.clone()), Reduce::Sum)?.wait()?;
        }
        let group = plan.group(mesh);
        if group.size() > 1 {
            grads.exchange(bucket, |x| group.reduce_scatter_in_place(x))?;
        }
        Ok(())
    }
}
