//! From files to the parts of parameters that a rank wants: every read of weights and moments goes through here.
//!
//! A want is matched with what lies where (both are runs of elements of a logical tensor), which gives copies from bytes of a file to
//! elements in memory. Copies are cut into units of a file and carried out in parallel, a unit to a task: where the file has
//! checksums the whole unit is read and checked, else only the span that is wanted.

use crate::{
    Error, Result,
    convert::{Float, decode},
    runs,
    store::Kind,
};
use half::{bf16, f16};
use rayon::prelude::*;
use std::{
    collections::BTreeMap,
    fs,
    ops::{AddAssign, Range},
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use temper_model::param::Param;
use temper_tensor::{DType, SliceMut, ViewMut};

/// Copies planned at once, which bounds the memory of a plan (48 bytes each).
const MAX_COPIES: usize = 1 << 20;
/// A copy at least this long that needs no conversion is read into its place without a buffer between.
const DIRECT: usize = 64 << 10;
/// Bytes between two copies that nobody wants are read along when they are fewer: cheaper than a second read. So rows of a matrix cost
/// what they hold, and columns whole rows.
const GAP: u64 = 64 << 10;

/// A part of a parameter to be read, and where to.
pub struct Slot<'a> {
    /// What of the parameter. A model folder has weights only.
    pub kind: Kind,
    /// The parameter as this rank has it.
    pub param: &'a Param,
    /// Elements of the flattened parameter.
    pub range: Range<usize>,
    /// As many elements in host memory, of any float type: bits are kept where the file has the same type.
    pub into: ViewMut<'a>,
}

/// What was moved, and how fast.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes read from files; more than `wanted` where a checksum covers neighbours.
    pub read: u64,
    /// Bytes that were asked for, as they lie in the files.
    pub wanted: u64,
    /// Time it took.
    pub took: Duration,
}

impl Traffic {
    /// Wanted bytes a second, in GB (10^9).
    pub fn gb_per_s(&self) -> f64 {
        self.wanted as f64 / 1e9 / self.took.as_secs_f64().max(1e-9)
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        self.read += other.read;
        self.wanted += other.wanted;
        self.took += other.took;
    }
}

/// Elements that follow each other both in a logical tensor and in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Number of the file.
    pub(crate) file: usize,
    /// Byte of the file.
    pub(crate) at: u64,
    /// Type in the file.
    pub(crate) dtype: DType,
    /// First element of the tensor.
    pub(crate) disk: usize,
    /// Number of elements.
    pub(crate) len: usize,
}

/// A file open for reading.
pub(crate) struct DataFile<'a> {
    pub(crate) path: &'a Path,
    pub(crate) file: &'a fs::File,
    /// Size.
    pub(crate) bytes: u64,
    /// BLAKE3 of each unit.
    pub(crate) checks: Option<&'a [blake3::Hash]>,
}

/// Knows where tensors lie.
pub(crate) trait Source: Sync {
    /// Bytes of the units in which files are read.
    fn unit(&self) -> u64;
    /// Where the tensor of piece `index` of a parameter lies, in the order of its elements.
    fn extents(&self, kind: Kind, param: &Param, index: usize) -> Result<Vec<Extent>>;
    /// A file by number.
    fn file(&self, file: usize) -> Result<DataFile<'_>>;
    /// The error when unit `unit` of a file is not what it was when it was written.
    fn damaged(&self, file: usize, unit: usize) -> Error;
    /// The error when an element of piece `index` lies nowhere.
    fn absent(&self, kind: Kind, param: &Param, index: usize, element: usize) -> Error;
}

/// Elements to be read from one unit of a file.
struct Copy<'a> {
    file: usize,
    at: u64,
    dtype: DType,
    into: SliceMut<'a>,
}

impl Copy<'_> {
    fn bytes(&self) -> usize {
        len(&self.into) * self.dtype.size()
    }
}

/// Fills the slots.
pub(crate) fn fill(source: &dyn Source, slots: Vec<Slot<'_>>) -> Result<Traffic> {
    let start = Instant::now();
    let (mut traffic, mut copies) = (Traffic::default(), Vec::new());
    for slot in slots {
        plan(source, slot, &mut copies)?;
        if copies.len() >= MAX_COPIES {
            traffic += carry_out(source, std::mem::take(&mut copies))?;
        }
    }
    traffic += carry_out(source, copies)?;
    Ok(Traffic { took: start.elapsed(), ..traffic })
}

