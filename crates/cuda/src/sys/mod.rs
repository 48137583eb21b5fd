//! NVIDIA's libraries, opened at run time: one struct of function pointers a library.
//!
//! Types and constants come from `cudarc`'s bindings. The functions are loaded here, because cudarc's own loader panics
//! when a library is missing and cannot be told which of several copies to take: it asks for `libcudnn.so` first, so a
//! system with development links ends up with two versions of cuDNN in one process.
//!
//! Status codes are received as plain integers: a library newer than the bindings may return codes they do not list.

pub mod cublaslt;
pub mod cudnn;
pub mod driver;
pub mod nccl;
pub mod nvrtc;
mod search;

pub use search::{Found, Spec, find};

/// Declares a library: a struct with one function pointer a function, and `load`, which fills it.
macro_rules! library {
    ($(#[$doc:meta])* $name:ident, $spec:expr, { $( fn $f:ident ( $($a:ident : $t:ty),* $(,)? ) $(-> $r:ty)?; )* }) => {
        $(#[$doc])*
        #[allow(non_snake_case, missing_docs)]
        pub struct $name {
            $( pub $f: unsafe extern "C" fn($($a: $t),*) $(-> $r)?, )*
            /// Where the library was found.
            pub found: crate::sys::Found,
        }
        impl $name {
            /// Finds and opens the library, and looks up every function.
            #[allow(unsafe_code, non_snake_case)] // the functions keep NVIDIA's names
            pub fn load() -> crate::Result<$name> {
                let found = crate::sys::find(&$spec)?;
                $(
                    // SAFETY: the signature is that of NVIDIA's header; `found` keeps the library open as long as the pointer.
                    let $f = unsafe { found.symbol::<unsafe extern "C" fn($($a: $t),*) $(-> $r)?>(concat!(stringify!($f), "\0"), &$spec)? };
                )*
                Ok($name { $($f,)* found })
            }
        }
    };
}
pub(crate) use library;
