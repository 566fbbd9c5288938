//! The payload of methods that send where a value is large, and its sign: k (4 bytes), a set of k indices, k signs.

use super::super::sparsification::adaptive::write_signs;
use super::super::sparsification::sparse::most_index_bytes;
use crate::Selection;
use crate::codec::ReadError;
use crate::wire::{Reader, Writer, packed_bytes, read_indices, write_indices_least};

/// Bytes with up to n of n values.
pub(super) fn most_bytes(n: usize) -> usize {
    4 + most_index_bytes(n, n) + packed_bytes(n, 1)
}

/// Appends where the values are and their signs.
pub(super) fn write(selection: &Selection, out: &mut Writer) {
    out.u32(selection.len() as u32);
    write_indices_least(selection.indices(), selection.n(), out);
    write_signs(selection.values(), out);
}

/// Indices into `indices`; `negative` gets a 1 for each that is negative.
pub(super) fn read(
    from: &mut Reader<'_>,
    n: usize,
    (indices, negative): (&mut Vec<u32>, &mut Vec<u8>),
) -> Result<(), ReadError> {
    let k = from.u32("number of values")? as usize;
    read_indices(from, n, k, indices)?;
    negative.resize(k, 0);
    crate::wire::unpack(from, "signs", 1, negative)
}
