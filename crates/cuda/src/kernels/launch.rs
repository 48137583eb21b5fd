//! Loading compiled kernels and enqueuing them.
#![allow(unsafe_code)] // calls into the driver

use super::cache::Cache;
use super::{Compiler, SOURCES, Source, Variant};
use crate::device::Device;
use crate::sys::driver::{CUfunction, CUfunction_attribute, CUmodule};
use crate::{Error, Result};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// All kernels of the device.
pub struct Kernels {
    device: Arc<Device>,
    compiler: Compiler,
    cache: Cache,
    modules: Mutex<HashMap<(&'static str, Variant), Module>>,
    functions: RwLock<HashMap<(&'static str, Variant, &'static str), Function>>,
}

struct Module(CUmodule);
#[derive(Clone, Copy)]
struct Function(CUfunction);
// SAFETY: handles of the driver, which may be called from any thread.
unsafe impl Send for Module {}
unsafe impl Send for Function {}
unsafe impl Sync for Function {}

/// Thread blocks, threads of a block, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Thread blocks along x, y and z.
    pub blocks: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

impl Grid {
    /// Blocks along x only.
    pub fn line(blocks: usize, threads: usize) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads, shared: 0 }
    }

    /// Blocks along x and y.
    pub fn plane(x: usize, y: usize, threads: usize) -> Grid {
        Grid { blocks: [x, y, 1], threads, shared: 0 }
    }

    /// With dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Grid {
        Grid { shared: bytes, ..self }
    }
}

/// A kernel argument of up to eight bytes, as its bits (the kernel reads as many as its parameter has).
pub trait Arg {
    /// The bits.
    fn bits(self) -> u64;
}
macro_rules! arg {
    ($($t:ty),*) => { $(impl Arg for $t { fn bits(self) -> u64 { self as u64 } })* };
}
arg!(u64, usize, i64, u32);
impl Arg for i32 {
    fn bits(self) -> u64 {
        self as u32 as u64
    }
}
impl Arg for bool {
    fn bits(self) -> u64 {
        self as u64
    }
}
impl Arg for f32 {
    fn bits(self) -> u64 {
        self.to_bits() as u64
    }
}

/// Arguments of a launch, in the kernel's order. `usize` serves for `int` and `i64`.
macro_rules! args {
    ($($a:expr),* $(,)?) => { &[$($crate::kernels::Arg::bits($a)),*] };
}
pub(crate) use args;

impl Kernels {
    /// Compiles every kernel that is not in the cache, on all cores, so that no step waits for the compiler.
    pub fn new(device: Arc<Device>, compiler: Compiler) -> Result<Kernels> {
        let k = Kernels { device, compiler, cache: Cache::open()?, modules: Mutex::default(), functions: RwLock::default() };
        k.compile_missing()?;
        Ok(k)
    }

