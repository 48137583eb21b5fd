//! Training over ranks, the optimizer divided between them, gives the weights, norms and decisions of one rank.
//!
//! In f64 what is left is the order of additions: 1e-11, with an `eps` that does not let Adam blow rounding noise up (a gradient wrong
//! by d moves a weight by at most lr / eps d a step: 1e4 d).

mod tiny;

use temper_comm::Axes;
use temper_config::Arch;
use temper_model::param::Param;
use temper_parallel::AdamWConfig;
use temper_tensor::DType;
use tiny::*;

const STEPS: usize = 5;

fn job(arch: Arch) -> Job {
    // The norms are around 10 and change: some steps are clipped.
    let adamw = AdamWConfig { betas: [0.9, 0.95], eps: 1e-6, weight_decay: 0.1, clip: 1.0 };
    Job { arch, dtype: DType::F64, adamw, steps: STEPS, broken: None }
}

/// Trains in a layout and compares with one rank; replicas must be equal to the bit.
fn agree(job: &Job, one: &[End], layout: Layout, tolerance: f64) {
    let at = format!("{layout:?}");
    let many = train(job, layout);
    let weights = |ends: &[End]| on_disk(ends.iter().map(|e| (e.params.as_slice(), e.weights.as_slice())), &at);
    let (found, want) = (weights(&many), weights(one));
    assert!(found.keys().eq(want.keys()), "{at}");
    for (name, want) in &want {
        let error = relative(&found[name], want);
        assert!(error < tolerance, "{at}: {name} is off by {error:e}");
    }
    for (rank, end) in many.iter().enumerate() {
        assert_eq!(end.settled, many[0].settled, "{at}: rank {rank} sees another norm");
        for (found, want) in end.settled.iter().zip(&one[0].settled) {
            let error = relative(&[found.grad_norm], &[want.grad_norm]);
            assert!(error < tolerance && found.updated == want.updated, "{at}: {found:?}, one rank {want:?}");
        }
    }
}

fn dense_layouts() -> Vec<Layout> {
    let sizes = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 3), (2, 2, 2), (4, 1, 2)];
    let both = sizes.into_iter().flat_map(|s| [false, true].map(|sequence| (s, sequence)));
    both.map(|((tp, cp, dp), sequence)| Layout { axes: axes(tp, cp, dp, 1, 1), sequence, overlap: (tp + dp) % 2 == 0 }).collect()
}

#[test]
fn dense_networks_over_tensor_context_and_data_ranks() {
    for tied in [false, true] {
        let job = job(dense(tied));
        let one = train(&job, Layout::ONE);
        let clipped = one[0].settled.iter().filter(|s| s.grad_norm > 1.0).count();
        assert!(clipped > 0 && one[0].settled.iter().all(|s| s.updated));
        for layout in dense_layouts() {
            agree(&job, &one, layout, 1e-11);
        }
    }
}

#[test]
fn experts_over_every_axis_they_fold_into() {
    let job = job(experts());
    let one = train(&job, Layout::ONE);
    let sizes = [
        (1, 1, 2, 1, 1),
        (1, 1, 2, 2, 1),
        (2, 1, 1, 1, 1),
        (2, 1, 1, 2, 1),
        (2, 1, 1, 1, 2),
        (2, 1, 2, 2, 2),
        (2, 1, 2, 2, 1),
        (1, 2, 1, 2, 1),
        (2, 2, 2, 2, 2),
        (4, 1, 1, 2, 2),
    ];
    for (i, (tp, cp, dp, ep, etp)) in sizes.into_iter().enumerate() {
        for sequence in [false, true] {
            agree(&job, &one, Layout { axes: axes(tp, cp, dp, ep, etp), sequence, overlap: i % 2 == 0 }, 1e-11);
        }
    }
}

#[test]
fn stages_that_share_a_tied_embedding() {
    for tied in [false, true] {
        let job = job(dense(tied));
        let one = train(&job, Layout::ONE);
        for (tp, cp, dp) in [(1, 1, 1), (1, 1, 2), (2, 1, 1), (4, 1, 1), (2, 1, 2), (1, 2, 2)] {
            let axes = Axes { pp: 2, ..axes(tp, cp, dp, 1, 1) };
            agree(&job, &one, Layout { axes, sequence: tp > 1, overlap: dp > 1 }, 1e-11);
        }
    }
}

#[test]
fn single_precision_is_as_good() {
    // With eps 1e-2 an error of a gradient moves a weight by at most as much: 1e-5 leaves room for eighty roundings of f32.
    let wide = |job: Job| Job { dtype: DType::F32, adamw: AdamWConfig { eps: 1e-2, ..job.adamw }, ..job };
    for job in [wide(job(dense(true))), wide(job(experts()))] {
        let one = train(&job, Layout::ONE);
        for (tp, cp, dp) in [(2, 1, 2), (1, 2, 2)] {
            agree(&job, &one, Layout { axes: axes(tp, cp, dp, 1, 1), sequence: true, overlap: true }, 1e-5);
        }
    }
}

#[test]
fn a_loss_that_is_not_a_number_on_one_rank_stops_the_update_of_all() {
    let whole = job(dense(true));
    let before = train(&Job { steps: 1, ..whole.clone() }, Layout::ONE);
    for broken in [2, 7] {
        // Ranks of the last stage have losses.
        let layout = Layout { axes: Axes { pp: if broken == 7 { 2 } else { 1 }, ..axes(2, 1, 2, 1, 1) }, sequence: true, overlap: true };
        let job = Job { steps: 2, broken: Some((1, broken)), ..whole.clone() };
        let many = train(&job, layout);
        let updated: Vec<Vec<bool>> = many.iter().map(|e| e.settled.iter().map(|s| s.updated).collect()).collect();
        assert!(updated.iter().all(|u| u == &[true, false]), "{updated:?}");
        let weights = |ends: &[End]| on_disk(ends.iter().map(|e| (e.params.as_slice(), e.weights.as_slice())), "after a skipped step");
        let (found, want) = (weights(&many), weights(&before));
        for (name, want) in &want {
            assert!(relative(&found[name], want) < 1e-11, "{name} changed");
        }
    }
}

#[test]
fn moments_are_divided_without_gaps() {
    for (arch, axes) in [(dense(false), axes(2, 1, 4, 1, 1)), (experts(), axes(1, 2, 4, 2, 1)), (experts(), axes(2, 1, 2, 4, 1))] {
        let ends = train(&Job { steps: 0, ..job(arch.clone()) }, Layout { axes, sequence: true, overlap: false });
        let share = |p: &Param| p.numel() as f64 / (if p.shard.is_expert() { axes.expert_dp() } else { axes.cp * axes.dp }) as f64;
        let shares = |end: &End| end.params.iter().map(share).sum::<f64>();
        let updated: usize = ends.iter().flat_map(|e| &e.segments).map(|s| s.range.len()).sum();
        assert_eq!(updated as f64, ends.iter().map(shares).sum::<f64>(), "{axes:?}");
        for end in &ends {
            // Parameters begin at multiples of 128; the parts of each bucket (two a layer, two beside) are as long as a multiple.
            let padding = 128 * (end.params.len() + 2 * arch.layers + 2);
            assert!(end.moments <= shares(end).ceil() as usize + padding, "{axes:?}: {} of {}", end.moments, shares(end));
        }
    }
}
