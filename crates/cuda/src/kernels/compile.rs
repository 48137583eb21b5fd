//! NVRTC: from a source and a variant to a cubin, with the registers and spills of each kernel.
#![allow(unsafe_code)] // calls into NVRTC

use super::{HEADER, Source, Variant};
use crate::sys::nvrtc::{Nvrtc, Program};
use crate::{Error, Result};
use std::ffi::{CStr, CString, c_char};

/// The compiler for one architecture.
pub struct Compiler {
    nvrtc: Nvrtc,
    /// Version, for example (13, 0).
    pub version: (i32, i32),
    /// Architecture, for example `sm_90a`.
    pub arch: String,
}

/// Machine code and what the assembler says of it.
pub struct Compiled {
    /// The cubin.
    pub cubin: Vec<u8>,
    /// One entry a kernel.
    pub resources: Vec<Resources>,
    /// What the assembler says of lost speed, such as tensor-core instructions that it had to serialise.
    pub losses: Vec<String>,
}

/// What a kernel takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Name of the kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack frame of a thread.
    pub stack: u32,
    /// Bytes a thread writes to spill registers.
    pub spill_stores: u32,
    /// Bytes a thread reads back.
    pub spill_loads: u32,
}

impl Compiler {
    /// A compiler for an architecture such as `sm_90a`.
    pub fn new(nvrtc: Nvrtc, arch: String) -> Result<Compiler> {
        let mut version = (0, 0);
        // SAFETY: plain query.
        let status = unsafe { (nvrtc.nvrtcVersion)(&mut version.0, &mut version.1) };
        check(&nvrtc, status, "nvrtcVersion")?;
        Ok(Compiler { nvrtc, version, arch })
    }

    /// Where NVRTC was found.
    pub fn path(&self) -> &str {
        &self.nvrtc.found.path
    }

    /// Options for a variant.
    pub fn options(&self, variant: Variant) -> Vec<String> {
        let mut all = vec![format!("--gpu-architecture={}", self.arch), "--std=c++17".into(), "--ptxas-options=-v".into()];
        all.extend(variant.defines());
        all
    }

    /// Compiles a source.
    pub fn compile(&self, source: &Source, variant: Variant) -> Result<Compiled> {
        let bad = |what: &str| Error::Compile { file: source.file.into(), arch: self.arch.clone(), log: what.into() };
        let text = CString::new(source.text).map_err(|_| bad("the source holds a NUL"))?;
        let name = CString::new(source.file).map_err(|_| bad("the name holds a NUL"))?;
        let header = [HEADER.1, HEADER.0].map(|s| CString::new(s).unwrap_or_default());
        let options: Vec<CString> = self.options(variant).into_iter().map(|o| CString::new(o).unwrap_or_default()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let n = &self.nvrtc;
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all strings outlive the calls; the program is destroyed below, whatever happens in between.
        unsafe {
            let status = (n.nvrtcCreateProgram)(&mut program, text.as_ptr(), name.as_ptr(), 1, &header[0].as_ptr(), &header[1].as_ptr());
            check(n, status, "nvrtcCreateProgram")?;
            let status = (n.nvrtcCompileProgram)(program, pointers.len() as i32, pointers.as_ptr());
            let result = self.collect(program, status, source);
            (n.nvrtcDestroyProgram)(&mut program);
            result
        }
    }

    /// The cubin and the log of a program after compilation.
    ///
    /// # Safety
    /// `program` must be alive.
    unsafe fn collect(&self, program: Program, status: i32, source: &Source) -> Result<Compiled> {
        let n = &self.nvrtc;
        let mut size = 0;
        let log = unsafe {
            check(n, (n.nvrtcGetProgramLogSize)(program, &mut size), "nvrtcGetProgramLogSize")?;
            let mut log = vec![0u8; size];
            check(n, (n.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast()), "nvrtcGetProgramLog")?;
            String::from_utf8_lossy(&log).trim_end_matches('\0').to_string()
        };
        if status != 0 {
            return Err(Error::Compile { file: source.file.into(), arch: self.arch.clone(), log });
        }
        let mut cubin = vec![];
        unsafe {
            check(n, (n.nvrtcGetCUBINSize)(program, &mut size), "nvrtcGetCUBINSize")?;
            cubin.resize(size, 0);
            check(n, (n.nvrtcGetCUBIN)(program, cubin.as_mut_ptr().cast()), "nvrtcGetCUBIN")?;
        }
        Ok(Compiled { cubin, resources: resources(&log), losses: losses(&log) })
    }
}

fn check(nvrtc: &Nvrtc, status: i32, call: &str) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: returns a static string.
    let text = unsafe { CStr::from_ptr((nvrtc.nvrtcGetErrorString)(status)) }.to_string_lossy().into_owned();
    Err(Error::Call { call: call.into(), status, text })
}

/// Reads what `ptxas -v` prints.
fn resources(log: &str) -> Vec<Resources> {
    let mut all: Vec<Resources> = vec![];
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_string();
            all.push(Resources { kernel, ..Resources::default() });
        }
        let Some(last) = all.last_mut() else { continue };
        let mut before = |words: &str, into: fn(&mut Resources) -> &mut u32| {
            let number = line.split(words).next().filter(|_| line.contains(words)).and_then(|s| s.split_whitespace().next_back());
            if let Some(value) = number.and_then(|n| n.parse().ok()) {
                *into(last) = value;
            }
        };
        before(" bytes stack frame", |r| &mut r.stack);
        before(" bytes spill stores", |r| &mut r.spill_stores);
        before(" bytes spill loads", |r| &mut r.spill_loads);
        before(" registers", |r| &mut r.registers);
    }
    all
}

/// The assembler's remarks on lost speed.
fn losses(log: &str) -> Vec<String> {
    log.lines().filter(|l| l.contains("Potential Performance Loss")).map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_assembler_report() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'gemm' for 'sm_90a'\n\
                   ptxas info    : Function properties for gemm\n    \
                   16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 168 registers, used 1 barriers\n";
        let want = Resources { kernel: "gemm".into(), registers: 168, stack: 16, spill_stores: 8, spill_loads: 12 };
        assert_eq!(resources(log), vec![want]);
        assert!(losses(log).is_empty());
        let loss = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized";
        assert_eq!(losses(&format!("{log}{loss}\n")), [loss]);
    }
}
