//! Figures that those who ran these jobs published, and what the planner says of them.

mod common;

use common::*;
use temper_planner::memory::Purpose;
use temper_planner::*;

const GIB: f64 = 1_073_741_824.0;

/// 64 devices of 96 GB with one 200 Gb/s port each, sequences of 4,096, 32 sequences a step.
fn qwen_235b(account: Account, layout: &str) -> Plan {
    let mut cluster = cluster("h20", 64);
    cluster.device.network_gb_s = 25.0;
    let job = Job::new(4096, 32).under(account);
    planned(run("Qwen3-235B-A22B", cluster, job, layout))
}

const LAYOUT_235B: &str = "tp=8,pp=2,ep=4,etp=8,recompute=moe";

#[test]
fn qwen3_235b_has_the_published_number_of_parameters() {
    let network = network("Qwen3-235B-A22B");
    assert_eq!(network.total, 235_093_634_560);
    near(network.active as f64, 22e9, 0.02);
}

#[test]
fn qwen3_235b_on_64_devices_holds_4_07_b_parameters_and_79_gb() {
    let plan = qwen_235b(Account::Megatron, LAYOUT_235B);
    println!("megatron: {:#?}", plan.heaviest);
    assert_eq!(plan.layout.dp, 4);
    assert_eq!(plan.layout.expert_dp(), 1);
    assert_eq!(plan.stages.iter().map(|s| s.stage.layers).collect::<Vec<_>>(), [47, 47]);
    near(plan.heaviest.params as f64, 4.07e9, 0.002);
    near(plan.heaviest.peak_bytes as f64, 79e9, 0.05);
    // Megatron divides keys and values below a head; temper copies heads: 0.6 % more parameters. Its masters are half as large.
    let ours = qwen_235b(Account::Temper, LAYOUT_235B);
    println!("temper: {:#?}", ours.heaviest);
    near(ours.heaviest.params as f64, 4.07e9, 0.01);
    assert!(ours.heaviest.peak_bytes < plan.heaviest.peak_bytes);
    assert_eq!(ours.beside.heaviest.peak_bytes, plan.heaviest.peak_bytes);
}

#[test]
fn etp_1_is_advised_for_qwen3_235b() {
    for account in [Account::Temper, Account::Megatron] {
        let plan = qwen_235b(account, LAYOUT_235B);
        let advice = plan.advice.iter().find(|a| a.remedy.contains("etp=1 shards better")).expect("advice on etp");
        println!("{advice:?}");
        let whole = qwen_235b(account, "tp=8,pp=2,ep=32,etp=1,recompute=moe");
        assert_eq!(whole.heaviest.params, plan.heaviest.params, "as many parameters a rank");
        assert!(whole.heaviest.peak_bytes < plan.heaviest.peak_bytes);
        assert!(whole.time.total < plan.time.total);
    }
}

#[test]
fn the_full_checkpoint_of_qwen3_235b_is_3_29_tb() {
    near(qwen_235b(Account::Temper, LAYOUT_235B).checkpoint.bytes as f64, 3.29e12, 0.002);
}

/// 40 H20 in 5 nodes, sequences of 49,152, 80 sequences of 29,000 tokens on average a step.
fn qwen_35b(account: Account, grad_bytes: u8) -> Plan {
    let mut job = Job::new(49_152, 80).under(account);
    job.mean_tokens = 29_000.0;
    job.precision.grad_bytes = grad_bytes;
    planned(run("Qwen3.6-35B-A3B", cluster("h20", 40), job, "tp=1,pp=1,ep=8,dp=40,recompute=full"))
}

#[test]
fn qwen3_6_35b_has_the_parameters_of_its_files() {
    // 1,026 tensors of the release, its multi-token prediction layer left out.
    assert_eq!(network("Qwen3.6-35B-A3B").total, 35_107_181_936);
    assert_eq!(network("Qwen3-Next-80B-A3B").total, 79_674_391_296);
    assert_eq!(network("Qwen3-8B").total, 8_190_735_360);
    assert_eq!(network("Qwen3-30B-A3B").total, 30_532_122_624);
    assert_eq!(network("Qwen3-0.6B").total, 596_049_920);
}

