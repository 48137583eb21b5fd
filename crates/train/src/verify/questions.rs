//! What a model is asked, the same of every rank.

use super::golden::Golden;
use super::reference::Reference;
use temper_comm::Axes;
use temper_config::Arch;
use temper_data::{IGNORE, MicroBatch, SampleId, StepBatch};
use temper_model::declare;
use temper_model::param::Param;
use temper_parallel::AdamWConfig;
use temper_tensor::Rng;

/// Optimizer steps where nothing says otherwise.
const STEPS: usize = 5;
/// Tokens of the first row that greedy decoding starts from.
const GREEDY_PROMPT: usize = 12;
/// The optimizer of the golden files' steps.
const GOLDEN_LR: f64 = 1e-2;
const ADAMW: AdamWConfig = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 1.0 };
/// Coefficients of the auxiliary losses, whatever the model's own.
const LAYOUT_AUX: [f64; 2] = [1e-2, 1e-3];
/// Learning rate of steps that only compare layouts: what a trained model bears without warm-up, or steps would enlarge every rounding.
const LAYOUT_LR: f64 = 1e-5;
/// Document lengths of random tokens, over and over: single tokens, packing, and micro-batches that no number of ranks divides.
const LENGTHS: [&[usize]; 4] = [&[13, 1, 9], &[29], &[6, 17, 4], &[22, 3]];

/// Documents: tokens, and of each the target.
pub(crate) type Rows = Vec<(Vec<i32>, Vec<i32>)>;

/// What a model is asked.
pub(crate) struct Questions {
    /// All documents together: what logits are asked of.
    pub all: MicroBatch,
    /// The micro-batches of a step.
    pub step: StepBatch,
    /// Whether logits are wanted.
    pub logits: bool,
    /// Whether losses and gradients are.
    pub losses: bool,
    /// Whether gradients are, beside the losses.
    pub grads: bool,
    /// Whether optimizer steps are.
    pub steps: bool,
    /// How many of them, all on the same tokens.
    pub step_count: usize,
    /// Their learning rate.
    pub lr: f64,
    /// Their other constants.
    pub adamw: AdamWConfig,
    /// Coefficients of the load-balancing loss (transformers') and of the router z-loss.
    pub aux: [f64; 2],
    /// Whether weights after them are.
    pub trained: bool,
    /// Tokens that greedy decoding should give, one after another.
    pub greedy: Vec<i64>,
    /// The tokens it starts from.
    pub prompt: Vec<i32>,
}

impl Questions {
    /// What a golden file has answers to. Each row is a micro-batch of its own where ranks share them; but for experts, whose balancing
    /// loss is one of a micro-batch: rows apart would have another.
    pub fn of(golden: &Golden, arch: &Arch, axes: Axes) -> Questions {
        let rows = &golden.rows;
        let spread = arch.moe.is_none() && axes.dp * axes.pp > 1;
        let balance = arch.moe.as_ref().map_or(0.0, |m| if m.aux_in_loss { m.aux_coef } else { 0.0 });
        let micro = if spread { rows.chunks(1).map(pack).collect() } else { vec![pack(rows)] };
        let counted = |name| golden.floats(name).ok().flatten().map(|v| v.len());
        Questions {
            all: pack(rows),
            step: StepBatch { micro, epoch: 0.0 },
            logits: golden.has("logits"),
            losses: golden.labelled,
            grads: golden.has("grad/"),
            steps: golden.has("step_") || golden.has("trained/"),
            step_count: counted("step_loss").or(counted("step_grad_norm")).unwrap_or(STEPS),
            lr: GOLDEN_LR,
            adamw: ADAMW,
            aux: [balance, 0.0],
            trained: golden.has("trained/"),
            greedy: golden.greedy.clone().unwrap_or_default(),
            prompt: rows.first().map_or_else(Vec::new, |(ids, _)| ids[..GREEDY_PROMPT.min(ids.len())].to_vec()),
        }
    }

    /// Everything that layouts are compared in, on random tokens: several micro-batches for every replica, one fewer for the last.
    pub fn random(arch: &Arch, axes: Axes) -> Questions {
        let (vocab, numel) = (arch.vocab, declare(arch).iter().map(Param::numel).sum::<usize>());
        let count = axes.dp * axes.pp.max(2) - usize::from(axes.dp > 1);
        let mut rng = Rng::new(17, 0);
        let micro: Vec<Rows> =
            (0..count).map(|i| LENGTHS[i % LENGTHS.len()].iter().map(|n| document(&mut rng, vocab, *n)).collect()).collect();
        Questions {
            all: pack(&micro[0]),
            step: StepBatch { micro: micro.iter().map(|rows| pack(rows)).collect(), epoch: 0.0 },
            logits: true,
            losses: true,
            grads: true,
            steps: true,
            step_count: STEPS,
            lr: LAYOUT_LR,
            // As large as a clipped gradient is in the mean, so that no step of a weight is decided by rounding (docs/NUMERICS.md).
            adamw: AdamWConfig { eps: ADAMW.clip / (numel.max(1) as f64).sqrt(), ..ADAMW },
            aux: LAYOUT_AUX,
            trained: true,
            greedy: Vec::new(),
            prompt: Vec::new(),
        }
    }

    /// The prompt and the tokens after it, but for the last, whose successor nobody asks for.
    pub fn greedy_tokens(&self) -> Vec<i32> {
        let told = self.greedy.iter().take(self.greedy.len().saturating_sub(1)).map(|t| *t as i32);
        self.prompt.iter().copied().chain(told).collect()
    }

    /// Tokens of the longest document of all.
    pub fn longest(&self) -> usize {
        let micro = self.step.micro.iter().chain([&self.all]);
        let longest = micro.flat_map(|m| &m.positions).max().map_or(1, |p| *p as usize + 1);
        longest.max(self.greedy_tokens().len())
    }
}

/// `n` random tokens; every fourth has no target.
fn document(rng: &mut Rng, vocab: usize, n: usize) -> (Vec<i32>, Vec<i32>) {
    let ids: Vec<i32> = (0..n).map(|_| rng.below(vocab) as i32).collect();
    let targets = (0..n).map(|t| ids.get(t + 1).copied().filter(|_| t % 4 != 2).unwrap_or(IGNORE)).collect();
    (ids, targets)
}

/// Documents end to end, each target of weight 1.
pub(crate) fn pack(rows: &[(Vec<i32>, Vec<i32>)]) -> MicroBatch {
    let mut micro = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
    for (row, (ids, targets)) in rows.iter().enumerate() {
        micro.ids.extend(ids);
        micro.targets.extend(targets);
        micro.positions.extend(0..ids.len() as i32);
        micro.cu_seqlens.push(micro.ids.len() as i32);
        micro.samples.push(SampleId { source: 0, row: row as u64 + 1, piece: 0 });
    }
    micro.weights = micro.targets.iter().map(|t| if *t == IGNORE { 0.0 } else { 1.0 }).collect();
    micro
}
