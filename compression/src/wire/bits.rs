//! Bits, the first one in the lowest bit of the first byte.

use crate::codec::ReadError;

/// Appends bits to a buffer of bytes.
#[derive(Debug)]
pub struct BitWriter<'a> {
    bytes: &'a mut Vec<u8>,
    /// Bits not written yet, from the lowest on; fewer than 64.
    pending: u64,
    count: u32,
}

impl<'a> BitWriter<'a> {
    pub(super) fn new(bytes: &'a mut Vec<u8>) -> Self {
        Self { bytes, pending: 0, count: 0 }
    }

    /// The lowest `width` bits of `value`, lowest first; width at most 64. Higher bits are ignored.
    pub fn put(&mut self, value: u64, width: u32) {
        let value = if width >= 64 { value } else { value & ((1 << width) - 1) };
        self.pending |= value << self.count;
        let filled = self.count + width;
        if filled < 64 {
            self.count = filled;
            return;
        }
        self.bytes.extend_from_slice(&self.pending.to_le_bytes());
        // What did not fit; a shift by 64 would be undefined.
        self.pending = if self.count == 0 { 0 } else { value >> (64 - self.count) };
        self.count = filled - 64;
    }

    /// `count` zeros.
    pub fn zeros(&mut self, mut count: u32) {
        while count > 0 {
            let width = count.min(63);
            self.put(0, width);
            count -= width;
        }
    }

    /// Lets a function put codes that take at most `most` bytes together, by [`BitRoom::put`]: many short ones cost less so.
    #[inline(always)]
    pub fn in_room(&mut self, most: usize, put: impl FnOnce(&mut BitRoom<'_>)) {
        let whole = self.count / 8;
        self.bytes.extend_from_slice(&self.pending.to_le_bytes()[..whole as usize]);
        let start = self.bytes.len();
        // A whole word is stored behind the last whole byte.
        self.bytes.resize(start + most + 8, 0);
        let pending = self.pending >> (8 * whole);
        let mut room = BitRoom { room: &mut self.bytes[start..], at: 0, pending, count: self.count % 8 };
        put(&mut room);
        let BitRoom { at, pending, count, .. } = room;
        self.bytes.truncate(start + at);
        (self.pending, self.count) = (pending, count);
    }

    /// Bytes of the buffer once it is finished.
    pub fn bytes(&self) -> usize {
        self.bytes.len() + self.count.div_ceil(8) as usize
    }

    /// Pads with zeros to a whole byte.
    pub fn finish(self) {
        let bytes = self.count.div_ceil(8) as usize;
        self.bytes.extend_from_slice(&self.pending.to_le_bytes()[..bytes]);
    }
}

/// Where a [`BitWriter`] has room: no branch hangs on widths.
#[derive(Debug)]
pub struct BitRoom<'a> {
    room: &'a mut [u8],
    /// Whole bytes that were written.
    at: usize,
    /// Bits behind them, fewer than 8.
    pending: u64,
    count: u32,
}

impl BitRoom<'_> {
    /// Puts `width` bits, at most 56; higher bits of `value` must be 0. Panics beyond the room.
    #[inline(always)]
    pub fn put(&mut self, value: u64, width: u32) {
        debug_assert!(width <= 56 && value >> width == 0, "{width} bits of {value}");
        self.pending |= value << self.count;
        self.count += width;
        self.room[self.at..self.at + 8].copy_from_slice(&self.pending.to_le_bytes());
        self.at += (self.count / 8) as usize;
        self.pending >>= self.count & !7;
        self.count %= 8;
    }
}

/// Reads what a [`BitWriter`] wrote; never beyond the end.
#[derive(Debug, Clone)]
pub struct BitReader<'a> {
    bytes: &'a [u8],
    /// Bits that were read.
    at: usize,
}

impl<'a> BitReader<'a> {
    /// All of these bytes.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bits not read yet, padding included.
    pub const fn left(&self) -> u64 {
        (self.bytes.len() * 8 - self.at) as u64
    }

