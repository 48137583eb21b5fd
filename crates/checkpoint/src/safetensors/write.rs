//! Writing tensors to one file or, past a size, to several files with an index. Elements pass through one fixed
//! buffer, so that a model is never held twice.

use super::{Stored, TensorRef};
use crate::{
    Error, Result,
    convert::{CHUNK, Float, decode, host_dtype, stored_dtype, zeros},
    disk::{Disk, Written},
};
use half::{bf16, f16};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::{ops::Range, path::Path};
use temper_tensor::{DType, Slice, Tensor, View, ViewMut};

/// Bytes that go to disk at once.
const BLOCK: usize = 16 << 20;
/// Bytes fetched at once of tensors that lie elsewhere: enough that several small ones share a read.
const WINDOW: usize = 64 << 20;

/// A tensor to write: what it is, where its elements are now, and the name they get.
#[derive(Clone)]
pub(crate) struct Item<'a> {
    /// Name in the file.
    pub(crate) name: String,
    /// Present element type.
    pub(crate) dtype: Stored,
    /// Shape.
    pub(crate) shape: Vec<usize>,
    /// The elements.
    pub(crate) data: Data<'a>,
}

/// Where the elements of an item are.
#[derive(Clone, Copy)]
pub(crate) enum Data<'a> {
    /// Here, as they will be on disk or to be converted.
    Bytes(&'a [u8]),
    /// Somewhere that gives them out in parts, in the type wanted.
    Far(&'a dyn Far),
}

/// Gives out parts of tensors.
pub(crate) trait Far {
    /// Fills all of these.
    fn fetch(&self, wants: Vec<Want<'_>>) -> Result<()>;
}

/// Some elements of a tensor, and where they are to go.
pub(crate) struct Want<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    pub(crate) range: Range<usize>,
    pub(crate) into: ViewMut<'a>,
}

impl<'a> Item<'a> {
    /// A tensor that lies here.
    pub(crate) fn new(name: String, tensor: TensorRef<'a>) -> Item<'a> {
        Item { name, dtype: tensor.dtype, shape: tensor.shape, data: Data::Bytes(tensor.bytes) }
    }
}

impl<'a> TensorRef<'a> {
    /// Elements `range` of a host tensor, under a shape of that many elements; `None` when they live on a device.
    pub fn of_view(view: View<'a>, range: std::ops::Range<usize>, shape: &[usize]) -> Option<TensorRef<'a>> {
        let bytes: &'a [u8] = match view.data {
            Slice::F64(s) => bytemuck::cast_slice(s.get(range)?),
            Slice::F32(s) => bytemuck::cast_slice(s.get(range)?),
            Slice::BF16(s) => bytemuck::cast_slice(s.get(range)?),
            Slice::F16(s) => bytemuck::cast_slice(s.get(range)?),
            Slice::I32(s) => bytemuck::cast_slice(s.get(range)?),
            Slice::Device(..) => return None,
        };
        Some(TensorRef { dtype: stored_dtype(view.dtype()), shape: shape.to_vec(), bytes })
    }
}

/// Type and size of an item as it will be on disk.
struct Target {
    dtype: Stored,
    bytes: u64,
}

/// Writes `STEM.safetensors`, or `STEM-0000i-of-0000n.safetensors` and `STEM.safetensors.index.json` when one file would hold
/// more than `max_shard` bytes of tensors. Elements are converted to `dtype`, or kept as they are.
pub(crate) fn write_sharded(
    disk: &Disk,
    dir: &Path,
    stem: &str,
    items: &[Item<'_>],
    dtype: Option<DType>,
    max_shard: u64,
) -> Result<Vec<Written>> {
    let targets = items.iter().map(|i| target(dir, i, dtype)).collect::<Result<Vec<_>>>()?;
    let shards = split(&targets, max_shard);
    let name = |i: usize| match shards.len() {
        1 => format!("{stem}.safetensors"),
        n => format!("{stem}-{:05}-of-{n:05}.safetensors", i + 1),
    };
    let mut written = Vec::new();
    let mut weight_map = Map::new();
    for (i, range) in shards.iter().enumerate() {
        written.push(write_file(disk, &dir.join(name(i)), &items[range.clone()], &targets[range.clone()])?);
        weight_map.extend(items[range.clone()].iter().map(|item| (item.name.clone(), Value::from(name(i)))));
    }
    if shards.len() > 1 {
        let total: u64 = targets.iter().map(|t| t.bytes).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        written.push(disk.write(&dir.join(format!("{stem}.safetensors.index.json")), format!("{index:#}\n").as_bytes())?);
    }
    Ok(written)
}

fn target(dir: &Path, item: &Item<'_>, dtype: Option<DType>) -> Result<Target> {
    let elements = item.shape.iter().product::<usize>();
    let (to, bytes) = match (dtype, host_dtype(item.dtype), item.data) {
        (None, _, Data::Bytes(bytes)) => (item.dtype, bytes.len()),
        (None, Some(from), Data::Far(_)) => (item.dtype, elements * from.size()),
        (Some(to), Some(_), _) if to != DType::I32 => (stored_dtype(to), elements * to.size()),
        (to, ..) => {
            let to = to.map_or("itself", DType::name);
            return Err(Error::bad(dir, format!("{} has dtype {} and cannot be written as {to}", item.name, item.dtype)));
        }
    };
    Ok(Target { dtype: to, bytes: bytes as u64 })
}

/// Consecutive items, as many to a shard as fit.
fn split(targets: &[Target], max_shard: u64) -> Vec<std::ops::Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut size) = (0, 0u64);
    for (i, t) in targets.iter().enumerate() {
        if i > start && size + t.bytes > max_shard {
            shards.push(start..i);
            (start, size) = (i, 0);
        }
        size += t.bytes;
    }
    shards.push(start..targets.len());
    shards
}

/// The header, with spaces at its end so that the tensors begin at a multiple of eight bytes.
fn header(items: &[Item<'_>], targets: &[Target]) -> Vec<u8> {
    #[derive(Serialize)]
    struct Info<'a> {
        dtype: &'a str,
        shape: &'a [usize],
        data_offsets: [u64; 2],
    }
    let mut text = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut at = 0;
    for (item, target) in items.iter().zip(targets) {
        let info = Info { dtype: target.dtype.name(), shape: &item.shape, data_offsets: [at, at + target.bytes] };
        text.push_str(&format!(",{}:{}", json!(item.name), json!(info)));
        at += target.bytes;
    }
    text.push('}');
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn write_file(disk: &Disk, path: &Path, items: &[Item<'_>], targets: &[Target]) -> Result<Written> {
    let mut out = disk.create(path)?;
    out.write(&header(items, targets))?;
    let mut buffer = Vec::new();
    let mut rest = items.iter().zip(targets).peekable();
    while let Some((item, target)) = rest.next() {
        match item.data {
            Data::Bytes(bytes) => write_bytes(&mut out, &mut buffer, item.dtype, bytes, target)?,
            Data::Far(far) => {
                let mut batch = vec![(item, target)];
                let mut size = target.bytes;
                while let Some((item, target)) = rest.next_if(|(i, t)| matches!(i.data, Data::Far(_)) && size + t.bytes <= WINDOW as u64) {
                    size += target.bytes;
                    batch.push((item, target));
                }
                write_far(&mut out, &mut buffer, far, &batch)?;
            }
        }
    }
    flush(&mut out, &mut buffer)?;
    out.finish()
}

/// Appends an item whose elements are here.
fn write_bytes(out: &mut crate::disk::Writer<'_>, buffer: &mut Vec<u8>, now: Stored, bytes: &[u8], target: &Target) -> Result<()> {
    // Small tensors share a write; large ones of an unchanged type go to disk from where they are.
    if now == target.dtype && bytes.len() >= BLOCK {
        flush(out, buffer)?;
        return bytes.chunks(BLOCK).try_for_each(|b| out.write(b));
    }
    let size = host_dtype(now).map_or(1, DType::size);
    for block in bytes.chunks(BLOCK) {
        if now == target.dtype {
            buffer.extend_from_slice(block);
        } else {
            convert(now, target.dtype, block, block.len() / size, buffer);
        }
        if buffer.len() >= BLOCK {
            flush(out, buffer)?;
        }
    }
    Ok(())
}

/// Appends items that are fetched: several small ones, or one of any size in windows.
fn write_far(out: &mut crate::disk::Writer<'_>, buffer: &mut Vec<u8>, far: &dyn Far, batch: &[(&Item<'_>, &Target)]) -> Result<()> {
    let mut parts: Vec<(&Item<'_>, Range<usize>, Tensor)> = Vec::new();
    for (item, target) in batch {
        let Some(dtype) = host_dtype(target.dtype) else { continue };
        let (numel, step) = (item.shape.iter().product::<usize>(), WINDOW / dtype.size());
        for start in (0..numel).step_by(step) {
            let end = (start + step).min(numel);
            parts.push((item, start..end, zeros(dtype, &[end - start])));
            if end < numel {
                fetch_parts(out, buffer, far, &mut parts)?;
            }
        }
    }
    fetch_parts(out, buffer, far, &mut parts)
}

fn fetch_parts(
    out: &mut crate::disk::Writer<'_>,
    buffer: &mut Vec<u8>,
    far: &dyn Far,
    parts: &mut Vec<(&Item<'_>, Range<usize>, Tensor)>,
) -> Result<()> {
    let wants =
        parts.iter_mut().map(|(item, range, t)| Want { name: &item.name, shape: &item.shape, range: range.clone(), into: t.view_mut() });
    far.fetch(wants.collect())?;
    for (_, range, tensor) in parts.drain(..) {
        let Some(TensorRef { bytes, dtype, .. }) = TensorRef::of_view(tensor.view(), 0..range.len(), &[range.len()]) else { continue };
        write_bytes(out, buffer, dtype, bytes, &Target { dtype, bytes: bytes.len() as u64 })?;
    }
    Ok(())
}

fn flush(out: &mut crate::disk::Writer<'_>, buffer: &mut Vec<u8>) -> Result<()> {
    if !buffer.is_empty() {
        out.write(buffer)?;
        buffer.clear();
    }
    Ok(())
}

/// Appends `n` elements converted from one type to another ([`target`] has checked that both are floats).
fn convert(from: Stored, to: Stored, bytes: &[u8], n: usize, buffer: &mut Vec<u8>) {
    let Some(from) = host_dtype(from) else { return };
    match host_dtype(to) {
        Some(DType::F64) => append::<f64>(from, bytes, n, buffer),
        Some(DType::F32) => append::<f32>(from, bytes, n, buffer),
        Some(DType::BF16) => append::<bf16>(from, bytes, n, buffer),
        Some(DType::F16) => append::<f16>(from, bytes, n, buffer),
        Some(DType::I32) | None => {}
    }
}

fn append<T: Float>(from: DType, bytes: &[u8], n: usize, buffer: &mut Vec<u8>) {
    let mut elements = vec![T::default(); n];
    elements.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * from.size())).for_each(|(d, b)| decode(from, b, d));
    buffer.extend_from_slice(bytemuck::cast_slice(&elements));
}
