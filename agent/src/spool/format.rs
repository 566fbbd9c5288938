//! The spool's record format, version 1. Pure.
//!
//! ```text
//! segment := "FXSPOOL1" record*
//! record  := length u32 | check u32 | seq u64 | class u8 | payload      (little-endian)
//! ```
//!
//! `length` counts the payload; `check` is the first 4 bytes of BLAKE3 over seq, class and payload. The first record
//! that is cut off or whose check is wrong ends the segment: what stands behind it was never acknowledged as
//! written.

/// First bytes of a segment.
pub(crate) const MAGIC: &[u8; 8] = b"FXSPOOL1";

/// Bytes before a record's payload.
pub(crate) const HEADER: usize = 17;

/// Longest payload: a report of [`flexcomm_wire::MAX_STEPS`] steps has about 64 KiB, and 80 more where it has the energies of many
/// buckets; a trainer's line is bounded by
/// [`flexcomm_wire::MAX_LINE`] and grows a little when it becomes a report.
pub(crate) const MAX_PAYLOAD: usize = 2 * flexcomm_wire::MAX_LINE;

/// Whether a report may be dropped when the spool is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Measurements; newer ones replace their worth.
    Telemetry,
    /// Results and events of which there is only one.
    Kept,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) seq: u64,
    pub(crate) class: Class,
    pub(crate) payload: Vec<u8>,
}

impl Record {
    /// Bytes on disk.
    pub(crate) fn size(&self) -> usize {
        HEADER + self.payload.len()
    }

    /// Appends the record's bytes.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let class = match self.class {
            Class::Telemetry => 0,
            Class::Kept => 1,
        };
        out.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        out.extend_from_slice(&check(self.seq, class, &self.payload));
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.push(class);
        out.extend_from_slice(&self.payload);
    }
}

fn check(seq: u64, class: u8, payload: &[u8]) -> [u8; 4] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seq.to_le_bytes()).update(&[class]).update(payload);
    let mut first = [0; 4];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..4]);
    first
}

/// Reads one record off the front of `bytes`; none when it is cut off or damaged.
pub(crate) fn decode(bytes: &[u8]) -> Option<Record> {
    let header = bytes.get(..HEADER)?;
    let length = u32::from_le_bytes(header[..4].try_into().ok()?) as usize;
    let seq = u64::from_le_bytes(header[8..16].try_into().ok()?);
    let class = match header[16] {
        0 => Class::Telemetry,
        1 => Class::Kept,
        _ => return None,
    };
    if length > MAX_PAYLOAD {
        return None;
    }
    let payload = bytes.get(HEADER..HEADER + length)?;
    (check(seq, header[16], payload) == header[4..8]).then(|| Record { seq, class, payload: payload.to_vec() })
}

/// All whole records of a segment in ascending order, and how many of its bytes they and the magic take.
pub(crate) fn scan(segment: &[u8]) -> (Vec<Record>, usize) {
    if !segment.starts_with(MAGIC) {
        return (Vec::new(), 0);
    }
    let (mut records, mut at) = (Vec::new(), MAGIC.len());
    let mut last = 0;
    while let Some(record) = decode(&segment[at..]) {
        if record.seq <= last {
            break;
        }
        last = record.seq;
        at += record.size();
        records.push(record);
    }
    (records, at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn records(payloads: &[Vec<u8>]) -> Vec<Record> {
        let class = |i| if i % 3 == 0 { Class::Kept } else { Class::Telemetry };
        payloads
            .iter()
            .enumerate()
            .map(|(i, p)| Record { seq: i as u64 + 1, class: class(i), payload: p.clone() })
            .collect()
    }

    fn segment(records: &[Record]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        records.iter().for_each(|r| r.encode(&mut bytes));
        bytes
    }

    proptest! {
        #[test]
        fn a_cut_segment_gives_its_whole_records(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..12), cut in any::<prop::sample::Index>()) {
            let all = records(&payloads);
            let bytes = segment(&all);
            let cut = cut.index(bytes.len() + 1);
            let (found, used) = scan(&bytes[..cut]);
            let mut end = MAGIC.len();
            let whole = all.iter().take_while(|r| { end += r.size(); end <= cut }).count();
            prop_assert_eq!(&found[..], &all[..whole]);
            prop_assert!(used <= cut);
        }

        #[test]
        fn a_flipped_byte_never_makes_another_record(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 1..8), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let all = records(&payloads);
            let mut bytes = segment(&all);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let (found, _) = scan(&bytes);
            prop_assert!(found.len() < all.len());
            prop_assert_eq!(&found[..], &all[..found.len()]);
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let (found, used) = scan(&bytes);
            prop_assert!(used <= bytes.len() && found.is_empty());
            let _ = decode(&bytes);
        }
    }
}
