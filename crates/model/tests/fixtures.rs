//! The networks against transformers' golden values (tests/fixtures/README.md).
//!
//! Errors are relative to the largest value of the compared tensor. The goldens are f32 results of another program, so agreement
//! ends at a few f32 roundings: 1e-5, for f32 and f64 alike. Weights after Adam steps are less well determined where gradients are
//! nearly zero, because a step divides each gradient by its own size; [`Spread`] says by how much.

mod common;
use common::adam::{Optimizer, Spread, blur, rounding};
use common::*;
use temper_config::Arch;
use temper_model::param::ParamId;
use temper_model::{AuxSettings, Batch, CachedStep, Grads, KvCache, Objective, Outputs, Recompute, StepTokens, Weights, loss_sum};
use temper_tensor::{Balance, DType, Rng};

const FIXTURES: [&str; 6] = ["llama", "qwen2", "qwen3_dense", "qwen3_dense_tied", "qwen3_moe", "qwen3_moe_sparse_step"];
const TOLERANCE: f64 = 1e-5;

/// Rows of the fixture with their labels shifted to targets.
fn rows(golden: &Golden) -> (Vec<Vec<i32>>, Vec<Vec<i32>>) {
    let shift = |labels: &Vec<i32>| labels[1..].iter().copied().chain([temper_model::IGNORE]).collect();
    (golden.rows("input_ids"), golden.rows("labels").iter().map(shift).collect())
}

/// Both rows as two documents of one micro-batch.
fn packed(s: &Setup, golden: &Golden) -> Batch {
    let (ids, targets) = rows(golden);
    pack(&s.ops, s.dtype, &ids, &targets)
}

/// Each row as a micro-batch.
fn separate(s: &Setup, golden: &Golden) -> Vec<Batch> {
    let (ids, targets) = rows(golden);
    ids.into_iter().zip(targets).map(|(i, t)| pack(&s.ops, s.dtype, &[i], &[t])).collect()
}

/// The balancing loss as transformers adds it.
fn hf_aux(arch: &Arch) -> Option<AuxSettings> {
    let moe = arch.moe.as_ref()?;
    Some(AuxSettings { kind: Balance::Hf, coef: moe.aux_coef, z_coef: 0.0, scale: 1.0 })
}

fn trained(batches: &[Batch]) -> f64 {
    batches.iter().flat_map(|b| &b.labels.as_ref().unwrap().host_weights).map(|w| f64::from(*w)).sum()
}

/// Loss and gradients of a step of several micro-batches.
fn step(s: &Setup, batches: &[Batch], aux: Option<AuxSettings>, recompute: Recompute) -> (f64, Option<f64>, Grads) {
    let mut grads = s.grads();
    let objective = Objective { loss_scale: 1.0 / trained(batches), aux, recompute };
    let (mut loss, mut balance) = (0.0, None);
    for batch in batches {
        let Outputs { losses, aux } = s.model.forward_backward(&s.cx(batch), &mut grads, &objective).unwrap();
        loss += objective.loss_scale * loss_sum(&s.ops, &losses, batch.labels().unwrap()).unwrap();
        balance = aux.map(|a| s.read(&a.balance)[0]);
    }
    (loss, balance, grads)
}

fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let error = relative(found, expected);
    assert!(error < tolerance, "{what}: relative error {error:e}");
}

/// Checks every `PREFIX/NAME` of the golden file and that every parameter was among them.
fn check_named(s: &Setup, golden: &Golden, prefix: &str, tolerance: f64, view: impl Fn(ParamId) -> Vec<f64>) {
    let mut covered: Vec<usize> = s.model.params.iter().map(|p| p.numel()).collect();
    for (name, _, expected) in golden.floats() {
        if let Some(name) = name.strip_prefix(prefix) {
            assert_close(&format!("{prefix}{name}"), &s.named(name, &view), &expected, tolerance);
            covered[s.names.find(name).unwrap().id.0] -= expected.len();
        }
    }
    assert!(covered.iter().all(|left| *left == 0), "some parameters have no golden {prefix}");
}

#[test]
fn logits_loss_and_gradients() {
    for dtype in [DType::F32, DType::F64] {
        for name in FIXTURES {
            let (s, golden) = (Setup::fixture(name, dtype), Golden::fixture(name));
            let batch = packed(&s, &golden);
            let logits = s.model.forward_logits(&s.cx(&batch)).unwrap();
            assert_close(&format!("{name} logits"), &s.read(&logits), &golden.float("logits"), TOLERANCE);
            let aux = hf_aux(&s.model.arch);
            for recompute in [Recompute::None, Recompute::Full] {
                let (mut loss, balance, grads) = step(&s, std::slice::from_ref(&batch), aux, recompute);
                if let (Some(balance), Some(aux)) = (balance, aux) {
                    assert_close(&format!("{name} aux_loss"), &[balance], &golden.float("aux_loss"), TOLERANCE);
                    loss += aux.coef * balance;
                }
                assert_close(&format!("{name} loss"), &[loss], &golden.float("loss"), TOLERANCE);
                check_named(&s, &golden, "grad/", TOLERANCE, |id| host(&s.ops, grads.get(id).unwrap()));
            }
        }
    }
}

