//! Reading messages: everything is checked before anything is believed, and nothing is copied or allocated.

use super::{
    HEADER_BYTES, INDEX_BYTES, MAGIC, VALUE_BYTES, VERSION, at, checksum::crc32c, dtype, encoding, method_code,
};
use crate::Compressor;
use crate::{MAX_VALUES, Selection};
use flexcomm_domain::spec::Checksum;

/// Failed to decode a message.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum DecodeError {
    /// Shorter than a header.
    #[error("decode a message of {0} bytes: a header has {HEADER_BYTES}")]
    Header(usize),
    /// Not ours.
    #[error("decode a message that starts with {0:02x?}: ours start with {MAGIC:02x?}")]
    Magic([u8; 4]),
    /// Another version.
    #[error("decode a message of format version {0}: this build reads version {VERSION}")]
    Version(u8),
    /// A field with a value that this version does not have.
    #[error("decode a message: field {field} is {value}")]
    Field {
        /// Which field.
        field: &'static str,
        /// As found.
        value: u64,
    },
    /// More kept than there are, or more than an index can name.
    #[error("decode a message that keeps {k} of {n} values")]
    Count {
        /// Kept.
        k: u64,
        /// Of.
        n: u64,
    },
    /// Another length than the header says.
    #[error("decode a message of {got} bytes: its header says {expected}")]
    Length {
        /// By the header.
        expected: u64,
        /// As found.
        got: usize,
    },
    /// It is not as it was sent.
    #[error("decode a message with checksum {got:08x}: its header says {expected:08x}")]
    Checksum {
        /// By the header.
        expected: u32,
        /// Of the bytes.
        got: u32,
    },
    /// An index is not below n, or not above the one before it.
    #[error("decode index {index} at position {position}: indices must ascend and stay below {n}")]
    Index {
        /// Where in the message.
        position: usize,
        /// As found.
        index: u32,
        /// Of how many values.
        n: u64,
    },
    /// NaN or infinity.
    #[error("decode value {value} at position {position}: it is not finite")]
    Value {
        /// Where in the message.
        position: usize,
        /// As found.
        value: f32,
    },
}

/// A message that has been checked, still in its bytes.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    compressor: Compressor,
    checksum: Checksum,
    n: u64,
    k: usize,
    dense: bool,
    has_values: bool,
    indices: &'a [[u8; 4]],
    values: &'a [[u8; 4]],
}

impl<'a> Message<'a> {
    /// Checks all of it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let (header, payload) = bytes.split_first_chunk().ok_or(DecodeError::Header(bytes.len()))?;
        let fields = Fields::read(header)?;
        let (indices, values) = fields.split(payload)?;
        if fields.checksum == Checksum::Crc32c {
            let (got, expected) = (crc32c(&[&header[..at::CHECKSUM], payload]), fields.checksum_value);
            if got != expected {
                return Err(DecodeError::Checksum { expected, got });
            }
        }
        check_indices(indices, fields.n)?;
        check_values(values)?;
        let Fields { compressor, checksum, n, dense, has_values, .. } = fields;
        // `split` has compared k with the length of a slice.
        Ok(Self { compressor, checksum, n, k: fields.k as usize, dense, has_values, indices, values })
    }

    /// Who made it.
    pub fn compressor(&self) -> Compressor {
        self.compressor
    }

    /// Whether it carried a checksum (which then was right).
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// Values of the whole gradient, as the sender says: compare it with your own before allocating.
    pub fn n(&self) -> u64 {
        self.n
    }

    /// Values kept.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Whether it has every value and no indices.
    pub fn is_dense(&self) -> bool {
        self.dense
    }

    /// Whether it has values; [`super::Part::Indices`] has none.
    pub fn has_values(&self) -> bool {
        self.has_values
    }

    /// Ascending, all below n; empty when dense.
    pub fn indices(&self) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        self.indices.iter().map(|b| u32::from_le_bytes(*b))
    }

    /// All finite; empty when it has none.
    pub fn values(&self) -> impl ExactSizeIterator<Item = f32> + use<'a> {
        self.values.iter().map(|b| f32::from_le_bytes(*b))
    }

    /// Replaces `out` by the indices (of a dense message: none).
    pub fn indices_into(&self, out: &mut Vec<u32>) {
        out.clear();
        out.extend(self.indices());
    }

    /// Copies a sparse message with values out of its bytes; None for the other kinds.
    pub fn to_selection(&self) -> Option<Selection> {
        let sparse = !self.dense && self.has_values();
        // n fits usize: it was checked against MAX_VALUES.
        sparse.then(|| Selection {
            n: self.n as usize,
            indices: self.indices().collect(),
            values: self.values().collect(),
        })
    }
}

