//! Random tokens and weights, drawn fast: what they are does not matter to a benchmark, only that they look like a model's.

use super::Work;
use crate::Result;
use crate::step::Trainer;
use temper_data::{MicroBatch, StepBatch};
use temper_model::param::{Init, Param, ParamId};
use temper_tensor::{Rng, Tensor, ViewMut};

/// Normals that are drawn; larger tensors repeat them. Eight (for aligned copies) times a prime, so that no rows of a matrix are equal.
const BLOCK: usize = 8 * 131_071;

/// The micro-batches of a step: tokens of the whole vocabulary, each with a random target; the same for each of `replicas`.
pub fn batch(work: &Work, vocab: usize, seed: u64, replicas: usize) -> StepBatch {
    let mut rng = Rng::new(seed, 0);
    let own = (0..work.accumulate).map(|_| micro_batch(work, vocab, &mut rng));
    StepBatch { micro: own.flat_map(|m| vec![m; replicas]).collect(), epoch: 0.0 }
}

fn micro_batch(work: &Work, vocab: usize, rng: &mut Rng) -> MicroBatch {
    let tokens = work.seq_len * work.micro_batch;
    let mut draw = || (0..tokens).map(|_| rng.below(vocab) as i32).collect::<Vec<_>>();
    let position = |t: usize| t % work.seq_len % work.doc_len;
    let starts = (0..tokens).filter(|t| position(*t) == 0).chain([tokens]);
    MicroBatch {
        ids: draw(),
        targets: draw(),
        weights: vec![1.0; tokens],
        positions: (0..tokens).map(|t| position(t) as i32).collect(),
        cu_seqlens: starts.map(|t| t as i32).collect(),
        samples: Vec::new(),
    }
}

/// Sets every weight as its declaration says, normals from one block copied on the device.
pub fn draw_weights(trainer: &mut Trainer, seed: u64) -> Result<()> {
    let ops = &*trainer.ops;
    let params = &trainer.model.params;
    let largest = params.iter().map(Param::numel).max().unwrap_or(1);
    let length = BLOCK.min(largest.next_multiple_of(8));
    let std = trainer.model.arch.init_std;
    let rng = Rng::new(seed, 1);
    let normals: Vec<f32> = (0..length as u64).map(|i| (std * rng.normal_at(i)) as f32).collect();
    let single = ops.adopt(Tensor::from_vec(normals, &[length]))?;
    let mut block = ops.alloc(trainer.weights.dtype(), &[length])?;
    ops.copy(block.view_mut(), single.view())?;
    let mut from = 0;
    for (i, param) in params.iter().enumerate() {
        let weight = trainer.weights.get_mut(ParamId(i))?;
        match param.init {
            Init::Ones => ops.fill(weight, 1.0)?,
            Init::Zeros => ops.fill(weight, 0.0)?,
            Init::Normal(_) => from = tile(ops, weight, &block, from)?,
        }
    }
    Ok(())
}

/// Fills a tensor with copies of the block, beginning at element `from` of it; returns where the next tensor begins.
fn tile(ops: &dyn temper_tensor::Ops, weight: ViewMut, block: &Tensor, mut from: usize) -> Result<usize> {
    let (total, length) = (weight.numel(), block.numel());
    let mut weight = weight.reshape(&[total]);
    let mut done = 0;
    while done < total {
        let n = (length - from).min(total - done);
        let to = weight.reborrow().slice_rows(done..done + n);
        ops.copy(to, block.view().slice_rows(from..from + n))?;
        done += n;
        from = (from + n) % length;
    }
    Ok(from.next_multiple_of(8) % length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(seq_len: usize, micro_batch: usize, accumulate: usize, doc_len: usize) -> Work {
        let tokens = seq_len * micro_batch * accumulate;
        let recompute = temper_config::Recompute::None;
        let (dtype, grads, moments) = ("float32", "float32", "float32");
        Work { seq_len, micro_batch, accumulate, doc_len, tokens, recompute, dtype, grads, moments, offload_optimizer: false }
    }

    #[test]
    fn documents_end_with_their_sequence() {
        let batch = batch(&work(10, 2, 3, 4), 50, 7, 1);
        assert_eq!((batch.micro.len(), batch.tokens(), batch.trained_tokens()), (3, 60, 60));
        let micro = &batch.micro[0];
        assert_eq!(micro.cu_seqlens, [0, 4, 8, 10, 14, 18, 20]);
        assert_eq!(micro.positions[..11], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0]);
        assert!(micro.ids.iter().chain(&micro.targets).all(|id| (0..50).contains(id)));
        assert_ne!(micro.ids, batch.micro[1].ids);
    }

    #[test]
    fn a_block_covers_tensors_of_any_length() {
        let cpu = temper_tensor::cpu::Cpu::new(1);
        let block = Tensor::from_vec((0..16).map(|i| i as f32).collect(), &[16]);
        let mut weight = Tensor::from_vec(vec![-1f32; 37], &[37]);
        assert_eq!(tile(&cpu, weight.view_mut(), &block, 8).unwrap(), 0);
        let wanted: Vec<f32> = (0..37).map(|i| ((i + 8) % 16) as f32).collect();
        assert_eq!(weight.as_slice::<f32>().unwrap(), wanted);
    }
}
