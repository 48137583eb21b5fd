//! [`Engine`]: requests in, tokens out.
//!
//! Legend: B sequences of a step, V vocabulary.

use crate::scheduler::{Scheduler, Sequence};
use crate::text::Decode;
use crate::{Completion, Error, Finish, Output, Request, RequestId, Result, sample};
use temper_config::Arch;
use temper_model::{CachedStep, KvCache, Model, RopeTables, Weights, read_floats};
use temper_tensor::{DType, Ops};

/// Sizes of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Most sequences of a step.
    pub max_batch: usize,
    /// Tokens of a cache block.
    pub block_size: usize,
    /// Tokens the KV cache holds, over all sequences; rounded up to whole blocks.
    pub cache_tokens: usize,
    /// Most tokens of a step: longer prompts are read in several steps.
    pub step_tokens: usize,
}

impl EngineOptions {
    /// A cache that lets `max_batch` of `requests` run at once without waiting for memory.
    pub fn for_requests(requests: &[Request], arch: &Arch, max_batch: usize) -> EngineOptions {
        let blocks_of = |r: &Request| r.longest().min(arch.max_positions).div_ceil(BLOCK_SIZE).saturating_add(1);
        let mut longest: Vec<usize> = requests.iter().map(blocks_of).collect();
        longest.sort_unstable_by(|a, b| b.cmp(a));
        let blocks = longest.iter().take(max_batch).fold(0usize, |sum, b| sum.saturating_add(*b));
        EngineOptions {
            max_batch,
            block_size: BLOCK_SIZE,
            cache_tokens: blocks.saturating_mul(BLOCK_SIZE).max(BLOCK_SIZE),
            step_tokens: STEP_TOKENS,
        }
    }

    /// Blocks of the cache.
    pub fn blocks(&self) -> usize {
        self.cache_tokens.div_ceil(self.block_size.max(1))
    }

    /// Bytes of the cache.
    pub fn cache_bytes(&self, arch: &Arch, dtype: DType) -> usize {
        self.blocks().saturating_mul(KvCache::block_bytes(arch, dtype, self.block_size))
    }

    fn check(&self) -> Result<()> {
        let sizes = [
            ("max_batch", self.max_batch),
            ("block_size", self.block_size),
            ("cache_tokens", self.cache_tokens),
            ("step_tokens", self.step_tokens),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(Error::Options(format!("{name} is 0; give at least 1")));
        }
        // Cache rows and step tokens are numbered in i32.
        let rows = self.blocks().saturating_mul(self.block_size);
        if let Some((name, n)) = [("cache_tokens", rows), ("step_tokens", self.step_tokens)].iter().find(|(_, n)| *n > i32::MAX as usize) {
            return Err(Error::Options(format!("{name} is {n}, past the limit of {}; lower it", i32::MAX)));
        }
        Ok(())
    }
}

const BLOCK_SIZE: usize = 16;
const STEP_TOKENS: usize = 2048;

/// What an engine has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Forward passes.
    pub steps: u64,
    /// Tokens that went through the model, those computed again after a preemption included.
    pub computed_tokens: u64,
    /// Tokens drawn.
    pub generated_tokens: u64,
    /// Sequences that gave their cache blocks back because there were too few, to be computed again.
    pub preemptions: u64,
}

/// A model that continues texts, many at a time.
///
/// After an error of [`Engine::step`] the tokens of that step are lost: drop the engine.
pub struct Engine<'a> {
    ops: &'a dyn Ops,
    model: &'a Model,
    weights: &'a Weights,
    rope: RopeTables,
    cache: KvCache,
    scheduler: Scheduler,
    decode: Option<Box<Decode<'a>>>,
    next_id: u64,
    stats: Stats,
}

