//! The payload that sparse methods share: k (4 bytes), a set of k indices, k values of 4 bytes in their order.

use crate::Selection;
use crate::codec::{ReadError, Size};
use crate::wire::{Reader, Writer, index_bytes, read_indices, write_indices};

/// Bytes of a payload with k of n values.
pub(super) fn size(n: usize, k: usize) -> Size {
    Size::Exact(4 + index_bytes(n, k) + 4 * k)
}

/// Appends a selection.
pub(super) fn write(selection: &Selection, out: &mut Writer) {
    out.u32(selection.len() as u32);
    write_indices(selection.indices(), selection.n(), out);
    out.f32s(selection.values());
}

/// `out += scale * C(x)`; `indices` is a buffer that the codec keeps.
pub(super) fn decode_add(
    from: &mut Reader<'_>,
    indices: &mut Vec<u32>,
    (scale, out): (f32, &mut [f32]),
) -> Result<(), ReadError> {
    let k = from.u32("number of values")? as usize;
    read_indices(from, out.len(), k, indices)?;
    let values = from.f32s("value", k)?;
    indices.iter().zip(values).for_each(|(i, value)| out[*i as usize] += scale * value);
    Ok(())
}
