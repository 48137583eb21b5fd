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

fn layer(d: &Dims, experts: bool, skew: f64) -> Layer {
    Layer::new(d, false, experts, skew, Account::Temper)
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
    assert_eq!(layer(&d, false, 1.0).kept(Recompute::None).all(), 2.0 * bf16 + 4.0 * f32s);
}

/// The same for a layer of experts.
#[test]
fn a_layer_of_experts_keeps_its_rows() {
    let (network, job) = (network("Qwen3-30B-A3B"), Job::new(512, 1));
    let d = Dims::new(&network, &job, &layout("tp=1", 1));
    let (t, h, e, k, i) = (512, 2048, 128, 8, 768);
    let s = t * k;
    let experts = layer(&d, true, 1.0).kept(Recompute::None);
    assert_eq!(experts.moe, 2.0 * elements(&[&[s, h], &[s, 2 * i]])); // rows, gate_up
    let (nq, nk, dim) = (32, 4, 128);
    let attention = 2.0 * elements(&[&[t, h], &[t, h], &[t, h], &[t, h], &[t, 2 * (nq + 2 * nk) * dim], &[t, nq * dim]])
        + 4.0 * elements(&[&[t], &[t, nq + nk], &[t, nq], &[t]]);
    let routing = 4.0 * elements(&[&[t, e], &[t, e], &[t, k], &[t, k], &[t, k], &[e + 1]]); // with the order of rows
    assert_eq!(experts.plain, attention + routing);
    // Twice the rows cost twice; in Megatron's account but for those that come home.
    assert_eq!(layer(&d, true, 2.0).kept(Recompute::None).moe, 2.0 * experts.moe);
    let megatron = |skew| Layer::new(&d, false, true, skew, Account::Megatron).kept(Recompute::None).moe;
    assert_eq!(megatron(2.0) - megatron(1.0), 2.0 * elements(&[&[s, h], &[s, 2 * i], &[s, i]]));
}

/// Inside the blocks tensors are divided by heads and columns, between them by tokens: nothing but one head's floor is left over.
#[test]
fn tensor_parallelism_divides_all_that_is_kept() {
    let (network, job) = (network("Qwen3-235B-A22B"), Job::new(4096, 8));
    let at = |text: &str| layer(&Dims::new(&network, &job, &layout(text, 8)), true, 1.0).kept(Recompute::None);
    let (one, four, eight) = (at("tp=1,etp=1"), at("tp=4,etp=1"), at("tp=8,etp=1"));
    // All but the borders between the 128 experts.
    let borders = 129.0 * 4.0;
    near(four.all() - borders, (one.all() - borders) / 4.0, 1e-12);
    // Beyond the four key/value heads a rank still has a whole head of k and v: before and after rotation, and its norm.
    let copies = 4096.0 * (2.0 * 2.0 * 128.0 * 2.0 + 4.0) / 2.0;
    near(eight.plain - borders, (one.plain - borders) / 8.0 + copies, 1e-12);
    // Without sequence parallelism every rank has all tokens between the matrices: input, two normed inputs, sum, and two statistics.
    let whole = at("tp=4,etp=1,sequence=false");
    near(whole.plain - four.plain, 0.75 * 4096.0 * (4.0 * 4096.0 * 2.0 + 2.0 * 4.0), 1e-12);
    assert_eq!(whole.moe, four.moe, "experts work on shares all the same");
}

