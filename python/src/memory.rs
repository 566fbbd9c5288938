//! Slices over memory that Python owns: the only unsafe code of this crate.
#![allow(unsafe_code)]

use crate::guard::Failure;

/// An address and a length that a Python caller took from a tensor that it keeps referenced during the call.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    address: usize,
    len: usize,
}

impl Span {
    /// Checks what can be checked: not null (unless empty) and aligned for `T`.
    pub fn new<T>(what: &'static str, address: usize, len: usize) -> Result<Self, Failure> {
        let aligned = address.is_multiple_of(align_of::<T>());
        let fits = len.checked_mul(size_of::<T>()).is_some_and(|bytes| bytes <= isize::MAX as usize);
        if (address == 0 && len > 0) || !aligned || !fits {
            return Err(Failure::input(format!(
                "{what}: address {address:#x} with {len} elements is no tensor's memory"
            )));
        }
        Ok(Self { address, len })
    }

    /// For reading.
    ///
    /// # Safety
    /// As [`Self::write`], and nobody writes meanwhile.
    unsafe fn read<'a, T>(self) -> &'a [T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: not null, aligned and of bounded size by `new`; alive and initialised by the caller's contract.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.len) }
    }

    /// For writing.
    ///
    /// # Safety
    /// The memory holds `len` initialised elements of the type that `new` was called with, stays allocated for as
    /// long as the slice is used, and is used by nobody else meanwhile.
    unsafe fn write<'a, T>(self) -> &'a mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as in `read`.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.len) }
    }

    /// 32-bit floats, to read.
    pub fn floats<'a>(self) -> &'a [f32] {
        // SAFETY: `_core` is private to the package; its callers in `flexcomm.torch` pass `data_ptr()` and `numel()`
        // of contiguous float32 CPU tensors that they hold during the call, and any bit pattern is a float.
        unsafe { self.read() }
    }

    /// 32-bit floats, to write.
    pub fn floats_mut<'a>(self) -> &'a mut [f32] {
        // SAFETY: as in `floats`; DDP hands a bucket to one hook call at a time, and the payload buffers belong to it.
        unsafe { self.write() }
    }

    /// Bytes, to read.
    pub fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: as in `floats`, of uint8 tensors.
        unsafe { self.read() }
    }

    /// Bytes, to write.
    pub fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: as in `floats_mut`, of uint8 tensors.
        unsafe { self.write() }
    }
}