/// Packing, separate micro-batches and recompute give one and the same gradient, and evaluation the same losses. The pooled
/// balancing loss belongs to a micro-batch, so it is left out here.
#[test]
fn one_gradient_whatever_the_micro_batches() {
    for name in FIXTURES {
        let (s, golden) = (Setup::fixture(name, DType::F64), Golden::fixture(name));
        let batch = packed(&s, &golden);
        let (loss, _, grads) = step(&s, std::slice::from_ref(&batch), None, Recompute::None);
        let reference = s.host_grads(&grads);
        for recompute in [Recompute::None, Recompute::Full] {
            let (other_loss, _, grads) = step(&s, &separate(&s, &golden), None, recompute);
            assert_close(&format!("{name} separate loss"), &[other_loss], &[loss], 1e-13);
            for (p, (a, b)) in s.model.params.iter().zip(s.host_grads(&grads).iter().zip(&reference)) {
                assert_close(&format!("{name} separate {}", p.name), a, b, 1e-12);
            }
        }
        let out = s.model.forward_loss(&s.cx(&batch), &None).unwrap();
        let evaluated = loss_sum(&s.ops, &out.losses, batch.labels().unwrap()).unwrap() / trained(std::slice::from_ref(&batch));
        assert_close(&format!("{name} evaluation"), &[evaluated], &[loss], 1e-14);
    }
}

/// Blurred runs whose spread says how well weights are determined.
const BLURRED_RUNS: usize = 8;
/// Another program may be off by twice that spread.
const SPREADS: f64 = 2.0;

/// A fixture in training.
struct Run {
    s: Setup,
    optimizer: Optimizer,
    losses: Vec<f64>,
    norms: Vec<f64>,
}

impl Run {
    /// Five steps, with gradients blurred by `blurred` if given. Also returns the first gradients.
    fn new(name: &str, golden: &Golden, dtype: DType, blurred: Option<(&[f64], u64)>) -> (Run, Vec<Vec<f64>>) {
        let s = Setup::fixture(name, dtype);
        let mut run = Run { optimizer: Optimizer::new(&s), losses: Vec::new(), norms: Vec::new(), s };
        let (batch, aux) = (packed(&run.s, golden), hf_aux(&run.s.model.arch));
        let mut first = Vec::new();
        for i in 0..5 {
            let (loss, balance, mut grads) = step(&run.s, std::slice::from_ref(&batch), aux, Recompute::None);
            if i == 0 {
                first = run.s.host_grads(&grads);
            }
            if let Some((rounding, seed)) = blurred {
                blur(&run.s, &mut grads, rounding, &Rng::new(seed, i));
            }
            run.losses.push(loss + aux.map_or(0.0, |a| a.coef * balance.unwrap()));
            run.norms.push(run.optimizer.step(&mut run.s, &grads));
        }
        (run, first)
    }

    /// Whether losses and norms are nearly those of another run. They are not where a router near a tie sent a token elsewhere:
    /// that is no rounding of the same computation.
    fn agrees(&self, other: &Run) -> bool {
        relative(&self.losses, &other.losses).max(relative(&self.norms, &other.norms)) < 10.0 * TOLERANCE
    }
}

#[test]
fn five_optimizer_steps() {
    for name in FIXTURES {
        let golden = Golden::fixture(name);
        let (exact, exact_grads) = Run::new(name, &golden, DType::F64, None);
        let (rounded, rounded_grads) = Run::new(name, &golden, DType::F32, None);
        let rounding = rounding(&exact_grads, &rounded_grads);
        let mut spread = Spread::new(&exact.s);
        let blurred = (0..4 * BLURRED_RUNS as u64).map(|seed| Run::new(name, &golden, DType::F64, Some((&rounding, seed))).0);
        let taken = blurred.filter(|run| run.agrees(&exact)).take(BLURRED_RUNS).map(|run| spread.add(&exact.s, &run.s)).count();
        assert_eq!(taken, BLURRED_RUNS, "{name}: blurred runs go other ways");
        for run in [exact, rounded] {
            let what = format!("{name} {}", run.s.dtype);
            assert_close(&format!("{what} step_loss"), &run.losses, &golden.float("step_loss"), TOLERANCE);
            assert_close(&format!("{what} step_grad_norm"), &run.norms, &golden.float("step_grad_norm"), TOLERANCE);
            check_trained(&what, &run.s, &golden, &spread);
        }
    }
}

