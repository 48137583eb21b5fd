use super::*;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

fn options(max_batch: usize, block_size: usize, cache_tokens: usize, step_tokens: usize) -> EngineOptions {
    EngineOptions { max_batch, block_size, cache_tokens, step_tokens }
}

fn sequence(id: u64, prompt: usize, max_tokens: usize) -> Sequence {
    let prompt: Vec<u32> = (0..prompt as u32).map(|i| id as u32 * 1000 + i).collect();
    Sequence::new(RequestId(id), Request::greedy(&prompt, max_tokens, &[]))
}

/// A model that only remembers what lies in which cache row: it checks that every sequence finds its own tokens there.
#[derive(Default)]
struct FakeCache(HashMap<i32, (i32, i32)>);

impl FakeCache {
    fn run(&mut self, step: &StepTokens, block_size: i32) {
        let sequences = step.context.len();
        let width = step.blocks.len() / sequences;
        let slots: HashSet<i32> = step.slots.iter().copied().collect();
        assert_eq!(slots.len(), step.slots.len(), "two tokens of a step share a cache row");
        for (i, slot) in step.slots.iter().enumerate() {
            self.0.insert(*slot, (step.tokens[i], step.positions[i]));
        }
        for b in 0..sequences {
            let table = &step.blocks[b * width..(b + 1) * width];
            let last = step.cu_q[b + 1] as usize - 1;
            let owner = step.tokens[last] / 1000;
            for p in 0..step.context[b] {
                let row = table[(p / block_size) as usize] * block_size + p % block_size;
                assert_eq!(self.0.get(&row), Some(&(owner * 1000 + p, p)), "sequence {owner} reads foreign or stale rows");
            }
        }
    }
}

/// Runs everything to the end; returns the number of steps.
fn drain(s: &mut Scheduler, block_size: usize, step_tokens: usize) -> usize {
    let mut cache = FakeCache::default();
    for steps in 1.. {
        let shares = s.plan();
        if shares.is_empty() {
            assert!(s.waiting.is_empty() && s.running.is_empty(), "a step was empty while requests wait");
            return steps - 1;
        }
        assert!(shares.iter().map(|x| x.count).sum::<usize>() <= step_tokens);
        assert!(shares.iter().all(|x| x.count > 0));
        assert!(s.running.len() <= s.max_batch);
        let order: Vec<RequestId> = s.running.iter().chain(&s.waiting).map(|q| q.id).collect();
        assert!(order.is_sorted(), "an older request waits behind a younger one");
        cache.run(&s.step_tokens(&shares), block_size as i32);
        let mut done = Vec::new();
        for share in shares {
            let q = &mut s.running[share.sequence];
            q.cached += share.count;
            if q.missing() == 0 {
                q.tokens.push(q.id.0 as u32 * 1000 + q.tokens.len() as u32);
                if q.generated() == q.request.max_tokens {
                    done.push(share.sequence);
                }
            }
        }
        s.retire(&done);
        assert!(steps < 100_000, "no end in sight");
    }
    unreachable!()
}

#[test]
fn prefill_and_decode_share_a_step() {
    let mut s = Scheduler::new(&options(4, 4, 64, 100));
    s.waiting.push_back(sequence(0, 5, 3));
    assert_eq!(s.plan(), [Share { sequence: 0, count: 5 }]);
    s.running[0].cached = 5;
    s.running[0].tokens.push(7);
    s.waiting.push_back(sequence(1, 6, 3));
    assert_eq!(s.plan(), [Share { sequence: 0, count: 1 }, Share { sequence: 1, count: 6 }]);
}

#[test]
fn a_long_prompt_is_read_in_pieces() {
    let mut s = Scheduler::new(&options(4, 4, 64, 8));
    s.waiting.push_back(sequence(0, 20, 1));
    let mut pieces = Vec::new();
    while s.running.first().is_none_or(|q| q.missing() > 0) {
        let shares = s.plan();
        pieces.push(shares[0].count);
        s.running[0].cached += shares[0].count;
    }
    assert_eq!(pieces, [8, 8, 4]);
}

#[test]
fn the_youngest_gives_way_and_comes_back_first() {
    let mut s = Scheduler::new(&options(4, 4, 20, 100));
    for id in 0..3 {
        s.waiting.push_back(sequence(id, 4, 9));
    }
    s.plan();
    let running: Vec<u64> = s.running.iter().map(|q| q.id.0).collect();
    assert_eq!(running, [0, 1, 2]);
    for q in &mut s.running {
        q.cached = 4;
        q.tokens.push(1);
    }
    s.plan(); // needs three more blocks, two are left
    assert_eq!((s.running.len(), s.preemptions), (2, 1));
    let back = s.waiting.front().map(|q| (q.id.0, q.cached, q.tokens.len()));
    assert_eq!(back, Some((2, 0, 5)), "it keeps its tokens and loses only the cache");
}

#[test]
fn cancelled_requests_leave_no_blocks_behind() {
    let mut s = Scheduler::new(&options(1, 4, 64, 100));
    s.waiting.extend([sequence(0, 9, 5), sequence(1, 9, 5)]);
    s.plan();
    assert!(s.cancel(RequestId(1)) && s.cancel(RequestId(0)) && !s.cancel(RequestId(0)));
    assert_eq!(s.pool.free(), 16);
    assert!(s.plan().is_empty());
}

proptest! {
    /// Any mix of requests in any pool that holds each of them alone: all end, in order of arrival, nobody ever reads a
    /// foreign row, and every block comes back.
    #[test]
    fn every_request_ends(
        sizes in prop::collection::vec((1usize..40, 1usize..30), 1..12),
        block_size in 1usize..9,
        max_batch in 1usize..6,
        step_tokens in 1usize..50,
        extra in 0usize..80,
    ) {
        let longest = sizes.iter().map(|(p, m)| p + m).max().unwrap_or(1);
        let opts = options(max_batch, block_size, longest + extra, step_tokens);
        let mut s = Scheduler::new(&opts);
        for (id, (prompt, max_tokens)) in sizes.iter().enumerate() {
            s.waiting.push_back(sequence(id as u64, *prompt, *max_tokens));
        }
        drain(&mut s, block_size, step_tokens);
        prop_assert_eq!(s.pool.free(), opts.blocks());
    }
}