impl<'a> Engine<'a> {
    /// An engine on the weights as they lie in memory; allocates the KV cache.
    pub fn new(ops: &'a dyn Ops, model: &'a Model, weights: &'a Weights, options: EngineOptions) -> Result<Engine<'a>> {
        options.check()?;
        let scheduler = Scheduler::new(&options);
        // No sequence can be longer than the whole cache.
        let positions = model.arch.max_positions.min(scheduler.pool.token_capacity());
        let rope = RopeTables::new(ops, &model.arch, positions, weights.dtype())?;
        let cache = KvCache::new(ops, &model.arch, weights.dtype(), options.blocks(), options.block_size)?;
        Ok(Engine { ops, model, weights, rope, cache, scheduler, decode: None, next_id: 0, stats: Stats::default() })
    }

    /// Outputs will carry text, and requests may have stop strings. `decode` should leave out special tokens and write
    /// U+FFFD for bytes that are no UTF-8, as Hugging Face tokenizers do.
    pub fn with_decoder(mut self, decode: impl Fn(&[u32]) -> String + 'a) -> Engine<'a> {
        self.decode = Some(Box::new(decode));
        self
    }

    /// Queues a request.
    ///
    /// # Errors
    /// When the request contradicts itself or the model, or could outgrow the whole cache.
    pub fn add(&mut self, request: Request) -> Result<RequestId> {
        let arch = &self.model.arch;
        request.check(arch.vocab, arch.max_positions)?;
        if !request.stop.is_empty() && self.decode.is_none() {
            return Err(Error::Options("a request has stop strings but the engine has no decoder; use with_decoder".into()));
        }
        let (longest, capacity) = (request.longest().min(arch.max_positions), self.scheduler.pool.token_capacity());
        if longest > capacity {
            let prompt = request.prompt.len();
            return Err(Error::Request(format!(
                "{prompt} prompt tokens and up to {} new ones do not fit the KV cache of {capacity} tokens; lower max_tokens or raise cache_tokens",
                longest - prompt
            )));
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.scheduler.waiting.push_back(Sequence::new(id, request));
        Ok(id)
    }

    /// Drops a request that is waiting or running. False when there is none of this name (any more).
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.scheduler.cancel(id)
    }

    /// Whether no request is waiting or running.
    pub fn is_idle(&self) -> bool {
        self.scheduler.waiting.is_empty() && self.scheduler.running.is_empty()
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        Stats { preemptions: self.scheduler.preemptions, ..self.stats }
    }

    /// Runs the model once. Returns the tokens drawn, oldest request first: none of a request whose prompt is still being read.
    pub fn step(&mut self) -> Result<Vec<Output>> {
        let shares = self.scheduler.plan();
        if shares.is_empty() {
            return Ok(Vec::new());
        }
        let step = CachedStep::new(self.ops, &self.scheduler.step_tokens(&shares))?;
        let logits = self.model.forward_cached(self.ops, self.weights, &self.rope, &step, &mut self.cache)?;
        let logits = read_floats(self.ops, &logits)?;
        self.stats.steps += 1;
        self.stats.computed_tokens += step.batch.tokens() as u64;
        let max_positions = self.model.arch.max_positions;
        let (mut outputs, mut finished) = (Vec::new(), Vec::new());
        for (share, row) in shares.iter().zip(logits.chunks_exact(self.model.arch.vocab)) {
            let sequence = &mut self.scheduler.running[share.sequence];
            sequence.cached += share.count;
            if sequence.missing() > 0 {
                continue;
            }
            let output = advance(sequence, row, max_positions, self.decode.as_deref())?;
            if output.finish.is_some() {
                finished.push(share.sequence);
            }
            outputs.push(output);
        }
        self.stats.generated_tokens += outputs.len() as u64;
        self.scheduler.retire(&finished);
        Ok(outputs)
    }

    /// Serves `requests` to their ends; the completions come in their order.
    pub fn generate(&mut self, requests: &[Request]) -> Result<Vec<Completion>> {
        self.generate_with(requests, |_, _| {})
    }

    /// As [`Engine::generate`], and calls `on_token` with the index of the request for every token as it is drawn.
    pub fn generate_with(&mut self, requests: &[Request], mut on_token: impl FnMut(usize, &Output)) -> Result<Vec<Completion>> {
        if !self.is_idle() {
            return Err(Error::Options("generate needs an idle engine; finish or cancel the requests added before".into()));
        }
        let first = self.next_id;
        let empty = Completion { tokens: Vec::new(), log_probs: Vec::new(), text: String::new(), finish: Finish::MaxTokens };
        let mut completions = vec![empty; requests.len()];
        for request in requests {
            if let Err(e) = self.add(request.clone()) {
                for id in first..self.next_id {
                    self.cancel(RequestId(id));
                }
                return Err(e);
            }
        }
        while !self.is_idle() {
            for output in self.step()? {
                let index = (output.id.0 - first) as usize;
                on_token(index, &output);
                completions[index].push(output);
            }
        }
        Ok(completions)
    }
}

impl Completion {
    fn push(&mut self, output: Output) {
        self.tokens.push(output.token);
        self.log_probs.push(output.log_prob);
        self.text.push_str(&output.text);
        if let Some(finish) = output.finish {
            self.finish = finish;
        }
    }
}

/// Draws the next token of a sequence from its row of logits, [V], and decides whether it is the last.
fn advance(sequence: &mut Sequence, logits: &[f64], max_positions: usize, decode: Option<&Decode>) -> Result<Output> {
    let index = sequence.generated();
    let fault = |fault| Error::Logits { request: sequence.id.0, token: index, fault };
    let choice = sample(logits, &sequence.request.sampling, &sequence.tokens, index).map_err(fault)?;
    sequence.tokens.push(choice.token);
    let request = &sequence.request;
    let (mut text, mut finish) = (String::new(), None);
    if request.end_tokens.contains(&choice.token) {
        finish = Some(Finish::EndToken(choice.token));
    } else if let Some(decode) = decode {
        let piece = sequence.text.push(choice.token, decode, &request.stop);
        text = piece.text;
        finish = piece.stopped_by.map(Finish::StopString);
    }
    if finish.is_none() && index + 1 == request.max_tokens {
        finish = Some(Finish::MaxTokens);
    }
    if finish.is_none() && sequence.tokens.len() >= max_positions {
        finish = Some(Finish::ContextFull);
    }
    if let (Some(decode), Some(Finish::EndToken(_) | Finish::MaxTokens | Finish::ContextFull)) = (decode, &finish) {
        text.push_str(&sequence.text.finish(decode));
    }
    Ok(Output { id: sequence.id, token: choice.token, log_prob: choice.log_prob, text, finish })
}
