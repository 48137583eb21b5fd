//! The inner part of a large matrix product: packed operands, and the tiles of the result that stay in registers
//! (Goto and van de Geijn 2008).
//!
//! A packed operand is a list of panels of W rows (of a) or columns (of b), the last one filled up with zeros; a panel holds
//! W values for each step along k. A panel of b stays in the first cache while the panels of a block of a stream by.
//!
//! An element of c is summed in the order of k, in blocks that follow from k alone. It therefore depends on its row of a and its
//! column of b and on nothing else: not on m, n, the number of threads or where a task ends.
//!
//! Legend: c[m, n] = a[m, k] . b[k, n]; a tile has R rows and two vectors of columns.

use super::{
    float::Float,
    matmul::{Mat, cut},
};
use crate::Beta;
use pulp::{Arch, Simd, WithSimd};

/// Most steps along k between two visits of c: a panel of b this deep fills two thirds of a first cache of 32 KiB.
const DEPTH: usize = 320;
/// Rows of a that stay in the second cache, beside a slab of b, while the panels of b go by.
const BLOCK_ROWS: usize = 96;

/// Arithmetic on vectors of an element type, on any instruction set.
pub trait Vectors: Sized + Copy {
    /// As many elements as a register holds.
    type Vector<S: Simd>: bytemuck::Pod;
    /// All whole vectors of `x`.
    fn vectors<S: Simd>(x: &[Self]) -> &[Self::Vector<S>];
    /// All whole vectors of `x`.
    fn vectors_mut<S: Simd>(x: &mut [Self]) -> &mut [Self::Vector<S>];
    /// `x` in every lane.
    fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S>;
    /// `a + b`.
    fn sum<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b + c`, with one rounding where the instruction set can.
    fn mul_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
}

macro_rules! vectors {
    ($t:ty, $vector:ident, $vectors:ident, $vectors_mut:ident, $splat:ident, $add:ident, $mul_add:ident) => {
        impl Vectors for $t {
            type Vector<S: Simd> = S::$vector;
            #[inline(always)]
            fn vectors<S: Simd>(x: &[$t]) -> &[S::$vector] {
                S::$vectors(x).0
            }
            #[inline(always)]
            fn vectors_mut<S: Simd>(x: &mut [$t]) -> &mut [S::$vector] {
                S::$vectors_mut(x).0
            }
            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: $t) -> S::$vector {
                simd.$splat(x)
            }
            #[inline(always)]
            fn sum<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$add(a, b)
            }
            #[inline(always)]
            fn mul_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$mul_add(a, b, c)
            }
        }
    };
}
vectors!(f32, f32s, as_simd_f32s, as_mut_simd_f32s, splat_f32s, add_f32s, mul_add_e_f32s);
vectors!(f64, f64s, as_simd_f64s, as_mut_simd_f64s, splat_f64s, add_f64s, mul_add_e_f64s);

/// Elements of a vector.
const fn lanes<T: Vectors, S: Simd>() -> usize {
    size_of::<T::Vector<S>>() / size_of::<T>()
}

/// Rows of a tile: twice as many sums as that, two vectors of b and one value of a fit in the registers.
const fn tile_rows<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 12 } else { 6 }
}

/// Which operand of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// a, in panels of rows.
    Left,
    /// b, in panels of columns.
    Right,
}

/// Rows (left) or columns (right) of a panel on this machine.
pub fn panel_width<T: Float>(side: Side) -> usize {
    struct Width<T>(Side, std::marker::PhantomData<T>);
    impl<T: Float> WithSimd for Width<T> {
        type Output = usize;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> usize {
            if self.0 == Side::Left { tile_rows::<S>() } else { 2 * lanes::<T, S>() }
        }
    }
    Arch::new().dispatch(Width::<T>(side, std::marker::PhantomData))
}

/// Fills `out` with panels of `x[rows, k]` (for the right side the transpose of b), overwriting everything.
pub fn pack<T: Float>(out: &mut [T], x: Mat<T>, side: Side) {
    struct Pack<'a, T>(&'a mut [T], Mat<'a, T>, Side);
    impl<T: Float> WithSimd for Pack<'_, T> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            let Pack(out, x, side) = self;
            match side {
                Side::Left if tile_rows::<S>() == 12 => pack_panels::<T, 12>(out, x),
                Side::Left => pack_panels::<T, 6>(out, x),
                Side::Right => match 2 * lanes::<T, S>() {
                    32 => pack_panels::<T, 32>(out, x),
                    16 => pack_panels::<T, 16>(out, x),
                    8 => pack_panels::<T, 8>(out, x),
                    4 => pack_panels::<T, 4>(out, x),
                    _ => pack_panels::<T, 2>(out, x),
                },
            }
        }
    }
    Arch::new().dispatch(Pack(out, x, side));
}

/// Asks for the line of the cache that holds `x[at]`, for use a little later: the processor cannot foresee rows far apart.
#[inline(always)]
fn fetch<T>(x: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(x) = x.get(at) {
        // SAFETY: a hint, and the address is that of an element.
        #[allow(unsafe_code)]
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(x).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, at);
}

/// Steps along k that are packed together: a line of the cache of every row. Rows are often a multiple of 4 KiB apart and so
/// compete for one place in the cache: a line must be used up before it is lost.
const AT_ONCE: usize = 16;

#[inline(always)]
fn pack_panels<T: Float, const W: usize>(out: &mut [T], x: Mat<T>) {
    let (rows, k) = x.size();
    let here = |panel: usize| panel * W..(panel * W + W).min(rows);
    if rows % W != 0 {
        out.chunks_exact_mut(W * k).last().into_iter().for_each(|panel| panel.fill(T::ZERO));
    }
    if let Some(row) = x.rows_whole() {
        // Along the rows, which the processor then reads ahead.
        for (i, panel) in out.chunks_exact_mut(W * k).enumerate() {
            for (block, steps) in panel.as_chunks_mut::<W>().0.chunks_mut(AT_ONCE).enumerate() {
                for (lane, i) in here(i).enumerate() {
                    let row = &row(i)[block * AT_ONCE..][..steps.len()];
                    for (step, &v) in steps.iter_mut().zip(row) {
                        step[lane] = v;
                    }
                }
            }
        }
    } else if let Some(column) = x.columns() {
        for steps in cut(k, AT_ONCE) {
            for (i, panel) in out.chunks_exact_mut(W * k).enumerate() {
                for (step, p) in panel.as_chunks_mut::<W>().0[steps.clone()].iter_mut().zip(steps.clone()) {
                    if p + AT_ONCE < k {
                        fetch(column(p + AT_ONCE), i * W);
                    }
                    let column = &column(p)[here(i)];
                    match column.first_chunk::<W>() {
                        Some(whole) => *step = *whole,
                        None => step[..column.len()].copy_from_slice(column),
                    }
                }
            }
        }
    }
}

/// `c = a . b` or `c += a . b` for packed operands of depth k; `c` by rows.
pub fn packed_product<T: Float>(c: &mut [&mut [T]], a: &[T], b: &[T], k: usize, beta: Beta) {
    struct Product<'a, 'c, T>(&'a mut [&'c mut [T]], &'a [T], &'a [T], usize, Beta);
    impl<T: Float> WithSimd for Product<'_, '_, T> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let Product(c, a, b, k, beta) = self;
            if tile_rows::<S>() == 12 { blocks::<T, S, 12>(simd, c, a, b, k, beta) } else { blocks::<T, S, 6>(simd, c, a, b, k, beta) }
        }
    }
    Arch::new().dispatch(Product(c, a, b, k, beta));
}

/// Blocks of k, then of rows, then panels of b, then panels of a.
#[inline(always)]
fn blocks<T: Float, S: Simd, const R: usize>(simd: S, c: &mut [&mut [T]], a: &[T], b: &[T], k: usize, beta: Beta) {
    let width = 2 * lanes::<T, S>();
    let panels = BLOCK_ROWS / R;
    for depth in cut(k, DEPTH) {
        let beta = if depth.start == 0 { beta } else { Beta::One };
        for (block, a) in a.chunks(panels * R * k).enumerate() {
            for (j, b) in b.chunks_exact(width * k).enumerate() {
                let b = &b[depth.start * width..depth.end * width];
                for (i, a) in a.chunks_exact(R * k).enumerate() {
                    let first = (block * panels + i) * R;
                    c[first..].iter().take(R).for_each(|row| fetch(row, j * width));
                    let sums = tile::<T, S, R>(simd, &a[depth.start * R..depth.end * R], b);
                    store::<T, S, R>(simd, c, first, j * width, sums, beta);
                }
            }
        }
    }
}

/// The product of a panel of a and a panel of b.
#[inline(always)]
fn tile<T: Float, S: Simd, const R: usize>(simd: S, a: &[T], b: &[T]) -> [[T::Vector<S>; 2]; R] {
    let mut sums = [[T::splat(simd, T::ZERO); 2]; R];
    for (a, b) in a.as_chunks::<R>().0.iter().zip(T::vectors::<S>(b).as_chunks::<2>().0) {
        for i in 0..R {
            let a = T::splat(simd, a[i]);
            sums[i] = [T::mul_add(simd, a, b[0], sums[i][0]), T::mul_add(simd, a, b[1], sums[i][1])];
        }
    }
    sums
}

/// Writes a tile at row `first`, column `left`, as far as it lies within `c`.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "constant indices: an iterator would bring the sums into memory")]
fn store<T: Float, S: Simd, const R: usize>(
    simd: S,
    c: &mut [&mut [T]],
    first: usize,
    left: usize,
    sums: [[T::Vector<S>; 2]; R],
    beta: Beta,
) {
    let width = 2 * lanes::<T, S>();
    for i in 0..R {
        let Some(row) = c.get_mut(first + i) else { return };
        let row = &mut row[left..];
        if row.len() >= width {
            let row = T::vectors_mut::<S>(&mut row[..width]);
            let [left, right] = sums[i];
            row[0] = if beta == Beta::One { T::sum(simd, row[0], left) } else { left };
            row[1] = if beta == Beta::One { T::sum(simd, row[1], right) } else { right };
        } else {
            // A copy: whatever has an address lives in memory, and the loop of the tile would store it at every step.
            let spilled = [sums[i][0], sums[i][1]];
            let spilled: &[T] = bytemuck::cast_slice(&spilled);
            for (c, &s) in row.iter_mut().zip(spilled) {
                *c = if beta == Beta::One { *c + s } else { s };
            }
        }
    }
}
