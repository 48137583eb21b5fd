//! Checks at the boundary: every argument has its dtype and shape, and lives on the device.

use temper_tensor::{DType, Error, Result, Slice, View, ViewMut};

/// The operation being checked, for error messages.
#[derive(Clone, Copy)]
pub struct Op(pub &'static str);

impl Op {
    /// The activation dtype of a call: f32 or bf16.
    pub fn activation(self, what: &'static str, dtype: DType) -> Result<DType> {
        self.one_of(what, dtype, &[DType::F32, DType::BF16])
    }

    /// The dtype, if it is one of those.
    pub fn one_of(self, what: &'static str, found: DType, want: &[DType]) -> Result<DType> {
        if want.contains(&found) {
            return Ok(found);
        }
        let names: Vec<&str> = want.iter().map(|d| d.name()).collect();
        Err(Error::DType { op: self.0, what, found, expected: format!("{} (CUDA backend)", names.join(" or ")) })
    }

    /// Address of an input of this dtype and shape.
    pub fn input(self, what: &'static str, x: View, dtype: DType, shape: &[usize]) -> Result<u64> {
        self.one_of(what, x.dtype(), &[dtype])?;
        self.shape(what, x, shape)?;
        self.address(what, x)
    }

    /// Address of an output of this dtype and shape.
    pub fn output(self, what: &'static str, x: &ViewMut, dtype: DType, shape: &[usize]) -> Result<u64> {
        self.input(what, x.as_view(), dtype, shape)
    }

    /// The shape must be this.
    pub fn shape(self, what: &'static str, x: View, shape: &[usize]) -> Result<()> {
        if x.shape() == shape {
            return Ok(());
        }
        Err(Error::Shape { op: self.0, what, found: x.shape().to_vec(), expected: format!("{shape:?}") })
    }

    /// The dims of a tensor of rank `N`.
    pub fn dims<const N: usize>(self, what: &'static str, x: View) -> Result<[usize; N]> {
        x.shape().try_into().map_err(|_| Error::Shape { op: self.0, what, found: x.shape().to_vec(), expected: format!("{N} dims") })
    }

    /// An error of shape in words.
    pub fn wrong<X>(self, what: &'static str, x: View, expected: impl Into<String>) -> Result<X> {
        Err(Error::Shape { op: self.0, what, found: x.shape().to_vec(), expected: expected.into() })
    }

    /// The device address.
    pub fn address(self, what: &'static str, x: View) -> Result<u64> {
        match x.data {
            Slice::Device(address, ..) => Ok(address),
            _ => Err(Error::Backend(format!("{}: {what} is in host memory; copy it to the GPU with from_host", self.0))),
        }
    }
}

/// Whether 16-byte accesses fit: rows of `width` elements and all addresses are multiples of 16 bytes.
pub fn vectors(dtype: DType, width: usize, addresses: &[u64]) -> bool {
    (width * dtype.size()).is_multiple_of(16) && addresses.iter().all(|a| a.is_multiple_of(16))
}
