//! One segment file.

use super::format::{self, Class, MAGIC, Record};
use super::{SpoolError, io};
use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A file of records, its newest ones possibly still being appended.
#[derive(Debug)]
pub(super) struct Segment {
    path: PathBuf,
    /// Open while it is the active one.
    file: Option<File>,
    /// Something that may not be lost was written since the last fsync.
    dirty: bool,
    /// Lowest and highest number in it (of all ever written to it).
    pub(super) first: u64,
    pub(super) last: u64,
    /// Bytes on disk.
    pub(super) bytes: u64,
    /// Records beyond the acknowledged ones, and how many of them may be dropped.
    pub(super) count: u64,
    pub(super) telemetry: u64,
    /// Where the first record beyond the acknowledged ones begins.
    offset: u64,
}

fn path_of(folder: &Path, first: u64) -> PathBuf {
    folder.join(format!("{first:020}.seg"))
}

/// All segments in order, each cut back to its whole records; and how many bytes were damaged.
pub(super) fn open_all(folder: &Path, acked: u64) -> Result<(VecDeque<Segment>, u64), SpoolError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io("list", folder))? {
        let path = entry.map_err(io("list", folder))?.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("seg") => names.push(path),
            // Left by a crash between write and rename.
            Some("new") => std::fs::remove_file(&path).map_err(io("remove", &path))?,
            _ => {}
        }
    }
    names.sort();
    let (mut segments, mut corrupt) = (VecDeque::new(), 0);
    for path in names {
        let bytes = std::fs::read(&path).map_err(io("read", &path))?;
        let (records, used) = format::scan(&bytes);
        corrupt += (bytes.len() - used) as u64;
        let last_before = segments.back().map_or(0, |s: &Segment| s.last);
        match Segment::found(path, &records, used as u64, acked) {
            Some(segment) if segment.first > last_before => segments.push_back(segment),
            Some(overlapping) => overlapping.delete()?,
            None => {}
        }
    }
    Ok((segments, corrupt))
}

impl Segment {
    pub(super) fn create(folder: &Path, first: u64) -> Result<Self, SpoolError> {
        let path = path_of(folder, first);
        // A file of that name can only be one whose records were all damaged.
        let mut file = crate::files::create(&path).map_err(io("make", &path))?;
        file.write_all(MAGIC).map_err(io("write", &path))?;
        let bytes = MAGIC.len() as u64;
        Ok(Self {
            path,
            file: Some(file),
            dirty: false,
            first,
            last: first.saturating_sub(1),
            bytes,
            count: 0,
            telemetry: 0,
            offset: bytes,
        })
    }

    /// A segment from before; none when nothing in it is whole (it is deleted then).
    fn found(path: PathBuf, records: &[Record], used: u64, acked: u64) -> Option<Self> {
        let (Some(first), Some(last)) = (records.first(), records.last()) else {
            let _ = std::fs::remove_file(&path);
            return None;
        };
        let mut segment = Self {
            path,
            file: None,
            dirty: false,
            first: first.seq,
            last: last.seq,
            bytes: used,
            count: 0,
            telemetry: 0,
            offset: MAGIC.len() as u64,
        };
        segment.count_from(records, acked);
        Some(segment)
    }

