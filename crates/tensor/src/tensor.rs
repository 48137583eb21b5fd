//! [`Tensor`] owns elements, [`View`] and [`ViewMut`] borrow a contiguous range of them.
//!
//! All tensors are dense and row-major. A view always covers whole rows of dim 0, so it is contiguous
//! too, and the borrow checker keeps inputs and outputs of an op apart.

use crate::{DType, Element, cpu::pool::Pooled};
use half::{bf16, f16};
use std::{any::Any, marker::PhantomData, ops::Range};

/// Elements of a tensor, wherever they live.
pub enum Buffer {
    /// f64 in host memory.
    F64(Pooled<f64>),
    /// f32 in host memory.
    F32(Pooled<f32>),
    /// bf16 in host memory.
    BF16(Pooled<bf16>),
    /// f16 in host memory.
    F16(Pooled<f16>),
    /// i32 in host memory.
    I32(Pooled<i32>),
    /// Memory of another backend.
    Device(Box<dyn DeviceBuffer>),
}

/// Memory of a backend other than the CPU. Freed on drop, in the order of the backend's stream.
pub trait DeviceBuffer: Send + Sync {
    /// Element type.
    fn dtype(&self) -> DType;
    /// Number of elements.
    fn len(&self) -> usize;
    /// True when there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Device address of the first element.
    fn address(&self) -> u64;
    /// For the owning backend to recognise its own buffers.
    fn as_any(&self) -> &dyn Any;
}

/// A dense row-major array that owns its elements.
pub struct Tensor {
    buffer: Buffer,
    shape: Vec<usize>,
}