struct Fields {
    compressor: Compressor,
    has_values: bool,
    dense: bool,
    n: u64,
    k: u64,
    checksum: Checksum,
    checksum_value: u32,
}

fn u64_at(header: &[u8; HEADER_BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&header[at..at + 8]);
    u64::from_le_bytes(bytes)
}

impl Fields {
    fn read(header: &[u8; HEADER_BYTES]) -> Result<Self, DecodeError> {
        let magic = [header[0], header[1], header[2], header[3]];
        if magic != MAGIC {
            return Err(DecodeError::Magic(magic));
        }
        if header[at::VERSION] != VERSION {
            return Err(DecodeError::Version(header[at::VERSION]));
        }
        let field = |field, at: usize| DecodeError::Field { field, value: u64::from(header[at]) };
        let compressor = Compressor::ALL.iter().copied().find(|c| method_code(*c) == header[at::METHOD]);
        let compressor = compressor.ok_or(field("method", at::METHOD))?;
        let has_values = match header[at::DTYPE] {
            dtype::NONE => false,
            dtype::F32 => true,
            _ => return Err(field("dtype", at::DTYPE)),
        };
        let dense = match header[at::ENCODING] {
            encoding::DENSE if has_values => true,
            encoding::U32 => false,
            _ => return Err(field("encoding", at::ENCODING)),
        };
        let fields = Self::counts(header, compressor, dense)?;
        Ok(Self { has_values, ..fields })
    }

    fn counts(header: &[u8; HEADER_BYTES], compressor: Compressor, dense: bool) -> Result<Self, DecodeError> {
        let (n, k) = (u64_at(header, at::N), u64_at(header, at::K));
        if n > MAX_VALUES as u64 || k > n || (dense && k != n) {
            return Err(DecodeError::Count { k, n });
        }
        let checksum = match header[at::CHECKSUM_KIND] {
            0 => Checksum::None,
            1 => Checksum::Crc32c,
            value => return Err(DecodeError::Field { field: "checksum kind", value: u64::from(value) }),
        };
        if let Some(value) = header[at::RESERVED..at::CHECKSUM].iter().find(|b| **b != 0) {
            return Err(DecodeError::Field { field: "reserved", value: u64::from(*value) });
        }
        let mut sum = [0; 4];
        sum.copy_from_slice(&header[at::CHECKSUM..]);
        let checksum_value = u32::from_le_bytes(sum);
        if checksum == Checksum::None && checksum_value != 0 {
            return Err(DecodeError::Field { field: "checksum", value: u64::from(checksum_value) });
        }
        Ok(Self { compressor, has_values: true, dense, n, k, checksum, checksum_value })
    }

    /// The payload as indices and values, if it has exactly the length that the header says.
    #[allow(clippy::type_complexity)]
    fn split<'a>(&self, payload: &'a [u8]) -> Result<(&'a [[u8; 4]], &'a [[u8; 4]]), DecodeError> {
        let index_bytes = if self.dense { 0 } else { self.k * INDEX_BYTES as u64 };
        let value_bytes = if self.has_values { self.k * VALUE_BYTES as u64 } else { 0 };
        // k is below 2^32: no overflow.
        if payload.len() as u64 != index_bytes + value_bytes {
            let expected = HEADER_BYTES as u64 + index_bytes + value_bytes;
            return Err(DecodeError::Length { expected, got: HEADER_BYTES + payload.len() });
        }
        let (indices, values) = payload.split_at(index_bytes as usize);
        Ok((indices.as_chunks().0, values.as_chunks().0))
    }
}

fn check_indices(indices: &[[u8; 4]], n: u64) -> Result<(), DecodeError> {
    let mut least = 0u64;
    for (position, bytes) in indices.iter().enumerate() {
        let index = u32::from_le_bytes(*bytes);
        if u64::from(index) < least || u64::from(index) >= n {
            return Err(DecodeError::Index { position, index, n });
        }
        least = u64::from(index) + 1;
    }
    Ok(())
}

fn check_values(values: &[[u8; 4]]) -> Result<(), DecodeError> {
    match values.iter().position(|b| !f32::from_le_bytes(*b).is_finite()) {
        Some(position) => Err(DecodeError::Value { position, value: f32::from_le_bytes(values[position]) }),
        None => Ok(()),
    }
}
