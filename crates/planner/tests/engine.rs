//! The account of memory against the engine itself: a small model runs on the CPU backend, whose pool counts every byte.
//!
//! All sizes are such that the pool's size classes waste nothing.

mod common;

use common::*;
use std::path::Path;
use temper_model::aux::AuxGrad;
use temper_model::{Batch, Cx, Grads, Model, RopeTables, Weights};
use temper_planner::memory::{Dims, Overheads, Purpose, Question, kept, stage_memory};
use temper_planner::{Job, Layout, LayoutRequest, Network, Precision, Recompute, stages};
use temper_tensor::{DType, Ops, cpu::Cpu};

const TOKENS: usize = 1024;

const DENSE: &str = r#"{"model_type":"qwen3","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":32,
    "intermediate_size":512,"vocab_size":2048,"tie_word_embeddings":false}"#;
const EXPERTS: &str = r#"{"model_type":"qwen3_moe","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":32,
    "intermediate_size":512,"moe_intermediate_size":128,"num_experts":16,"num_experts_per_tok":4,"vocab_size":2048,"tie_word_embeddings":false}"#;

struct Bench {
    network: Network,
    model: Model,
    cpu: Cpu,
    weights: Weights,
    rope: RopeTables,
    batch: Batch,
}

impl Bench {
    fn new(config: &str) -> Bench {
        let network = Network::from_json(config, Path::new("config.json")).unwrap();
        let cpu = Cpu::new(1);
        let model = Model::new(&network.arch).unwrap();
        let weights = Weights::random(&model.params, 7, DType::F32, &cpu).unwrap();
        let rope = RopeTables::new(&cpu, &network.arch, TOKENS, DType::F32).unwrap();
        let ids: Vec<i32> = (0..TOKENS as i32).map(|i| i * 7 % 2048).collect();
        let positions: Vec<i32> = (0..TOKENS as i32).collect();
        let batch = Batch::new(&cpu, &ids, &positions, &[0, TOKENS as i32]).unwrap();
        let batch = batch.with_labels(&cpu, DType::F32, &ids, &[1.0; TOKENS]).unwrap();
        Bench { network, model, cpu, weights, rope, batch }
    }

    fn cx(&self) -> Cx<'_> {
        Cx {
            ops: &self.cpu as &dyn Ops,
            weights: &self.weights,
            rope: &self.rope,
            batch: &self.batch,
            ranks: temper_model::Ranks::single(),
        }
    }
}

/// Bytes held by tensors.
fn used(cpu: &Cpu) -> usize {
    cpu.memory().unwrap().now.iter().sum()
}

fn job() -> Job {
    Job { precision: Precision::F32, ..Job::new(TOKENS, 1) }
}

fn one_rank(recompute: Recompute) -> Layout {
    Layout { recompute, ..LayoutRequest::parse("tp=1,etp=1", "").unwrap().complete(1, true) }
}

#[test]
fn layers_hold_what_the_account_says() {
    for (config, experts) in [(DENSE, false), (EXPERTS, true)] {
        let bench = Bench::new(config);
        let d = Dims::new(&bench.network, &job(), &one_rank(Recompute::None));
        let one = kept(&d, false, experts, 1.0);
        for (recompute, expected) in [(temper_model::Recompute::None, one.all()), (temper_model::Recompute::Full, one.input)] {
            let x = bench.model.embedding().unwrap().forward(&bench.cx()).unwrap();
            let before = used(&bench.cpu);
            // The input of the first layer was there before, the output of the last one is there now: as many bytes.
            let held = bench.model.forward_layers(&bench.cx(), 0..4, x, None, recompute).unwrap();
            let measured = (used(&bench.cpu) - before) as f64;
            println!("experts {experts}, {recompute:?}: {measured} measured, {} predicted", 4.0 * expected);
            near(measured, 4.0 * expected, 0.002);
            drop(held);
        }
    }
}

/// The peak of a forward and backward pass, weights and gradients included. The pool also counts buffers that it keeps for
/// reuse: in a layer's backward pass those are the feed-forward's gate and up, its product's gradient and rows that were freed.
#[test]
fn a_micro_batch_needs_what_the_account_says() {
    for (config, experts) in [(DENSE, false), (EXPERTS, true)] {
        for (recompute, engine) in [(Recompute::None, temper_model::Recompute::None), (Recompute::Full, temper_model::Recompute::Full)] {
            let bench = Bench::new(config);
            let mut grads = Grads::zeros(&bench.model.params, DType::F32, &bench.cpu).unwrap();
            let x = bench.model.embedding().unwrap().forward(&bench.cx()).unwrap();
            let (x, kept) = bench.model.forward_layers(&bench.cx(), 0..4, x, None, engine).unwrap();
            let (losses, dx) = bench.model.output().unwrap().forward_backward(&bench.cx(), &x, 1.0, &mut grads).unwrap();
            drop((x, losses));
            bench.cpu.trim();
            drop(bench.model.backward_layers(&bench.cx(), 0..4, kept, dx, &AuxGrad::default(), &mut grads).unwrap());
            let measured = bench.cpu.memory().unwrap().peak_total as f64;
            let (layout, job) = (one_rank(recompute), job());
            let question = Question { network: &bench.network, job: &job, layout: &layout, overheads: Overheads::NONE };
            let predicted = stage_memory(&question, &stages(&bench.network, &layout).unwrap()[0], 1.0);
            let predicted = predicted.without(Purpose::Moments); // nothing optimizes here
            let d = Dims::new(&bench.network, &job, &layout);
            let spare = if experts { d.routed * (2.0 * d.hidden + 3.0 * d.expert) } else { d.tokens * 3.0 * d.dense } * d.a;
            let small = 1e6; // batch and rotary tables
            println!("{recompute:?}: {measured:.0} measured, {predicted:.0} predicted, at most {spare:.0} kept for reuse");
            assert!(measured >= predicted && measured <= predicted + spare + small);
        }
    }
}
