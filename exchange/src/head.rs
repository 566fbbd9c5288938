//! How a rank that has no part in an exchange tells the others in that very exchange: gathered blocks begin with a header that
//! has its status, and what it sums begins with NaN, which every rank then finds in the sum.

use crate::bucket::{How, Round};
use flexcomm_compression::codec::Element;

/// Bytes of the header in front of every gathered block: a check, the status, zeros.
pub const HEAD_BYTES: usize = 8;

/// Where in it the status is, for a kernel that learns after the header was written that the gradient is not finite.
pub(crate) const STATUS_AT: usize = 4;
pub(crate) const NOT_FINITE: u8 = 2;

/// A rank's part in an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Status {
    /// There is one.
    #[default]
    Ready = 0,
    /// None: it could not be made.
    Failed = 1,
    /// None: its gradient has values that are not finite.
    NotFinite = NOT_FINITE as isize,
    /// None: its gradient is finite, and the sum with its residual is not.
    Overflowed = 3,
}

/// The header of a block. `check` stands for all that must be alike on all ranks.
pub fn head(check: u32, status: Status) -> [u8; HEAD_BYTES] {
    let [a, b, c, d] = check.to_le_bytes();
    [a, b, c, d, status as u8, 0, 0, 0]
}

/// What a round's collective brought.
#[derive(Debug, Clone, Default)]
pub struct Arrived<'a> {
    /// Whether the header of some rank says that it has no part.
    pub refused: bool,
    /// All ranks' payloads in rank order, or the one sum, or the one that was broadcast.
    pub parts: Vec<&'a [u8]>,
}

impl Round {
    /// Bytes of the header in front of this rank's payload.
    pub fn head_bytes(&self) -> usize {
        if self.header.is_some() { HEAD_BYTES } else { 0 }
    }

    /// What the collective brought.
    ///
    /// # Errors
    /// The first rank whose header has another check than `check`.
    pub fn split<'a>(&self, check: u32, world: usize, arrived: &'a [u8]) -> Result<Arrived<'a>, usize> {
        let (refused, parts) = match (self.how, self.header) {
            (How::Refused, _) => (false, Vec::new()),
            (How::Broadcast(_) | How::Sum(_), _) => (false, vec![arrived]),
            // No rank sends anything; every message is empty.
            (How::Gather, None) if self.bytes == 0 => (false, vec![&arrived[..0]; world]),
            (How::Gather, None) => (false, arrived.chunks_exact(self.bytes).collect()),
            (How::Gather, Some(_)) => {
                let blocks = arrived.chunks_exact(self.bytes + HEAD_BYTES).map(|block| block.split_at(HEAD_BYTES));
                let (heads, payloads): (Vec<_>, Vec<_>) = blocks.unzip();
                (any_refuses(check, heads.into_iter())?, payloads)
            }
        };
        Ok(Arrived { refused, parts })
    }
}

/// Whether any rank has no part, by all ranks' headers in rank order.
///
/// # Errors
/// The first rank whose check is another one.
fn any_refuses<'a>(check: u32, heads: impl Iterator<Item = &'a [u8]>) -> Result<bool, usize> {
    let mut refused = false;
    for (rank, head) in heads.enumerate() {
        match head.first_chunk::<HEAD_BYTES>() {
            Some(head) if head[..STATUS_AT] == check.to_le_bytes() => refused |= head[STATUS_AT] != Status::Ready as u8,
            _ => return Err(rank),
        }
    }
    Ok(refused)
}

/// What a rank sums that has no part: NaN first, which no other rank's part makes a number of again.
pub(crate) fn refuse_sum(element: Element, out: &mut [u8]) {
    out.fill(0);
    let nan: &[u8] = match element {
        Element::F32 => &f32::NAN.to_le_bytes(),
        Element::F16 => &0x7e00u16.to_le_bytes(),
        Element::Bf16 => &0x7fc0u16.to_le_bytes(),
    };
    out.iter_mut().zip(nan).for_each(|(byte, nan)| *byte = *nan);
}

/// Whether some rank had no part in a sum.
pub(crate) fn is_refused(element: Element, sum: &[u8]) -> bool {
    let half = |exponent: u16, fraction: u16| {
        let bits = sum.first_chunk().map_or(0, |bytes| u16::from_le_bytes(*bytes));
        bits & exponent == exponent && bits & fraction != 0
    };
    match element {
        Element::F32 => sum.first_chunk().is_some_and(|bytes| f32::from_le_bytes(*bytes).is_nan()),
        Element::F16 => half(0x7c00, 0x03ff),
        Element::Bf16 => half(0x7f80, 0x007f),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_compression::pipeline::add_elements;

    #[test]
    fn one_rank_without_a_part_is_found_in_the_sum() {
        for element in [Element::F32, Element::F16, Element::Bf16] {
            let ones: &[u8] = match element {
                Element::F32 => &[0, 0, 0x80, 0x3f, 0, 0, 0x80, 0x3f],
                Element::F16 => &[0, 0x3c, 0, 0x3c],
                Element::Bf16 => &[0x80, 0x3f, 0x80, 0x3f],
            };
            let mut sum = ones.to_vec();
            add_elements(element, &mut sum, ones);
            assert!(!is_refused(element, &sum), "{element:?}");
            let mut none = vec![1; ones.len()];
            refuse_sum(element, &mut none);
            add_elements(element, &mut sum, &none);
            add_elements(element, &mut sum, ones);
            assert!(is_refused(element, &sum), "{element:?}");
        }
        assert!(!is_refused(Element::F32, &[]) && !is_refused(Element::F32, &f32::INFINITY.to_le_bytes()));
    }

    #[test]
    fn headers_tell_who_differs_and_whether_any_refuses() {
        let heads = [head(7, Status::Ready), head(7, Status::NotFinite), head(7, Status::Failed)];
        let read = |heads: &[[u8; HEAD_BYTES]], check| any_refuses(check, heads.iter().map(|head| &head[..]));
        assert_eq!((read(&heads[..1], 7), read(&heads[..2], 7), read(&heads, 7)), (Ok(false), Ok(true), Ok(true)));
        assert_eq!(read(&[heads[0], head(8, Status::Ready)], 7), Err(1));
        assert_eq!(any_refuses(7, [&heads[0][..4]].into_iter()), Err(0), "cut");
    }
}
