//! Reductions: `kernels/reduce.cu`, and the column sums of `kernels/norm.cu`.

use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Error, Result, View, ViewMut};

/// Blocks of columns of a column sum, each with a counter; as in `norm.cu`.
const COLUMN_BLOCKS: usize = 8192;

/// How the rows of a column sum are cut into chunks: enough blocks to fill the device, few enough partial sums.
/// Depends on shapes and device only, so results repeat bitwise.
pub fn chunks(c: &Cuda, rows: usize, column_blocks: usize) -> (usize, usize) {
    let wanted = (c.device.multiprocessors * 4).div_ceil(column_blocks.max(1)).clamp(1, 512);
    let per_chunk = rows.div_ceil(wanted).max(8);
    (rows.div_ceil(per_chunk), per_chunk)
}

/// What is summed over rows.
pub enum ColumnSum {
    /// `dy`.
    Plain,
    /// `dy * x * rstd`; addresses of x and rstd.
    Norm(u64, u64),
}

/// `out[cols] += sum over rows` of f32 or bf16 rows.
pub fn column_sum(c: &Cuda, out: u64, out_dtype: DType, dy: u64, dtype: DType, rows: usize, cols: usize, kind: ColumnSum) -> Result<()> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let other = if let ColumnSum::Norm(x, _) = kind { x } else { dy };
    let v = Variant::of(dtype, vectors(dtype, cols, &[dy, other]));
    let blocks = cols.div_ceil(32 * v.width());
    if blocks > COLUMN_BLOCKS {
        return Err(Error::Backend(format!("column sums of {cols} columns: at most {} with such rows", COLUMN_BLOCKS * 32 * v.width())));
    }
    let (parts, per_chunk) = chunks(c, rows, blocks);
    let partial = c.scratch(parts * cols * 4)?;
    let grid = Grid::plane(blocks, parts, 256);
    let (out_f32, partial) = (out_dtype == DType::F32, partial.address());
    let launched = match kind {
        ColumnSum::Plain => c.kernels.launch("norm.cu", v, "column_sums", grid, args![out, out_f32, partial, dy, rows, per_chunk, cols]),
        ColumnSum::Norm(x, rstd) => {
            c.kernels.launch("norm.cu", v, "norm_weight", grid, args![out, out_f32, partial, dy, x, rstd, rows, per_chunk, cols])
        }
    };
    Ok(launched?)
}

pub fn sum_squares(c: &Cuda, out: ViewMut, x: View) -> Result<()> {
    let op = Op("sum_squares");
    let dtype = op.activation("x", x.dtype())?;
    let (o, p) = (op.output("out", &out, DType::F64, &[1])?, op.address("x", x)?);
    let n = x.numel();
    // One wave: six blocks fit a multiprocessor. `finish_squares` takes at most 1024.
    let parts = n.div_ceil(256 * 16).min(c.device.multiprocessors * 6).min(1024);
    if parts == 0 {
        return Ok(());
    }
    let partial = c.scratch(parts * 8)?;
    let kernel = if dtype == DType::F32 { "sum_squares_f32" } else { "sum_squares_bf16" };
    c.kernels.launch("reduce.cu", Variant::PLAIN, kernel, Grid::line(parts, 256), args![partial.address(), p, n])?;
    Ok(c.kernels.launch("reduce.cu", Variant::PLAIN, "finish_squares", Grid::line(1, 1024), args![o, partial.address(), parts])?)
}

pub fn count_non_finite(c: &Cuda, out: ViewMut, x: View) -> Result<()> {
    let op = Op("count_non_finite");
    let dtype = op.activation("x", x.dtype())?;
    let (o, p) = (op.output("out", &out, DType::I32, &[1])?, op.address("x", x)?);
    let kernel = if dtype == DType::F32 { "count_non_finite_f32" } else { "count_non_finite_bf16" };
    let grid = Grid::line(c.flat_blocks(x.numel().div_ceil(4)), 256);
    Ok(c.kernels.launch("reduce.cu", Variant::PLAIN, kernel, grid, args![o, p, x.numel()])?)
}
