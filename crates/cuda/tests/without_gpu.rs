//! What can be checked on a machine without NVIDIA's hardware.

use temper_cuda::kernels::SOURCES;
use temper_cuda::sys::{driver::Driver, nccl::Nccl};
use temper_cuda::{Cuda, Error, Options};

/// One error names every missing library and what to do about each.
#[test]
fn opening_without_a_driver_names_the_remedy() {
    if Driver::load().is_ok() {
        eprintln!("SKIPPED: this machine has NVIDIA's driver");
        return;
    }
    let Err(e @ Error::Missing { .. }) = Cuda::open(Options::default()) else { panic!("a GPU without a driver") };
    let text = e.to_string();
    assert!(text.contains("libcuda.so.1") && text.contains("install NVIDIA's driver"), "{text}");
    assert_eq!(text.matches("cannot use the GPU").count(), 1, "{text}");
}

/// A file of kernels that is not in the table would never be compiled, nor checked.
#[test]
fn every_kernel_file_is_listed() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
    let mut files: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).filter(|f| f.ends_with(".cu")).collect();
    files.sort();
    let listed: Vec<&str> = SOURCES.iter().map(|s| s.file).collect();
    assert_eq!(files, listed);
}

/// The variants of a source differ in their options, so that no two share a name in the cache.
#[test]
fn variants_are_distinct() {
    for source in SOURCES {
        let mut seen = std::collections::HashSet::new();
        assert!(source.variants().into_iter().all(|v| seen.insert(v)), "{}", source.file);
    }
}

/// NCCL opens without a GPU, so its names and versions can be checked wherever the library is installed.
#[test]
fn nccl_has_every_function_or_says_how_to_get_it() {
    match Nccl::load() {
        Ok(nccl) => assert!(nccl.version().unwrap() >= 21_800 && nccl.text(4).contains("invalid argument")),
        Err(e) => {
            let text = e.to_string();
            assert!(text.contains("libnccl") && text.contains("pip install nvidia-nccl"), "{text}");
            eprintln!("SKIPPED: {text}");
        }
    }
}
