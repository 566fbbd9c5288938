//! cuBLAS, by its C interface: PowerSGD's products. Loaded when asked for and not before. `unsafe` is for the calls into
//! it: signatures are those of `cublas_v2.h`, the same in CUDA 12 and 13.

use super::library::{self, Place};
use super::{Device, Gpu, OnStream, Span};
use crate::error::{BlasError, LaunchError, LoadError, Version};
use crate::low_rank::{Gemm, Sgemm};
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

type Handle = *mut c_void;
type Status = c_int;

const PLACE: Place = Place {
    variable: "FLEXCOMM_CUBLAS",
    names: &["libcublas.so.13", "libcublas.so.12"],
    wheels: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
};

/// The library.
#[derive(Debug)]
pub struct Cublas {
    library: Library,
    path: String,
    version: Version,
}

/// What a library of another kind lacks: looked for when it is loaded, so that no step finds it missing.
const FUNCTIONS: [&str; 5] =
    ["cublasCreate_v2", "cublasDestroy_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSgemm_v2"];

type Create = unsafe extern "C" fn(*mut Handle) -> Status;
type Destroy = unsafe extern "C" fn(Handle) -> Status;
type SetStream = unsafe extern "C" fn(Handle, *mut c_void) -> Status;
type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> Status;
type GetProperty = unsafe extern "C" fn(c_int, *mut c_int) -> Status;
type Multiply = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const f32,
    *const f32,
    c_int,
    *const f32,
    c_int,
    *const f32,
    *mut f32,
    c_int,
) -> Status;

impl Cublas {
    /// From `FLEXCOMM_CUBLAS` (the library or its folder) and nowhere else where that is set; else as NVRTC is found.
    pub fn find() -> Result<Self, LoadError> {
        Self::first_of(&PLACE.candidates())
    }

    /// The first of these that exists; a name without a folder is left to the dynamic linker.
    pub fn first_of(candidates: &[PathBuf]) -> Result<Self, LoadError> {
        match library::first_of(candidates) {
            Ok(Some((library, path))) => Self::new(library, path),
            Ok(None) => Err(LoadError::NoBlas { tried: library::listed(candidates) }),
            Err((path, why)) => Err(LoadError::BadBlas { path: path.display().to_string(), why }),
        }
    }

    /// Where a Python environment would have it.
    pub fn in_environment(root: &Path) -> Vec<PathBuf> {
        PLACE.in_environment(root)
    }

    fn new(library: Library, path: &Path) -> Result<Self, LoadError> {
        let path = path.display().to_string();
        let mut blas = Self { library, path, version: Version { major: 0, minor: 0 } };
        for name in FUNCTIONS {
            // SAFETY: only looked for.
            let found = unsafe { blas.library.get::<*const c_void>(name.as_bytes()) }.map(drop);
            found.map_err(|error| blas.bad(format!("{name}: {error}")))?;
        }
        let (major, minor) = (blas.property(0)?, blas.property(1)?);
        blas.version = Version { major, minor };
        Ok(blas)
    }

    fn bad(&self, why: String) -> LoadError {
        LoadError::BadBlas { path: self.path.clone(), why }
    }

    /// Of `libraryPropertyType`: 0 is the major version, 1 the minor.
    fn property(&self, which: c_int) -> Result<u32, LoadError> {
        let mut value = 0;
        let asked = self.call::<GetProperty>("cublasGetProperty", |f| unsafe { f(which, &mut value) });
        asked.map_err(|why| self.bad(why)).map(|()| value.unsigned_abs())
    }

    /// Of the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Calls a function of the library that answers a status.
    fn call<F: Copy>(&self, name: &'static str, with: impl FnOnce(F) -> Status) -> Result<(), String> {
        // SAFETY: every F here is the function's signature in cublas_v2.h.
        let function = unsafe { self.library.get::<F>(name.as_bytes()) }.map_err(|error| format!("{name}: {error}"))?;
        match with(*function) {
            0 => Ok(()),
            status => {
                Err(format!("{name} says {}", library::status_name(&self.library, c"cublasGetStatusName", status)))
            }
        }
    }
}

/// cuBLAS on a device. Products with the default mathematics: full f32, and the same bits for the same call.
#[derive(Debug)]
pub struct Blas<'a> {
    gpu: &'a Gpu,
    cublas: Cublas,
    /// One stream at a time.
    handle: Mutex<Owned>,
}

