//! How many micro-batches a pipeline stage holds at once.

/// Micro-batches, in units of one chunk of a stage's layers (1/vpp of them), whose activations stage `stage` of `pp` holds at
/// its fullest.
///
/// 1F1B (Narayanan et al. 2021): a stage runs `pp - 1 - stage` forward passes before its first backward pass, and one more
/// comes with it. Interleaved: Megatron's `(pp - 1 - stage) * 2 + (vpp - 1) * pp` warm-up passes, and one more.
pub fn in_flight(stage: usize, pp: usize, vpp: usize, micro_batches: usize) -> usize {
    let after = pp.saturating_sub(stage + 1);
    match vpp {
        0 | 1 => (after + 1).min(micro_batches),
        _ => (after * 2 + (vpp - 1) * pp + 1).min(micro_batches.saturating_mul(vpp)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clockwork of 1F1B: each stage may run ahead of its backward passes by its warm-up, and holds a micro-batch from its
    /// forward to its backward pass. No formula: every stage acts as soon as its neighbours allow.
    fn simulated(pp: usize, micro_batches: usize) -> Vec<usize> {
        let (mut forward, mut backward, mut most) = (vec![0; pp], vec![0; pp], vec![0; pp]);
        while backward[0] < micro_batches {
            let (f, b) = (forward.clone(), backward.clone());
            for s in 0..pp {
                let may_backward = b[s] < f[s] && (s + 1 == pp || b[s + 1] > b[s]);
                let may_forward = f[s] < micro_batches && (s == 0 || f[s - 1] > f[s]) && f[s] - b[s] < pp - s;
                if may_backward {
                    backward[s] += 1;
                } else if may_forward {
                    forward[s] += 1;
                }
                most[s] = most[s].max(forward[s] - backward[s]);
            }
        }
        most
    }

    #[test]
    fn one_f_one_b_holds_what_a_clockwork_holds() {
        for pp in 1..9 {
            for micro_batches in 1..20 {
                let formula: Vec<usize> = (0..pp).map(|s| in_flight(s, pp, 1, micro_batches)).collect();
                assert_eq!(formula, simulated(pp, micro_batches), "pp {pp}, {micro_batches} micro-batches");
            }
        }
    }

    #[test]
    fn interleaving_holds_more_chunks_but_never_more_than_there_are() {
        assert_eq!(in_flight(0, 4, 2, 100), 11); // 3 * 2 + 4 + 1
        assert_eq!(in_flight(3, 4, 2, 100), 5);
        assert_eq!(in_flight(0, 4, 2, 4), 8);
        assert_eq!(in_flight(0, 1, 1, 1), 1);
    }
}
