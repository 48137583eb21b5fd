//! From any layout to any other, to one rank, to a Hugging Face folder, and back, bit for bit.

use super::common::{load_latest, names, snapshot, views};
use super::ranks::*;
use half::bf16;
use proptest::prelude::*;
use std::fs;
use temper_checkpoint::{Checkpoint, ExportOptions, Kind, Slot, WeightsFolder, export_checkpoint, store};
use temper_model::{declare, param::Param};
use temper_tensor::{DType, Tensor};
use tempfile::tempdir;

fn weights_type() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::BF16)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_is_read_in_any_other(
        from in Layout::any(), to in Layout::any(), dtype in weights_type(), tied: bool, experts: bool, vocab in 8..40usize,
    ) {
        let root = tempdir().unwrap();
        let job = Job::new(root.path(), arch(tied, experts, vocab), dtype);
        for result in job.save(&from, 5) {
            prop_assert_eq!(result.unwrap().saved.path, job.store().step_dir(5));
        }
        let step_dir = job.store().step_dir(5);
        let bytes: u64 = snapshot(&step_dir).values().map(|b| b.len() as u64).sum();
        let manifest = fs::metadata(step_dir.join("manifest.json")).unwrap().len();
        prop_assert_eq!(store::verify(&step_dir).unwrap(), bytes - manifest);
        prop_assert!(job.assert_resumes(&to, 5).is_empty());
        prop_assert!(job.assert_resumes(&Layout::ONE, 5).is_empty());
        // Nothing is written twice.
        let data: u64 = snapshot(&step_dir).iter().filter(|f| f.0.extension().is_some_and(|e| e == "bin")).map(|f| f.1.len() as u64).sum();
        let elements: usize = declare(&job.arch).iter().map(Param::numel).sum();
        let padding = 8 * 3 * 4 * declare(&job.arch).len() * from.ranks();
        prop_assert!(data as usize <= elements * (8 + dtype.size()) + padding);
    }

    #[test]
    fn a_checkpoint_of_one_rank_is_read_in_any_layout(to in Layout::any(), dtype in weights_type(), experts: bool) {
        let root = tempdir().unwrap();
        let job = Job::new(root.path(), arch(false, experts, 20), dtype);
        let params = declare(&job.arch);
        let of = |kind, dtype| params.iter().map(|p| values(7, kind, p, dtype)).collect::<Vec<_>>();
        let (w, m, v) = (of(Kind::Weight, dtype), of(Kind::ExpAvg, DType::F32), of(Kind::ExpAvgSq, DType::F32));
        job.store().save(7, &params, &views(&w), &views(&m), &views(&v), &serde_json::json!({ "cursor": 56 }), &job.side).unwrap();
        prop_assert!(job.assert_resumes(&to, 7).is_empty());
    }

    #[test]
    fn an_export_holds_every_weight_and_is_read_by_slices(
        from in Layout::any(), to in Layout::any(), dtype in weights_type(), experts: bool, as_bf16: bool,
    ) {
        let root = tempdir().unwrap();
        let job = Job::new(root.path(), arch(false, experts, 20), dtype);
        job.save(&from, 5).into_iter().for_each(|r| drop(r.unwrap()));
        let out = root.path().join("hf");
        let target = if as_bf16 { DType::BF16 } else { DType::F32 };
        export_checkpoint(&job.store().step_dir(5), &out, &ExportOptions { dtype: Some(target), max_shard_bytes: 900, ..ExportOptions::default() })
            .unwrap();
        prop_assert!(names(&out).contains("config.json") && names(&out).contains("tokenizer.json"));
        let folder = WeightsFolder::open(&out).unwrap();
        prop_assert!(folder.files().len() > 1);
        for rank in 0..to.ranks() {
            let held = held(&job.arch, &to, rank);
            let empty = |len: usize| match target {
                DType::BF16 => Tensor::from_vec(vec![bf16::ONE; len], &[len]),
                _ => Tensor::from_vec(vec![1f32; len], &[len]),
            };
            let mut got: Vec<Tensor> = held.shares.iter().map(|r| empty(r.len())).collect();
            let slots = held.params.iter().zip(&held.shares).zip(&mut got);
            let slots = slots.map(|((param, range), t)| Slot { kind: Kind::Weight, param, range: range.clone(), into: t.view_mut() });
            let traffic = folder.read(slots.collect()).unwrap();
            let own: usize = held.shares.iter().map(|r| r.len() * target.size()).sum();
            prop_assert_eq!(traffic.wanted, own as u64);
            for ((param, range), got) in held.params.iter().zip(&held.shares).zip(&got) {
                let want = rounded(values(5, Kind::Weight, param, dtype), target);
                prop_assert!(same_bits(got.view(), part(&want, range)), "rank {}: {} {:?}", rank, param.name, range);
            }
        }
    }
}