/// Every trained weight within [`TOLERANCE`] of the largest plus what rounding makes of it; for nearly all that is next to nothing.
fn check_trained(what: &str, s: &Setup, golden: &Golden, spread: &Spread) {
    let (mut total, mut loose, mut far) = (0, 0, 0);
    for (name, _, expected) in golden.floats() {
        let Some(name) = name.strip_prefix("trained/") else { continue };
        let found = s.named(name, |id| host(&s.ops, s.weights.get(id).unwrap()));
        let spread = s.named(name, |id| spread.of(id));
        let largest = expected.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        for ((found, expected), spread) in found.iter().zip(&expected).zip(spread) {
            let (error, slack) = ((found - expected).abs(), SPREADS * spread);
            assert!(error <= TOLERANCE * largest + slack, "{what} {name}: {found} for {expected}, allowed {slack}");
            total += 1;
            loose += usize::from(slack > 1e-4 * largest);
            far += usize::from(error > 1e-4 * largest);
        }
    }
    assert_eq!(total, s.model.params.iter().map(|p| p.numel()).sum::<usize>());
    assert!(loose * 25 < total && far * 5000 < total, "{what}: of {total} weights {loose} are loose and {far} further than 1e-4");
}

fn argmax(row: &[f64]) -> i32 {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap() as i32
}

fn last_row(s: &Setup, tokens: &[i32]) -> Vec<f64> {
    let positions: Vec<i32> = (0..tokens.len() as i32).collect();
    let batch = Batch::new(&s.ops, tokens, &positions, &[0, tokens.len() as i32]).unwrap();
    let logits = s.read(&s.model.forward_logits(&s.cx(&batch)).unwrap());
    logits[logits.len() - s.model.arch.vocab..].to_vec()
}

#[test]
fn greedy_by_full_forward() {
    for name in FIXTURES {
        let (s, golden) = (Setup::trained_fixture(name, DType::F32), Golden::fixture(name));
        let mut tokens = golden.rows("input_ids")[0][..12].to_vec();
        for _ in 0..16 {
            tokens.push(argmax(&last_row(&s, &tokens)));
        }
        assert_eq!(tokens[12..], golden.rows("greedy")[0], "{name}");
    }
}

/// Two sequences in a cache of blocks of 4 tokens, handed out back to front and alternately, so that no order helps.
struct Paged {
    cache: KvCache,
    blocks: Vec<Vec<i32>>,
    lengths: Vec<usize>,
    free: Vec<i32>,
}

impl Paged {
    const MAX_BLOCKS: usize = 8;

    fn new(s: &Setup, sequences: usize) -> Paged {
        let cache = KvCache::new(&s.ops, &s.model.arch, s.dtype, Self::MAX_BLOCKS * sequences, 4).unwrap();
        let free = (0..(Self::MAX_BLOCKS * sequences) as i32).collect();
        Paged { cache, blocks: vec![Vec::new(); sequences], lengths: vec![0; sequences], free }
    }

    /// Appends tokens to sequences and returns the logits after the last of each.
    fn step(&mut self, s: &Setup, weights: &Weights, tokens: &[Vec<i32>]) -> Vec<Vec<f64>> {
        let mut step = StepTokens { cu_q: vec![0], ..StepTokens::default() };
        for (i, new) in tokens.iter().enumerate() {
            for &token in new {
                let p = self.lengths[i];
                if p.is_multiple_of(4) {
                    self.blocks[i].push(self.free.pop().unwrap());
                }
                step.tokens.push(token);
                step.positions.push(p as i32);
                step.slots.push(self.blocks[i][p / 4] * 4 + (p % 4) as i32);
                self.lengths[i] += 1;
            }
            step.cu_q.push(step.tokens.len() as i32);
            step.context.push(self.lengths[i] as i32);
            let padded = self.blocks[i].iter().copied().chain(std::iter::repeat(-1)).take(Self::MAX_BLOCKS);
            step.blocks.extend(padded);
        }
        let step = CachedStep::new(&s.ops, &step).unwrap();
        let logits = s.model.forward_cached(&s.ops, weights, &s.rope, &step, &mut self.cache).unwrap();
        s.read(&logits).chunks(s.model.arch.vocab).map(<[f64]>::to_vec).collect()
    }
}

#[test]
fn greedy_by_paged_cache() {
    for name in FIXTURES {
        let (s, golden) = (Setup::trained_fixture(name, DType::F32), Golden::fixture(name));
        let prompt = golden.rows("input_ids")[0][..12].to_vec();
        let mut other = golden.rows("input_ids")[1][..5].to_vec();
        let mut paged = Paged::new(&s, 2);
        // The prompt in two pieces, the second together with the other sequence's whole prompt.
        let first = paged.step(&s, &s.weights, &[prompt[..7].to_vec(), other[..2].to_vec()]);
        assert_close(&format!("{name} first piece"), &first[0], &last_row(&s, &prompt[..7]), TOLERANCE);
        let mut logits = paged.step(&s, &s.weights, &[prompt[7..].to_vec(), other[2..].to_vec()]);
        let mut generated = Vec::new();
        for _ in 0..16 {
            assert_close(&format!("{name} other sequence"), &logits[1], &last_row(&s, &other), TOLERANCE);
            let next: Vec<Vec<i32>> = logits.iter().map(|l| vec![argmax(l)]).collect();
            generated.push(next[0][0]);
            other.push(next[1][0]);
            logits = paged.step(&s, &s.weights, &next);
        }
        assert_eq!(generated, golden.rows("greedy")[0], "{name}");
    }
}
