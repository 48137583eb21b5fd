//! The element types the CPU computes in, and the vector-friendly arithmetic on slices of them.
//!
//! Reductions run in a fixed number of lanes, so that they vectorise and still give the same bits everywhere.

use super::kernel::Vectors;
use crate::{Element, FromSlice, ViewOf};
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

/// f32 or f64.
pub trait Float:
    Element
    + FromSlice
    + ViewOf
    + Vectors
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Minus infinity.
    const NEG_INFINITY: Self;
    /// Rounded from f64.
    fn of(x: f64) -> Self;
    /// Widened.
    fn f64(self) -> f64;
    /// e^x; for f32 without a branch or a call, so that loops over it vectorise.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Neither NaN nor infinite.
    fn is_finite(self) -> bool;
    /// The larger; a NaN in `other` is ignored.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

impl Float for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn of(x: f64) -> f32 {
        x as f32
    }
    #[inline(always)]
    fn f64(self) -> f64 {
        self as f64
    }
    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }
    #[inline(always)]
    fn ln(self) -> f32 {
        f32::ln(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        f32::is_finite(self)
    }
}

impl Float for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    #[inline(always)]
    fn of(x: f64) -> f64 {
        x
    }
    #[inline(always)]
    fn f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }
    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        f64::is_finite(self)
    }
}

/// e^x within 1.5e-7 relative: x = n ln2 + r with |r| <= ln2/2, a polynomial for e^r (Cephes `expf`), and 2^n put into the
/// exponent. 0 below -87.3 (no subnormals), infinity above 88.7, NaN stays NaN.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LOW: f32 = -87.3;
    const HIGH: f32 = 88.7;
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    // ln2 in two parts, the first short enough that n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let c = if x < LOW { LOW } else { x };
    let c = if c > HIGH { HIGH } else { c };
    let shifted = c * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = c - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    // n + 127 without the bias of ROUND, in the exponent field. n <= 128 would overflow it, so half goes to each factor.
    let whole = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let half = whole >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let y = p * power(half) * power(whole - half);
    let y = if x < LOW { 0.0 } else { y };
    if x > HIGH { f32::INFINITY } else { y }
}

const LANES: usize = 16;

/// Reduces `f(a_i, b_i)` by addition; both slices have the same length.
#[inline(always)]
pub fn sum2<T: Float>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let n = a.len().min(b.len());
    let whole = n / LANES * LANES;
    let tail = a[whole..n].iter().zip(&b[whole..n]);
    for (x, y) in a[..whole].chunks_exact(LANES).zip(b[..whole].chunks_exact(LANES)) {
        for i in 0..LANES {
            lanes[i] += f(x[i], y[i]);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(tail) {
        *lane += f(x, y);
    }
    fold(lanes)
}

/// Inner product.
#[inline(always)]
pub fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    sum2(a, b, |x, y| x * y)
}

/// Sum of squares.
#[inline(always)]
pub fn squares<T: Float>(a: &[T]) -> T {
    dot(a, a)
}

/// The largest element that is not NaN; minus infinity when there is none.
#[inline(always)]
pub fn max<T: Float>(a: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let chunks = a.chunks_exact(LANES);
    let tail = chunks.remainder();
    for x in chunks {
        for i in 0..LANES {
            lanes[i] = lanes[i].larger(x[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = lane.larger(x);
    }
    lanes.into_iter().fold(T::NEG_INFINITY, T::larger)
}

/// Replaces every element by `exp(x - shift)` and returns the sum of the new values.
#[inline(always)]
pub fn exp_shifted<T: Float>(a: &mut [T], shift: T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let mut chunks = a.chunks_exact_mut(LANES);
    for x in &mut chunks {
        for i in 0..LANES {
            x[i] = (x[i] - shift).exp();
            lanes[i] += x[i];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *x = (*x - shift).exp();
        *lane += *x;
    }
    fold(lanes)
}

/// The sum of `exp(x - shift)`.
#[inline(always)]
pub fn sum_exp_shifted<T: Float>(a: &[T], shift: T) -> T {
    sum2(a, a, |x, _| (x - shift).exp())
}

/// `y += c * x`.
#[inline(always)]
pub fn axpy<T: Float>(y: &mut [T], c: T, x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += c * x;
    }
}

/// `y += x`.
#[inline(always)]
pub fn accumulate<T: Float>(y: &mut [T], x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// `y *= c`.
#[inline(always)]
pub fn scale<T: Float>(y: &mut [T], c: T) {
    for y in y {
        *y *= c;
    }
}

#[inline(always)]
fn fold<T: Float>(mut lanes: [T; LANES]) -> T {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
        n /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut worst = 0.0f64;
        for i in -873_000..=887_000 {
            let x = i as f32 * 1e-4;
            let exact = (x as f64).exp();
            worst = worst.max((exp_f32(x) as f64 - exact).abs() / exact);
        }
        assert!(worst < 1.5e-7, "{worst:e}");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(-1e30), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(100.0), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan());
    }
}