    /// The next `width` bits, the first one lowest; width at most 56.
    pub fn get(&mut self, what: &'static str, width: u32) -> Result<u64, ReadError> {
        debug_assert!(width <= 56, "width {width}");
        let (bits, count) = self.peek();
        if count < width {
            let (wanted, left) = (u64::from(width).div_ceil(8), count as usize / 8);
            return Err(ReadError::End { what, wanted, left });
        }
        self.skip(width);
        Ok(bits & ((1 << width) - 1))
    }

    /// The next bits, the first one lowest, and how many of them there are: at least 57, or all that are left.
    #[inline(always)]
    pub fn peek(&self) -> (u64, u32) {
        let (rest, read) = (&self.bytes[self.at / 8..], self.at as u32 % 8);
        match rest.first_chunk() {
            Some(word) => (u64::from_le_bytes(*word) >> read, u64::BITS - read),
            None => Self::last(rest, read),
        }
    }

    /// Of the last bytes, fewer than 8.
    #[cold]
    fn last(rest: &[u8], read: u32) -> (u64, u32) {
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        (u64::from_le_bytes(word) >> read, 8 * rest.len() as u32 - read)
    }

    /// Leaves out bits that were peeked at.
    #[inline(always)]
    pub fn skip(&mut self, width: u32) {
        debug_assert!(u64::from(width) <= self.left(), "{width} of {}", self.left());
        self.at += width as usize;
    }

    /// The bits from here on, for many short codes in a row.
    #[inline(always)]
    pub fn window(&self) -> Window<'a> {
        let (bytes, read) = (&self.bytes[self.at / 8..], self.at as u32 % 8);
        match bytes.split_first() {
            Some((byte, rest)) if read > 0 => Window { bytes: rest, bits: u64::from(byte >> read), count: 8 - read },
            _ => Window { bytes, bits: 0, count: 0 },
        }
    }

    /// Goes on behind what was read by a window of these bits.
    #[inline(always)]
    pub fn resume(&mut self, window: &Window<'a>) {
        self.at = 8 * (self.bytes.len() - window.bytes.len()) - window.count as usize;
    }

    /// How many zeros come before the next one, which is read too; more than `most` are refused.
    pub fn zeros(&mut self, what: &'static str, most: u32) -> Result<u32, ReadError> {
        let mut zeros = 0;
        loop {
            let (bits, count) = self.peek();
            if count == 0 {
                return Err(ReadError::End { what, wanted: 1, left: 0 });
            }
            let run = bits.trailing_zeros().min(count);
            zeros += run;
            if zeros > most {
                return Err(ReadError::field(what, zeros, "too many zeros in a row"));
            }
            self.skip(if run < count { run + 1 } else { run });
            if run < count {
                return Ok(zeros);
            }
        }
    }

    /// Whether only padding is left: fewer than 8 bits, all 0.
    pub fn finish(self, what: &'static str) -> Result<(), ReadError> {
        let (padding, left) = (self.peek().0, self.left());
        if left >= 8 {
            return Err(ReadError::Trailing((left / 8) as usize));
        }
        if padding == 0 { Ok(()) } else { Err(ReadError::field(what, padding, "padding must be 0")) }
    }
}

/// Bits of a [`BitReader`] in a register, so that no code waits for a load that waits for the code before it.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// What does not fit.
    bytes: &'a [u8],
    /// The next bits, the first one lowest.
    bits: u64,
    /// How many of them were counted off `bytes`, fewer than 64. Behind them there may be some of the next byte's, which are
    /// put there again.
    count: u32,
}

