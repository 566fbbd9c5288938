//! Readers never see a torn payload, whatever the writer does.
#![allow(clippy::unwrap_used)]

use flexcomm_page::{CAPACITY, CreateError, OpenError, PageReader, PageWriter, PublishError, ReadError};
use proptest::prelude::*;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" }).unwrap()
}

/// A payload in which every byte follows from the first eight: a mixture of two is recognised.
fn payload(number: u64) -> Vec<u8> {
    let length = 8 + (number as usize * 97) % 3000;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((8..length).map(|i| (number as usize).wrapping_mul(31).wrapping_add(i) as u8));
    bytes
}

fn number_of(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes == payload(number), "torn: {} bytes that say {number}", bytes.len());
    number
}

#[test]
fn what_is_published_is_read() {
    let dir = folder();
    let path = dir.path().join("job.page");
    let mut writer = PageWriter::create(&path).unwrap();
    let mut reader = PageReader::open(&path).unwrap();
    let mut out = b"last good".to_vec();
    assert_eq!(reader.read(&mut out), Err(ReadError::Unpublished));
    assert_eq!(out, b"last good");
    writer.publish(b"{}").unwrap();
    let first = reader.read(&mut out).unwrap();
    assert_eq!((out.as_slice(), first), (&b"{}"[..], reader.counter()));
    writer.publish(&vec![7; CAPACITY]).unwrap();
    assert!(reader.counter() > first);
    reader.read(&mut out).unwrap();
    assert_eq!(out, vec![7; CAPACITY]);
    let error = writer.publish(&vec![7; CAPACITY + 1]).unwrap_err();
    assert!(matches!(error, PublishError::TooLong { bytes } if bytes == CAPACITY + 1));
    reader.read(&mut out).unwrap();
    assert_eq!(out.len(), CAPACITY, "a refused payload must not touch the page");
    writer.beat(42);
    assert_eq!(reader.heartbeat_us(), 42);
}

#[test]
fn a_restarted_writer_takes_over_in_place() {
    let dir = folder();
    let path = dir.path().join("job.page");
    let mut writer = PageWriter::create(&path).unwrap();
    writer.publish(b"one").unwrap();
    let mut reader = PageReader::open(&path).unwrap();
    assert!(matches!(PageWriter::create(&path), Err(CreateError::InUse { .. })));
    drop(writer);
    let mut writer = PageWriter::create(&path).unwrap();
    let mut out = Vec::new();
    let before = reader.read(&mut out).unwrap();
    assert_eq!(out, b"one");
    writer.publish(b"two").unwrap();
    assert!(reader.read(&mut out).unwrap() > before);
    assert_eq!(out, b"two");
}

#[test]
fn a_killed_publication_is_refused_until_mended() {
    let dir = folder();
    let path = dir.path().join("job.page");
    let mut writer = PageWriter::create(&path).unwrap();
    writer.publish(b"good").unwrap();
    let mut reader = PageReader::open(&path).unwrap();
    let mut out = Vec::new();
    let good = reader.read(&mut out).unwrap();
    drop(writer);
    // What a writer leaves that dies within `publish`: an odd counter and half a payload.
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(8 * 8)).unwrap();
    file.write_all(&(good + 1).to_ne_bytes()).unwrap();
    file.seek(SeekFrom::Start(24 * 8)).unwrap();
    file.write_all(b"ba").unwrap();
    assert_eq!(reader.read(&mut out), Err(ReadError::Busy));
    assert_eq!(out, b"good");
    let mut writer = PageWriter::create(&path).unwrap();
    assert!(writer.publish(b"better").unwrap() > good);
    reader.read(&mut out).unwrap();
    assert_eq!(out, b"better");
}

#[test]
fn foreign_files_are_replaced_not_shortened() {
    let dir = folder();
    let path = dir.path().join("job.page");
    let mut writer = PageWriter::create(&path).unwrap();
    writer.publish(b"old").unwrap();
    let mut reader = PageReader::open(&path).unwrap();
    drop(writer);
    // Another layout version.
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(8)).unwrap();
    file.write_all(&99u64.to_ne_bytes()).unwrap();
    assert!(matches!(PageReader::open(&path), Err(OpenError::Foreign { .. })));
    let before = reader.counter();
    let mut writer = PageWriter::create(&path).unwrap();
    assert_ne!(reader.counter(), before, "a reader of the old file must notice");
    let mut out = b"kept".to_vec();
    assert_eq!(reader.read(&mut out), Err(ReadError::Retired));
    assert_eq!(out, b"kept");
    assert_eq!(file.metadata().unwrap().len(), PathBuf::from(&path).metadata().unwrap().len());
    writer.publish(b"new").unwrap();
    PageReader::open(&path).unwrap().read(&mut out).unwrap();
    assert_eq!(out, b"new");
}

