//! [`Scheduler`]: which tokens the model computes next, and where their keys and values go.
//!
//! A sequence is its tokens and how many of them are in the cache; there is no other difference between reading a prompt
//! and generating. Every step the running sequences, oldest first, get their missing tokens computed as far as the step's
//! budget goes, then waiting ones are admitted while blocks are free. When blocks run out, the youngest running sequence
//! gives all of its back and waits at the head of the queue, to be computed again from its tokens.

use crate::blocks::BlockPool;
use crate::text::TextStream;
use crate::{EngineOptions, Request, RequestId};
use std::collections::VecDeque;
use temper_model::StepTokens;

/// A request being served.
pub(crate) struct Sequence {
    pub id: RequestId,
    pub request: Request,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    pub text: TextStream,
    /// Tokens whose keys and values are in the cache.
    pub cached: usize,
    table: Vec<i32>,
}

impl Sequence {
    pub fn new(id: RequestId, request: Request) -> Sequence {
        Sequence { id, tokens: request.prompt.clone(), request, text: TextStream::default(), cached: 0, table: Vec::new() }
    }

    /// Tokens to compute before the next one can be drawn; at least one.
    pub fn missing(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// Tokens of the answer so far.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }
}

/// What a step computes of one running sequence: its next `count` missing tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    /// Index in [`Scheduler::running`].
    pub sequence: usize,
    pub count: usize,
}

pub(crate) struct Scheduler {
    pub waiting: VecDeque<Sequence>,
    /// In order of arrival, all older than those waiting.
    pub running: Vec<Sequence>,
    pub pool: BlockPool,
    /// Sequences that gave their blocks back so far.
    pub preemptions: u64,
    max_batch: usize,
    step_tokens: usize,
}

impl Scheduler {
    pub fn new(options: &EngineOptions) -> Scheduler {
        Scheduler {
            waiting: VecDeque::new(),
            running: Vec::new(),
            pool: BlockPool::new(options.blocks(), options.block_size),
            preemptions: 0,
            max_batch: options.max_batch,
            step_tokens: options.step_tokens,
        }
    }

    /// Chooses the next step and takes the blocks it needs. Empty only when there are no requests, given that every
    /// request alone fits the pool.
    pub fn plan(&mut self) -> Vec<Share> {
        let mut budget = self.step_tokens;
        let mut shares = Vec::new();
        let before = self.preemptions;
        while shares.len() < self.running.len() && budget > 0 {
            let sequence = shares.len();
            let count = self.running[sequence].missing().min(budget);
            if !self.secure(sequence, count) {
                break;
            }
            shares.push(Share { sequence, count });
            budget -= count;
        }
        while self.preemptions == before && self.running.len() < self.max_batch && budget > 0 && self.admit() {
            let sequence = self.running.len() - 1;
            let count = self.running[sequence].missing().min(budget);
            shares.push(Share { sequence, count });
            budget -= count;
        }
        shares
    }

    /// Blocks for `count` more tokens of a running sequence, from the youngest ones if need be. False when it had to give way itself.
    fn secure(&mut self, sequence: usize, count: usize) -> bool {
        loop {
            let s = &mut self.running[sequence];
            if self.pool.grow(&mut s.table, s.cached + count) {
                return true;
            }
            if let Some(mut youngest) = self.running.pop() {
                self.pool.release(&mut youngest.table);
                youngest.cached = 0;
                self.preemptions += 1;
                self.waiting.push_front(youngest);
            }
            if self.running.len() == sequence {
                return false;
            }
        }
    }

    /// Starts the first waiting sequence if there are blocks for all its tokens, with a block to spare for each running
    /// one (else the next token of any would throw it out again).
    fn admit(&mut self) -> bool {
        let Some(next) = self.waiting.front_mut() else { return false };
        let spare = self.running.len();
        if self.pool.blocks_for(next.tokens.len()) + spare > self.pool.free() || !self.pool.grow(&mut next.table, next.tokens.len()) {
            return false;
        }
        self.running.extend(self.waiting.pop_front());
        true
    }

    /// The step as the model takes it.
    pub fn step_tokens(&self, shares: &[Share]) -> StepTokens {
        let widest = shares.iter().map(|s| self.running[s.sequence].table.len()).max().unwrap_or(0);
        let mut step = StepTokens { cu_q: vec![0], ..StepTokens::default() };
        for share in shares {
            let s = &self.running[share.sequence];
            let new = s.cached..s.cached + share.count;
            step.tokens.extend(s.tokens[new.clone()].iter().map(|t| *t as i32));
            step.positions.extend(new.clone().map(|p| p as i32));
            step.slots.extend(new.clone().map(|p| self.pool.slot(&s.table, p)));
            step.cu_q.push(step.tokens.len() as i32);
            step.context.push(new.end as i32);
            step.blocks.extend(&s.table);
            step.blocks.resize(step.blocks.len() + widest - s.table.len(), -1);
        }
        step
    }

    /// Ends running sequences; `indices` in ascending order.
    pub fn retire(&mut self, indices: &[usize]) {
        for index in indices.iter().rev() {
            let mut s = self.running.remove(*index);
            self.pool.release(&mut s.table);
        }
    }

    /// Ends a sequence wherever it is; false when there is none of this name.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        if let Some(index) = self.running.iter().position(|s| s.id == id) {
            self.retire(&[index]);
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|s| s.id != id);
        self.waiting.len() < before
    }
}

#[cfg(test)]
mod tests;