    /// The compiler.
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    fn compile_missing(&self) -> Result<()> {
        let arch = self.compiler.arch.as_str();
        let sources = SOURCES.iter().filter(|s| s.only.is_none_or(|a| a == arch));
        let all: Vec<(&Source, Variant)> = sources.flat_map(|s| s.variants().into_iter().map(move |v| (s, v))).collect();
        let missing: Vec<_> = all.into_iter().filter(|(s, v)| !self.cache.path(&self.compiler, s, *v).exists()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let start = std::time::Instant::now();
        let queue = Mutex::new(missing.iter());
        let failure = Mutex::new(None);
        let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).min(missing.len());
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some((source, variant)) = queue.lock().unwrap_or_else(PoisonError::into_inner).next() {
                        if let Err(e) = self.cache.fill(&self.compiler, source, *variant) {
                            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                        }
                    }
                });
            }
        });
        tracing::info!(kernels = missing.len(), seconds = start.elapsed().as_secs_f64(), "compiled GPU kernels");
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Enqueues a kernel. An empty grid does nothing.
    pub fn launch(&self, file: &'static str, variant: Variant, kernel: &'static str, grid: Grid, args: &[u64]) -> Result<()> {
        let mut pointers: [*mut c_void; 32] = [std::ptr::null_mut(); 32];
        assert!(args.len() <= pointers.len(), "{kernel} has too many arguments");
        for (p, a) in pointers.iter_mut().zip(args) {
            *p = std::ptr::from_ref(a).cast_mut().cast();
        }
        // SAFETY: each pointer leads to eight bytes, at least as many as any scalar parameter has.
        unsafe { self.launch_raw(file, variant, kernel, grid, &mut pointers) }
    }

    /// As [`Kernels::launch`], with pointers to the arguments.
    ///
    /// # Safety
    /// Each pointer must lead to an argument of the size the kernel declares.
    pub unsafe fn launch_raw(
        &self,
        file: &'static str,
        variant: Variant,
        kernel: &'static str,
        grid: Grid,
        pointers: &mut [*mut c_void],
    ) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.device.bind()?;
        let f = self.function(file, variant, kernel)?;
        let [x, y, z] = grid.blocks;
        if x > i32::MAX as usize || y > 65535 || z > 65535 {
            return Err(Error::Unsupported(format!("{kernel}: a grid of {x} x {y} x {z} blocks is too large")));
        }
        let d = &self.device.driver;
        let status = unsafe {
            (d.cuLaunchKernel)(
                f.0,
                x as u32,
                y as u32,
                z as u32,
                grid.threads as u32,
                1,
                1,
                grid.shared as u32,
                self.device.stream(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if status == 0 { Ok(()) } else { d.check(status, &format!("launch of {kernel} ({file}, {variant:?}, {grid:?})")) }
    }

    fn function(&self, file: &'static str, variant: Variant, kernel: &'static str) -> Result<Function> {
        let key = (file, variant, kernel);
        if let Some(f) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(*f);
        }
        let module = self.module(file, variant)?;
        let d = &self.device.driver;
        let name = CString::new(kernel).map_err(|_| Error::Unsupported(format!("kernel name {kernel:?}")))?;
        let mut f: CUfunction = std::ptr::null_mut();
        // SAFETY: the module stays loaded as long as `self`.
        unsafe {
            d.check((d.cuModuleGetFunction)(&mut f, module, name.as_ptr()), &format!("cuModuleGetFunction {kernel} of {file}"))?;
            // A block's limit covers its static shared memory too.
            let mut taken = 0;
            let size = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            d.check((d.cuFuncGetAttribute)(&mut taken, size, f), "cuFuncGetAttribute")?;
            let limit = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let most = self.device.max_shared as i32 - taken;
            d.check((d.cuFuncSetAttribute)(f, limit, most), &format!("cuFuncSetAttribute {kernel} of {file}"))?;
        }
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(key, Function(f));
        Ok(Function(f))
    }

    fn module(&self, file: &'static str, variant: Variant) -> Result<CUmodule> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(m) = modules.get(&(file, variant)) {
            return Ok(m.0);
        }
        let source = Source::named(file).ok_or_else(|| Error::Unsupported(format!("there is no kernel source {file}")))?;
        let cubin = self.cache.get(&self.compiler, source, variant)?;
        let module = self.load(&cubin).or_else(|e| {
            tracing::warn!(file, error = %e, "a cached kernel does not load; compiling it anew");
            self.load(&self.cache.fill(&self.compiler, source, variant)?)
        })?;
        modules.insert((file, variant), Module(module));
        Ok(module)
    }

    fn load(&self, cubin: &[u8]) -> Result<CUmodule> {
        let mut module: CUmodule = std::ptr::null_mut();
        let d = &self.device.driver;
        // SAFETY: the driver copies the image.
        d.check(unsafe { (d.cuModuleLoadData)(&mut module, cubin.as_ptr().cast()) }, "cuModuleLoadData")?;
        Ok(module)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.device.synchronize().is_ok() {
            for m in self.modules.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
                // SAFETY: no launch is pending after the wait.
                unsafe { (self.device.driver.cuModuleUnload)(m.0) };
            }
        }
    }
}
