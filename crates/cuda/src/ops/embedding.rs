//! Embedding: `kernels/embedding.cu`, and the stable sort of `kernels/sort.cu`.

use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, View, ViewMut};

const FILE: &str = "embedding.cu";
/// Items a block sorts; as in `sort.cu`.
const SORT_TILE: usize = 2048;
/// Rows a block of the gradient takes; as in `embedding.cu`.
const CHUNK: usize = 32;

pub fn embedding(c: &Cuda, out: ViewMut, table: View, ids: View) -> Result<()> {
    let op = Op("embedding");
    let dtype = op.activation("table", table.dtype())?;
    let [vocabulary, h] = op.dims("table", table)?;
    let [t] = op.dims("ids", ids)?;
    let (o, p) = (op.output("out", &out, dtype, &[t, h])?, op.address("table", table)?);
    let ids = op.input("ids", ids, DType::I32, &[t])?;
    let v = Variant::of(dtype, vectors(dtype, h, &[o, p]));
    let grid = Grid::line(t, Cuda::row_threads(h / v.width()));
    Ok(c.kernels.launch(FILE, v, "embedding", grid, args![o, p, ids, vocabulary, h])?)
}

pub fn embedding_grad(c: &Cuda, dtable: ViewMut, dy: View, ids: View) -> Result<()> {
    let op = Op("embedding_grad");
    let dtype = op.activation("dy", dy.dtype())?;
    let [t, h] = op.dims("dy", dy)?;
    let [vocabulary, width] = op.dims("dtable", dtable.as_view())?;
    let out = op.one_of("dtable", dtable.dtype(), &[DType::F32, dtype])?;
    if width != h {
        return op.wrong("dtable", dtable.as_view(), format!("[V, {h}]"));
    }
    if vocabulary > 1 << 24 {
        return op.wrong("dtable", dtable.as_view(), "at most 2^24 rows");
    }
    let (d, g) = (op.address("dtable", dtable.as_view())?, op.address("dy", dy)?);
    let ids = op.input("ids", ids, DType::I32, &[t])?;
    if t == 0 || h == 0 {
        return Ok(());
    }
    let lists = c.scratch(4 * t * 4)?;
    let at = |i: usize| lists.address() + (i * t * 4) as u64;
    // Three stable passes of eight bits: ids below 2^24.
    let pass = |from, shift, keys, values| sort_pass(c, from, t, By::Bits(shift), Sorted { keys, values, ..Sorted::default() });
    pass((ids, 0), 0, at(0), at(1))?;
    pass((at(0), at(1)), 8, at(2), at(3))?;
    pass((at(2), at(3)), 16, at(0), at(1))?;
    let (keys, order) = (at(0), at(1));
    let blocks = t.div_ceil(CHUNK);
    let partial = c.scratch(2 * blocks * h * 4)?;
    let v = Variant::of(dtype, vectors(dtype, h, &[d, g]));
    let threads = (h / v.width()).next_multiple_of(32).clamp(32, 128);
    let columns = (h / v.width()).div_ceil(threads);
    let grid = Grid::plane(blocks, columns, threads);
    let f32_out = out == DType::F32;
    c.kernels.launch(FILE, v, "embedding_grad", grid, args![d, f32_out, partial.address(), g, keys, order, t, vocabulary, h])?;
    let a = args![d, f32_out, partial.address(), keys, t, vocabulary, h];
    Ok(c.kernels.launch(FILE, v, "embedding_grad_borders", grid, a)?)
}

/// What a sorting pass goes by.
#[derive(Clone, Copy)]
pub enum By {
    /// Eight bits of the key, from this one on.
    Bits(usize),
    /// The key's distance from `first`; keys outside `first..first + count` come last.
    Class { first: usize, count: usize },
}

/// Addresses for the results of a sorting pass, each 0 when not wanted.
#[derive(Clone, Copy, Default)]
pub struct Sorted {
    /// Sorted keys.
    pub keys: u64,
    /// Their values.
    pub values: u64,
    /// The place of each value.
    pub places: u64,
    /// The first place of each class, and the end of the last.
    pub offsets: u64,
}

/// One stable counting pass over `n` keys and their values; `values` 0 stands for 0, 1, 2, ...
pub fn sort_pass(c: &Cuda, (keys, values): (u64, u64), n: usize, by: By, out: Sorted) -> Result<()> {
    const FILE: &str = "sort.cu";
    let tiles = n.div_ceil(SORT_TILE);
    let counts = c.scratch(256 * tiles * 4)?;
    let p = counts.address();
    let (shift, first, count) = match by {
        By::Bits(shift) => (shift, 0, 0),
        By::Class { first, count } => (0, first, count),
    };
    let v = Variant::PLAIN;
    c.kernels.launch(FILE, v, "sort_count", Grid::line(tiles, 256), args![p, keys, n, shift, first, count, tiles])?;
    c.kernels.launch(FILE, v, "sort_scan", Grid::line(1, 1024), args![p, out.offsets, count, n, tiles])?;
    let a = args![out.keys, out.values, out.places, p, keys, values, n, shift, first, count, tiles];
    Ok(c.kernels.launch(FILE, v, "sort_scatter", Grid::line(tiles, 256), a)?)
}
