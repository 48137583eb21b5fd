//! Checks of arguments at the boundary of an operation: shape, element type, index ranges.

use crate::{DType, Error, FromSlice, Result, View, ViewMut};

/// The operation whose arguments are checked; its name goes into every error.
#[derive(Clone, Copy)]
pub struct Op(pub &'static str);

impl Op {
    /// The sizes of a view that must have `R` dims.
    pub fn dims<const R: usize>(self, what: &'static str, shape: &[usize]) -> Result<[usize; R]> {
        shape.try_into().map_err(|_| self.misshapen(what, shape, format!("{R} dims")))
    }

    /// Fails unless `found` equals `expected`.
    pub fn shape(self, what: &'static str, found: &[usize], expected: &[usize]) -> Result<()> {
        if found == expected { Ok(()) } else { Err(self.misshapen(what, found, format!("{expected:?}"))) }
    }

    /// Fails with a shape error unless `ok`.
    pub fn require(self, ok: bool, what: &'static str, found: &[usize], expected: &'static str) -> Result<()> {
        if ok { Ok(()) } else { Err(self.misshapen(what, found, expected.to_string())) }
    }

    /// The elements of an input of the given shape.
    pub fn read<'a, T: FromSlice>(self, what: &'static str, x: View<'a>, shape: &[usize]) -> Result<&'a [T]> {
        self.shape(what, x.shape(), shape)?;
        x.as_slice().ok_or_else(|| self.mistyped::<T>(what, x.dtype()))
    }

    /// The elements of an output of the given shape.
    pub fn write<'a, T: FromSlice>(self, what: &'static str, x: ViewMut<'a>, shape: &[usize]) -> Result<&'a mut [T]> {
        self.shape(what, x.shape(), shape)?;
        let found = x.dtype();
        x.into_slice().ok_or_else(|| self.mistyped::<T>(what, found))
    }

    /// `index` as a position in a table of `limit` entries.
    pub fn index(self, what: &'static str, index: i32, limit: usize) -> Result<usize> {
        match usize::try_from(index) {
            Ok(i) if i < limit => Ok(i),
            _ => Err(Error::Index { op: self.0, what, index: index.into(), limit }),
        }
    }

    /// Fails unless every index lies below `limit`.
    pub fn indices(self, what: &'static str, indices: &[i32], limit: usize) -> Result<()> {
        indices.iter().try_for_each(|&i| self.index(what, i, limit).map(drop))
    }

    /// Fails unless the I32 `bounds` rise from 0 to `end` without falling.
    pub fn bounds(self, what: &'static str, bounds: &[i32], end: usize) -> Result<()> {
        let legal = bounds.first() == Some(&0)
            && bounds.last().is_some_and(|&b| usize::try_from(b) == Ok(end))
            && bounds.windows(2).all(|w| w[0] <= w[1]);
        if legal {
            return Ok(());
        }
        let shown = if bounds.len() > 8 { format!("{:?}...", &bounds[..8]) } else { format!("{bounds:?}") };
        Err(self.misshapen(what, &[bounds.len()], format!("values that rise from 0 to {end}, found {shown}")))
    }

    /// A dtype error for a view that is not of type `T` or not in host memory.
    fn mistyped<T: FromSlice>(self, what: &'static str, found: DType) -> Error {
        let expected = if found == T::DTYPE { "host memory (it is on a device)".to_string() } else { T::DTYPE.to_string() };
        Error::DType { op: self.0, what, found, expected }
    }

    /// A shape error.
    pub fn misshapen(self, what: &'static str, found: &[usize], expected: String) -> Error {
        Error::Shape { op: self.0, what, found: found.to_vec(), expected }
    }
}
