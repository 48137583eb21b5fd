//! Matrix products on strided host slices: the one place that calls the `gemm` crate.
//!
//! Legend: c[m, n] = a[m, k] . b[k, n].

use super::{
    Cpu,
    float::{Float, accumulate},
};
use crate::Beta;

/// Multiply-adds below which a product runs on the calling thread.
const SERIAL_MACS: usize = 1 << 18;
/// Least rows (or columns) of a slab. Above 64, where `gemm` blocks k alike whatever the slab, so bits do not depend on the cut.
const MIN_SLAB: usize = 96;
/// Columns of a slab where there are too few rows to cut.
const COLUMN_SLAB: usize = 128;

/// A strided matrix: element (i, j) is `data[i * row + j * col]`.
#[derive(Clone, Copy)]
pub struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

/// A strided matrix to write: element (i, j) is `data[i * row + j]`.
pub struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row: usize,
}

fn fits(len: usize, rows: usize, cols: usize, row: usize, col: usize) -> bool {
    rows == 0 || cols == 0 || (rows - 1) * row + (cols - 1) * col < len
}

impl<'a, T: Float> Mat<'a, T> {
    /// A row-major matrix whose rows are `stride` apart.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Mat<'a, T> {
        assert!(fits(data.len(), rows, cols, stride, 1), "matrix {rows} x {cols} by {stride} in {} elements", data.len());
        Mat { data, rows, cols, row: stride, col: 1 }
    }

    /// A dense row-major matrix.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Mat<'a, T> {
        Mat::strided(data, rows, cols, cols)
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Mat<'a, T> {
        Mat { rows: self.cols, cols: self.rows, row: self.col, col: self.row, ..self }
    }

    /// `n` rows from `first`.
    fn rows(self, first: usize, n: usize) -> Mat<'a, T> {
        assert!(first + n <= self.rows);
        Mat { data: if n == 0 { &[] } else { &self.data[first * self.row..] }, rows: n, ..self }
    }

    /// `n` columns from `first`.
    fn cols(self, first: usize, n: usize) -> Mat<'a, T> {
        self.t().rows(first, n).t()
    }
}

impl<'a, T: Float> MatMut<'a, T> {
    /// A row-major matrix whose rows are `stride` apart.
    pub fn strided(data: &'a mut [T], rows: usize, cols: usize, stride: usize) -> MatMut<'a, T> {
        assert!(fits(data.len(), rows, cols, stride, 1), "matrix {rows} x {cols} by {stride} in {} elements", data.len());
        MatMut { data, rows, cols, row: stride }
    }

    /// A dense row-major matrix.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> MatMut<'a, T> {
        MatMut::strided(data, rows, cols, cols)
    }
}

/// `c = a . b` or `c += a . b` on this thread.
pub fn product<T: Float>(c: MatMut<T>, a: Mat<T>, b: Mat<T>, beta: Beta) {
    let (m, n, k) = (c.rows, c.cols, a.cols);
    assert!(a.rows == m && b.rows == k && b.cols == n, "product of {m} x {k} and {} x {n}", b.rows);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if beta == Beta::Zero {
            c.data.chunks_mut(c.row.max(1)).take(m).for_each(|r| r[..n].fill(T::ZERO));
        }
        return;
    }
    let (keep, one) = (beta == Beta::One, T::ONE);
    let stride = |s: usize| s as isize;
    // SAFETY: `Mat` and `MatMut` were checked to lie within their slices, and `c` is exclusively borrowed.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.data.as_mut_ptr(),
            1,
            stride(c.row),
            keep,
            a.data.as_ptr(),
            stride(a.col),
            stride(a.row),
            b.data.as_ptr(),
            stride(b.col),
            stride(b.row),
            one,
            one,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

impl Cpu {
    /// `c = a . b` or `c += a . b` for dense `c[m, n]`, in slabs on all threads when it is large.
    pub(super) fn matmul<T: Float>(&self, c: &mut [T], a: Mat<T>, b: Mat<T>, beta: Beta) {
        let (m, n, k) = (a.rows, b.cols, a.cols);
        if m * n * k < SERIAL_MACS || (m >= 2 * MIN_SLAB && self.threads == 1) {
            product(MatMut::new(c, m, n), a, b, beta);
        } else if m >= 2 * MIN_SLAB {
            let rows = m.div_ceil(self.threads).max(MIN_SLAB);
            let rows = if m % rows != 0 && m % rows < MIN_SLAB { m.div_ceil(m / rows) } else { rows };
            self.each(
                usize::MAX,
                c.chunks_mut(rows * n).enumerate(),
                #[inline(always)]
                |(i, c)| {
                    let here = c.len() / n;
                    product(MatMut::new(c, here, n), a.rows(i * rows, here), b, beta);
                },
            );
        } else {
            self.matmul_columns(c, a, b, beta);
        }
    }

    /// Few rows, as in generation: slabs of columns, each computed apart and then moved into the rows of `c`.
    fn matmul_columns<T: Float>(&self, c: &mut [T], a: Mat<T>, b: Mat<T>, beta: Beta) {
        let (m, n) = (a.rows, b.cols);
        let slabs = self.map(
            usize::MAX,
            (0..n).step_by(COLUMN_SLAB),
            #[inline(always)]
            |first| {
                let cols = COLUMN_SLAB.min(n - first);
                let mut slab = vec![T::ZERO; m * cols];
                product(MatMut::new(&mut slab, m, cols), a, b.cols(first, cols), Beta::Zero);
                slab
            },
        );
        for (slab, first) in slabs.iter().zip((0..n).step_by(COLUMN_SLAB)) {
            let cols = COLUMN_SLAB.min(n - first);
            for (row, s) in c.chunks_mut(n).zip(slab.chunks(cols)) {
                let row = &mut row[first..first + cols];
                match beta {
                    Beta::Zero => row.copy_from_slice(s),
                    Beta::One => accumulate(row, s),
                }
            }
        }
    }
}
