//! The shapes: none, one, odd, and beyond the blocks in which backends work.

use super::{Bench, Case, attention, dense, moe, norm};
use temper_tensor::{Balance, Beta, DType, GroupedGemm, Trans};

/// Every operation at every shape.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, run: Box<dyn Fn(&mut Bench)>| cases.push(Case { name, run });
    macro_rules! case {
        ($f:path, $($arg:expr),+) => {
            add(format!(concat!(stringify!($f), " {:?}"), ($($arg),+,)), Box::new(move |b: &mut Bench| $f(b, $($arg),+)))
        };
    }

    case!(dense::clip_factor, 2.0);
    case!(dense::clip_factor, 0.0);
    for n in [0, 1, 7, 1000, 70_001] {
        case!(dense::elementwise, n);
        case!(dense::statistics, n);
        case!(dense::adamw, n, 1);
        case!(dense::adamw, n, 5);
    }
    let small = [[0, 5, 3], [5, 0, 3], [5, 3, 0], [1, 1, 1], [1, 300, 70], [3, 1030, 600], [7, 5, 9], [65, 33, 129]];
    let large = [[200, 90, 70], [450, 100, 700], [600, 20, 40], [50, 620, 40], [48, 17, 2100]];
    for [m, n, k] in small.into_iter().chain(large) {
        for ta in [Trans::No, Trans::Yes] {
            for tb in [Trans::No, Trans::Yes] {
                for beta in [Beta::Zero, Beta::One] {
                    case!(dense::gemm, m, n, k, ta, tb, beta);
                }
            }
        }
    }
    for (a, c) in [(DType::BF16, DType::F32), (DType::F32, DType::F32), (DType::F32, DType::BF16)] {
        for (ta, tb) in [(Trans::No, Trans::No), (Trans::No, Trans::Yes), (Trans::Yes, Trans::No)] {
            case!(dense::gemm_mixed, a, c, ta, tb, Beta::Zero);
            case!(dense::gemm_mixed, a, c, ta, tb, Beta::One);
        }
    }
    for (t, n) in [(0, 4), (1, 1), (5, 7), (130, 300)] {
        case!(dense::bias, t, n);
        case!(dense::embedding, 1 + t / 3, n, t);
        case!(dense::cross_entropy, t, n);
        case!(norm::rms_norm, t, n);
        case!(norm::swiglu, t, n);
        case!(moe::router, t, n.max(4), 1);
        case!(moe::router, t, n.max(4), 3);
        case!(moe::dispatch, t, n, 5, 2, 0..5);
        case!(moe::dispatch, t, n, 5, 2, 1..4);
        case!(moe::ranks, t, 6, 2, 3, 1);
        case!(moe::ranks, t, 6, 2, 2, 2);
    }
    case!(dense::cross_entropy, 3, 40_000);
    for (n, v, parts) in [(0, 4, 2), (1, 5, 1), (5, 7, 3), (9, 300, 4)] {
        case!(dense::cross_entropy_divided, n, v, parts);
    }
    for (t, nq, nk, d) in [(0, 2, 1, 4), (1, 1, 1, 2), (5, 3, 3, 6), (40, 4, 2, 16), (300, 3, 1, 8)] {
        for normed in [false, true] {
            case!(norm::qkv_prepare, t, nq, nk, d, normed);
            if t <= 40 {
                case!(norm::qkv_prepare_grad, t, nq, nk, d, normed);
            }
        }
    }
    for (lengths, nq, nk, d) in
        [(&[][..], 2, 1, 4), (&[1], 1, 1, 2), (&[0, 3, 0, 1, 4], 4, 2, 4), (&[63, 1, 65], 2, 2, 4), (&[130, 7], 3, 1, 3)]
    {
        case!(attention::forward, lengths, nq, nk, d);
        case!(attention::backward, lengths, nq, nk, d);
    }
    case!(attention::forward, &[300, 129, 64], 6, 3, 16);
    for (lengths, skip, nq, nk, d) in
        [(&[1][..], 0, 1, 1, 2), (&[5, 0, 4], 3, 4, 2, 4), (&[70, 3], 65, 2, 1, 8), (&[3, 140], 3, 2, 2, 8), (&[6, 150, 9], 40, 4, 2, 4)]
    {
        case!(attention::later_queries, lengths, skip, nq, nk, d);
    }
    case!(attention::paged, &[(1, 1)], 1, 1, 2, 4);
    case!(attention::paged, &[(1, 9), (0, 3), (5, 5), (3, 20)], 4, 2, 8, 4);
    case!(attention::paged, &[(1, 300), (1, 77)], 6, 2, 16, 16);
    for kind in [GroupedGemm::Forward, GroupedGemm::InputGrad, GroupedGemm::WeightGrad(Beta::One), GroupedGemm::WeightGrad(Beta::Zero)] {
        for sizes in [&[0][..], &[3], &[0, 5, 0, 1, 9, 0], &[300, 2, 0, 270]] {
            case!(moe::grouped_gemm, kind, sizes, 37, 20);
        }
    }
    case!(moe::grouped_gemm, GroupedGemm::Forward, &[600, 100], 70, 550);
    for kind in [Balance::Hf, Balance::Megatron] {
        case!(moe::balance_loss, kind, 3, 5, 40, 2);
        case!(moe::balance_loss, kind, 1, 4, 0, 1);
    }
    for (t, normalised, balance, z) in
        [(0, true, true, 0.1), (1, false, false, 0.0), (9, true, false, 0.0), (9, false, true, 0.3), (9, true, true, 0.3)]
    {
        case!(moe::router_grad, t, normalised, balance, z);
    }
    cases
}
