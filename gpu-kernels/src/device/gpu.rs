//! A GPU, by the driver. `unsafe` is for calls into it; every one is documented in the CUDA driver API.

use super::{Copies, Device, MOST_ARGUMENTS, Nvrtc, Span, THREADS};
use crate::error::{LaunchError, LoadError, Version};
use crate::workspace::{check_as_long, check_lengths};
use crate::{Arch, Cache, Module, source};
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};

/// The kernels, loaded on one device.
///
/// It works in the device's primary context, which is the one that PyTorch uses. Launches go to a stream of the caller's
/// (see [`Gpu::on`]); nothing here waits for a stream or allocates on the device after loading.
#[derive(Debug)]
pub struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<&'static str, Function>,
    multiprocessors: u32,
    arch: Arch,
}

// SAFETY: handles of the driver may be used from any thread; every call makes the context current in its own thread first.
unsafe impl Send for Gpu {}
// SAFETY: as above; nothing is changed after loading.
unsafe impl Sync for Gpu {}

/// A kernel, and how many of its blocks run at the same time.
#[derive(Debug, Clone, Copy)]
struct Function {
    handle: sys::CUfunction,
    blocks: u32,
}

/// A [`Gpu`] and a stream.
#[derive(Debug, Clone, Copy)]
pub struct OnStream<'a> {
    gpu: &'a Gpu,
    stream: sys::CUstream,
}

fn driver(call: &'static str) -> impl Fn(result::DriverError) -> LoadError {
    move |error| LoadError::Driver { call, code: code(error) }
}

pub(super) fn code(error: result::DriverError) -> String {
    match error.error_name() {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(_) => format!("{:?}", error.0),
    }
}

/// Refuses to go on without a driver: cudarc's calls would panic.
fn check_driver() -> Result<Version, LoadError> {
    // SAFETY: loading libcuda only sets up its own state.
    if !unsafe { sys::is_culib_present() } {
        return Err(LoadError::NoDriver);
    }
    result::init().map_err(driver("start the CUDA driver"))?;
    let mut version = 0;
    // SAFETY: the pointer is to a number that lives.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(driver("ask the CUDA driver's version"))?;
    let version = version.unsigned_abs();
    Ok(Version { major: version / 1000, minor: version % 1000 / 10 })
}

fn attribute(device: sys::CUdevice, what: sys::CUdevice_attribute) -> Result<u32, LoadError> {
    // SAFETY: the device was answered by the driver.
    let value = unsafe { result::device::get_attribute(device, what) };
    value.map(i32::unsigned_abs).map_err(driver("ask for an attribute of the device"))
}

fn open(ordinal: u32) -> Result<(sys::CUdevice, Arch), LoadError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let count = result::device::get_count().map_err(driver("count CUDA devices"))?.unsigned_abs();
    if ordinal >= count {
        return Err(LoadError::NoDevice { ordinal, count });
    }
    let device = result::device::get(ordinal as i32).map_err(driver("open a CUDA device"))?;
    Ok((device, Arch::new(attribute(device, MAJOR)?, attribute(device, MINOR)?)))
}

/// From the cache, else compiled and kept. A cache that cannot be written to costs time and nothing else.
fn cubin(module: &Module, arch: Arch, nvrtc: &Nvrtc, cache: Option<&Cache>) -> Result<Vec<u8>, LoadError> {
    let path = cache.map(|c| (c, c.path(module.name, (&source::digest(module), &arch.sm()), nvrtc.version())));
    if let Some(kept) = path.as_ref().and_then(|(cache, path)| cache.read(path)) {
        return Ok(kept);
    }
    let compiled = nvrtc.compile(module, arch)?.cubin;
    if let Some((cache, path)) = path {
        drop(cache.write(&path, &compiled));
    }
    Ok(compiled)
}

