//! The mapped words: the only unsafe code of this crate.
#![allow(unsafe_code)]

use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::sync::atomic::AtomicU64;

/// A file mapped shared, seen as a row of atomic words. Both sides only ever touch the memory through
/// atomics, so that a concurrent writer in another process is a race in values, never undefined behaviour.
#[derive(Debug)]
pub(crate) struct Words {
    map: MmapRaw,
}

impl Words {
    /// Maps the whole file for reading and writing. Its length must be a multiple of 8.
    pub(crate) fn writable(file: &File) -> std::io::Result<Self> {
        Ok(Self { map: MmapOptions::new().map_raw(file)? })
    }

    /// Maps the whole file for reading.
    pub(crate) fn read_only(file: &File) -> std::io::Result<Self> {
        Ok(Self { map: MmapOptions::new().map_raw_read_only(file)? })
    }

    /// The words of the mapping. Storing to words of a [`Words::read_only`] mapping would fault; the reader's
    /// type has no method that stores.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping starts at a page boundary, so it is aligned for u64; `len / 8` words lie inside
        // it; it lives as long as `self`; AtomicU64 has u64's layout and every bit pattern is valid. Other
        // processes touch the memory only through atomics too. The file is never shortened by this crate
        // (see `PageWriter::create`), so the pages stay backed.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.map.len() / 8) }
    }
}
