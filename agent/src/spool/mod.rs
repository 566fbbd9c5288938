//! Reports on their way to the controller, on disk.
//!
//! Append-only segment files of checked records ([`format`]), named by the sequence number of their first record,
//! and `acked`, which holds the highest number that the controller has stored. Every report is written with one
//! `write` before anything else happens with it, and so is every acknowledgement, so a SIGKILL of the agent loses
//! nothing. After a power failure the kernel's cache is gone: what may not be dropped is fsynced at least every
//! [`SYNC_EVERY`] and before the agent ends, so that at most that much of it is lost; telemetry is not, since a disk would
//! be busy with it all day. The acknowledgement is fsynced before acknowledged segments are deleted.
//!
//! When the spool is over its limit, telemetry is dropped, oldest segment first; trial results, applied decisions
//! and comings and goings are never dropped. They have as much room again for themselves, and [`reserve`] on a disk
//! that is full. Where that is taken, too, what trainers report is refused and they keep it ([`Priority::Result`]); the
//! last quarter is left to events that have no one else to keep them.

pub(crate) mod format;
mod reserve;
mod segment;

use crate::files;
use format::{Class, MAGIC, MAX_PAYLOAD, Record};
use reserve::Reserve;
use segment::Segment;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest time between the write of a report that may not be dropped and its fsync.
pub(crate) const SYNC_EVERY: Duration = Duration::from_secs(1);

/// Numbers left out at every start: more than were ever given out and delivered without reaching the disk before a power
/// failure. Given out again they would be taken for what the controller has.
const UNSEEN: u64 = 1 << 20;

/// The active segment is removed when all of it is acknowledged and it takes this part of a full one's bytes; on a full
/// disk, whatever it takes.
const SPARE: u64 = 4;

/// What cannot be dropped may take this many times the limit before more of it is refused.
const HARD_FACTOR: u64 = 2;

/// The part of all room that is left to [`Priority::Event`]: at the smallest limit, the leave of every trainer fits.
const EVENTS_PART: u64 = 4;

/// The part of the limit that is reserved on the disk, and its bounds: some hundred results at the least, and no more
/// than a disk that is otherwise full misses.
const RESERVE_PART: u64 = 8;
const RESERVE: std::ops::RangeInclusive<u64> = 64 * 1024..=4 * 1024 * 1024;

/// What becomes of a report when there is little room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Dropped, the oldest first.
    Telemetry,
    /// Refused: its source keeps it and tries again.
    Result,
    /// May take all room: its source cannot keep it, and there are at most a few for each trainer.
    Event,
}

impl Priority {
    fn class(self) -> Class {
        match self {
            Self::Telemetry => Class::Telemetry,
            Self::Result | Self::Event => Class::Kept,
        }
    }
}

/// Why the spool could not do something.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The system refused.
    #[error("{operation} {path}: {source}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A report longer than a record may be.
    #[error("spool a report of {bytes} bytes: at most {most} fit (a larger `spool_limit_bytes` takes more)")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// Allowed.
        most: u64,
    },
    /// Even what may not be dropped fills it.
    #[error("spool a report: {bytes} bytes wait already and the limit is {limit}")]
    Full {
        /// On disk now.
        bytes: u64,
        /// As configured.
        limit: u64,
    },
}

fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SpoolError {
    let path = path.to_owned();
    move |source| SpoolError::Io { operation, path, source }
}

/// What an append did besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Appended {
    /// The report's number; 0 when it was itself dropped.
    pub(crate) seq: u64,
    /// Telemetry that was dropped to make room.
    pub(crate) dropped: u64,
}

/// The reports that the controller has not stored yet.
#[derive(Debug)]
pub(crate) struct Spool {
    folder: PathBuf,
    limit: u64,
    segment_size: u64,
    segments: VecDeque<Segment>,
    reserve: Reserve,
    /// Holds `acked`, see [`acked_text`].
    acked_file: File,
    acked: u64,
    next: u64,
    /// A write was refused for want of room, and since then the spool was never empty.
    full: bool,
    /// First number given out since the start, until the first registration: see [`Spool::registered`].
    life_began: Option<u64>,
    /// Damaged bytes found at start.
    pub(crate) corrupt_bytes: u64,
}

