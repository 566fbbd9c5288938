//! Where what lies in the file. All words are 64 bits in the machine's byte order: the file never leaves it.

/// `FLXPAGE` and a zero, read as a little-endian word.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"FLXPAGE\0");

/// Version of the layout; a file with another one is replaced, not reinterpreted.
pub(crate) const LAYOUT: u64 = 1;

/// Largest payload: the orders of one job with sixteen candidates of a trial are about 3 KiB of JSON.
pub const CAPACITY: usize = 16 * 1024;

/// Word of [`MAGIC`].
pub(crate) const W_MAGIC: usize = 0;
/// Word of [`LAYOUT`].
pub(crate) const W_LAYOUT: usize = 1;
/// Word of [`CAPACITY`].
pub(crate) const W_CAPACITY: usize = 2;
/// 1 once the file has been replaced by another under the same name, or removed.
pub(crate) const W_RETIRED: usize = 3;
// The words above never change in normal work and share a cache line; each of the next two has its own, so
// that the heartbeat does not take the counter's line away from a trainer that polls it every step.
/// The counter: odd while a publication is under way, even otherwise. 0: nothing published yet.
pub(crate) const W_COUNTER: usize = 8;
/// Bytes of payload; guarded by the counter.
pub(crate) const W_LENGTH: usize = 9;
/// Time of the last sign of life, in microseconds since the epoch; not guarded.
pub(crate) const W_HEARTBEAT: usize = 16;
/// First word of payload.
pub(crate) const W_PAYLOAD: usize = 24;

/// Words of the whole file.
pub(crate) const WORDS: usize = W_PAYLOAD + CAPACITY / 8;

/// Bytes of the whole file.
pub(crate) const FILE_BYTES: u64 = (WORDS * 8) as u64;
