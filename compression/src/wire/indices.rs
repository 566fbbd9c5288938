//! Sets of indices below n, ascending, in the least bytes for this k and n.
//!
//! Of u32, Elias-Fano and bitmap the sizes are known from k and n alone, so a cost model can charge them exactly.
//! Gaps of one width depend on the indices; they win when these cluster.

use super::{Reader, Writer, levels_width, pack};
use crate::codec::ReadError;
use flexcomm_domain::spec::{self, EliasFano, IndexCoding};

/// Bytes of a set that [`write_indices`] writes: from k and n alone.
pub fn index_bytes(n: usize, k: usize) -> usize {
    // n is below 2^32: it fits.
    spec::index_bytes(n as u64, k as u64) as usize
}

/// Appends k indices, ascending and below n, in [`index_bytes`] bytes.
pub fn write_indices(indices: &[u32], n: usize, out: &mut Writer) {
    write_as(IndexCoding::least(n as u64, indices.len() as u64), indices, n, out);
}

/// As [`write_indices`], in fewer bytes when the indices cluster: for methods whose size depends on values anyway.
pub fn write_indices_least(indices: &[u32], n: usize, out: &mut Writer) {
    let k = indices.len() as u64;
    let gaps = 1 + (k * u64::from(gap_width(indices))).div_ceil(8);
    let least = IndexCoding::least(n as u64, k);
    let better = least.fixed_bytes(n as u64, k).is_some_and(|bytes| gaps < bytes);
    write_as(if better { IndexCoding::Gaps } else { least }, indices, n, out);
}

/// Gaps less 1; the first counts from before 0.
fn gaps(indices: &[u32]) -> impl Iterator<Item = u32> + '_ {
    let before = std::iter::once(0).chain(indices.iter().map(|i| i + 1));
    indices.iter().zip(before).map(|(index, from)| index - from)
}

fn gap_width(indices: &[u32]) -> u32 {
    levels_width(u64::from(gaps(indices).max().unwrap_or(0)) + 1)
}

/// Appends in a given way.
pub(crate) fn write_as(coding: IndexCoding, indices: &[u32], n: usize, out: &mut Writer) {
    out.u8(coding as u8);
    match coding {
        IndexCoding::U32 => out.u32s(indices),
        IndexCoding::Bitmap => {
            let map = out.room(n.div_ceil(8));
            indices.iter().for_each(|i| map[*i as usize / 8] |= 1 << (i % 8));
        }
        IndexCoding::Gaps => {
            let width = gap_width(indices);
            out.u8(width as u8);
            let mut bits = out.bits();
            gaps(indices).for_each(|gap| bits.put(u64::from(gap), width));
            bits.finish();
        }
        IndexCoding::EliasFano => write_elias_fano(indices, n, out),
    }
}

fn write_elias_fano(indices: &[u32], n: usize, out: &mut Writer) {
    let EliasFano { low_bits: low, upper_bits } = EliasFano::of(n as u64, indices.len() as u64);
    write_low_bits(indices, low, out);
    let upper = out.room(upper_bits.div_ceil(8) as usize);
    let (mut word, mut held) = (0, 0u64);
    for (position, index) in indices.iter().enumerate() {
        // The position-th one lies behind as many zeros as its upper part says.
        let at = (index >> low) as usize + position;
        if at / 64 != word {
            put_word(upper, word, held);
            (word, held) = (at / 64, 0);
        }
        held |= 1 << (at % 64);
    }
    put_word(upper, word, held);
}

/// Bits from 64 `word` on; those beyond the end are zeros.
fn put_word(bytes: &mut [u8], word: usize, bits: u64) {
    let room = bytes.get_mut(8 * word..).unwrap_or_default();
    room.iter_mut().zip(bits.to_le_bytes()).for_each(|(to, byte)| *to = byte);
}

/// The lowest bits of each index: up to 8 packed as codes, more one index after the other.
fn write_low_bits(indices: &[u32], low: u32, out: &mut Writer) {
    match low {
        0 => {}
        1..=8 => {
            let mut codes = [0; 512];
            for block in indices.chunks(codes.len()) {
                let codes = &mut codes[..block.len()];
                codes.iter_mut().zip(block).for_each(|(code, index)| *code = (index & ((1 << low) - 1)) as u8);
                pack(codes, low, out);
            }
        }
        _ => {
            let mut bits = out.bits();
            indices.iter().for_each(|i| bits.put(u64::from(*i), low));
            bits.finish();
        }
    }
}

/// Replaces `out` by k indices that a writer above wrote: ascending and below n, or refused. `out` never grows beyond
/// what the bytes hold.
pub fn read_indices(from: &mut Reader<'_>, n: usize, k: usize, out: &mut Vec<u32>) -> Result<(), ReadError> {
    out.clear();
    if k > n {
        return Err(ReadError::field("number of indices", k as u64, "more than values"));
    }
    let code = from.u8("index coding")?;
    let coding = IndexCoding::ALL.into_iter().find(|coding| *coding as u8 == code);
    match coding {
        Some(IndexCoding::U32) => {
            let (chunks, _) = from.items("indices", k as u64, 4)?.as_chunks::<4>();
            push_all(chunks.iter().map(|bytes| Ok(u64::from(u32::from_le_bytes(*bytes)))), n, out)
        }
        Some(IndexCoding::Bitmap) => read_bitmap(from, n, k, out),
        Some(IndexCoding::Gaps) => read_gaps(from, n, k, out),
        Some(IndexCoding::EliasFano) => read_elias_fano(from, n, k, out),
        None => Err(ReadError::field("index coding", code, "no such coding")),
    }
}

