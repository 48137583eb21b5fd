//! The account of memory against the engine itself, to the byte: a small model runs on the CPU backend, which counts every tensor.

mod common;

use std::path::Path;
use temper_model::aux::AuxGrad;
use temper_model::{Batch, Cx, Grads, Model, Parts, RopeTables, Weights};
use temper_planner::memory::{Dims, Layer, Overheads, Purpose, Question, stage_memory};
use temper_planner::{Account, Job, Layout, LayoutRequest, Network, Precision, Recompute, stages};
use temper_tensor::{DType, Ops, cpu::Cpu};

const TOKENS: usize = 100;

const DENSE: &str = r#"{"model_type":"qwen3","hidden_size":96,"num_hidden_layers":4,"num_attention_heads":6,"num_key_value_heads":2,"head_dim":16,
    "intermediate_size":200,"vocab_size":301,"tie_word_embeddings":false}"#;
const EXPERTS: &str = r#"{"model_type":"qwen3_moe","hidden_size":96,"num_hidden_layers":4,"num_attention_heads":6,"num_key_value_heads":2,"head_dim":16,
    "intermediate_size":200,"moe_intermediate_size":72,"num_experts":16,"num_experts_per_tok":4,"vocab_size":301,"tie_word_embeddings":false}"#;
/// No norm of heads, a tied head, two dense layers among those with experts.
const LLAMA: &str = r#"{"model_type":"llama","hidden_size":64,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":4,
    "intermediate_size":176,"vocab_size":5000,"tie_word_embeddings":true}"#;
const MIXED: &str = r#"{"model_type":"qwen3_moe","hidden_size":96,"num_hidden_layers":5,"num_attention_heads":6,"num_key_value_heads":2,"head_dim":16,
    "intermediate_size":900,"moe_intermediate_size":24,"num_experts":8,"num_experts_per_tok":2,"vocab_size":301,"mlp_only_layers":[0,2],
    "tie_word_embeddings":false}"#;

/// Every setting of recomputation.
fn settings() -> Vec<Recompute> {
    let chosen = |norm, act, moe, mlp, qkv| Recompute::Selective(Parts { norm, act, moe, mlp, qkv });
    vec![
        Recompute::None,
        Recompute::Selective(Parts::usual()),
        chosen(true, false, false, false, false),
        chosen(false, true, false, false, false),
        chosen(false, false, true, false, false),
        chosen(false, false, false, true, true),
        chosen(true, true, true, true, true),
        Recompute::Full,
    ]
}

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
        let ids: Vec<i32> = (0..TOKENS as i32).map(|i| i * 7 % 301).collect();
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
    Job { precision: Precision::F32, loss_chunk: temper_model::CHUNK_ROWS, ..Job::new(TOKENS, 1) }
}

fn one_rank(recompute: Recompute) -> Layout {
    Layout { recompute, ..LayoutRequest::parse("tp=1,etp=1", "").unwrap().complete(1, true) }
}

#[test]
fn layers_hold_what_the_account_says() {
    for (config, experts) in [(DENSE, false), (EXPERTS, true), (LLAMA, false)] {
        let bench = Bench::new(config);
        let d = Dims::new(&bench.network, &job(), &one_rank(Recompute::None));
        let (layer, layers) = (Layer::new(&d, false, experts, 1.0, Account::Temper), bench.model.layers.len());
        for recompute in settings() {
            let x = bench.model.embedding().unwrap().forward(&bench.cx()).unwrap();
            let before = used(&bench.cpu);
            // The input of the first layer was there before, the output of the last one is there now: as many bytes.
            let held = bench.model.forward_layers(&bench.cx(), 0..layers, x, None, recompute).unwrap();
            assert_eq!((used(&bench.cpu) - before) as f64, layers as f64 * layer.kept(recompute).all(), "{recompute}, experts {experts}");
            drop(held);
        }
    }
}

/// The peak of a forward and backward pass with its loss, weights, gradients, batch and tables included.
#[test]
fn a_micro_batch_needs_what_the_account_says() {
    for config in [DENSE, EXPERTS, LLAMA, MIXED] {
        for recompute in settings() {
            let bench = Bench::new(config);
            let layers = bench.model.layers.len();
            let mut grads = Grads::zeros(&bench.model.params, DType::F32, &bench.cpu).unwrap();
            bench.cpu.reset_memory_peak();
            let x = bench.model.embedding().unwrap().forward(&bench.cx()).unwrap();
            let (x, kept) = bench.model.forward_layers(&bench.cx(), 0..layers, x, None, recompute).unwrap();
            let (losses, dx) = bench.model.output().unwrap().forward_backward(&bench.cx(), &x, 1.0, &mut grads).unwrap();
            drop(x);
            drop(bench.model.backward_layers(&bench.cx(), 0..layers, kept, dx, &AuxGrad::default(), &mut grads).unwrap());
            drop(losses);
            let measured = bench.cpu.memory().unwrap().peak_tensors as f64;
            let (layout, job) = (one_rank(recompute), job());
            let question = Question { network: &bench.network, job: &job, layout: &layout, overheads: Overheads::NONE };
            let predicted = stage_memory(&question, &stages(&bench.network, &layout).unwrap()[0], 1.0);
            let predicted = predicted.without(Purpose::Moments); // nothing optimizes here
            // Beside the account are the borders of documents, and at the loss the token losses counted twice.
            let off = measured - predicted;
            assert!(
                (-4.0 * TOKENS as f64..=64.0).contains(&off),
                "{recompute}, {}: {measured} measured, {predicted} predicted",
                bench.network.family
            );
        }
    }
}