impl Spool {
    /// Opens or makes the folder, ignores a cut-off tail, goes on with the numbers.
    pub(crate) fn open(folder: &Path, limit: u64) -> Result<Self, SpoolError> {
        files::own_folder(folder, files::PRIVATE).map_err(io("make the spool", folder))?;
        let (acked_file, acked) = open_acked(&folder.join("acked"))?;
        let (segments, corrupt_bytes) = segment::open_all(folder, acked)?;
        let last = segments.back().map_or(0, |s| s.last);
        let seen = acked.max(last);
        let next = if seen == 0 { 1 } else { seen + UNSEEN };
        let segment_size = (limit / 16).clamp(16 * 1024, 4 * 1024 * 1024);
        let mut spool = Self {
            folder: folder.to_owned(),
            limit,
            segment_size,
            segments,
            reserve: Reserve::open(folder, (limit / RESERVE_PART).clamp(*RESERVE.start(), *RESERVE.end()))?,
            acked_file,
            acked,
            next,
            full: false,
            life_began: Some(next),
            corrupt_bytes,
        };
        spool.forget_acked()?;
        Ok(spool)
    }

    /// Reports waiting.
    pub(crate) fn len(&self) -> u64 {
        self.segments.iter().map(|s| s.count).sum()
    }

    /// Bytes on disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.bytes).sum()
    }

    /// Writes one report; `payload` gets its number and returns its bytes.
    pub(crate) fn append(
        &mut self,
        priority: Priority,
        payload: impl FnOnce(u64) -> Vec<u8>,
    ) -> Result<Appended, SpoolError> {
        let class = priority.class();
        let record = Record { seq: self.next, class, payload: payload(self.next) };
        let (size, room) = (record.size() as u64, self.room(priority));
        // What an empty spool has no room for would be tried for ever.
        let most = (MAX_PAYLOAD as u64).min(room.saturating_sub(self.segment_size));
        if record.payload.len() as u64 > most {
            return Err(SpoolError::TooLong { bytes: record.payload.len(), most });
        }
        let dropped = match self.make_room(size) {
            // On a full disk not even a shorter segment can be written.
            Err(error) if class == Class::Kept && reserve::is_full(&error) => 0,
            made => made?,
        };
        let bytes = self.bytes() + size;
        if bytes > room && class == Class::Telemetry {
            return Ok(Appended { seq: 0, dropped: dropped + 1 });
        }
        if bytes > room {
            return Err(SpoolError::Full { bytes: self.bytes(), limit: self.limit });
        }
        self.write(&record)?;
        self.next += 1;
        Ok(Appended { seq: record.seq, dropped })
    }

    /// Bytes that all reports may take, so that one more of this priority is written.
    fn room(&self, priority: Priority) -> u64 {
        let all = self.limit * HARD_FACTOR;
        match priority {
            Priority::Telemetry => self.limit,
            Priority::Result => all - all / EVENTS_PART,
            Priority::Event => all,
        }
    }

    /// On a full disk, where acknowledged reports were; into the reserve, when the report may not be dropped.
    fn write(&mut self, record: &Record) -> Result<(), SpoolError> {
        loop {
            let written = self.active(record.seq).and_then(|segment| segment.append(record));
            match written {
                Err(error) if reserve::is_full(&error) => {
                    self.full = true;
                    let is_kept = record.class == Class::Kept;
                    let found = self.forget_spent()? || is_kept && self.reserve.release(record.size() as u64)?;
                    if !found {
                        return Err(error);
                    }
                }
                done => return done,
            }
        }
    }

    fn active(&mut self, seq: u64) -> Result<&mut Segment, SpoolError> {
        let size = self.segment_size;
        if self.segments.back().is_none_or(|s| !s.is_open() || s.bytes >= size) {
            if let Some(full) = self.segments.back_mut() {
                full.close()?;
            }
            self.segments.push_back(Segment::create(&self.folder, seq)?);
        }
        // Pushed just now when there was none.
        self.segments.back_mut().ok_or(SpoolError::Full { bytes: 0, limit: self.limit })
    }

    /// Drops telemetry from the oldest segments until `more` bytes fit or none is left.
    fn make_room(&mut self, more: u64) -> Result<u64, SpoolError> {
        let mut dropped = 0;
        while self.bytes() + more > self.limit {
            let Some(at) = self.segments.iter().position(|s| s.telemetry > 0) else { break };
            let segment = &mut self.segments[at];
            // Without a write, which a full disk refuses.
            let whole = segment.telemetry == segment.count;
            dropped += if whole { segment.count } else { segment.drop_telemetry(self.acked)? };
            if (whole || segment.count == 0)
                && let Some(empty) = self.segments.remove(at)
            {
                empty.delete()?;
            }
        }
        Ok(dropped)
    }

    /// The oldest waiting reports, at most `most` of them and about `most_bytes`.
    pub(crate) fn batch(&mut self, most: usize, most_bytes: usize) -> Result<Vec<Record>, SpoolError> {
        let (mut found, mut bytes) = (Vec::new(), 0);
        for segment in &mut self.segments {
            for record in segment.read(self.acked)? {
                if found.len() == most || (!found.is_empty() && bytes + record.size() > most_bytes) {
                    return Ok(found);
                }
                bytes += record.size();
                found.push(record);
            }
            if found.len() == most || bytes >= most_bytes {
                break;
            }
        }
        Ok(found)
    }

    /// The controller has stored everything up to `seq`; a number beyond what was given out counts as the last one.
    pub(crate) fn ack(&mut self, seq: u64) -> Result<(), SpoolError> {
        let seq = seq.min(self.next - 1);
        if seq <= self.acked {
            return Ok(());
        }
        self.acked = seq;
        self.acked_file.write_all_at(acked_text(seq).as_bytes(), 0).map_err(io("write", &self.folder.join("acked")))?;
        self.forget_acked()?;
        self.fill_reserve();
        Ok(())
    }

    /// Keeps room on the disk for what may not be dropped: the last step of a start, which needs room for itself.
    pub(crate) fn fill_reserve(&mut self) {
        self.reserve.refill();
    }

    fn forget_acked(&mut self) -> Result<(), SpoolError> {
        self.forget_spent()?;
        match self.segments.front_mut() {
            Some(front) => front.skip(self.acked),
            None => Ok(()),
        }
    }

    /// Removes segments that are acknowledged as a whole; whether there were any.
    fn forget_spent(&mut self) -> Result<bool, SpoolError> {
        // A segment without records is never spent: the next report would only make it again.
        let spare = if self.full { MAGIC.len() as u64 + 1 } else { self.segment_size / SPARE };
        let spent = self.segments.iter().take_while(|s| s.is_spent(self.acked, spare)).count();
        if spent > 0 {
            self.acked_file.sync_data().map_err(io("fsync", &self.folder.join("acked")))?;
        }
        for _ in 0..spent {
            if let Some(done) = self.segments.pop_front() {
                done.delete()?;
            }
        }
        self.full &= !self.segments.is_empty();
        Ok(spent > 0)
    }

    /// The controller says at registration what it has stored. When that reaches beyond what stood in the spool at
    /// this start, the numbers given out since then were used before (the state directory was lost): these reports get
    /// new numbers, else the controller would take them for what it has already.
    pub(crate) fn registered(&mut self, stored: u64) -> Result<(), SpoolError> {
        match self.life_began {
            Some(began) if stored >= began => self.renumber(began, stored + 1)?,
            _ => self.ack(stored)?,
        }
        self.life_began = None;
        Ok(())
    }

    /// Copies first, and only when they are on the disk the old ones go: a crash in between leaves some twice.
    fn renumber(&mut self, from: u64, to: u64) -> Result<(), SpoolError> {
        let mut moved = Vec::new();
        for segment in &mut self.segments {
            moved.extend(segment.read(from - 1)?);
        }
        let to = to.max(self.next);
        self.next = to;
        for record in moved {
            // The number stands in the payload too.
            let payload = segment::with_seq(&record.payload, self.next);
            // They were there before: an event's room is enough for each.
            let priority = if record.class == Class::Kept { Priority::Event } else { Priority::Telemetry };
            self.append(priority, |_| payload)?;
        }
        if let Some(file) = self.take_unsynced() {
            file.sync_data().map_err(io("fsync a segment in", &self.folder))?;
        }
        self.ack(to - 1)
    }

    /// Whether there is a file that must reach the disk.
    pub(crate) fn is_unsynced(&self) -> bool {
        self.segments.back().is_some_and(Segment::is_unsynced)
    }

    /// The file that must reach the disk; call `sync_data` on it outside of any lock.
    pub(crate) fn take_unsynced(&mut self) -> Option<std::fs::File> {
        self.segments.back_mut().and_then(Segment::take_unsynced)
    }
}

/// Always as long, so that it is written over in place.
fn acked_text(seq: u64) -> String {
    format!("{seq:020}\n")
}

/// The file and the number in it.
fn open_acked(path: &Path) -> Result<(File, u64), SpoolError> {
    let file = files::open(path).map_err(io("open", path))?;
    let bytes = std::fs::read(path).map_err(io("read", path))?;
    // Damaged or empty: 0 is safe, the controller's answer at registration brings the number back.
    let text = std::str::from_utf8(&bytes).unwrap_or_default();
    if text.is_empty() {
        // The file's block is found now: on a disk that the spool fills, no acknowledgement would ever be written.
        let _ = file.write_all_at(acked_text(0).as_bytes(), 0);
    }
    let acked = text.lines().next().and_then(|line| line.trim().parse().ok()).unwrap_or(0);
    Ok((file, acked))
}

#[cfg(test)]
mod tests;
