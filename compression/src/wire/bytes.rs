//! Bytes, little endian.

use super::{BitReader, BitWriter};
use crate::codec::ReadError;

/// Appends to a buffer that is kept from step to step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues a buffer that exists.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// The buffer.
    pub fn into_vec(self) -> Vec<u8> {
        self.bytes
    }

    /// All bytes so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Forgets them and keeps the room.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }

    /// Forgets all from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
    }

    /// Makes room for so many bytes more, so that payloads whose size varies from step to step allocate once.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve(bytes);
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Four bytes.
    pub fn f32(&mut self, value: f32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn f64(&mut self, value: f64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// As they are.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Four bytes each.
    pub fn f32s(&mut self, values: &[f32]) {
        let (chunks, _) = self.room(4 * values.len()).as_chunks_mut::<4>();
        chunks.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    }

    /// Four bytes each.
    pub fn u32s(&mut self, values: &[u32]) {
        let (chunks, _) = self.room(4 * values.len()).as_chunks_mut::<4>();
        chunks.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    }

    /// Appends `len` zero bytes and returns them, for kernels that write a known number of bytes.
    pub fn room(&mut self, len: usize) -> &mut [u8] {
        let start = self.bytes.len();
        self.bytes.resize(start + len, 0);
        &mut self.bytes[start..]
    }

    /// Four bytes at `at`, which were written before.
    pub fn set_f32(&mut self, at: usize, value: f32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Bytes from `at` on, which were written before.
    pub fn set(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Bits from here on; [`BitWriter::finish`] pads to a whole byte.
    pub fn bits(&mut self) -> BitWriter<'_> {
        BitWriter::new(&mut self.bytes)
    }
}

/// Reads what a [`Writer`] wrote; never beyond the end.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    /// All of these bytes.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Bytes not read yet.
    pub const fn left(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes not read yet, which stay so.
    pub const fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    /// The next `len` bytes.
    pub fn take(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], ReadError> {
        let end = || ReadError::End { what, wanted: len as u64, left: self.bytes.len() };
        let (head, rest) = self.bytes.split_at_checked(len).ok_or_else(end)?;
        self.bytes = rest;
        Ok(head)
    }

    /// `count` items of `size` bytes; the count may be any number that a message claims.
    pub fn items(&mut self, what: &'static str, count: u64, size: usize) -> Result<&'a [u8], ReadError> {
        let wanted = count.saturating_mul(size as u64);
        let len = usize::try_from(wanted).unwrap_or(usize::MAX);
        self.take(what, len)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], ReadError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(what, N)?);
        Ok(array)
    }

    /// One byte.
    pub fn u8(&mut self, what: &'static str) -> Result<u8, ReadError> {
        Ok(self.array::<1>(what)?[0])
    }

    /// Four bytes.
    pub fn u32(&mut self, what: &'static str) -> Result<u32, ReadError> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self, what: &'static str) -> Result<u64, ReadError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Four bytes; NaN and infinity are refused.
    pub fn f32(&mut self, what: &'static str) -> Result<f32, ReadError> {
        finite(what, self.array(what).map(f32::from_le_bytes)?)
    }

    /// Four bytes; at least 0 and finite: norms and scales.
    pub fn scale(&mut self, what: &'static str) -> Result<f32, ReadError> {
        let value = self.f32(what)?;
        if value >= 0.0 { Ok(value) } else { Err(ReadError::number(what, value, "it must not be negative")) }
    }

    /// Eight bytes; NaN and infinity are refused.
    pub fn f64(&mut self, what: &'static str) -> Result<f64, ReadError> {
        finite(what, self.array(what).map(f64::from_le_bytes)?)
    }

    /// `count` values of four bytes, still in their bytes; NaN and infinity are refused.
    pub fn f32s(
        &mut self,
        what: &'static str,
        count: usize,
    ) -> Result<impl ExactSizeIterator<Item = f32> + Clone + use<'a>, ReadError> {
        let (chunks, _) = self.items(what, count as u64, 4)?.as_chunks::<4>();
        let values = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes));
        match values.clone().find(|v| !v.is_finite()) {
            Some(value) => finite(what, value).map(|_| values),
            None => Ok(values),
        }
    }

    /// `out += scale * values`, of as many values of four bytes as `out` has; NaN and infinity are refused.
    pub(crate) fn add_f32s(&mut self, what: &'static str, (scale, out): (f32, &mut [f32])) -> Result<(), ReadError> {
        let values = self.f32s(what, out.len())?;
        out.iter_mut().zip(values).for_each(|(out, value)| *out += scale * value);
        Ok(())
    }

    /// One byte: 0 or 1.
    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, ReadError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(ReadError::field(what, other, "0 or 1")),
        }
    }

    /// Bits of the next `len` bytes.
    pub fn bits(&mut self, what: &'static str, len: usize) -> Result<BitReader<'a>, ReadError> {
        self.take(what, len).map(BitReader::new)
    }

    /// Refuses bytes behind the end.
    pub fn finish(self) -> Result<(), ReadError> {
        if self.bytes.is_empty() { Ok(()) } else { Err(ReadError::Trailing(self.bytes.len())) }
    }
}

/// Refuses NaN and infinity among values.
pub(crate) fn all_finite(what: &'static str, values: &[f32]) -> Result<(), ReadError> {
    values.iter().find(|value| !value.is_finite()).map_or(Ok(()), |value| finite(what, *value).map(drop))
}

/// `to += value`, unless that is infinite.
pub(crate) fn add_finite(to: &mut f32, value: f32) -> Result<(), ReadError> {
    *to = finite("value", *to + value)?;
    Ok(())
}

/// The value, unless it is NaN or infinite.
pub(crate) fn finite<T: Copy + Into<f64>>(what: &'static str, value: T) -> Result<T, ReadError> {
    match value.into().is_finite() {
        true => Ok(value),
        false => Err(ReadError::number(what, value, "it must be finite")),
    }
}