/// Matches what a slot wants of each piece with where that lies.
fn plan<'a>(source: &dyn Source, slot: Slot<'a>, copies: &mut Vec<Copy<'a>>) -> Result<()> {
    let Slot { kind, param, range, into } = slot;
    let fits = range.start <= range.end && range.end <= param.numel() && into.numel() == range.len();
    if !fits || matches!(into.data, SliceMut::Device(..)) {
        let message = format!("elements {range:?} of {} do not fit their place in host memory (a fault of this program)", param.numel());
        return Err(Error::bad(Path::new(&param.name), message));
    }
    let mut rest = into.data;
    for (index, piece) in param.pieces.iter().enumerate() {
        let within = runs::overlap(&piece.range, &range);
        if within.is_empty() {
            continue;
        }
        let extents = source.extents(kind, param, index)?;
        let mut extents = extents.iter().peekable();
        for run in runs::within(piece, within) {
            let (mut disk, end) = (run.disk, run.disk + run.len);
            while disk < end {
                while extents.next_if(|x| x.disk + x.len <= disk).is_some() {}
                let Some(x) = extents.peek().filter(|x| x.disk <= disk) else {
                    return Err(source.absent(kind, param, index, disk));
                };
                let len = (x.disk + x.len).min(end) - disk;
                let at = x.at + ((disk - x.disk) * x.dtype.size()) as u64;
                cut(source.unit(), Copy { file: x.file, at, dtype: x.dtype, into: take(&mut rest, len) }, copies);
                disk += len;
            }
        }
    }
    Ok(())
}

/// Cuts a copy where units of the file end.
fn cut<'a>(unit: u64, copy: Copy<'a>, copies: &mut Vec<Copy<'a>>) {
    let Copy { file, mut at, dtype, mut into } = copy;
    while len(&into) > 0 {
        let here = ((unit - at % unit) / dtype.size() as u64).min(len(&into) as u64) as usize;
        copies.push(Copy { file, at, dtype, into: take(&mut into, here) });
        at += (here * dtype.size()) as u64;
    }
}

fn carry_out(source: &dyn Source, mut copies: Vec<Copy<'_>>) -> Result<Traffic> {
    let place = |c: &Copy<'_>| (c.file, c.at / source.unit());
    copies.sort_unstable_by_key(|c| (c.file, c.at));
    let mut files = BTreeMap::new();
    let mut tasks: Vec<Vec<Copy<'_>>> = Vec::new();
    let wanted = copies.iter().map(|c| c.bytes() as u64).sum();
    for copy in copies {
        if let std::collections::btree_map::Entry::Vacant(vacant) = files.entry(copy.file) {
            vacant.insert(source.file(copy.file)?);
        }
        match tasks.last_mut() {
            Some(task) if task.first().is_some_and(|first| place(first) == place(&copy)) => task.push(copy),
            _ => tasks.push(vec![copy]),
        }
    }
    let read = AtomicU64::new(0);
    tasks.into_par_iter().try_for_each_init(Vec::new, |buffer, task| -> Result<()> {
        let (Some(first), Some(file)) = (task.first(), task.first().and_then(|c| files.get(&c.file))) else { return Ok(()) };
        let (number, unit) = (first.file, (first.at / source.unit()) as usize);
        let bytes = match file.checks {
            Some(checks) => read_checked(file, checks.get(unit), unit as u64 * source.unit(), source.unit(), task, buffer)?,
            None => Some(read_plain(file, task, buffer)?),
        };
        read.fetch_add(bytes.ok_or_else(|| source.damaged(number, unit))?, Ordering::Relaxed);
        Ok(())
    })?;
    Ok(Traffic { read: read.into_inner(), wanted, took: Duration::ZERO })
}

/// Reads a whole unit and, if its checksum is right, carries out the copies from it. `None` when it is not.
fn read_checked(
    file: &DataFile<'_>,
    check: Option<&blake3::Hash>,
    start: u64,
    unit: u64,
    task: Vec<Copy<'_>>,
    buffer: &mut Vec<u8>,
) -> Result<Option<u64>> {
    let bytes = file.bytes.saturating_sub(start).min(unit) as usize;
    buffer.resize(bytes, 0);
    read_at(file, buffer, start)?;
    if check != Some(&blake3::hash(buffer)) {
        return Ok(None);
    }
    for copy in task {
        let first = (copy.at - start) as usize;
        // The index was checked against the size of the file.
        let Some(bytes) = buffer.get(first..first + copy.bytes()) else { return Ok(None) };
        convert(copy.dtype, bytes, copy.into);
    }
    Ok(Some(bytes as u64))
}