impl Window<'_> {
    /// Bits that a refilled window has at least.
    pub const LEAST: u32 = 56;

    /// Makes them [`Self::LEAST`]; answers false where too few bytes are left, and changes nothing.
    #[inline(always)]
    pub fn refill(&mut self) -> bool {
        let Some(word) = self.bytes.first_chunk() else { return false };
        self.bits |= u64::from_le_bytes(*word) << self.count;
        self.bytes = &self.bytes[(63 - self.count) as usize / 8..];
        self.count |= Self::LEAST;
        true
    }

    /// The next bits, the first one lowest.
    #[inline(always)]
    pub fn bits(&self) -> u64 {
        self.bits
    }

    /// Leaves out bits, no more than there are.
    #[inline(always)]
    pub fn skip(&mut self, width: u32) {
        debug_assert!(width <= self.count, "{width} of {}", self.count);
        self.bits >>= width;
        self.count -= width;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Writer;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bits_come_back(items in prop::collection::vec((any::<u64>(), 0u32..=56), 0..200)) {
            let mut out = Writer::new();
            let mut bits = out.bits();
            items.iter().for_each(|(value, width)| bits.put(*value, *width));
            bits.finish();
            let total: u64 = items.iter().map(|(_, w)| u64::from(*w)).sum();
            prop_assert_eq!(out.len() as u64, total.div_ceil(8));
            let mut reader = BitReader::new(out.bytes());
            for (value, width) in &items {
                prop_assert_eq!(reader.get("it", *width).unwrap(), value & ((1 << width) - 1));
            }
            reader.finish("it").unwrap();
        }

        /// In rooms what is put one after the other, and by windows what is read so; both begin and end at any bit.
        #[test]
        fn rooms_and_windows_are_those_of_single_bits(
            items in prop::collection::vec((any::<u64>(), 0u32..=56, any::<bool>()), 0..200),
        ) {
            let (mut plain, mut out) = (Writer::new(), Writer::new());
            let (mut one_by_one, mut bits) = (plain.bits(), out.bits());
            for part in items.chunk_by(|a, b| a.2 == b.2) {
                let codes = part.iter().map(|(value, width, _)| (value & ((1 << width) - 1), *width));
                codes.clone().for_each(|(value, width)| one_by_one.put(value, width));
                match part[0].2 {
                    true => bits.in_room(7 * part.len() + 1, |room| codes.for_each(|(value, width)| room.put(value, width))),
                    false => codes.for_each(|(value, width)| bits.put(value, width)),
                }
            }
            one_by_one.finish();
            bits.finish();
            prop_assert_eq!(out.bytes(), plain.bytes());
            let mut reader = BitReader::new(out.bytes());
            for part in items.chunk_by(|a, b| a.2 == b.2) {
                let mut window = reader.window();
                for (value, width, _) in part {
                    let want = value & ((1 << width) - 1);
                    if part[0].2 && window.refill() {
                        prop_assert_eq!(window.bits() & ((1 << width) - 1), want);
                        window.skip(*width);
                        reader.resume(&window);
                    } else {
                        prop_assert_eq!(reader.get("it", *width).unwrap(), want);
                        window = reader.window();
                    }
                }
            }
            reader.finish("it").unwrap();
        }

        #[test]
        fn nothing_is_read_beyond_the_end(bytes in prop::collection::vec(any::<u8>(), 0..40), widths in prop::collection::vec(0u32..=56, 0..60)) {
            let mut reader = BitReader::new(&bytes);
            let mut read = 0;
            for width in widths {
                let fits = read + u64::from(width) <= bytes.len() as u64 * 8;
                prop_assert_eq!(reader.get("it", width).is_ok(), fits);
                read += if fits { u64::from(width) } else { 0 };
                prop_assert_eq!(reader.left(), bytes.len() as u64 * 8 - read);
            }
        }

        #[test]
        fn runs_of_zeros(runs in prop::collection::vec(0u32..200, 1..30)) {
            let mut out = Writer::new();
            let mut bits = out.bits();
            for run in &runs {
                bits.zeros(*run);
                bits.put(1, 1);
            }
            bits.finish();
            let mut reader = BitReader::new(out.bytes());
            for run in &runs {
                prop_assert_eq!(reader.zeros("it", 200).unwrap(), *run);
            }
            prop_assert!(reader.zeros("it", 200).is_err());
        }
    }

    #[test]
    fn whole_words() {
        let mut out = Writer::new();
        let mut bits = out.bits();
        bits.put(5, 3);
        bits.put(u64::MAX, 64);
        bits.put(0, 64);
        bits.finish();
        assert_eq!(out.len(), 17);
        assert_eq!(out.bytes()[0], 0xfd);
    }
}