/// Matrices large enough to tell rows from neighbours: a rank reads the rows of its heads, its experts and its layers to the byte, and
/// of matrices that are divided by columns whole rows.
#[test]
fn of_a_model_folder_a_rank_reads_its_slices() {
    let root = tempdir().unwrap();
    let mut arch = arch(false, true, 2048);
    (arch.hidden, arch.head_dim, arch.heads, arch.kv_heads, arch.intermediate) = (256, 64, 8, 4, 1024);
    arch.moe.as_mut().unwrap().intermediate = 512;
    let whole = declare(&arch);
    let tensors: Vec<Tensor> = whole.iter().map(|p| values(5, Kind::Weight, p, DType::BF16).reshape(&p.shape)).collect();
    let out = root.path().join("hf");
    let side = super::common::side_folder(&root.path().join("base"));
    temper_checkpoint::export(
        &out,
        &whole,
        &views(&tensors),
        &side,
        &ExportOptions { dtype: Some(DType::BF16), ..ExportOptions::default() },
    )
    .unwrap();
    let folder = WeightsFolder::open(&out).unwrap();
    assert_eq!(folder.check(&whole).unwrap(), Vec::<String>::new());
    let all: usize = whole.iter().map(|p| 2 * p.numel()).sum();
    let layouts = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 2)];
    for (tp, pp, ep) in layouts {
        let layout = Layout { tp, pp, ep, ..Layout::ONE };
        let mut rows = 0;
        for rank in 0..layout.ranks() {
            let held = held(&arch, &layout, rank);
            let mut got: Vec<Tensor> = held.params.iter().map(|p| Tensor::from_vec(vec![bf16::ONE; p.numel()], &[p.numel()])).collect();
            let slots = held.params.iter().zip(&mut got);
            let slots = slots.map(|(param, t)| Slot { kind: Kind::Weight, param, range: 0..param.numel(), into: t.view_mut() });
            let traffic = folder.read(slots.collect()).unwrap();
            let pieces = || held.params.iter().flat_map(|p| &p.pieces);
            let by_columns = |p: &&temper_model::param::Piece| p.part.as_ref().is_some_and(|part| part.dim == 1);
            let wanted: usize = pieces().map(|p| 2 * p.range.len()).sum();
            let more: usize = pieces().filter(by_columns).map(|p| 2 * (p.whole.len() - p.range.len())).sum();
            assert_eq!(traffic.wanted, wanted as u64);
            // Norms and the like lie between; those of a few kilobytes are read along.
            let between = 64 << 10;
            let read = traffic.read as usize;
            assert!(wanted <= read && read <= wanted + more + between, "{layout:?}, rank {rank}: {traffic:?}, {more} by columns");
            rows += wanted;
            for (param, got) in held.params.iter().zip(&got) {
                assert!(
                    same_bits(got.view(), values(5, Kind::Weight, param, DType::BF16).view()),
                    "{layout:?}, rank {rank}: {}",
                    param.name
                );
            }
        }
        // Together they have every matrix once, where experts are divided over all the ranks of a stage.
        assert!(rows >= all && (rows <= all + all / 10 || ep < tp), "{layout:?}: {rows} of {all}");
    }
}

/// As the conversion of single elements gives it.
fn rounded(t: Tensor, to: DType) -> Tensor {
    let shape = t.shape().to_vec();
    match (t.as_slice::<f32>(), t.as_slice::<bf16>(), to) {
        (Some(s), _, DType::BF16) => Tensor::from_vec(s.iter().map(|x| bf16::from_f32(*x)).collect(), &shape),
        (_, Some(s), DType::F32) => Tensor::from_vec(s.iter().map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)).collect(), &shape),
        _ => t,
    }
}

