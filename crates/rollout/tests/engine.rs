//! The engine against the greedy tokens that transformers generated, alone, in batches and short of memory.

use std::path::PathBuf;
use temper_config::Arch;
use temper_model::{Batch, Cx, Model, Names, RopeTables, Weights, read_floats};
use temper_rollout::{Completion, Engine, EngineOptions, Error, Finish, Request, Sampling};
use temper_tensor::{DType, Ops, Tensor, cpu::Cpu};

const FIXTURES: [&str; 6] = ["llama", "qwen2", "qwen3_dense", "qwen3_dense_tied", "qwen3_moe", "qwen3_moe_sparse_step"];
/// Tokens of row 0 before the golden continuation.
const PROMPT: usize = 12;

struct Fixture {
    ops: Cpu,
    model: Model,
    weights: Weights,
    /// Rows of `input_ids`.
    rows: Vec<Vec<u32>>,
    greedy: Vec<u32>,
}

/// The folder of the fixtures, or a printed reason and `None`.
fn folder(name: &str) -> Option<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let places = [here.join("../model/tests/fixtures"), here.join("../../../shared/fixtures")].map(|p| p.join(name));
    let found = places.iter().find(|p| p.join("golden.safetensors").exists()).cloned();
    if found.is_none() {
        eprintln!("skipped: no fixture {name} in {}", places[0].display());
    }
    found
}

/// The fixture's weights after its five training steps: those its greedy tokens come from.
fn load(name: &str) -> Option<Fixture> {
    let dir = folder(name)?;
    let arch = Arch::from_folder(&dir).expect("config.json of the fixture");
    let ops = Cpu::new(1);
    let model = Model::new(&arch).expect("a network of the architecture");
    let bytes = std::fs::read(dir.join("golden.safetensors")).expect("golden values of the fixture");
    let golden = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let names = Names::new(&model.params);
    let mut host: Vec<Vec<f32>> = model.params.iter().map(|p| vec![f32::NAN; p.numel()]).collect();
    for (key, tensor) in golden.tensors() {
        if let Some(place) = key.strip_prefix("trained/").and_then(|name| names.find(name)) {
            let values = tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
            host[place.id.0][place.range.clone()].iter_mut().zip(values).for_each(|(x, v)| *x = v);
        }
    }
    let tensors = host.into_iter().zip(&model.params).map(|(values, p)| Tensor::from_vec(values, &p.shape)).collect();
    let weights = Weights::from_host(&model.params, tensors, DType::F32, &ops).expect("all weights");
    let ids = |key: &str| -> Vec<u32> {
        let data = golden.tensor(key).expect(key).data().to_vec();
        data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")) as u32).collect()
    };
    let rows = ids("input_ids").chunks(40).map(<[u32]>::to_vec).collect();
    Some(Fixture { greedy: ids("greedy"), rows, ops, model, weights })
}

fn options(max_batch: usize, block_size: usize, cache_tokens: usize, step_tokens: usize) -> EngineOptions {
    EngineOptions { max_batch, block_size, cache_tokens, step_tokens }
}

impl Fixture {
    fn engine(&self, options: EngineOptions) -> Engine<'_> {
        Engine::new(&self.ops, &self.model, &self.weights, options).expect("an engine")
    }

    fn golden_request(&self) -> Request {
        Request::greedy(&self.rows[0][..PROMPT], self.greedy.len(), &[])
    }

    /// The golden request among others of different lengths, some of them drawn at random.
    fn mixed(&self) -> Vec<Request> {
        let mut requests = Vec::new();
        for (i, (start, length, max_tokens)) in [(0, 3, 20), (5, 17, 9), (2, 30, 25), (9, 1, 13), (0, 40, 7)].into_iter().enumerate() {
            let mut request = Request::greedy(&self.rows[1][start.min(40 - length)..][..length], max_tokens, &[]);
            if i % 2 == 1 {
                request.sampling = Sampling { temperature: 0.9, top_k: 40, top_p: 0.95, seed: i as u64, ..Sampling::default() };
            }
            requests.push(request);
        }
        requests.insert(2, self.golden_request());
        requests
    }
}

fn tokens(completions: &[Completion]) -> Vec<&[u32]> {
    completions.iter().map(|c| c.tokens.as_slice()).collect()
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    for name in FIXTURES {
        let Some(f) = load(name) else { continue };
        for step_tokens in [5, 2048] {
            let done = f.engine(options(1, 4, 64, step_tokens)).generate(&[f.golden_request()]).expect("a completion");
            assert_eq!(done[0].tokens, f.greedy, "{name}, at most {step_tokens} tokens a step");
            assert_eq!(done[0].finish, Finish::MaxTokens);
        }
    }
}

