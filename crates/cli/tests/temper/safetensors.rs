//! Safetensors files read and written by the format's own description, independent of the library under test:
//! eight bytes of header length, a JSON header, the data.

use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};

/// A tensor as it lies in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<String, Stored>;

pub fn read(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let (length, rest) = file.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let number = |v: &Value| v.as_u64().unwrap() as usize;
    let entries = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, entry)| {
        let (start, end) = (number(&entry["data_offsets"][0]), number(&entry["data_offsets"][1]));
        let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
        (name, Stored { dtype: entry["dtype"].as_str().unwrap().into(), shape, bytes: data[start..end].to_vec() })
    });
    entries.collect()
}

pub fn write(path: &Path, tensors: &Tensors) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
    for (name, tensor) in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        header.insert(name.clone(), json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] }));
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    fs::write(path, file).unwrap();
}

impl Stored {
    /// The elements of an F32 tensor.
    pub fn floats(&self) -> Vec<f32> {
        assert_eq!(self.dtype, "F32");
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Bytes of one element.
    pub fn width(&self) -> usize {
        self.bytes.len() / self.shape.iter().product::<usize>().max(1)
    }
}