/// The first stage of a pipeline holds as many micro-batches as there are stages.
#[test]
fn early_stages_hold_more_micro_batches() {
    let (network, job) = (network("Qwen3-8B"), Job::new(4096, 32));
    let l = layout("tp=1,pp=4,etp=1", 4);
    let q = question(&network, &job, &l);
    let list = stages(&network, &l).unwrap();
    let d = Dims::new(&network, &job, &l);
    let one = 9.0 * layer(&d, false, 1.0).kept(Recompute::None).all();
    let peaks: Vec<Peak> = list.iter().map(|s| peak_activations(&q, &d, s, 1.0)).collect();
    assert_eq!(peaks.iter().map(|p| p.flights).collect::<Vec<_>>(), [4.0, 3.0, 2.0, 1.0]);
    for peak in &peaks[..3] {
        near(peak.kept.all(), peak.flights * one, 1e-12);
        assert_eq!(peak.moving, peaks[0].moving);
    }
    // A tensor handed on waits in each direction that a stage sends in.
    let message = 4096.0 * 4096.0 * 2.0;
    near(peaks[1].standing - peaks[0].standing, message, 1e-12);
    // Two micro-batches are all there are.
    let few = Job::new(4096, 2);
    let q = Question { job: &few, ..q };
    near(peak_activations(&q, &d, &list[0], 1.0).kept.all(), 2.0 * one, 1e-12);
}

#[test]
fn recomputation_keeps_less_and_full_keeps_only_inputs() {
    let (network, job) = (network("Qwen3-30B-A3B"), Job::new(4096, 64));
    let peak = |text: &str| {
        let l = layout(text, 8);
        let stage = &stages(&network, &l).unwrap()[0];
        stage_memory(&question(&network, &job, &l), stage, 1.0).total()
    };
    let all: Vec<f64> =
        ["none", "norm", "norm+act", "selective", "norm+act+moe+qkv", "full"].map(|r| peak(&format!("ep=8,recompute={r}"))).to_vec();
    assert!(all.windows(2).all(|w| w[0] > w[1]), "{all:?}");
    let d = Dims::new(&network, &job, &layout("ep=8", 8));
    let experts = layer(&d, true, 1.0);
    assert_eq!(experts.kept(Recompute::Full).all(), 4096.0 * 2048.0 * 2.0);
    let usual = Recompute::parse("selective").unwrap();
    assert_eq!(experts.kept(usual).moe, 0.0);
    // Dropped outside the experts: two normed inputs, and q, k, v after rotation with their norm.
    let dropped = 4096.0 * (2.0 * 2048.0 * 2.0 + (32.0 + 8.0) * 128.0 * 2.0 + 36.0 * 4.0);
    near(experts.kept(Recompute::None).plain - experts.kept(usual).plain, dropped, 1e-12);
}