    fn count_from(&mut self, records: &[Record], acked: u64) {
        self.offset = MAGIC.len() as u64;
        (self.count, self.telemetry) = (0, 0);
        for record in records {
            if record.seq <= acked {
                self.offset += record.size() as u64;
            } else {
                self.count += 1;
                self.telemetry += u64::from(record.class == Class::Telemetry);
            }
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.file.is_some()
    }

    pub(super) fn append(&mut self, record: &Record) -> Result<(), SpoolError> {
        let Some(file) = self.file.as_ref() else { return Ok(()) };
        let mut bytes = Vec::with_capacity(record.size());
        record.encode(&mut bytes);
        // At the known end: half a record that a full disk left behind is written over, not built upon.
        file.write_all_at(&bytes, self.bytes).map_err(io("write", &self.path))?;
        self.dirty |= record.class == Class::Kept;
        self.bytes += bytes.len() as u64;
        self.last = record.seq;
        self.count += 1;
        self.telemetry += u64::from(record.class == Class::Telemetry);
        Ok(())
    }

    /// No more appends; on disk.
    pub(super) fn close(&mut self) -> Result<(), SpoolError> {
        match self.file.take() {
            Some(file) => file.sync_data().map_err(io("fsync", &self.path)),
            None => Ok(()),
        }
    }

    /// Whether something that may not be lost was written since the last fsync.
    pub(super) fn is_unsynced(&self) -> bool {
        self.dirty
    }

    /// A handle to fsync when something was written since the last.
    pub(super) fn take_unsynced(&mut self) -> Option<File> {
        if !std::mem::take(&mut self.dirty) {
            return None;
        }
        self.file.as_ref().and_then(|file| file.try_clone().ok())
    }

    /// The records beyond `acked`.
    pub(super) fn read(&mut self, acked: u64) -> Result<Vec<Record>, SpoolError> {
        if self.last <= acked {
            return Ok(Vec::new());
        }
        let length = self.bytes.saturating_sub(self.offset) as usize;
        let read = match &self.file {
            Some(file) => read_at(file, self.offset, length),
            None => File::open(&self.path).and_then(|file| read_at(&file, self.offset, length)),
        };
        let bytes = read.map_err(io("read", &self.path))?;
        let (mut records, mut at) = (Vec::new(), 0);
        while let Some(record) = format::decode(&bytes[at..]) {
            at += record.size();
            if record.seq > acked {
                records.push(record);
            }
        }
        Ok(records)
    }

    /// Moves the beginning behind what is acknowledged.
    pub(super) fn skip(&mut self, acked: u64) -> Result<(), SpoolError> {
        let before = self.count;
        let records = self.read(acked)?;
        self.count = records.len() as u64;
        self.telemetry = records.iter().filter(|r| r.class == Class::Telemetry).count() as u64;
        if self.count < before {
            self.offset = self.bytes - records.iter().map(|r| r.size() as u64).sum::<u64>();
        }
        Ok(())
    }

    /// Writes the segment again without its telemetry and without what is acknowledged. Returns how many records
    /// were dropped.
    pub(super) fn drop_telemetry(&mut self, acked: u64) -> Result<u64, SpoolError> {
        let records = self.read(acked)?;
        let (dropped, kept): (Vec<_>, Vec<_>) = records.into_iter().partition(|r| r.class == Class::Telemetry);
        let mut bytes = MAGIC.to_vec();
        kept.iter().for_each(|r| r.encode(&mut bytes));
        crate::files::replace(&self.path, &bytes).map_err(io("shrink", &self.path))?;
        // The old file handle points to the replaced file.
        self.file = None;
        self.bytes = bytes.len() as u64;
        self.count_from(&kept, acked);
        Ok(dropped.len() as u64)
    }

    /// Not after every acknowledgement: a file that is made and removed for each report costs more than all else.
    pub(super) fn is_spent(&self, acked: u64, spare: u64) -> bool {
        self.last <= acked && (self.file.is_none() || self.bytes >= spare)
    }

    pub(super) fn delete(self) -> Result<(), SpoolError> {
        std::fs::remove_file(&self.path).map_err(io("remove", &self.path))
    }
}

/// Up to `length` bytes from `offset`; less when the file ends before.
fn read_at(file: &File, offset: u64, length: usize) -> std::io::Result<Vec<u8>> {
    let (mut bytes, mut read) = (vec![0; length], 0);
    while read < length {
        match file.read_at(&mut bytes[read..], offset + read as u64)? {
            0 => break,
            more => read += more,
        }
    }
    bytes.truncate(read);
    Ok(bytes)
}

/// A report's bytes with another number: `{"seq":N,...`, see `ReportLog`.
pub(super) fn with_seq(payload: &[u8], seq: u64) -> Vec<u8> {
    match serde_json::from_slice::<flexcomm_wire::Report>(payload) {
        Ok(mut report) => {
            report.seq = seq;
            serde_json::to_vec(&report).unwrap_or_else(|_| payload.to_vec())
        }
        Err(_) => payload.to_vec(),
    }
}
