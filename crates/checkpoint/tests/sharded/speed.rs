//! How fast checkpoints are written and read: `cargo test --release -p temper-checkpoint --test sharded -- --ignored --nocapture speed`.

use super::ranks::*;
use temper_checkpoint::{ExportOptions, Kind, Slot, WeightsFolder, export_checkpoint};
use temper_tensor::{DType, Tensor};
use tempfile::tempdir_in;

#[test]
#[ignore = "takes a gigabyte of disk"]
fn speed() {
    // Beside the build, which lies on a real disk; TMPDIR may be in memory.
    let root = tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut job = Job::new(root.path(), arch(false, false, 6_000_000), DType::F32);
    // The second save finds the buffers of the first.
    job.times = 2;
    let from = Layout { tp: 2, ..Layout::ONE };
    for (rank, result) in job.save(&from, 5).into_iter().enumerate() {
        let done = result.unwrap();
        let gb = done.saved.bytes as f64 / 1e9;
        println!(
            "save, rank {rank}: {gb:.2} GB by all, paused {:?}, took {:?}: {:.2} GB/s",
            done.paused,
            done.took,
            gb / done.took.as_secs_f64()
        );
    }
    let out = root.path().join("hf");
    let start = std::time::Instant::now();
    export_checkpoint(&job.store().step_dir(5), &out, &ExportOptions { dtype: Some(DType::BF16), ..ExportOptions::default() }).unwrap();
    println!("export as bf16: {:?}", start.elapsed());
    let to = Layout { tp: 2, dp: 2, cuts: 4, ..Layout::ONE };
    for rank in 0..2 {
        let checkpoint = temper_checkpoint::Checkpoint::open(&job.store().step_dir(5)).unwrap();
        let traffic = job.read_rank(&checkpoint, &to, rank).unwrap();
        println!(
            "load, rank {rank}: {:.2} GB wanted, {:.2} read, {:.2} GB/s",
            traffic.wanted as f64 / 1e9,
            traffic.read as f64 / 1e9,
            traffic.gb_per_s()
        );
    }
    let folder = WeightsFolder::open(&out).unwrap();
    for (what, dtype) in [("as they are", DType::BF16), ("as f32", DType::F32)] {
        let held = held(&job.arch, &to, 0);
        let empty = |len: usize| match dtype {
            DType::BF16 => Tensor::from_vec(vec![half::bf16::ONE; len], &[len]),
            _ => Tensor::from_vec(vec![1f32; len], &[len]),
        };
        let mut into: Vec<Tensor> = held.shares.iter().map(|r| empty(r.len())).collect();
        let slots = held.params.iter().zip(&held.shares).zip(&mut into);
        let slots = slots.map(|((param, range), t)| Slot { kind: Kind::Weight, param, range: range.clone(), into: t.view_mut() });
        let traffic = folder.read(slots.collect()).unwrap();
        println!("Hugging Face folder, {what}: {:.3} GB, {:.2} GB/s", traffic.wanted as f64 / 1e9, traffic.gb_per_s());
    }
}
