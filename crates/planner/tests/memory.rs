//! The account of memory against tensors counted one by one, and against what must hold of any plan.

mod common;

use common::*;
use temper_planner::memory::*;
use temper_planner::*;

fn question<'a>(network: &'a Network, job: &'a Job, layout: &'a Layout) -> Question<'a> {
    Question { network, job, layout, overheads: Overheads::NONE }
}

fn layout(text: &str, gpus: usize) -> Layout {
    LayoutRequest::parse(text, "").unwrap().complete(gpus, true)
}

/// Elements of tensors by their shapes.
fn elements(shapes: &[&[usize]]) -> f64 {
    shapes.iter().map(|s| s.iter().product::<usize>()).sum::<usize>() as f64
}

/// The tensors that a dense layer's `Saved` structs name, at one rank in bf16.
#[test]
fn a_dense_layer_keeps_what_its_saved_structs_name() {
    let (network, job) = (network("Qwen3-8B"), Job::new(1024, 1));
    let d = Dims::new(&network, &job, &layout("tp=1", 1));
    let (t, h, nq, nk, dim, i) = (1024, 4096, 32, 8, 128, 12_288);
    let bf16 = elements(&[
        &[t, h],                   // norm1.x, the layer's input
        &[t, h],                   // attention.x
        &[t, (nq + 2 * nk) * dim], // attention.qkv
        &[t, nq, dim],             // q
        &[t, nk, dim],             // k
        &[t, nk, dim],             // v
        &[t, nq, dim],             // o
        &[t, h],                   // norm2.x
        &[t, h],                   // mlp.x
        &[t, 2 * i],               // mlp.gate_up
        &[t, i],                   // mlp.act
    ]);
    let f32s = elements(&[&[t], &[t, nq + nk], &[t, nq], &[t]]); // rstd, heads' rstd, lse, rstd
    assert_eq!(kept(&d, false, false, 1.0).all(), 2.0 * bf16 + 4.0 * f32s);
}

/// The same for a layer of experts.
#[test]
fn a_layer_of_experts_keeps_its_rows() {
    let (network, job) = (network("Qwen3-30B-A3B"), Job::new(512, 1));
    let d = Dims::new(&network, &job, &layout("tp=1", 1));
    let (t, h, e, k, i) = (512, 2048, 128, 8, 768);
    let s = t * k;
    let kept = kept(&d, false, true, 1.0);
    assert_eq!(kept.moe, 2.0 * elements(&[&[s, h], &[s, 2 * i], &[s, i], &[s, h]])); // rows, gate_up, act, out
    assert_eq!(kept.feed_forward, 4.0 * elements(&[&[t, e], &[t, e], &[t, k], &[t, k], &[s], &[t, k]])); // routing and order
    // Twice the rows cost twice, but for those that come home.
    let skewed = memory::kept(&d, false, true, 2.0).moe - kept.moe;
    assert_eq!(skewed, 2.0 * elements(&[&[s, h], &[s, 2 * i], &[s, i]]));
}

/// Inside the blocks tensors are divided by heads and columns, between them by tokens: nothing but one head's floor is left over.
#[test]
fn tensor_parallelism_divides_all_that_is_kept() {
    let (network, job) = (network("Qwen3-235B-A22B"), Job::new(4096, 8));
    let at = |text: &str| kept(&Dims::new(&network, &job, &layout(text, 8)), false, true, 1.0);
    let (one, four, eight) = (at("tp=1,etp=1"), at("tp=4,etp=1"), at("tp=8,etp=1"));
    near(four.all(), one.all() / 4.0, 1e-12);
    // Beyond the four key/value heads a rank still has a whole head of k and v: before and after rotation, and its norm.
    let copies = 4096.0 * (2.0 * 2.0 * 128.0 * 2.0 + 4.0) / 2.0;
    near(eight.mixer, one.mixer / 8.0 + copies, 1e-12);
}

/// The first stage of a pipeline holds as many micro-batches as there are stages.
#[test]
fn early_stages_hold_more_micro_batches() {
    let (network, job) = (network("Qwen3-8B"), Job::new(4096, 32));
    let l = layout("tp=1,pp=4,etp=1", 4);
    let q = question(&network, &job, &l);
    let list = stages(&network, &l).unwrap();
    let d = Dims::new(&network, &job, &l);
    let one = 9.0 * kept(&d, false, false, 1.0).all();
    let held: Vec<f64> = list.iter().map(|s| stage_memory(&q, s, 1.0).of(Purpose::Activations)).collect();
    near(held[0] - held[1], one, 1e-9);
    near(held[1] - held[2], one, 1e-9);
    let moving = transient(&d, false, false, 1.0, Account::Temper).all();
    near(held[0], 4.0 * one + moving, 1e-9);
    // Two micro-batches are all there are.
    let few = Job::new(4096, 2);
    let q = Question { job: &few, ..q };
    near(stage_memory(&q, &list[0], 1.0).of(Purpose::Activations), 2.0 * one + moving, 1e-9);
}

