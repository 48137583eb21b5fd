//! Every layout trains as one rank does: losses, gradients, their norms and weights after five optimizer steps. Ranks are threads.
//!
//! In f64 what is left is the order of additions: 1e-9. In f32 all agree to 1e-5; gradients to twice what one rank itself is off by where
//! its sums cancel; weights to 1e-5 of the largest and twice what rounding makes of them (docs/NUMERICS.md). Kinds of layout one by one
//! and the layouts of real jobs; `sweep.rs` takes all layouts of up to 16 ranks.

mod common;

use common::{Job, all_agree, dense, experts, layout};
use std::time::Duration;
use temper_comm::threads;
use temper_config::{Arch, LossReduction, Moe};
use temper_model::Recompute;
use temper_tensor::{Balance, DType};
use temper_train::layout::Layout;

#[test]
fn dense_models_over_every_axis() {
    let layouts = [
        layout(2, 1, 1, 1, 1, 1),
        Layout { sequence: false, ..layout(2, 1, 1, 1, 1, 1) },
        layout(4, 1, 1, 1, 1, 1),
        layout(1, 2, 1, 1, 1, 1),
        layout(1, 1, 2, 1, 1, 1),
        layout(1, 1, 3, 1, 1, 1),
        layout(1, 1, 1, 2, 1, 1),
        layout(1, 1, 1, 4, 1, 1),
        Layout { split: vec![1, 3], ..layout(1, 1, 1, 2, 1, 1) },
        Layout { vpp: 2, ..layout(1, 1, 1, 2, 1, 1) },
        layout(2, 1, 2, 2, 1, 1),
        layout(2, 2, 2, 2, 1, 1),
        Layout { sequence: false, ..layout(4, 1, 2, 2, 1, 1) },
    ];
    all_agree(&dense(), &layouts);
    all_agree(&Job { arch: Arch { tied: true, ..dense().arch }, ..dense() }, &layouts);
}

#[test]
fn experts_over_every_axis() {
    let layouts = [
        layout(1, 1, 2, 1, 2, 1),
        layout(1, 1, 4, 1, 2, 1),
        layout(2, 1, 1, 1, 2, 1),
        layout(2, 1, 1, 1, 1, 2),
        layout(2, 1, 2, 2, 2, 1),
        layout(2, 1, 2, 1, 4, 1),
        layout(1, 2, 1, 2, 2, 1),
        Layout { sequence: false, ..layout(2, 1, 2, 2, 2, 2) },
        Layout { vpp: 2, ..layout(2, 1, 2, 2, 4, 1) },
        layout(2, 2, 2, 2, 2, 2),
    ];
    all_agree(&experts(), &layouts);
    all_agree(&Job { balance: Some((Balance::Megatron, 0.3)), reduction: LossReduction::Microbatch, ..experts() }, &layouts[4..9]);
}

#[test]
fn in_single_precision_losses_and_gradients_agree_to_1e_5() {
    // Weights of a trained model's size: with the large ones of the tests in f64 a rounding of 6e-8 grows two hundredfold on its way back.
    let single = |job: Job| Job { dtype: DType::F32, lr: 1e-3, arch: Arch { init_std: 0.1, ..job.arch.clone() }, ..job };
    all_agree(&single(dense()), &[layout(2, 1, 2, 2, 1, 1), layout(4, 2, 1, 1, 1, 1)]);
    let experts = Job { recompute: Recompute::Full, ..experts() };
    all_agree(&single(experts), &[layout(2, 1, 2, 2, 2, 2), layout(1, 2, 2, 1, 4, 1)]);
}

/// Full-parameter SFT of Qwen3-235B-A22B on 64 ranks: its depth, heads, experts and layout, at a tiny width.
#[test]
fn the_layout_of_235b_on_64_ranks() {
    let mut arch = Arch { hidden: 16, layers: 94, heads: 64, kv_heads: 4, head_dim: 2, vocab: 40, ..experts().arch };
    arch.moe = arch.moe.map(|moe| Moe { experts: 128, top_k: 8, intermediate: 2, ..moe });
    let job = Job { arch, micro: vec![vec![9, 7], vec![16], vec![3, 13], vec![11]], steps: 1, ..experts() };
    all_agree(&job, &[Layout { split: vec![47, 47], ..layout(8, 1, 4, 2, 4, 1) }]);
}

/// Qwen3-30B-A3B with packing on 8 ranks: EP does not multiply the ranks.
#[test]
fn the_layout_of_30b_on_8_ranks() {
    let mut arch = Arch { layers: 48, heads: 32, kv_heads: 4, head_dim: 2, ..experts().arch };
    arch.moe = arch.moe.map(|moe| Moe { experts: 16, top_k: 4, intermediate: 2, ..moe });
    let job = Job { arch, micro: vec![vec![3, 1, 6], vec![5, 5], vec![2, 2, 2, 4], vec![8]], steps: 2, ..experts() };
    all_agree(&job, &[layout(2, 1, 2, 2, 2, 1)]);
}

/// Qwen3.6-35B-A3B's layout on 40 ranks (of attention and experts; its linear attention comes with the hybrid layers).
#[test]
fn the_layout_of_35b_on_40_ranks() {
    let mut arch = Arch { layers: 10, heads: 16, kv_heads: 2, ..experts().arch };
    arch.moe = arch.moe.map(|moe| Moe { experts: 64, top_k: 8, intermediate: 2, ..moe });
    let micro = (0..40).map(|i| vec![3 + i % 5, 4]).collect();
    all_agree(&Job { arch, micro, steps: 1, recompute: Recompute::Full, ..experts() }, &[layout(1, 1, 40, 1, 8, 1)]);
}

/// Qwen3-8B's 36 layers do not divide over 8 stages: refused unless asked for.
#[test]
fn thirty_six_layers_on_eight_stages() {
    let arch = Arch { layers: 36, heads: 4, ..dense().arch };
    let job = Job { arch: arch.clone(), micro: (0..8).map(|i| vec![3 + i]).collect(), steps: 1, ..dense() };
    let even = layout(1, 1, 1, 8, 1, 1);
    let refused = std::thread::scope(|scope| {
        let ranks = threads(8, Duration::from_secs(20)).into_iter().map(|world| {
            let (even, arch) = (&even, &arch);
            scope.spawn(move || even.portion(arch, &even.ranks(&world, arch).unwrap()).unwrap_err().to_string())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(refused.iter().all(|e| e.contains("36 layers do not divide over pp 8") && e.contains("split=")), "{}", refused[0]);
    all_agree(&job, &[Layout { split: vec![4, 4, 4, 5, 5, 5, 5, 4], ..layout(1, 1, 4, 8, 1, 1) }]);
}