/// Reads the bytes that copies from one unit need, which are in the order of the file. Returns how many were read.
fn read_plain(file: &DataFile<'_>, task: Vec<Copy<'_>>, buffer: &mut Vec<u8>) -> Result<u64> {
    let (direct, through): (Vec<_>, Vec<_>) = task.into_iter().partition(|c| c.dtype == dtype(&c.into) && c.bytes() >= DIRECT);
    let mut read = 0;
    for mut copy in direct {
        read += copy.bytes() as u64;
        read_at(file, bytes_of(&mut copy.into), copy.at)?;
    }
    let mut through = through.into_iter().peekable();
    while let Some(first) = through.next() {
        let (start, mut end) = (first.at, first.at + first.bytes() as u64);
        let mut near = vec![first];
        while let Some(copy) = through.next_if(|c| c.at <= end + GAP) {
            end = end.max(copy.at + copy.bytes() as u64);
            near.push(copy);
        }
        buffer.resize((end - start) as usize, 0);
        read_at(file, buffer, start)?;
        for copy in near {
            let first = (copy.at - start) as usize;
            convert(copy.dtype, &buffer[first..first + copy.bytes()], copy.into);
        }
        read += end - start;
    }
    Ok(read)
}

fn read_at(file: &DataFile<'_>, buffer: &mut [u8], at: u64) -> Result<()> {
    file.file.read_exact_at(buffer, at).map_err(Error::io("read", file.path))
}

/// Bytes of a file's type into elements of another.
fn convert(from: DType, bytes: &[u8], into: SliceMut<'_>) {
    fn to<T: Float>(from: DType, bytes: &[u8], into: &mut [T]) {
        decode(from, bytes, into);
    }
    match into {
        SliceMut::F64(s) => to::<f64>(from, bytes, s),
        SliceMut::F32(s) => to::<f32>(from, bytes, s),
        SliceMut::BF16(s) => to::<bf16>(from, bytes, s),
        SliceMut::F16(s) => to::<f16>(from, bytes, s),
        // `plan` lets none of these through; no file of weights or moments holds integers.
        SliceMut::I32(_) | SliceMut::Device(..) => {}
    }
}

fn dtype(slice: &SliceMut<'_>) -> DType {
    match slice {
        SliceMut::F64(_) => DType::F64,
        SliceMut::F32(_) => DType::F32,
        SliceMut::BF16(_) => DType::BF16,
        SliceMut::F16(_) => DType::F16,
        SliceMut::I32(_) => DType::I32,
        SliceMut::Device(_, _, dtype, _) => *dtype,
    }
}

fn len(slice: &SliceMut<'_>) -> usize {
    match slice {
        SliceMut::F64(s) => s.len(),
        SliceMut::F32(s) => s.len(),
        SliceMut::BF16(s) => s.len(),
        SliceMut::F16(s) => s.len(),
        SliceMut::I32(s) => s.len(),
        SliceMut::Device(_, len, ..) => *len,
    }
}

fn bytes_of<'a>(slice: &'a mut SliceMut<'_>) -> &'a mut [u8] {
    match slice {
        SliceMut::F64(s) => bytemuck::cast_slice_mut(s),
        SliceMut::F32(s) => bytemuck::cast_slice_mut(s),
        SliceMut::BF16(s) => bytemuck::cast_slice_mut(s),
        SliceMut::F16(s) => bytemuck::cast_slice_mut(s),
        SliceMut::I32(s) => bytemuck::cast_slice_mut(s),
        SliceMut::Device(..) => &mut [],
    }
}

/// Takes `n` elements off the front.
fn take<'a>(rest: &mut SliceMut<'a>, n: usize) -> SliceMut<'a> {
    macro_rules! halves {
        ($($variant:ident),*) => {
            match std::mem::replace(rest, SliceMut::I32(&mut [])) {
                $(SliceMut::$variant(s) => {
                    let (front, back) = s.split_at_mut(n);
                    *rest = SliceMut::$variant(back);
                    SliceMut::$variant(front)
                })*
                device @ SliceMut::Device(..) => device,
            }
        };
    }
    halves!(F64, F32, BF16, F16, I32)
}