#[test]
fn qwen3_6_35b_on_40_h20_holds_what_its_engineers_counted() {
    let plan = qwen_35b(Account::Megatron, 4);
    let by = |purpose| plan.heaviest.by_purpose.of(purpose);
    near(plan.heaviest.params as f64, 6.9e9, 0.005);
    near(by(Purpose::Weights), 13.8e9, 0.005);
    near(by(Purpose::Gradients), 27.7e9, 0.005);
    assert_eq!(plan.layout.expert_dp(), 5);
    let halved = qwen_35b(Account::Megatron, 2);
    near(halved.heaviest.by_purpose.of(Purpose::Gradients), 27.7e9 / 2.0, 0.005);
}

/// Their framework (Megatron-SWIFT) reports `max_memory_reserved / 1024^3`: 85.6 GiB.
#[test]
fn qwen3_6_35b_needs_85_6_gib_under_megatron_and_far_less_with_a_chunked_head() {
    let theirs = qwen_35b(Account::Megatron, 2);
    println!("{:#?}", theirs.heaviest);
    println!("{:.2} GiB, {:.2} GB", theirs.heaviest.peak_bytes as f64 / GIB, theirs.heaviest.peak_bytes as f64 / 1e9);
    near(theirs.heaviest.peak_bytes as f64 / GIB, 85.6, 0.10);
    near(theirs.heaviest.by_purpose.of(Purpose::Logits), 49_152.0 * 248_320.0 * 4.0, 1e-12);
    let ours = qwen_35b(Account::Temper, 2);
    println!("{:#?}", ours.heaviest);
    assert!(ours.heaviest.peak_bytes as f64 <= 0.65 * theirs.heaviest.peak_bytes as f64);
    // The difference is explained: logits first.
    assert_eq!(ours.beside.heaviest.peak_bytes, theirs.heaviest.peak_bytes);
    assert_eq!(ours.beside.differences[0].0, "logits", "{:?}", ours.beside.differences);
}

#[test]
fn the_measured_speed_of_qwen3_6_35b_is_8_to_10_percent_of_the_peak() {
    let mfu = qwen_35b(Account::Temper, 2).measured_mfu(482.0);
    println!("mfu {mfu}");
    assert!((0.08..=0.10).contains(&mfu), "{mfu}");
}

#[test]
fn qwen3_8b_in_8_stages_is_refused_by_default_and_split_on_request() {
    let ask = |layout: &str| plan(run("Qwen3-8B", cluster("h100", 32), Job::new(4096, 128), layout));
    let refused = ask("tp=1,pp=8").unwrap_err();
    assert_eq!(refused.problems.iter().map(|p| p.rule).collect::<Vec<_>>(), [Rule::Split]);
    println!("{}", refused.problems[0]);
    assert!(refused.problems[0].to_string().contains("36 layers") && refused.problems[0].remedy.contains("split=4/4/4/5/5/5/5/4"));
    let uneven = &refused.nearest[0];
    assert_eq!((uneven.pp, uneven.tp, uneven.split.iter().sum::<usize>()), (8, 1, 36));
    let plan = ask("tp=1,pp=8,split=5/5/5/5/4/4/4/4").unwrap();
    assert_eq!(plan.layout.dp, 4);
    assert_eq!(plan.stages.iter().map(|s| s.stage.layers).collect::<Vec<_>>(), [5, 5, 5, 5, 4, 4, 4, 4]);
    let experts = ask("tp=1,pp=4,ep=2").unwrap_err();
    assert_eq!(experts.problems[0].rule, Rule::NoExperts);
    assert!(experts.nearest.iter().all(|l| l.ep == 1) && experts.nearest[0].pp == 4);
}

#[test]
fn ep_does_not_multiply_the_world() {
    let plan = planned(run("Qwen3-30B-A3B", cluster("h100", 8), Job::new(2048, 128), "tp=2,pp=2,ep=2"));
    let l = &plan.layout;
    assert_eq!((l.tp, l.pp, l.dp, l.ep, l.world()), (2, 2, 2, 2, 8));
    // Experts fold into the four ranks of a stage: ep x etp x expert_dp.
    assert_eq!(l.ep * l.etp * l.expert_dp(), 4);
    let refused = temper_planner::plan(run("Qwen3-30B-A3B", cluster("h100", 8), Job::new(2048, 128), "tp=2,pp=2,ep=2,dp=4")).unwrap_err();
    assert_eq!(refused.problems[0].rule, Rule::World);
    assert!(refused.problems[0].remedy.contains("dp=2"));
}
