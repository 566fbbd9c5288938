//! Slices over memory that Python owns: with `device`, the only unsafe code of this crate.
#![allow(unsafe_code)]

use crate::guard::Failure;
use pyo3::intern;
use pyo3::prelude::*;

/// Where values lie that a Python caller keeps referenced during the call; given as a contiguous tensor of torch.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    address: usize,
    bytes: usize,
}

/// Of which any bits are a value.
pub trait AnyBits {}
impl AnyBits for f32 {}
impl AnyBits for u8 {}

impl FromPyObject<'_, '_> for Span {
    type Error = PyErr;

    fn extract(tensor: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        Ok(Self {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            bytes: tensor.getattr(intern!(py, "nbytes"))?.extract()?,
        })
    }
}

impl Span {
    /// 32-bit floats at an address.
    pub fn of_floats(address: usize, values: usize) -> Self {
        Self { address, bytes: values.saturating_mul(size_of::<f32>()) }
    }

    /// Elements of a type, after checking what can be checked: not null (unless empty), aligned, and as many bytes as they have.
    fn elements<T>(self, what: &'static str) -> Result<usize, Failure> {
        let Self { address, bytes } = self;
        let whole = bytes.is_multiple_of(size_of::<T>()) && bytes <= isize::MAX as usize;
        if whole && address.is_multiple_of(align_of::<T>()) && (address != 0 || bytes == 0) {
            return Ok(bytes / size_of::<T>());
        }
        Err(Failure::input(format!("{what}: address {address:#x} with {bytes} bytes is no memory of such a tensor")))
    }

    /// On the host.
    pub fn read<'a, T: AnyBits>(self, what: &'static str) -> Result<&'a [T], Failure> {
        match self.elements::<T>(what)? {
            0 => Ok(&[]),
            // SAFETY: not null, aligned and of bounded size. `_core` is private to the package; its callers in `flexcomm.torch`
            // pass contiguous tensors of the host that they hold during the call.
            len => Ok(unsafe { std::slice::from_raw_parts(self.address as *const T, len) }),
        }
    }

    /// On the host.
    pub fn write<'a, T: AnyBits>(self, what: &'static str) -> Result<&'a mut [T], Failure> {
        match self.elements::<T>(what)? {
            0 => Ok(&mut []),
            // SAFETY: as in `read`; DDP gives a bucket to one call of the hook at a time, whose buffers are its own.
            len => Ok(unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, len) }),
        }
    }

    /// As kernels have it.
    pub fn on_device(self) -> flexcomm_gpu_kernels::Span {
        // SAFETY: the hook passes contiguous tensors on the device, which it keeps until the stream has done what was launched
        // (torch's allocator gives memory of a stream only to what comes later on it).
        unsafe { flexcomm_gpu_kernels::Span::new(self.address as u64, self.bytes as u64) }
    }
}
