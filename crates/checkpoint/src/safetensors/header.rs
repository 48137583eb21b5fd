//! Parsing of the header. Nothing in it is trusted: lengths are checked against the file before anything
//! is allocated, and what is allocated is bounded by the header's own size.

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use std::{
    collections::{HashMap, hash_map::Entry as Place},
    fmt,
    ops::Range,
};

/// Largest accepted header in bytes, the limit of the reference implementation.
pub const MAX_HEADER: u64 = 100_000_000;

/// Element types that a file may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)]
pub enum Stored {
    BOOL,
    F4,
    F6_E2M3,
    F6_E3M2,
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
    U8,
    I8,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    C64,
}

impl Stored {
    const ALL: [(Stored, &'static str, u64); 20] = [
        (Stored::BOOL, "BOOL", 8),
        (Stored::F4, "F4", 4),
        (Stored::F6_E2M3, "F6_E2M3", 6),
        (Stored::F6_E3M2, "F6_E3M2", 6),
        (Stored::F8_E4M3, "F8_E4M3", 8),
        (Stored::F8_E5M2, "F8_E5M2", 8),
        (Stored::F8_E8M0, "F8_E8M0", 8),
        (Stored::U8, "U8", 8),
        (Stored::I8, "I8", 8),
        (Stored::U16, "U16", 16),
        (Stored::I16, "I16", 16),
        (Stored::F16, "F16", 16),
        (Stored::BF16, "BF16", 16),
        (Stored::U32, "U32", 32),
        (Stored::I32, "I32", 32),
        (Stored::F32, "F32", 32),
        (Stored::U64, "U64", 64),
        (Stored::I64, "I64", 64),
        (Stored::F64, "F64", 64),
        (Stored::C64, "C64", 64),
    ];

    /// The name in the header, e.g. `BF16`.
    pub fn name(self) -> &'static str {
        Stored::ALL[self as usize].1
    }

    /// Bits of one element.
    pub fn bits(self) -> u64 {
        Stored::ALL[self as usize].2
    }

    fn parse(name: &str) -> Option<Stored> {
        Stored::ALL.iter().find(|d| d.1 == name).map(|d| d.0)
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the header says about one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Element type.
    pub dtype: Stored,
    /// Shape.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the end of the header.
    pub bytes: Range<usize>,
}

/// A parsed and checked header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The free-form `__metadata__`.
    pub metadata: HashMap<String, String>,
    /// Tensors by name.
    pub tensors: HashMap<String, Entry>,
    /// Where the tensors' bytes begin in the file.
    pub data_start: usize,
}

impl Header {
    /// Parses the header of a file whose whole content is `file`.
    ///
    /// # Errors
    /// In words, without the file's name: a length past the limit or the file's end, malformed JSON, a name given
    /// twice, an unknown dtype, a shape that does not fit its byte range, ranges that overlap or leave gaps, or
    /// that end before or after the file does (a truncated download).
    pub fn parse(file: &[u8]) -> Result<Header, String> {
        let Some((length, rest)) = file.split_first_chunk::<8>() else {
            return Err(format!("not a safetensors file: only {} bytes long", file.len()));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER {
            return Err(format!("not a safetensors file: a header of {length} bytes (the limit is {MAX_HEADER})"));
        }
        let Some((json, data)) = rest.split_at_checked(length as usize) else {
            return Err(format!("truncated: the header should be {length} bytes, {} are left. Download the file again", rest.len()));
        };
        let raw: RawHeader = serde_json::from_slice(json).map_err(|e| format!("malformed header: {e}"))?;
        let mut header = Header { metadata: raw.metadata, tensors: HashMap::with_capacity(raw.tensors.len()), data_start: 8 + json.len() };
        for (name, entry) in raw.tensors {
            let entry = entry.check().map_err(|e| format!("malformed header: {name}: {e}"))?;
            header.tensors.insert(name, entry);
        }
        header.check_cover(data.len())?;
        Ok(header)
    }

    /// The tensors must cover the file's data exactly.
    fn check_cover(&self, data: usize) -> Result<(), String> {
        let mut order: Vec<(&String, &Entry)> = self.tensors.iter().collect();
        order.sort_unstable_by_key(|(name, e)| (e.bytes.start, e.bytes.end, *name));
        let mut end = 0;
        for (name, e) in order {
            if e.bytes.start != end {
                let what = if e.bytes.start < end { "overlaps the tensor before it" } else { "leaves a gap before it" };
                return Err(format!("malformed header: {name} starts at byte {}, expected {end}: it {what}", e.bytes.start));
            }
            end = e.bytes.end;
        }
        match data {
            _ if data < end => Err(format!("truncated: tensors need {end} bytes, the file has {data}. Download or copy the file again")),
            _ if data > end => Err(format!("{} bytes after the last tensor; the file is damaged", data - end)),
            _ => Ok(()),
        }
    }
}

/// The JSON as it stands.
struct RawHeader {
    metadata: HashMap<String, String>,
    tensors: HashMap<String, RawEntry>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawEntry {
    fn check(self) -> Result<Entry, String> {
        let dtype = Stored::parse(&self.dtype).ok_or_else(|| format!("unknown dtype {:?}", self.dtype))?;
        let (start, end) = self.data_offsets;
        let too_large = || format!("shape {:?} is too large", self.shape);
        let elements = self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).ok_or_else(too_large)?;
        let bits = elements.checked_mul(dtype.bits()).ok_or_else(too_large)?;
        if end < start || !bits.is_multiple_of(8) || end - start != bits / 8 {
            return Err(format!("data_offsets [{start}, {end}] do not fit shape {:?} of {dtype}", self.shape));
        }
        let small = |n: u64| usize::try_from(n).map_err(|_| format!("{n} does not fit this machine"));
        let shape = self.shape.iter().map(|d| small(*d)).collect::<Result<_, _>>()?;
        Ok(Entry { dtype, shape, bytes: small(start)?..small(end)? })
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut metadata = None;
                let mut tensors = HashMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if metadata.replace(map.next_value::<HashMap<String, String>>()?).is_some() {
                            return Err(A::Error::custom("__metadata__ is given twice"));
                        }
                        continue;
                    }
                    match tensors.entry(name) {
                        Place::Occupied(o) => return Err(A::Error::custom(format_args!("{} is given twice", o.key()))),
                        Place::Vacant(v) => {
                            let entry = map.next_value().map_err(|e| A::Error::custom(format_args!("{}: {e}", v.key())))?;
                            v.insert(entry);
                        }
                    }
                }
                Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
            }
        }
        deserializer.deserialize_map(Names)
    }
}
