//! Matrix products on strided host slices: large ones on packed operands (`kernel`) and all threads, small ones by the `gemm` crate,
//! which only this file calls.
//!
//! Legend: c[m, n] = a[m, k] . b[k, n].

use super::{
    Cpu,
    float::{Float, accumulate},
    kernel::{Side, pack, packed_product, panel_width},
    pool::Pooled,
};
use crate::Beta;
use std::ops::Range;

/// Multiply-adds below which a product runs on the calling thread.
const SERIAL_MACS: usize = 1 << 18;
/// Rows below which packing b costs more than it saves, as in generation.
const FEW_ROWS: usize = 48;
/// Columns of a slab where there are few rows.
const COLUMN_SLAB: usize = 128;
/// Most steps along k that are packed at once.
const PACKED_DEPTH: usize = 2048;
/// Most rows or columns that one task packs: with a block of the other operand they fill the second cache.
const SLAB: usize = 288;

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

impl<'a, T> Mat<'a, T> {
    /// Rows and columns.
    pub fn size(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// The columns, where each lies in one piece.
    #[inline(always)]
    pub fn columns(&self) -> Option<impl Fn(usize) -> &'a [T]> {
        let Mat { data, rows, col, .. } = *self;
        (self.row == 1).then_some(move |j: usize| &data[j * col..][..rows])
    }

    /// The rows, where each lies in one piece.
    #[inline(always)]
    pub fn rows_whole(&self) -> Option<impl Fn(usize) -> &'a [T]> {
        let Mat { data, cols, row, .. } = *self;
        (self.col == 1).then_some(move |i: usize| &data[i * row..][..cols])
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

/// `0..len` in equal parts of at most `most`.
pub fn cut(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let size = len.div_ceil(len.div_ceil(most).max(1)).max(1);
    (0..len).step_by(size).map(move |first| first..(first + size).min(len))
}

impl Cpu {
    /// `c = a . b` or `c += a . b` for dense `c[m, n]`, on all threads when it is large.
    pub(super) fn matmul<T: Float>(&self, c: &mut [T], a: Mat<T>, b: Mat<T>, beta: Beta) {
        let (m, n, k) = (a.rows, b.cols, a.cols);
        if m * n * k < SERIAL_MACS {
            product(MatMut::new(c, m, n), a, b, beta);
        } else if m < FEW_ROWS {
            self.matmul_columns(c, a, b, beta);
        } else {
            for depth in cut(k, PACKED_DEPTH) {
                let beta = if depth.start == 0 { beta } else { Beta::One };
                self.matmul_packed(c, a.cols(depth.start, depth.len()), b.rows(depth.start, depth.len()), beta);
            }
        }
    }

    /// The operand with the shorter side is packed once for all; the other is cut into slabs, each packed by its task.
    fn matmul_packed<T: Float>(&self, c: &mut [T], a: Mat<T>, b: Mat<T>, beta: Beta) {
        let (m, n, k) = (a.rows, b.cols, a.cols);
        let left = (a, Side::Left);
        let right = (b.t(), Side::Right);
        let ((shared, shared_side), (own, own_side)) = if m <= n { (left, right) } else { (right, left) };
        let shared = self.packed(shared, shared_side);
        let slab = self.slab(own.rows, panel_width::<T>(own_side));
        let outputs = if own_side == Side::Left { row_slabs(c, n, slab) } else { column_slabs(c, n, slab) };
        self.each(
            usize::MAX,
            outputs.into_iter().enumerate(),
            #[inline(always)]
            |(i, mut c)| {
                let own = own.rows(i * slab, slab.min(own.rows - i * slab));
                let mut packed = self.panels(own, own_side);
                pack(&mut packed, own, own_side);
                let (a, b) = if own_side == Side::Left { (&packed, &shared) } else { (&shared, &packed) };
                packed_product(&mut c, a, b, k, beta);
            },
        );
    }

    /// Rows or columns of a slab: whole panels, and as many slabs for each thread.
    fn slab(&self, len: usize, width: usize) -> usize {
        let slabs = self.threads * len.div_ceil(self.threads * SLAB);
        len.div_ceil(slabs.max(1)).next_multiple_of(width)
    }

    /// Room for the panels of `x`.
    fn panels<T: Float>(&self, x: Mat<T>, side: Side) -> Pooled<T> {
        let len = x.rows.next_multiple_of(panel_width::<T>(side)) * x.cols;
        self.buffers.take_scratch(len).unwrap_or_else(|| Pooled::unpooled(vec![T::ZERO; len]))
    }

    /// The whole of `x` in panels.
    fn packed<T: Float>(&self, x: Mat<T>, side: Side) -> Pooled<T> {
        let mut out = self.panels(x, side);
        let rows = self.slab(x.rows, panel_width::<T>(side));
        self.each(
            x.rows * x.cols,
            out.chunks_mut(rows * x.cols).enumerate(),
            #[inline(always)]
            |(i, out)| pack(out, x.rows(i * rows, rows.min(x.rows - i * rows)), side),
        );
        out
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

/// The rows of c[m, n], in slabs of `size` rows.
fn row_slabs<T>(c: &mut [T], n: usize, size: usize) -> Vec<Vec<&mut [T]>> {
    c.chunks_mut(size * n).map(|slab| slab.chunks_mut(n).collect()).collect()
}

/// The rows of c[m, n], cut into slabs of `size` columns.
fn column_slabs<T>(c: &mut [T], n: usize, size: usize) -> Vec<Vec<&mut [T]>> {
    let rows = c.len() / n;
    let mut slabs: Vec<Vec<&mut [T]>> = (0..n.div_ceil(size)).map(|_| Vec::with_capacity(rows)).collect();
    for row in c.chunks_mut(n) {
        for (slab, part) in slabs.iter_mut().zip(row.chunks_mut(size)) {
            slab.push(part);
        }
    }
    slabs
}