/// A chunk of logits has as many rows as the engine's head takes on a GPU.
#[test]
fn logits_come_in_the_engines_chunks() {
    let rows = |model: &str, seq| Dims::new(&network(model), &Job::new(seq, 1), &layout("tp=1,etp=1", 1)).logit_rows;
    // 1.25 GiB hold 4,417 rows of 151,936 bf16 logits: 4,352 in tiles of 256; 8,192 rows are two parts of 4,096.
    assert_eq!([rows("Qwen3-8B", 8192), rows("Qwen3-8B", 4352), rows("Qwen3-8B", 100)], [4096.0, 4352.0, 100.0]);
    let asked = Job { loss_chunk: 512, ..Job::new(8192, 1) };
    assert_eq!(Dims::new(&network("Qwen3-8B"), &asked, &layout("tp=1,etp=1", 1)).logit_rows, 512.0);
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
    let halved = Precision { grad_bytes: 2, moment_bytes: 2, ..Precision::BF16 };
    assert_eq!(sizes(Account::Temper, halved), [2.0, 2.0, 2.0, 4.0]);
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
    near(here.total() - away.total(), away.host, 1e-12);
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

/// What passes through a device is no larger than the engine's buffers of 64 MiB, and for a small model as small as its parameters: by hand,
/// Qwen3-0.6B's embedding has 151,936 x 1,024 elements, a tied one is alone on its stage.
#[test]
fn what_passes_through_a_device_is_a_parameter_at_most() {
    let network = network("Qwen3-0.6B");
    let embedding = 151_936.0 * 1024.0;
    let of = |text: &str, gpus: usize, f32s: bool| {
        let l = layout(text, gpus);
        let mut job = Job::new(64, 8);
        job.precision.weight_bytes = if f32s { 4 } else { 2 };
        let (q, list) = (question(&network, &job, &l), stages(&network, &l).unwrap());
        let (memory, phases) = (stage_memory(&q, &list[0], 1.0), phases(&q, &list[0], 1.0));
        let stands = memory.between();
        (phases.load - stands, phases.save - stands, phases.resume - stands)
    };
    let stage = 64.0 * 1_048_576.0;
    for (text, gpus, f32s, read, save) in [
        ("tp=1", 1, false, stage, 4.0 * embedding),
        ("tp=1", 1, true, stage, 0.0),
        // The share of the embedding, alone in its bucket, and the remainders of what others update.
        ("dp=4", 4, false, 1.5 * stage, embedding),
    ] {
        let (load, saved, resumed) = of(text, gpus, f32s);
        near(load, read, 1e-6);
        assert!((saved - save).abs() < 1.0, "{text}: {saved}, not {save}");
        assert_eq!(load, resumed);
    }
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

/// The schedule played through with the same routing everywhere is the account by formula, for every rank.
#[test]
fn a_step_played_through_is_the_account() {
    for (model, gpus, text, batch) in [
        ("Qwen3-30B-A3B", 8, "ep=8", 16),
        ("Qwen3-30B-A3B", 16, "tp=2,pp=4,ep=2,etp=2", 8),
        ("Qwen3-30B-A3B", 16, "pp=4,vpp=3,ep=4,recompute=full", 20),
        ("Qwen3-30B-A3B", 8, "pp=2,vpp=2,ep=4,etp=1,recompute=selective", 5),
        ("Qwen3-8B", 8, "pp=4,vpp=3,tp=2,etp=1", 6),
        ("Qwen3.6-35B-A3B", 8, "ep=4,pp=2,recompute=moe", 8),
    ] {
        let network = network(model);
        let (job, l) = (Job::new(4096, batch), layout(text, gpus));
        let (q, list) = (question(&network, &job, &l), stages(&network, &l).unwrap());
        for skew in [1.0, 1.7] {
            for rank in 0..gpus {
                let played = routed_memory(&q, &list, rank, &vec![skew; 10_000]).unwrap();
                let account = rank_memory(&q, &list, rank, skew).unwrap();
                for purpose in Purpose::ALL {
                    near(played.of(purpose), account.of(purpose), 1e-9);
                }
            }
        }
    }
    // One busy layer keeps its own rows beyond its share.
    let network = network("Qwen3-30B-A3B");
    let (job, l) = (Job::new(4096, 8), layout("ep=8,dp=8", 8));
    let (q, list) = (question(&network, &job, &l), stages(&network, &l).unwrap());
    let busy = |at: usize| {
        let skews: Vec<f64> = (0..48).map(|layer| if layer == at { 2.0 } else { 1.0 }).collect();
        routed_memory(&q, &list, 0, &skews).unwrap().of(Purpose::Moe)
    };
    let balanced = rank_memory(&q, &list, 0, 1.0).unwrap().of(Purpose::Moe);
    let row = 2.0 * (2048.0 + 2.0 * 768.0);
    near(busy(3) - balanced, 4096.0 * 8.0 * row, 1e-9);
    // With full recomputation only inputs are kept: a busy last layer is as heavy as if all were, an early one is not.
    let l = layout("ep=8,dp=8,recompute=full", 8);
    let q = question(&network, &job, &l);
    let full = |at: usize| {
        let once = (0..48).map(|layer| if layer == at { 2.0 } else { 1.0 });
        routed_memory(&q, &list, 0, &once.clone().chain(once.rev()).collect::<Vec<f64>>()).unwrap().total()
    };
    near(full(47), rank_memory(&q, &list, 0, 2.0).unwrap().total(), 1e-12);
    assert!(full(47) > full(3) && full(3) >= rank_memory(&q, &list, 0, 1.0).unwrap().total());
}
