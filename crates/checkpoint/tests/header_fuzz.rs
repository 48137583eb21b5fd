//! Headers and indexes from anywhere: never a panic, never more memory than the file is worth, and agreement with the
//! reference implementation on what is a valid file.

mod common;

use common::*;
use proptest::{prelude::*, sample::Index};
use temper_checkpoint::{
    WeightsFolder,
    safetensors::{Header, MAX_HEADER},
};
use temper_tensor::DType;

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    bytes
}

#[track_caller]
fn refused(header: &str, data: usize, word: &str) {
    let error = Header::parse(&file(header, data)).expect_err(header);
    assert!(error.contains(word), "{word:?} is not in {error:?}");
}

#[test]
fn malformed_headers_are_refused_with_their_reason() {
    let t = |offsets: &str| format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#);
    assert!(Header::parse(&file(&format!(r#"{{"a":{}}}"#, t("[0,8]")), 8)).is_ok());
    assert!(Header::parse(&file("{}", 0)).is_ok());
    refused(&format!(r#"{{"a":{},"a":{}}}"#, t("[0,8]"), t("[8,16]")), 16, "a is given twice");
    refused(&format!(r#"{{"a":{},"b":{}}}"#, t("[0,8]"), t("[4,12]")), 12, "overlaps");
    refused(&format!(r#"{{"a":{},"b":{}}}"#, t("[0,8]"), t("[9,17]")), 17, "gap");
    refused(&format!(r#"{{"a":{}}}"#, t("[4,12]")), 12, "gap");
    refused(&format!(r#"{{"a":{}}}"#, t("[0,8]")), 7, "truncated");
    refused(&format!(r#"{{"a":{}}}"#, t("[0,8]")), 9, "after the last tensor");
    refused(&format!(r#"{{"a":{}}}"#, t("[8,0]")), 8, "do not fit");
    refused(&format!(r#"{{"a":{}}}"#, t("[0,4]")), 4, "do not fit");
    refused(r#"{"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}"#, 8, "unknown dtype");
    refused(r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#, 1, "do not fit");
    refused(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#, 0, "too large");
    refused(r#"{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}"#, 0, "too large");
    refused(r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}"#, 0, "malformed header");
    refused(r#"{"a":{"dtype":"F32","shape":[2]}}"#, 8, "data_offsets");
    refused(r#"{"__metadata__":{"a":"b"},"__metadata__":{}}"#, 0, "__metadata__ is given twice");
    refused(r#"{"__metadata__":{"a":1}}"#, 0, "malformed header");
    refused("[]", 0, "malformed header");
    refused("", 0, "malformed header");
    refused(&"[".repeat(100_000), 0, "malformed header");
    refused(&format!(r#"{{"a":{}}}"#, "{\"x\":".repeat(100_000)), 0, "malformed header");
}

#[test]
fn lengths_are_checked_before_anything_is_read() {
    for (bytes, word) in [
        (vec![], "not a safetensors file"),
        (vec![0; 7], "not a safetensors file"),
        (u64::MAX.to_le_bytes().to_vec(), "limit"),
        ((MAX_HEADER + 1).to_le_bytes().to_vec(), "limit"),
        (MAX_HEADER.to_le_bytes().to_vec(), "truncated"),
    ] {
        assert!(Header::parse(&bytes).unwrap_err().contains(word));
    }
}

/// JSON that looks like a header, most of it subtly wrong.
fn headers() -> impl Strategy<Value = String> {
    let number = prop_oneof![0u64..40, Just(u64::MAX), Just(1 << 62)];
    let dtype = prop_oneof![Just("F32"), Just("BF16"), Just("U8"), Just("F4"), Just("I64"), Just("X")];
    let entry = ("[ab]{1,2}", dtype, prop::collection::vec(0u64..4, 0..3), number.clone(), number)
        .prop_map(|(name, dtype, shape, a, b)| format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{a},{b}]}}"#));
    prop::collection::vec(entry, 0..4).prop_map(|entries| format!("{{{}}}", entries.join(",")))
}

/// Tensors that tile their data, for agreement on valid files too.
fn tilings() -> impl Strategy<Value = (String, usize)> {
    prop::collection::vec((prop_oneof![Just(("F32", 4)), Just(("BF16", 2)), Just(("U8", 1))], 0usize..4, 1usize..4), 0..5).prop_map(
        |parts| {
            let mut at = 0;
            let entry = |(i, ((dtype, size), rows, cols)): (usize, ((&str, usize), usize, usize))| {
                let start = at;
                at += size * rows * cols;
                format!(r#""t{i}":{{"dtype":"{dtype}","shape":[{rows},{cols}],"data_offsets":[{start},{at}]}}"#)
            };
            let entries: Vec<String> = parts.into_iter().enumerate().map(entry).collect();
            (format!("{{{}}}", entries.join(",")), at)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Header::parse(&bytes);
    }

    /// What we accept, the reference accepts, and sees the same tensors.
    #[test]
    fn arbitrary_headers_agree_with_the_reference(header in headers(), data in 0usize..80) {
        let bytes = file(&header, data);
        if let Ok(ours) = Header::parse(&bytes) {
            let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            prop_assert_eq!(reference.len(), ours.tensors.len());
            for (name, entry) in &ours.tensors {
                let theirs = reference.tensor(name).unwrap();
                prop_assert_eq!(theirs.shape(), &entry.shape[..]);
                prop_assert_eq!(theirs.data(), &bytes[ours.data_start..][entry.bytes.clone()]);
            }
        }
    }

    #[test]
    fn valid_headers_are_accepted((header, data) in tilings()) {
        prop_assert!(Header::parse(&file(&header, data)).is_ok());
    }

    /// A good file with one byte changed or cut somewhere opens or is refused; what opens can be loaded.
    #[test]
    fn mutated_files_never_panic(at in any::<Index>(), byte in any::<u8>(), cut in any::<Option<Index>>()) {
        let (params, dir) = (experts(), tempfile::tempdir().unwrap());
        let path = dir.path().join("model.safetensors");
        write(&path, &on_disk(&params, &values(&params, 1)));
        let mut bytes = std::fs::read(&path).unwrap();
        let i = at.index(bytes.len());
        bytes[i] = byte;
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(&path, bytes).unwrap();
        if let Ok(folder) = WeightsFolder::open(dir.path()) {
            let _ = folder.load(&params, DType::F32);
        }
    }

    #[test]
    fn mutated_indexes_never_panic(at in any::<Index>(), byte in any::<u8>()) {
        let (params, dir) = (experts(), tempfile::tempdir().unwrap());
        write_sharded(dir.path(), &on_disk(&params, &values(&params, 1)), &["model.layers.0.mlp.experts.1.up_proj.weight"]);
        let path = dir.path().join(INDEX);
        let mut bytes = std::fs::read(&path).unwrap();
        let i = at.index(bytes.len());
        bytes[i] = byte;
        std::fs::write(&path, bytes).unwrap();
        if let Ok(folder) = WeightsFolder::open(dir.path()) {
            let _ = folder.load(&params, DType::F32);
        }
    }
}