#[test]
fn garbage_and_links_are_refused_or_replaced() {
    let dir = folder();
    let path = dir.path().join("job.page");
    std::fs::write(&path, b"short").unwrap();
    assert!(matches!(PageReader::open(&path), Err(OpenError::Foreign { .. })));
    drop(PageWriter::create(&path).unwrap());
    PageReader::open(&path).unwrap();
    let link = dir.path().join("link.page");
    let target = dir.path().join("precious");
    std::fs::write(&target, b"precious").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    assert!(matches!(PageWriter::create(&link), Err(CreateError::Io { .. })));
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    assert!(PageReader::open(&dir.path().join("absent")).is_err());
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_string_lossy().ends_with(".tmp")), "{left:?}");
}

#[test]
fn a_retired_page_is_gone_and_says_so() {
    let dir = folder();
    let path = dir.path().join("job.page");
    let mut writer = PageWriter::create(&path).unwrap();
    writer.publish(b"x").unwrap();
    let mut reader = PageReader::open(&path).unwrap();
    writer.retire().unwrap();
    assert!(!path.exists());
    assert_eq!(reader.read(&mut Vec::new()), Err(ReadError::Retired));
}

/// Longest time that a test waits for a writer.
const WAIT_LIMIT: std::time::Duration = std::time::Duration::from_secs(300);

/// Reads until `enough` says so; every payload seen must be whole and none older than the one before.
fn watch(path: &Path, mut enough: impl FnMut(u64, u64) -> bool) -> u64 {
    let mut reader = PageReader::open(path).unwrap();
    let (mut out, mut last, mut last_counter, mut good) = (Vec::new(), 0, 0, 0u64);
    let began = std::time::Instant::now();
    loop {
        assert!(
            began.elapsed() < WAIT_LIMIT,
            "{good} pages were read, the newest holds {last}: nothing more is written"
        );
        match reader.read(&mut out) {
            Ok(counter) => {
                let number = number_of(&out);
                assert!(number >= last && counter >= last_counter, "went back from {last} to {number}");
                (last, last_counter, good) = (number, counter, good + 1);
            }
            Err(ReadError::Busy | ReadError::Unpublished) => std::thread::yield_now(),
            Err(other) => panic!("{other}"),
        }
        if enough(good, last) {
            return good;
        }
    }
}

#[test]
fn no_torn_read_beside_a_writing_thread() {
    let dir = folder();
    let path = dir.path().join("job.page");
    let mut writer = PageWriter::create(&path).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writing = std::thread::spawn({
        let stop = stop.clone();
        move || {
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                writer.publish(&payload(number)).unwrap();
            }
            number
        }
    });
    let good = watch(&path, |good, number| good >= 20_000 && number >= 20_000);
    stop.store(true, Ordering::Relaxed);
    assert!(good >= 20_000 && writing.join().unwrap() > 0);
}

const CHILD: &str = "FLEXCOMM_PAGE_TEST_CHILD";

/// Not a test of its own: the body of the writing process below, started with the path in [`CHILD`].
#[test]
fn child_writes_until_its_standard_input_ends() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let mut writer = PageWriter::create(Path::new(&path)).unwrap();
    // The counter grows by two per number, so this is beyond every number published so far.
    let mut number = writer.counter();
    let done = Arc::new(AtomicBool::new(false));
    let flag = done.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        flag.store(true, Ordering::Relaxed);
    });
    while !done.load(Ordering::Relaxed) {
        number += 1;
        writer.publish(&payload(number)).unwrap();
    }
}

struct Child(std::process::Child);

impl Child {
    fn start(path: &Path) -> Self {
        let command = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_writes_until_its_standard_input_ends"])
            .env(CHILD, path)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn();
        Self(command.unwrap())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn no_torn_read_beside_writing_processes_that_are_killed() {
    let dir = folder();
    let path = dir.path().join("job.page");
    drop(PageWriter::create(&path).unwrap());
    let mut child = Child::start(&path);
    let mut kills = 0;
    let mut killed_at = 0;
    let good = watch(&path, |_, number| {
        if number > killed_at + 2000 && kills < 10 {
            // SIGKILL wherever it happens to be, then a fresh writer on the same file.
            child = Child::start(&dir.path().join("other.page"));
            child = Child::start(&path);
            kills += 1;
            killed_at = number;
        }
        kills == 10 && number > killed_at + 2000
    });
    assert!(good > 10);
}

proptest! {
    #[test]
    fn any_sequence_of_payloads_reads_back(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..20)) {
        let dir = folder();
        let path = dir.path().join("p");
        let mut writer = PageWriter::create(&path).unwrap();
        let mut reader = PageReader::open(&path).unwrap();
        let mut out = Vec::new();
        let mut last = 0;
        for bytes in &payloads {
            writer.publish(bytes).unwrap();
            let counter = reader.read(&mut out).unwrap();
            prop_assert_eq!(&out, bytes);
            prop_assert!(counter > last);
            last = counter;
        }
    }
}
