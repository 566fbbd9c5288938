//! What an allreduce does to messages that travel as sums.

use crate::codec::{Element, ReadError};
use crate::wire::{Common, DType, Envelope, Header, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Elements converted at a time.
const BLOCK: usize = 256;

/// `sum += other`, element by element; both of one strategy, round and length. A checksum cannot survive a sum: messages
/// that carry one are refused.
pub fn add_messages(element: Element, sum: &mut [u8], other: &[u8]) -> Result<(), ReadError> {
    let (mine, theirs) = (Envelope::parse(sum)?, Envelope::parse(other)?);
    if mine.header.checksum != crate::Checksum::None {
        return Err(ReadError::field("checksum kind", 1u64, "sums travel without"));
    }
    let (expected, got) = (mine.header.method, theirs.header.method);
    let Header { dtype, common, .. } = mine.header;
    if mine.header != (Header { dtype, common, ..theirs.header }) {
        return Err(ReadError::Strategy { expected, got });
    }
    check_common(common, theirs.header.common)?;
    if mine.payload.len() != theirs.payload.len() || !mine.payload.len().is_multiple_of(element.bytes()) {
        let (expected, got) = (mine.payload.len() as u64, theirs.payload.len() as u64);
        return Err(ReadError::Length { expected, got });
    }
    let start = mine.header.bytes();
    add_elements(element, &mut sum[start..], theirs.payload);
    Ok(())
}

/// Parts of a sum that say it are of one scope, step and seed.
fn check_common(mine: Option<Common>, theirs: Option<Common>) -> Result<(), ReadError> {
    let Some((mine, theirs)) = mine.zip(theirs) else { return Ok(()) };
    if mine.scope != theirs.scope {
        return Err(ReadError::Scope { expected: mine.scope.as_str(), got: theirs.scope.as_str() });
    }
    if mine.step != theirs.step {
        return Err(ReadError::Step { expected: mine.step.into(), got: theirs.step });
    }
    match mine.draw == theirs.draw {
        true => Ok(()),
        false => {
            Err(ReadError::field("draw by seed, step and tensor", theirs.draw, "all parts of a sum have the same"))
        }
    }
}

/// `sum += other` of as many elements.
pub fn add_elements(element: Element, sum: &mut [u8], other: &[u8]) {
    match element {
        Element::F32 => {
            let (sum, other) = (sum.as_chunks_mut::<4>().0, other.as_chunks::<4>().0);
            let add = |a: &[u8; 4], b: &[u8; 4]| f32::from_le_bytes(*a) + f32::from_le_bytes(*b);
            sum.iter_mut().zip(other).for_each(|(a, b)| *a = add(a, b).to_le_bytes());
        }
        Element::F16 => add_halves(DType::F16, sum, other),
        Element::Bf16 => add_halves(DType::Bf16, sum, other),
    }
}

/// Adds in f32 and rounds once.
fn add_halves(dtype: DType, sum: &mut [u8], other: &[u8]) {
    let (mut bits, mut a, mut b) = ([0u16; BLOCK], [0.0f32; BLOCK], [0.0f32; BLOCK]);
    let half = dtype == DType::F16;
    let widen = if half { f16_to_f32 } else { bf16_to_f32 };
    let narrow = if half { f32_to_f16 } else { f32_to_bf16 };
    for (sum, other) in sum.chunks_mut(2 * BLOCK).zip(other.chunks(2 * BLOCK)) {
        let len = sum.len() / 2;
        for (bytes, wide) in [(&*sum, &mut a), (other, &mut b)] {
            bits.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(to, from)| *to = u16::from_le_bytes(*from));
            widen(&bits[..len], &mut wide[..len]);
        }
        a.iter_mut().zip(&b).for_each(|(a, b)| *a += b);
        narrow(&a[..len], &mut bits[..len]);
        sum.as_chunks_mut::<2>().0.iter_mut().zip(&bits).for_each(|(to, from)| *to = from.to_le_bytes());
    }
}