#[derive(Debug)]
struct Owned(Handle);

// SAFETY: a handle may be used from any thread, by one at a time: it lies in a mutex.
unsafe impl Send for Owned {}

/// A [`Blas`] and a stream: launches, and products in between.
#[derive(Debug, Clone, Copy)]
pub struct BlasOnStream<'a> {
    blas: &'a Blas<'a>,
    device: OnStream<'a>,
    workspace: Span,
}

/// Bytes of workspace that NVIDIA advises for one handle (32 MiB on Hopper, 4 MiB before).
pub const BLAS_WORKSPACE: u64 = 32 << 20;

impl Gpu {
    /// Products on this device, by this library.
    pub fn blas(&self, cublas: Cublas) -> Result<Blas<'_>, BlasError> {
        let mut handle = std::ptr::null_mut();
        let made = self.within(|| Ok(cublas.call::<Create>("cublasCreate_v2", |f| unsafe { f(&mut handle) })));
        match made {
            Ok(Ok(())) => Ok(Blas { gpu: self, cublas, handle: Mutex::new(Owned(handle)) }),
            Ok(Err(why)) => Err(BlasError { path: cublas.path, why }),
            Err(error) => Err(BlasError { path: cublas.path, why: super::gpu::code(error) }),
        }
    }
}

impl Drop for Blas<'_> {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner).0;
        // Nothing can be done about a failure here.
        let _ = self.gpu.within(|| Ok(self.cublas.call::<Destroy>("cublasDestroy_v2", |f| unsafe { f(handle) })));
    }
}

impl Blas<'_> {
    /// Products go to this stream. `workspace` is the caller's ([`BLAS_WORKSPACE`] bytes, aligned to 256): with one, no
    /// call allocates, and a CUDA graph can capture it; [`Span::NONE`] leaves that to cuBLAS.
    ///
    /// # Safety
    /// As [`Gpu::on`].
    pub unsafe fn on(&self, stream: u64, workspace: Span) -> BlasOnStream<'_> {
        // SAFETY: as the caller vouches.
        BlasOnStream { blas: self, device: unsafe { self.gpu.on(stream) }, workspace }
    }
}

impl BlasOnStream<'_> {
    fn multiply(&self, handle: Handle, call: &Sgemm) -> Result<(), String> {
        let stream = self.device.handle();
        let cublas = &self.blas.cublas;
        cublas.call::<SetStream>("cublasSetStream_v2", |f| unsafe { f(handle, stream) })?;
        if !self.workspace.is_none() {
            // Changing the stream has put the library's own back.
            let (at, bytes) = (self.workspace.address() as *mut c_void, self.workspace.bytes() as usize);
            cublas.call::<SetWorkspace>("cublasSetWorkspace_v2", |f| unsafe { f(handle, at, bytes) })?;
        }
        let [a, b] = call.transposed.map(c_int::from);
        let [m, n, k, lda, ldb, ldc] =
            [call.m, call.n, call.k, call.a.1, call.b.1, call.to.1].map(|number| number as c_int);
        let address = |span: Span| span.address() as *mut f32;
        let (one, zero) = (1.0f32, 0.0f32);
        cublas.call::<Multiply>("cublasSgemm_v2", |f| unsafe {
            let (from, by, to) = (address(call.a.0), address(call.b.0), address(call.to.0));
            f(handle, a, b, m, n, k, &one, from, lda, by, ldb, &zero, to, ldc)
        })
    }
}

impl Gemm for BlasOnStream<'_> {
    fn sgemm(&self, call: &Sgemm) -> Result<(), LaunchError> {
        let failed = |code| LaunchError::Blas { code };
        let handle = self.blas.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let done = self.blas.gpu.within(|| Ok(self.multiply(handle.0, call)));
        done.map_err(|error| failed(super::gpu::code(error)))?.map_err(failed)
    }
}

impl Device for BlasOnStream<'_> {
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError> {
        self.device.launch(kernel, blocks, arguments)
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        self.device.zero(span)
    }

    fn copy(&self, to: Span, from: Span) -> Result<(), LaunchError> {
        self.device.copy(to, from)
    }

    fn blocks(&self, kernel: &'static str) -> u32 {
        self.device.blocks(kernel)
    }
}