/// Several blocks to a file, parts that begin and end within blocks, and fewer buffers than data.
#[test]
fn large_files_go_through_few_buffers() {
    let root = tempdir().unwrap();
    let mut job = Job::new(root.path(), arch(false, true, 250_000), DType::F32);
    job.host_bytes = 0;
    let from = Layout { tp: 2, dp: 1, ..Layout::ONE };
    for result in job.save(&from, 5) {
        let committed = result.unwrap();
        assert!(committed.paused <= committed.took);
    }
    let to = Layout { tp: 1, dp: 3, pp: 2, cuts: 99, ..Layout::ONE };
    assert!(job.assert_resumes(&to, 5).is_empty());
    let checkpoint = Checkpoint::open(&job.store().step_dir(5)).unwrap();
    // A rank that wants a little reads little.
    let params: Vec<Param> = declare(&job.arch).into_iter().filter(|p| p.name.contains("embed")).collect();
    let mut few = Tensor::from_vec(vec![0f32; 1000], &[1000]);
    let slot = Slot { kind: Kind::ExpAvg, param: &params[0], range: 999_900..1_000_900, into: few.view_mut() };
    let traffic = checkpoint.read(vec![slot]).unwrap();
    assert_eq!(traffic.wanted, 4000);
    assert!(traffic.read <= 3 * (4 << 20), "{traffic:?}");
    assert!(same_bits(few.view(), part(&values(5, Kind::ExpAvg, &params[0], DType::F32), &(999_900..1_000_900))));
    // A whole load by one process gives the same as the ranks' loads.
    let (loaded, _) = load_latest(&job.store(), &params).unwrap().unwrap();
    assert!(same_bits(loaded.exp_avg_sq[0].view().reshape(&[2_000_000]), values(5, Kind::ExpAvgSq, &params[0], DType::F32).view()));
    // Damage is located to a block and the tensors in it, and does not matter to whoever reads others.
    let path = job.store().step_dir(5).join("rank-00001.bin");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let fault = store::verify(&job.store().step_dir(5)).unwrap_err().to_string();
    for word in ["rank-00001.bin", "in 1 of 6 blocks", "which hold exp_avg_sq of lm_head.weight"] {
        assert!(fault.contains(word), "{fault}");
    }
    let one = [declare(&job.arch).into_iter().find(|p| p.name == "lm_head.weight").unwrap()];
    let read = |range: std::ops::Range<usize>| {
        let mut into = Tensor::from_vec(vec![0f32; range.len()], &[range.len()]);
        checkpoint.read(vec![Slot { kind: Kind::ExpAvgSq, param: &one[0], range, into: into.view_mut() }])
    };
    read(0..1000).unwrap();
    assert!(matches!(read(1_999_000..2_000_000), Err(temper_checkpoint::Error::NotWhole { .. })));
}

#[test]
fn saves_follow_each_other_and_training_may_go_on_meanwhile() {
    let root = tempdir().unwrap();
    let job = Job::new(root.path(), arch(true, false, 20), DType::F32);
    let layout = Layout { tp: 2, dp: 2, cuts: 3, ..Layout::ONE };
    on_ranks(4, |comm| {
        let (rank, lead) = (comm.rank(), comm.rank() == 0);
        let store = std::sync::Arc::new(job.store());
        let mut saver = temper_checkpoint::Saver::new(store.clone(), comm, 1 << 30);
        let held = held(&job.arch, &layout, rank);
        let whole = declare(&job.arch);
        let mut done = Vec::new();
        for step in 1..=4 {
            let state = serde_json::json!({ "cursor": step * 8 });
            let mut save = saver.begin(store::Request { step, whole: &whole, state, sidecar: job.side.clone() }).unwrap();
            for kind in Kind::ALL {
                for (param, share) in held.params.iter().zip(&held.shares) {
                    for range in store::own_ranges(param, share, held.tp_rank) {
                        let data = values(step, kind, param, DType::F32);
                        save.add(temper_checkpoint::Entry { kind, param, range: range.clone(), data: part(&data, &range) }).unwrap();
                    }
                }
            }
            save.finish().unwrap();
            if lead {
                // A clean-up in the middle of a save leaves the save alone.
                assert!(store.prune(0, 0).unwrap().is_empty());
            }
            done.extend(saver.poll().unwrap().map(|c| c.saved.step));
        }
        done.extend(saver.wait().unwrap().map(|c| c.saved.step));
        assert!(saver.wait().unwrap().is_none());
        assert_eq!(done.last(), Some(&4));
        if lead {
            store.prune(1, 0).unwrap();
        }
    });
    assert_eq!(job.store().list().unwrap().iter().map(|l| l.step).collect::<Vec<_>>(), [4]);
    assert!(job.assert_resumes(&Layout { dp: 3, cuts: 1, ..Layout::ONE }, 4).is_empty());
}
