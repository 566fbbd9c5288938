//! The byte format of messages. `FORMAT.md` beside this crate's manifest is the specification.

pub(crate) mod checksum;
mod decode;
mod encode;

pub use decode::{DecodeError, Message};
pub use encode::{Part, encode, encode_dense};

use crate::Compressor;
use crate::{Layers, Method};

/// Version written, and the only one read so far.
pub const VERSION: u8 = 1;

/// Bytes of a message's fixed part.
pub const HEADER_BYTES: usize = 32;

/// Bytes of an index.
pub const INDEX_BYTES: usize = 4;

/// Bytes of a value.
pub const VALUE_BYTES: usize = 4;

pub(crate) const MAGIC: [u8; 4] = *b"FXCG";

/// Where the fields of the header lie.
pub(crate) mod at {
    pub(crate) const VERSION: usize = 4;
    pub(crate) const METHOD: usize = 5;
    pub(crate) const DTYPE: usize = 6;
    pub(crate) const ENCODING: usize = 7;
    pub(crate) const N: usize = 8;
    pub(crate) const K: usize = 16;
    pub(crate) const CHECKSUM_KIND: usize = 24;
    pub(crate) const RESERVED: usize = 25;
    pub(crate) const CHECKSUM: usize = 28;
}

/// Type of the values.
pub(crate) mod dtype {
    pub(crate) const NONE: u8 = 0;
    pub(crate) const F32: u8 = 1;
}

/// How indices are written. 2 and up are free for delta and bitmap packing.
pub(crate) mod encoding {
    /// No indices: every value, in order.
    pub(crate) const DENSE: u8 = 0;
    /// u32 little endian.
    pub(crate) const U32: u8 = 1;
}

pub(crate) fn method_code(compressor: Compressor) -> u8 {
    match compressor {
        Compressor::None => 0,
        Compressor::TopK => 1,
        Compressor::LwTopK => 2,
        Compressor::MsTopK => 3,
    }
}

/// Bytes of a message with k of n values; [`Part::Indices`] leaves the values out.
pub const fn message_bytes(k: usize, part: Part) -> usize {
    match part {
        Part::Whole => HEADER_BYTES + k * (INDEX_BYTES + VALUE_BYTES),
        Part::Indices => HEADER_BYTES + k * INDEX_BYTES,
    }
}

/// Bytes of a dense message of n values.
pub const fn dense_bytes(n: usize) -> usize {
    HEADER_BYTES + n * VALUE_BYTES
}

impl Method {
    /// Exactly the bytes of the message that this method makes of such a gradient.
    pub fn message_bytes(&self, layers: &Layers) -> usize {
        match self.compressor {
            Compressor::None => dense_bytes(layers.values()),
            _ => message_bytes(self.kept(layers), Part::Whole),
        }
    }
}