impl Gpu {
    /// Every kernel on a device, from the cache or compiled now (seconds, the first time).
    pub fn load(ordinal: u32, cache: Option<&Cache>) -> Result<Self, LoadError> {
        let driver_version = check_driver()?;
        let (device, arch) = open(ordinal)?;
        let nvrtc = Nvrtc::fitting(driver_version, arch)?;
        // SAFETY: released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(driver("open the device's context"))?;
        let (modules, functions) = (Vec::new(), HashMap::new());
        let mut gpu = Self { device, context, modules, functions, multiprocessors: 0, arch };
        gpu.multiprocessors = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        for module in source::MODULES {
            gpu.add(module, &cubin(module, arch, &nvrtc, cache)?)?;
        }
        Ok(gpu)
    }

    fn add(&mut self, module: &Module, cubin: &[u8]) -> Result<(), LoadError> {
        // SAFETY: a whole cubin, which names its own length.
        let loaded = self.within(|| unsafe { result::module::load_data(cubin.as_ptr().cast()) });
        let loaded = loaded.map_err(driver("load kernels"))?;
        self.modules.push(loaded);
        for kernel in module.kernels {
            let name = CString::new(*kernel).unwrap_or_default();
            // SAFETY: the module was loaded above.
            let function = self.within(|| unsafe { result::module::get_function(loaded, name) });
            let missing = |error| LoadError::NoKernel { kernel, module: module.name, code: code(error) };
            let function = self.measured(function.map_err(missing)?)?;
            self.functions.insert(kernel, function);
        }
        Ok(())
    }

    /// What registers and shared memory leave room for.
    fn measured(&self, handle: sys::CUfunction) -> Result<Function, LoadError> {
        // SAFETY: the function was answered by the driver.
        let fit = || unsafe { result::occupancy::max_active_block_per_multiprocessor(handle, THREADS as i32, 0) };
        let each = self.within(fit).map_err(driver("ask how many blocks fit a multiprocessor"))?;
        Ok(Function { handle, blocks: self.multiprocessors * each.unsigned_abs() })
    }

    /// Does something in the device's context, and puts back the one that was current: it says which device is PyTorch's.
    pub(super) fn within<T>(
        &self,
        what: impl FnOnce() -> Result<T, result::DriverError>,
    ) -> Result<T, result::DriverError> {
        let before = result::ctx::get_current()?;
        if before == Some(self.context) {
            return what();
        }
        // SAFETY: the context is retained as long as this lives.
        unsafe { result::ctx::set_current(self.context) }?;
        let done = what();
        // SAFETY: it was current a moment ago; null means that there was none.
        unsafe { result::ctx::set_current(before.unwrap_or(std::ptr::null_mut())) }?;
        done
    }

    pub(super) fn handle(&self) -> sys::CUdevice {
        self.device
    }

    /// Of the device.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Refuses memory that the driver does not know as this device's: freed (as far as the allocator gave it back), of another
    /// device, or of the host (of what is pinned there only what another device has pinned). Costs microseconds: ask
    /// when buffers change, not at every step.
    pub fn check_memory(&self, what: &'static str, span: Span) -> Result<(), LaunchError> {
        use sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as ORDINAL;
        if span.is_none() || span.bytes() == 0 {
            return Ok(());
        }
        for at in [span.address(), span.address() + span.bytes() - 1] {
            let mut ordinal = -1i32;
            let to = std::ptr::from_mut(&mut ordinal).cast();
            // SAFETY: the driver writes one number, and only looks the address up.
            let known = self.within(|| unsafe { sys::cuPointerGetAttribute(to, ORDINAL, at) }.result());
            if known.is_err() || ordinal != self.device {
                return Err(LaunchError::NotDevice { what, at });
            }
        }
        Ok(())
    }

    /// Launches go to this stream: PyTorch's `torch.cuda.current_stream().cuda_stream`; 0 is the default stream.
    ///
    /// # Safety
    /// It must be a stream of this device's primary context, and live as long as what is answered.
    pub unsafe fn on(&self, stream: u64) -> OnStream<'_> {
        OnStream { gpu: self, stream: stream as sys::CUstream }
    }
}