/// Borrowed elements.
#[derive(Clone, Copy)]
pub enum Slice<'a> {
    /// f64 in host memory.
    F64(&'a [f64]),
    /// f32 in host memory.
    F32(&'a [f32]),
    /// bf16 in host memory.
    BF16(&'a [bf16]),
    /// f16 in host memory.
    F16(&'a [f16]),
    /// i32 in host memory.
    I32(&'a [i32]),
    /// Device memory: address of the first element, number of elements.
    Device(u64, usize, DType, PhantomData<&'a ()>),
}

/// Mutably borrowed elements.
pub enum SliceMut<'a> {
    /// f64 in host memory.
    F64(&'a mut [f64]),
    /// f32 in host memory.
    F32(&'a mut [f32]),
    /// bf16 in host memory.
    BF16(&'a mut [bf16]),
    /// f16 in host memory.
    F16(&'a mut [f16]),
    /// i32 in host memory.
    I32(&'a mut [i32]),
    /// Device memory: address of the first element, number of elements.
    Device(u64, usize, DType, PhantomData<&'a mut ()>),
}

/// A shared view of a contiguous part of a tensor.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The elements.
    pub data: Slice<'a>,
    shape: Dims,
}

/// An exclusive view of a contiguous part of a tensor.
pub struct ViewMut<'a> {
    /// The elements.
    pub data: SliceMut<'a>,
    shape: Dims,
}

/// A shape of up to four dims, kept inline so that views are `Copy`.
#[derive(Clone, Copy)]
struct Dims {
    dims: [usize; 4],
    rank: u8,
}

impl Dims {
    fn new(shape: &[usize]) -> Dims {
        assert!(shape.len() <= 4, "a view has at most four dims, got {shape:?}");
        let mut dims = [1; 4];
        dims[..shape.len()].copy_from_slice(shape);
        Dims { dims, rank: shape.len() as u8 }
    }
    fn as_slice(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }
}

/// Gives a typed slice of a view; implemented for every [`Element`].
pub trait FromSlice: Element {
    /// The elements, if they are of this type and in host memory.
    fn from_slice<'a>(s: Slice<'a>) -> Option<&'a [Self]>;
    /// The elements, if they are of this type and in host memory.
    fn from_slice_mut<'a>(s: SliceMut<'a>) -> Option<&'a mut [Self]>;
    /// The buffer holding these elements.
    fn buffer(data: Pooled<Self>) -> Buffer;
}

macro_rules! from_slice {
    ($($t:ty => $v:ident),*) => { $(impl FromSlice for $t {
        fn from_slice<'a>(s: Slice<'a>) -> Option<&'a [Self]> {
            match s { Slice::$v(x) => Some(x), _ => None }
        }
        fn from_slice_mut<'a>(s: SliceMut<'a>) -> Option<&'a mut [Self]> {
            match s { SliceMut::$v(x) => Some(x), _ => None }
        }
        fn buffer(data: Pooled<Self>) -> Buffer { Buffer::$v(data) }
    })* };
}
from_slice!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, i32 => I32);

macro_rules! each {
    ($enum:ident, $x:expr, $s:ident => $e:expr, $($device:tt)+) => {
        match $x {
            $enum::F64($s) => $enum::F64($e),
            $enum::F32($s) => $enum::F32($e),
            $enum::BF16($s) => $enum::BF16($e),
            $enum::F16($s) => $enum::F16($e),
            $enum::I32($s) => $enum::I32($e),
            $($device)+
        }
    };
}

macro_rules! halves {
    ($x:expr, $n:expr, $($v:ident)*) => {
        match $x {
            $(SliceMut::$v(s) => {
                let (a, b) = s.split_at_mut($n);
                (SliceMut::$v(a), SliceMut::$v(b))
            })*
            SliceMut::Device(p, len, d, m) => {
                assert!($n <= len);
                (SliceMut::Device(p, $n, d, m), SliceMut::Device(p + ($n * d.size()) as u64, len - $n, d, m))
            }
        }
    };
}

impl Tensor {
    /// Wraps a buffer. Panics when the number of elements does not fit the shape (a bug of the backend).
    pub fn new(buffer: Buffer, shape: &[usize]) -> Tensor {
        let t = Tensor { buffer, shape: shape.to_vec() };
        assert_eq!(t.view().data.len(), t.numel(), "buffer and shape {shape:?} disagree");
        t
    }

    /// A host tensor from a vector, outside any pool.
    pub fn from_vec<T: FromSlice>(data: Vec<T>, shape: &[usize]) -> Tensor {
        Tensor::new(T::buffer(Pooled::unpooled(data)), shape)
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.buffer {
            Buffer::F64(_) => DType::F64,
            Buffer::F32(_) => DType::F32,
            Buffer::BF16(_) => DType::BF16,
            Buffer::F16(_) => DType::F16,
            Buffer::I32(_) => DType::I32,
            Buffer::Device(d) => d.dtype(),
        }
    }

    /// The buffer, for the backend that made it.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// All elements, shared. Shapes of more than four dims are flattened.
    pub fn view(&self) -> View<'_> {
        let data = match &self.buffer {
            Buffer::F64(v) => Slice::F64(v),
            Buffer::F32(v) => Slice::F32(v),
            Buffer::BF16(v) => Slice::BF16(v),
            Buffer::F16(v) => Slice::F16(v),
            Buffer::I32(v) => Slice::I32(v),
            Buffer::Device(d) => Slice::Device(d.address(), d.len(), d.dtype(), PhantomData),
        };
        View { data, shape: Dims::new(&self.shape) }
    }

    /// All elements, exclusive.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let shape = Dims::new(&self.shape);
        let data = match &mut self.buffer {
            Buffer::F64(v) => SliceMut::F64(v),
            Buffer::F32(v) => SliceMut::F32(v),
            Buffer::BF16(v) => SliceMut::BF16(v),
            Buffer::F16(v) => SliceMut::F16(v),
            Buffer::I32(v) => SliceMut::I32(v),
            Buffer::Device(d) => SliceMut::Device(d.address(), d.len(), d.dtype(), PhantomData),
        };
        ViewMut { data, shape }
    }

    /// The elements as a typed host slice; `None` when the type differs or they live on a device.
    pub fn as_slice<T: FromSlice>(&self) -> Option<&[T]> {
        T::from_slice(self.view().data)
    }

    /// The elements as a typed mutable host slice.
    pub fn as_slice_mut<T: FromSlice>(&mut self) -> Option<&mut [T]> {
        T::from_slice_mut(self.view_mut().data)
    }

    /// The same elements under another shape of equal size.
    pub fn reshape(mut self, shape: &[usize]) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), self.numel(), "reshape {:?} to {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }
}

impl Slice<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Slice::F64(s) => s.len(),
            Slice::F32(s) => s.len(),
            Slice::BF16(s) => s.len(),
            Slice::F16(s) => s.len(),
            Slice::I32(s) => s.len(),
            Slice::Device(_, n, ..) => *n,
        }
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> View<'a> {
    /// A view of host elements.
    pub fn host<T: FromSlice + ViewOf>(data: &'a [T], shape: &[usize]) -> View<'a> {
        assert_eq!(data.len(), shape.iter().product::<usize>());
        View { data: T::slice(data), shape: Dims::new(shape) }
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// Size of dim 0 (1 for a scalar).
    pub fn rows(&self) -> usize {
        self.shape().first().copied().unwrap_or(1)
    }

    /// Elements per index of dim 0.
    pub fn row_len(&self) -> usize {
        self.shape().iter().skip(1).product()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape().iter().product()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self.data {
            Slice::F64(_) => DType::F64,
            Slice::F32(_) => DType::F32,
            Slice::BF16(_) => DType::BF16,
            Slice::F16(_) => DType::F16,
            Slice::I32(_) => DType::I32,
            Slice::Device(_, _, d, _) => d,
        }
    }

    /// The typed host elements, if they are of this type.
    pub fn as_slice<T: FromSlice>(&self) -> Option<&'a [T]> {
        T::from_slice(self.data)
    }

    /// The same elements under another shape of equal size.
    pub fn reshape(self, shape: &[usize]) -> View<'a> {
        assert_eq!(shape.iter().product::<usize>(), self.numel(), "reshape {:?} to {shape:?}", self.shape());
        View { data: self.data, shape: Dims::new(shape) }
    }

    /// Rows `range` of dim 0.
    pub fn slice_rows(self, range: Range<usize>) -> View<'a> {
        let n = self.row_len();
        let (a, b) = (range.start * n, range.end * n);
        let mut shape = self.shape;
        shape.dims[0] = range.len();
        let data = each!(Slice, self.data, s => &s[a..b],
        Slice::Device(p, len, d, m) => {
            assert!(a <= b && b <= len);
            Slice::Device(p + (a * d.size()) as u64, b - a, d, m)
        });
        View { data, shape }
    }

    /// Entry `i` of dim 0, with that dim removed.
    pub fn index(self, i: usize) -> View<'a> {
        let v = self.slice_rows(i..i + 1);
        let shape = Dims::new(&self.shape()[1..]);
        View { data: v.data, shape }
    }
}