#[test]
fn recomputation_keeps_less_and_full_keeps_only_inputs() {
    let (network, job) = (network("Qwen3-30B-A3B"), Job::new(4096, 64));
    let peak = |text: &str| {
        let l = layout(text, 8);
        let stage = &stages(&network, &l).unwrap()[0];
        stage_memory(&question(&network, &job, &l), stage, 1.0)
    };
    let (none, selective, full) = (peak("ep=8,recompute=none"), peak("ep=8,recompute=selective"), peak("ep=8,recompute=full"));
    assert!(none.total() > selective.total() && selective.total() > full.total());
    let d = Dims::new(&network, &job, &layout("ep=8", 8));
    let (k, t) = (kept(&d, false, true, 1.0), transient(&d, false, true, 1.0, Account::Temper));
    near(full.of(Purpose::Activations), 48.0 * k.input + k.mixer + k.feed_forward + t.plain, 1e-9);
    near(full.of(Purpose::Moe), k.moe + t.moe, 1e-9);
    near(none.of(Purpose::Moe), 48.0 * k.moe + t.moe, 1e-9);
}

#[test]
fn bytes_a_parameter_are_those_of_the_numbers() {
    let (network, l) = (network("Qwen3-0.6B"), layout("tp=1,etp=1", 1));
    let stage = &stages(&network, &l).unwrap()[0];
    let sizes = |account, precision| {
        let job = Job { precision, ..Job::new(128, 1).under(account) };
        let m = stage_memory(&question(&network, &job, &l), stage, 1.0);
        [Purpose::Weights, Purpose::Gradients, Purpose::Masters, Purpose::Moments].map(|p| m.of(p) / network.total as f64)
    };
    assert_eq!(sizes(Account::Temper, Precision::BF16), [2.0, 4.0, 2.0, 8.0]);
    assert_eq!(sizes(Account::Megatron, Precision::BF16), [2.0, 4.0, 4.0, 8.0]);
    assert_eq!(sizes(Account::Temper, Precision::F32), [4.0, 4.0, 0.0, 8.0]);
}

#[test]
fn off_loading_moves_the_optimizer_to_the_host() {
    let (network, job) = (network("Qwen3-8B"), Job::new(4096, 8));
    let of = |text: &str| {
        let l = layout(text, 1);
        stage_memory(&question(&network, &job, &l), &stages(&network, &l).unwrap()[0], 1.0)
    };
    let (here, away) = (of("tp=1,etp=1"), of("tp=1,etp=1,offload=optimizer"));
    near(away.host, network.total as f64 * 10.0, 1e-12);
    assert!(here.total() - away.total() > 0.99 * (away.host - 2.0 * 64.0 * 1_048_576.0));
}

#[test]
fn phases_tell_who_allocates_when() {
    let (network, l) = (network("Qwen3-8B"), layout("tp=1,etp=1,dp=8", 8));
    let of = |account| {
        let job = Job::new(4096, 8).under(account);
        phases(&question(&network, &job, &l), &stages(&network, &l).unwrap()[0], 1.0)
    };
    let (ours, theirs) = (of(Account::Temper), of(Account::Megatron));
    assert_eq!(ours.first_step, ours.steady, "temper allocates before step 1");
    near(theirs.steady - theirs.first_step, network.total as f64 / 8.0 * 8.0, 1e-9); // the lazy moments
    assert!(ours.load < ours.steady && ours.save < ours.steady && ours.resume <= ours.steady);
    // 36 layers x (k, v) x 8 heads x 128 x 2 bytes x 4096 tokens x 64 sequences.
    assert_eq!(ours.kv_cache, 36.0 * 2.0 * 8.0 * 128.0 * 2.0 * 4096.0 * 64.0);
}

#[test]
fn the_memory_of_a_rank_is_that_of_its_stage() {
    let (network, job) = (network("Qwen3-235B-A22B"), Job::new(4096, 32));
    let l = layout("tp=8,pp=2,ep=4,recompute=moe", 64);
    let q = question(&network, &job, &l);
    let list = stages(&network, &l).unwrap();
    assert_eq!(rank_memory(&q, &list, 0, 1.0), Some(stage_memory(&q, &list[0], 1.0)));
    assert_eq!(rank_memory(&q, &list, 63, 1.0), Some(stage_memory(&q, &list[1], 1.0)));
    assert_eq!(rank_memory(&q, &list, 64, 1.0), None);
    assert!(rank_memory(&q, &list, 0, 2.0).unwrap().total() > rank_memory(&q, &list, 0, 1.0).unwrap().total());
}