impl OnStream<'_> {
    pub(super) fn handle(&self) -> *mut c_void {
        self.stream.cast()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Nothing can be done about a failure here: the process ends, or the driver is gone already.
        for module in &self.modules {
            // SAFETY: loaded by this, unloaded once.
            let _ = self.within(|| unsafe { result::module::unload(*module) });
        }
        // SAFETY: retained once by `load`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl Device for OnStream<'_> {
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError> {
        let failed = |code| LaunchError::Driver { kernel, code };
        if arguments.len() > MOST_ARGUMENTS {
            return Err(failed(format!(
                "nothing: {} arguments, of which there is room for {MOST_ARGUMENTS}",
                arguments.len()
            )));
        }
        let function = self.gpu.functions.get(kernel).ok_or_else(|| failed("it has no such kernel".into()))?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); MOST_ARGUMENTS];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = std::ptr::from_ref(argument).cast_mut().cast();
        }
        let (grid, block) = ((blocks, 1, 1), (THREADS, 1, 1));
        // SAFETY: every argument is a word whose low bytes are the parameter (the devices are little endian, as are the
        // machines with them); spans are vouched for by their maker.
        let launched = self
            .gpu
            .within(|| unsafe { result::launch_kernel(function.handle, grid, block, 0, self.stream, &mut pointers) });
        launched.map_err(|error| failed(code(error)))
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        if span.is_none() {
            // What the driver says to nothing at no address is not documented.
            return Ok(());
        }
        let failed = |error| LaunchError::Driver { kernel: "memset", code: code(error) };
        let (at, bytes) = (span.address(), span.bytes() as usize);
        // SAFETY: the span is vouched for by its maker.
        let zeroed = self.gpu.within(|| unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.stream) }.result());
        zeroed.map_err(failed)
    }

    fn copy(&self, to: Span, from: Span) -> Result<(), LaunchError> {
        check_lengths(to, from)?;
        if to.is_none() {
            return Ok(());
        }
        let failed = |error| LaunchError::Driver { kernel: "memcpy", code: code(error) };
        let (to, from, bytes) = (to.address(), from.address(), from.bytes() as usize);
        // SAFETY: both spans are vouched for by their makers and equally long; one address space says where each lies.
        let copied = self.gpu.within(|| unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream) }.result());
        copied.map_err(failed)
    }

    fn blocks(&self, kernel: &'static str) -> u32 {
        self.gpu.functions.get(kernel).map_or(1, |function| function.blocks)
    }
}

impl Copies for OnStream<'_> {
    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), LaunchError> {
        check_as_long(to, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let failed = |error| LaunchError::Driver { kernel: "memcpy to the device", code: code(error) };
        // SAFETY: equally long; from memory that is not pinned the driver has copied when it returns.
        let copied = self.gpu.within(|| unsafe { result::memcpy_htod_async(to.address(), bytes, self.stream) });
        copied.map_err(failed)
    }

    fn download(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        check_as_long(from, to.len())?;
        if to.is_empty() {
            return Ok(());
        }
        let failed = |error| LaunchError::Driver { kernel: "memcpy from the device", code: code(error) };
        // SAFETY: equally long, and nobody looks at it before the stream was waited for.
        let copied = self.gpu.within(|| unsafe {
            result::memcpy_dtoh_async(to, from.address(), self.stream)?;
            result::stream::synchronize(self.stream)
        });
        copied.map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On machines without a GPU there is a named error and no panic; with one, the kernels load.
    #[test]
    fn loading_answers_or_says_why_not() {
        match Gpu::load(0, None) {
            Ok(gpu) => assert!(!gpu.functions.is_empty() && gpu.functions.values().all(|function| function.blocks > 0)),
            Err(error) => {
                // SAFETY: as in `check_driver`.
                let present = unsafe { sys::is_culib_present() };
                assert_eq!(matches!(error, LoadError::NoDriver), !present, "{error}");
            }
        }
    }
}