#[test]
fn tokens_do_not_depend_on_company_or_memory() {
    for name in ["qwen3_dense", "qwen3_moe"] {
        let Some(f) = load(name) else { continue };
        let requests = f.mixed();
        let alone: Vec<Completion> = requests
            .iter()
            .flat_map(|r| f.engine(options(1, 16, 64, 2048)).generate(std::slice::from_ref(r)).expect("a completion"))
            .collect();
        assert_eq!(alone[2].tokens, f.greedy);
        // (options, whether blocks run out)
        let settings = [
            (options(8, 16, 1024, 2048), false),
            (options(3, 7, 200, 16), false),
            (options(8, 2, 56, 2048), true),
            (options(8, 5, 55, 11), true),
        ];
        for (options, tight) in settings {
            let mut engine = f.engine(options);
            let together = engine.generate(&requests).expect("completions");
            assert_eq!(tokens(&together), tokens(&alone), "{name}, {options:?}");
            assert_eq!(engine.stats().preemptions > 0, tight, "{options:?}: {:?}", engine.stats());
            for (a, b) in together.iter().zip(&alone) {
                for (x, y) in a.log_probs.iter().zip(&b.log_probs) {
                    assert!((x - y).abs() < 1e-4, "{name}: log-probability {x} in company, {y} alone");
                }
            }
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_training_forward() {
    let Some(f) = load("qwen3_moe") else { return };
    let mut request = f.golden_request();
    request.sampling = Sampling { temperature: 1.3, top_p: 0.9, seed: 3, ..Sampling::default() };
    let done = f.engine(options(1, 4, 64, 7)).generate(std::slice::from_ref(&request)).expect("a completion").remove(0);
    let all: Vec<i32> = request.prompt.iter().chain(&done.tokens).map(|t| *t as i32).collect();
    let positions: Vec<i32> = (0..all.len() as i32).collect();
    let rope = RopeTables::new(&f.ops, &f.model.arch, all.len(), DType::F32).expect("tables");
    let batch = Batch::new(&f.ops, &all, &positions, &[0, all.len() as i32]).expect("a batch");
    let cx = Cx { ops: &f.ops, weights: &f.weights, rope: &rope, batch: &batch, ranks: temper_model::Ranks::single() };
    let logits = read_floats(&f.ops, &f.model.forward_logits(&cx).expect("logits")).expect("host logits");
    for (i, (token, log_prob)) in done.tokens.iter().zip(&done.log_probs).enumerate() {
        let row = &logits[(PROMPT + i - 1) * f.model.arch.vocab..][..f.model.arch.vocab];
        let expected = row[*token as usize] - row.iter().map(|l| l.exp()).sum::<f64>().ln();
        assert!((log_prob - expected).abs() < 1e-4, "token {i}: {log_prob}, training forward {expected}");
    }
}

/// Tokens are bytes, as far as they go.
fn decode(tokens: &[u32]) -> String {
    String::from_utf8_lossy(&tokens.iter().map(|t| b'a' + (*t % 26) as u8).collect::<Vec<_>>()).into_owned()
}

#[test]
fn every_way_to_end() {
    let Some(f) = load("qwen3_dense") else { return };
    let whole = decode(&f.greedy);
    let run = |change: &dyn Fn(&mut Request)| {
        let mut request = f.golden_request();
        change(&mut request);
        f.engine(options(2, 4, 64, 64)).with_decoder(decode).generate(&[request]).expect("a completion").remove(0)
    };
    // The first place at which a token is met for the first time, past the start.
    let at = (3..16).find(|i| !f.greedy[..*i].contains(&f.greedy[*i])).expect("a new token");
    let end = run(&|r| r.end_tokens = vec![319, f.greedy[at]]);
    assert_eq!((end.finish.clone(), end.finish.reason()), (Finish::EndToken(f.greedy[at]), "stop"));
    assert_eq!(end.tokens, f.greedy[..=at], "the end token is among the tokens");
    assert_eq!(end.text, whole[..at], "but not in the text");
    let stop = whole[5..8].to_string();
    let stopped = run(&|r| r.stop = vec!["never".into(), stop.clone()]);
    assert_eq!((stopped.finish, stopped.text.as_str()), (Finish::StopString(stop.clone()), &whole[..whole.find(&stop).unwrap_or(0)]));
    let short = run(&|r| r.max_tokens = 5);
    assert_eq!((short.finish.reason(), short.text.as_str(), short.log_probs.len()), ("length", &whole[..5], 5));
}

#[test]
fn generation_ends_with_the_models_last_position() {
    let Some(mut f) = load("qwen3_dense") else { return };
    f.model.arch.max_positions = 20;
    let done = f.engine(options(1, 4, 64, 64)).generate(&[f.golden_request()]).expect("a completion").remove(0);
    assert_eq!((done.tokens.as_slice(), done.finish), (&f.greedy[..8], Finish::ContextFull));
    let full = Request::greedy(&f.rows[0][..20], 4, &[]);
    let error = f.engine(options(1, 4, 64, 64)).add(full).expect_err("no room").to_string();
    assert!(error.contains("20 tokens") && error.contains("shorten"), "{error}");
}

#[test]
fn streaming_gives_the_same_text_piece_by_piece() {
    let Some(f) = load("qwen3_dense") else { return };
    let requests = f.mixed();
    let mut engine = f.engine(options(4, 4, 128, 64)).with_decoder(decode);
    let mut streamed = vec![(String::new(), Vec::new()); requests.len()];
    let done = engine
        .generate_with(&requests, |i, output| {
            streamed[i].0.push_str(&output.text);
            streamed[i].1.push(output.token);
        })
        .expect("completions");
    for (c, (text, tokens)) in done.iter().zip(&streamed) {
        assert_eq!((&c.text, &c.tokens), (text, tokens));
        assert_eq!(*text, decode(tokens));
    }
}

#[test]
fn requests_join_and_leave_between_steps() {
    let Some(f) = load("qwen3_moe") else { return };
    let mut engine = f.engine(options(4, 4, 128, 64));
    let other = engine.add(Request::greedy(&f.rows[1][..9], 30, &[])).expect("queued");
    for _ in 0..4 {
        engine.step().expect("a step");
    }
    let golden = engine.add(f.golden_request()).expect("queued");
    let mut tokens = Vec::new();
    while !engine.is_idle() {
        for output in engine.step().expect("a step") {
            if output.id == golden {
                tokens.push(output.token);
            }
        }
        if tokens.len() == 3 {
            assert!(engine.cancel(other));
        }
    }
    assert_eq!(tokens, f.greedy);
    assert!(!engine.cancel(golden), "it has ended");
}

#[test]
fn requests_that_cannot_be_served_are_refused() {
    let Some(f) = load("qwen3_dense") else { return };
    let fine = f.golden_request();
    let refused = |change: &dyn Fn(&mut Request), word: &str| {
        let mut request = fine.clone();
        change(&mut request);
        let mut engine = f.engine(options(1, 4, 40, 64));
        let error = engine.generate(&[fine.clone(), request]).expect_err(word).to_string();
        assert!(error.contains(word), "{error}");
        assert!(engine.is_idle(), "the good request before it is not left behind");
    };
    refused(&|r| r.prompt.clear(), "no tokens");
    refused(&|r| r.prompt[1] = 320, "vocabulary of 320");
    refused(&|r| r.max_tokens = 0, "max_tokens is 0");
    refused(&|r| r.max_tokens = 30, "cache of 40 tokens; lower max_tokens");
    refused(&|r| r.max_tokens = usize::MAX, "lower max_tokens");
    refused(&|r| r.stop = vec!["x".into()], "no decoder");
    refused(&|r| r.stop = vec![String::new()], "empty stop string");
    refused(&|r| r.sampling.top_p = 0.0, "top_p");
    for bad in [options(0, 4, 40, 64), options(1, 0, 40, 64), options(1, 4, 0, 64), options(1, 4, 40, 0), options(1, 4, usize::MAX, 64)] {
        assert!(matches!(Engine::new(&f.ops, &f.model, &f.weights, bad), Err(Error::Options(_))), "{bad:?}");
    }
}

#[test]
fn a_nan_in_the_weights_is_an_error_that_says_where() {
    let Some(mut f) = load("qwen3_dense") else { return };
    let norm = f.model.output().unwrap().norm.weight;
    f.ops.fill(f.weights.get_mut(norm).expect("the last norm"), f64::NAN).expect("filled");
    let error = f.engine(options(1, 4, 64, 64)).generate(&[f.golden_request()]).expect_err("no token can be drawn").to_string();
    assert!(error.contains("request 0, token 0") && error.contains("NaN"), "{error}");
}