impl<'a> ViewMut<'a> {
    /// The shape.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// Size of dim 0 (1 for a scalar).
    pub fn rows(&self) -> usize {
        self.shape().first().copied().unwrap_or(1)
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape().iter().product()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.as_view().dtype()
    }

    /// A shared view of the same elements.
    pub fn as_view(&self) -> View<'_> {
        let data = match &self.data {
            SliceMut::F64(s) => Slice::F64(s),
            SliceMut::F32(s) => Slice::F32(s),
            SliceMut::BF16(s) => Slice::BF16(s),
            SliceMut::F16(s) => Slice::F16(s),
            SliceMut::I32(s) => Slice::I32(s),
            SliceMut::Device(p, n, d, _) => Slice::Device(*p, *n, *d, PhantomData),
        };
        View { data, shape: self.shape }
    }

    /// A shorter exclusive borrow of the same elements.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        let data = match &mut self.data {
            SliceMut::F64(s) => SliceMut::F64(s),
            SliceMut::F32(s) => SliceMut::F32(s),
            SliceMut::BF16(s) => SliceMut::BF16(s),
            SliceMut::F16(s) => SliceMut::F16(s),
            SliceMut::I32(s) => SliceMut::I32(s),
            SliceMut::Device(p, n, d, _) => SliceMut::Device(*p, *n, *d, PhantomData),
        };
        ViewMut { data, shape: self.shape }
    }

    /// The typed host elements, if they are of this type.
    pub fn into_slice<T: FromSlice>(self) -> Option<&'a mut [T]> {
        T::from_slice_mut(self.data)
    }

    /// The same elements under another shape of equal size.
    pub fn reshape(self, shape: &[usize]) -> ViewMut<'a> {
        assert_eq!(shape.iter().product::<usize>(), self.numel(), "reshape {:?} to {shape:?}", self.shape());
        ViewMut { data: self.data, shape: Dims::new(shape) }
    }

    /// Rows `range` of dim 0.
    pub fn slice_rows(self, range: Range<usize>) -> ViewMut<'a> {
        let n: usize = self.shape().iter().skip(1).product();
        let (a, b) = (range.start * n, range.end * n);
        let mut shape = self.shape;
        shape.dims[0] = range.len();
        let data = each!(SliceMut, self.data, s => &mut s[a..b],
        SliceMut::Device(p, len, d, m) => {
            assert!(a <= b && b <= len);
            SliceMut::Device(p + (a * d.size()) as u64, b - a, d, m)
        });
        ViewMut { data, shape }
    }

    /// Rows before and from `at` of dim 0, as two views.
    pub fn split_rows(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        let n = at * self.shape().iter().skip(1).product::<usize>();
        let (mut before, mut after) = (self.shape, self.shape);
        (before.dims[0], after.dims[0]) = (at, self.rows() - at);
        let (a, b) = halves!(self.data, n, F64 F32 BF16 F16 I32);
        (ViewMut { data: a, shape: before }, ViewMut { data: b, shape: after })
    }

    /// Entry `i` of dim 0, with that dim removed.
    pub fn index(self, i: usize) -> ViewMut<'a> {
        let shape = Dims::new(&self.shape()[1..]);
        let v = self.slice_rows(i..i + 1);
        ViewMut { data: v.data, shape }
    }
}

/// Wraps a typed slice; implemented for every [`Element`].
pub trait ViewOf: Element {
    /// The borrowed slice as [`Slice`].
    fn slice(data: &[Self]) -> Slice<'_>;
}
macro_rules! view_of {
    ($($t:ty => $v:ident),*) => { $(impl ViewOf for $t {
        fn slice(data: &[Self]) -> Slice<'_> { Slice::$v(data) }
    })* };
}
view_of!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, i32 => I32);