/// Indices must ascend and lie below n.
fn push_all(
    indices: impl Iterator<Item = Result<u64, ReadError>>,
    n: usize,
    out: &mut Vec<u32>,
) -> Result<(), ReadError> {
    let mut least = 0;
    for index in indices {
        let index = index?;
        if index < least || index >= n as u64 {
            return Err(ReadError::field("index", index, "it must ascend and stay below n"));
        }
        least = index + 1;
        out.push(index as u32);
    }
    Ok(())
}

fn read_bitmap(from: &mut Reader<'_>, n: usize, k: usize, out: &mut Vec<u32>) -> Result<(), ReadError> {
    let map = from.take("bitmap", n.div_ceil(8))?;
    let ones: u64 = map.iter().map(|byte| u64::from(byte.count_ones())).sum();
    if ones != k as u64 {
        return Err(ReadError::field("bitmap", ones, "another number of ones than of values"));
    }
    for (at, chunk) in map.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let mut word = u64::from_le_bytes(word);
        while word != 0 {
            out.push((at * 64) as u32 + word.trailing_zeros());
            word &= word - 1;
        }
    }
    match out.last() {
        Some(last) if *last as usize >= n => Err(ReadError::field("bitmap", *last, "padding must be 0")),
        _ => Ok(()),
    }
}

fn read_gaps(from: &mut Reader<'_>, n: usize, k: usize, out: &mut Vec<u32>) -> Result<(), ReadError> {
    let width = u32::from(from.u8("width of gaps")?);
    if width > 32 {
        return Err(ReadError::field("width of gaps", width, "at most 32"));
    }
    // k is at most n, below 2^32: no overflow. Width 0 says that the first k are in: bounded by k <= n alone, which the
    // caller compared with its own n.
    let mut bits = from.bits("gaps", (k as u64 * u64::from(width)).div_ceil(8) as usize)?;
    let mut next = 0;
    let indices = (0..k).map(|_| {
        next += bits.get("gaps", width)? + 1;
        Ok(next - 1)
    });
    push_all(indices, n, out)?;
    bits.finish("gaps")
}

fn read_elias_fano(from: &mut Reader<'_>, n: usize, k: usize, out: &mut Vec<u32>) -> Result<(), ReadError> {
    let EliasFano { low_bits: low, upper_bits } = EliasFano::of(n as u64, k as u64);
    let mut bits = from.bits("low bits of indices", (k as u64 * u64::from(low)).div_ceil(8) as usize)?;
    let mut upper = from.bits("upper bits of indices", upper_bits.div_ceil(8) as usize)?;
    let mut high = 0u64;
    let indices = (0..k).map(|_| {
        high += u64::from(upper.zeros("upper bits of indices", u32::MAX)?);
        Ok(high << low | bits.get("low bits of indices", low)?)
    });
    push_all(indices, n, out)?;
    bits.finish("low bits of indices")?;
    // Behind the last one there are zeros only.
    match upper.zeros("upper bits of indices", u32::MAX) {
        Ok(at) => Err(ReadError::field("upper bits of indices", at, "a one too many")),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set() -> impl Strategy<Value = (usize, Vec<u32>)> {
        (1usize..3000, 0.0f64..1.0, any::<u64>()).prop_map(|(n, share, seed)| {
            let stream = crate::random::Stream::new(seed, [0; 4]);
            let share = share * share;
            (n, (0..n as u32).filter(|i| stream.unit(u64::from(*i)) < share).collect())
        })
    }

    proptest! {
        #[test]
        fn sets_come_back((n, indices) in set()) {
            for coding in IndexCoding::ALL {
                let mut out = Writer::new();
                write_as(coding, &indices, n, &mut out);
                if let Some(bytes) = coding.fixed_bytes(n as u64, indices.len() as u64) {
                    prop_assert_eq!(out.len() as u64, 1 + bytes, "{:?}", coding);
                }
                let mut back = vec![5];
                let mut reader = Reader::new(out.bytes());
                read_indices(&mut reader, n, indices.len(), &mut back).unwrap();
                prop_assert_eq!((&back, reader.left()), (&indices, 0), "{:?}", coding);
                for end in 0..out.len() {
                    prop_assert!(read_indices(&mut Reader::new(&out.bytes()[..end]), n, indices.len(), &mut back).is_err());
                }
            }
            let (mut exact, mut least) = (Writer::new(), Writer::new());
            write_indices(&indices, n, &mut exact);
            write_indices_least(&indices, n, &mut least);
            prop_assert_eq!(exact.len(), index_bytes(n, indices.len()));
            prop_assert!(least.len() <= exact.len());
        }

        #[test]
        fn any_bytes_are_refused_or_a_set(bytes in prop::collection::vec(any::<u8>(), 0..60), code in 0u8..6, n in 0usize..300, k in 0usize..40) {
            let bytes: Vec<u8> = std::iter::once(code).chain(bytes).collect();
            let mut out = Vec::new();
            if read_indices(&mut Reader::new(&bytes), n, k, &mut out).is_ok() {
                prop_assert_eq!(out.len(), k);
                prop_assert!(out.is_sorted_by(|a, b| a < b) && out.last().is_none_or(|i| (*i as usize) < n));
            }
        }
    }
}
