use super::*;
use crate::skipped;
use proptest::prelude::*;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

const LIMIT: u64 = 64 * 1024;

fn open(dir: &tempfile::TempDir) -> Spool {
    Spool::open(dir.path(), LIMIT).unwrap()
}

fn put(spool: &mut Spool, priority: Priority, payload: &[u8]) -> u64 {
    spool.append(priority, |_| payload.to_vec()).unwrap().seq
}

fn waiting(spool: &mut Spool) -> Vec<u64> {
    spool.batch(usize::MAX, usize::MAX).unwrap().iter().map(|r| r.seq).collect()
}

#[test]
fn numbers_go_on_after_everything_was_delivered() {
    let dir = folder();
    let mut spool = open(&dir);
    assert_eq!((1..=3).map(|_| put(&mut spool, Priority::Telemetry, b"x")).collect::<Vec<_>>(), [1, 2, 3]);
    spool.ack(3).unwrap();
    assert_eq!(spool.len(), 0);
    drop(spool);
    // Numbers that were delivered and did not reach the disk before a power failure are not given out again.
    let mut spool = open(&dir);
    assert_eq!(put(&mut spool, Priority::Telemetry, b"x"), 3 + UNSEEN);
    drop(spool);
    let mut spool = open(&dir);
    assert_eq!(waiting(&mut spool), [3 + UNSEEN]);
    assert_eq!(put(&mut spool, Priority::Telemetry, b"x"), 3 + 2 * UNSEEN);
    assert_eq!(waiting(&mut spool), [3 + UNSEEN, 3 + 2 * UNSEEN]);
}

#[test]
fn an_acknowledgement_makes_and_removes_no_file_until_many_have_come() {
    let dir = folder();
    let mut spool = open(&dir);
    let files = || std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    put(&mut spool, Priority::Telemetry, b"x");
    let (first, mut names) = (files(), std::collections::BTreeSet::new());
    for seq in 2..2000 {
        put(&mut spool, Priority::Telemetry, &[7; 100]);
        spool.ack(seq).unwrap();
        assert_eq!(spool.len(), 0);
        assert!(spool.bytes() < spool.limit);
        names.extend(files());
    }
    assert_eq!(first.len(), 3, "{first:?}");
    assert!((4..61).contains(&names.len()), "{}", names.len());
    drop(spool);
    assert!(waiting(&mut open(&dir)).is_empty());
}

#[test]
fn only_what_may_not_be_dropped_is_brought_to_the_disk() {
    let dir = folder();
    let mut spool = open(&dir);
    put(&mut spool, Priority::Telemetry, b"x");
    assert!(spool.take_unsynced().is_none());
    put(&mut spool, Priority::Result, b"x");
    assert!(spool.take_unsynced().is_some());
    assert!(spool.take_unsynced().is_none());
}

#[test]
fn batches_are_bounded_and_in_order() {
    let dir = folder();
    let mut spool = open(&dir);
    for _ in 0..100 {
        put(&mut spool, Priority::Result, &[7; 100]);
    }
    let batch = spool.batch(10, usize::MAX).unwrap();
    assert_eq!(batch.iter().map(|r| r.seq).collect::<Vec<_>>(), (1..=10).collect::<Vec<_>>());
    assert_eq!(spool.batch(100, 300).unwrap().len(), 2);
    assert_eq!(spool.batch(100, 1).unwrap().len(), 1, "one is always given, else the spool would stand still");
    spool.ack(10).unwrap();
    assert_eq!(spool.batch(1, usize::MAX).unwrap()[0].seq, 11);
    spool.ack(u64::MAX).unwrap();
    assert_eq!((spool.len(), spool.acked), (0, 100));
}

#[test]
fn telemetry_goes_first_and_results_stay() {
    let dir = folder();
    let mut spool = open(&dir);
    let (mut kept, mut dropped) = (Vec::new(), 0);
    for i in 0..2000 {
        let priority = if i % 50 == 0 { Priority::Result } else { Priority::Telemetry };
        let done = spool.append(priority, |_| vec![1; 200]).unwrap();
        dropped += done.dropped;
        if priority == Priority::Result {
            kept.push(done.seq);
        }
        assert!(spool.bytes() <= LIMIT, "{} bytes", spool.bytes());
    }
    let left = waiting(&mut spool);
    assert!(dropped > 1000 && left.len() as u64 + dropped == 2000, "{dropped} dropped, {} left", left.len());
    assert!(kept.iter().all(|seq| left.contains(seq)), "a result was dropped");
    assert!(left.is_sorted() && *left.last().unwrap() == 2000);
    let again = waiting(&mut open(&dir));
    assert_eq!(left, again, "what is left survives a restart");
}

#[test]
fn results_alone_are_bounded_too_and_events_find_room_beyond_them() {
    let dir = folder();
    let mut spool = open(&dir);
    let fill = |spool: &mut Spool, priority| (0..10_000).find_map(|_| spool.append(priority, |_| vec![1; 500]).err());
    assert!(matches!(fill(&mut spool, Priority::Result), Some(SpoolError::Full { .. })));
    let results = spool.bytes();
    assert!(results > LIMIT && results <= spool.room(Priority::Result));
    assert!(matches!(fill(&mut spool, Priority::Event), Some(SpoolError::Full { .. })));
    assert!(spool.bytes() > results + LIMIT / 4 && spool.bytes() <= LIMIT * HARD_FACTOR);
    let telemetry = spool.append(Priority::Telemetry, |_| vec![1; 10]).unwrap();
    assert_eq!(telemetry, Appended { seq: 0, dropped: 1 });
    let next = spool.next;
    spool.ack(next - 1).unwrap();
    put(&mut spool, Priority::Result, b"there is room again");
}

/// Refused for good, not again and again: an empty spool has no more room.
#[test]
fn a_report_that_never_fits_is_too_long() {
    let dir = folder();
    let mut spool = open(&dir);
    let long = spool.append(Priority::Result, |_| vec![0; 90 * 1024]).unwrap_err();
    assert!(matches!(long, SpoolError::TooLong { bytes: 92_160, most: 81_920 }), "{long}");
    put(&mut spool, Priority::Result, &[0; 80 * 1024]);
}

/// A tmpfs of half a MiB, in a mount namespace of this thread's own.
fn on_a_small_disk(test: impl FnOnce(&Path) + Send) {
    use nix::mount::{MsFlags, mount};
    let dir = folder();
    let path = dir.path();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let private = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS | nix::sched::CloneFlags::CLONE_FS);
            let none: Option<&str> = None;
            let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            let made = private
                .and_then(|()| mount(none, "/", none, flags, none))
                .and_then(|()| mount(Some("small"), path, Some("tmpfs"), MsFlags::empty(), Some("size=512k")));
            match made {
                Ok(()) => test(path),
                Err(error) => skipped::skipped(&format!("cannot mount a small disk here: {error}")),
            }
        });
    });
}

#[test]
fn a_full_disk_takes_results_into_the_reserve_and_refuses_only_then() {
    on_a_small_disk(|path| {
        let mut spool = Spool::open(path, 16 * LIMIT).unwrap();
        spool.fill_reserve();
        std::fs::write(path.join("of others"), vec![1; 1 << 20]).unwrap_err();
        let telemetry = spool.append(Priority::Telemetry, |_| vec![1; 200]).unwrap_err();
        assert!(reserve::is_full(&telemetry), "{telemetry}");
        let mut stored = Vec::new();
        let refused = loop {
            match spool.append(Priority::Result, |_| vec![1; 200]) {
                Ok(done) => stored.push(done.seq),
                Err(error) => break error,
            }
        };
        assert!(reserve::is_full(&refused) && stored.len() >= 400, "{} stored, then {refused}", stored.len());
        assert_eq!(waiting(&mut spool), stored);
        // Room again: first for the reserve.
        std::fs::remove_file(path.join("of others")).unwrap();
        spool.ack(*stored.last().unwrap()).unwrap();
        std::fs::write(path.join("of others"), vec![1; 1 << 20]).unwrap_err();
        put(&mut spool, Priority::Result, &[1; 200]);
        drop(spool);
        let mut spool = Spool::open(path, 16 * LIMIT).unwrap();
        assert_eq!(waiting(&mut spool).len(), 1, "what was stored on a full disk is there after a restart");
    });
}

/// Nothing but this spool is on the disk, and all of it is smaller than one segment.
#[test]
fn a_full_disk_has_room_again_when_all_is_acknowledged() {
    on_a_small_disk(|path| {
        let mut spool = Spool::open(path, 1024 * LIMIT).unwrap();
        spool.fill_reserve();
        let refused = (0..10_000).find_map(|_| spool.append(Priority::Result, |_| vec![1; 200]).err()).unwrap();
        assert!(reserve::is_full(&refused), "{refused}");
        let last = spool.next - 1;
        spool.ack(last).unwrap();
        std::fs::write(path.join("a decision"), vec![1; 64 * 1024]).unwrap();
        put(&mut spool, Priority::Result, &[1; 200]);
        assert_eq!(waiting(&mut spool), [last + 1]);
    });
}

#[test]
fn acknowledged_reports_make_room_for_the_next_on_a_disk_that_others_fill() {
    on_a_small_disk(|path| {
        let mut spool = Spool::open(path, 1024 * LIMIT).unwrap();
        // Ends where a page of the disk ends: not a byte more finds room.
        let overhead = Record { seq: 1, class: Class::Telemetry, payload: vec![] }.size() + MAGIC.len();
        let last = put(&mut spool, Priority::Telemetry, &vec![1; 4 * 4096 - overhead]);
        std::fs::write(path.join("of others"), vec![1; 1 << 20]).unwrap_err();
        spool.ack(last).unwrap();
        assert_eq!((spool.bytes(), spool.reserve.release(1).unwrap()), (4 * 4096, false));
        let stored: Vec<_> = (0..50).map(|_| put(&mut spool, Priority::Telemetry, &[1; 200])).collect();
        assert_eq!(waiting(&mut spool), stored);
    });
}

#[test]
fn the_reserve_is_what_a_disk_smaller_than_it_has_beside_a_margin() {
    on_a_small_disk(|path| {
        let mut spool = Spool::open(path, 1024 * LIMIT).unwrap();
        spool.fill_reserve();
        let bytes = std::fs::metadata(path.join("reserve")).unwrap().len();
        assert!((128 * 1024..=256 * 1024).contains(&bytes), "{bytes}");
        std::fs::write(path.join("of others"), vec![1; 192 * 1024]).unwrap();
    });
}

#[test]
fn a_restart_on_a_full_disk_has_room_from_the_reserve() {
    on_a_small_disk(|path| {
        let mut spool = Spool::open(path, 16 * LIMIT).unwrap();
        assert_eq!(std::fs::metadata(path.join("reserve")).unwrap().len(), 0, "the start comes first");
        spool.fill_reserve();
        drop(spool);
        std::fs::write(path.join("of others"), vec![1; 1 << 20]).unwrap_err();
        let mut spool = Spool::open(path, 16 * LIMIT).unwrap();
        crate::files::replace(&path.join("instance"), b"1\n").unwrap();
        spool.fill_reserve();
        put(&mut spool, Priority::Event, &[1; 200]);
    });
}

fn report(seq: u64) -> Vec<u8> {
    let body = flexcomm_wire::ReportBody::JobLeft {
        job: flexcomm_domain::JobId::new("j").unwrap(),
        rank: seq as u32,
        run: None,
        connection_lost: false,
    };
    serde_json::to_vec(&flexcomm_wire::Report { seq, at_us: 1, body }).unwrap()
}

fn numbers(spool: &mut Spool) -> Vec<(u64, u64)> {
    let batch = spool.batch(usize::MAX, usize::MAX).unwrap();
    batch.iter().map(|r| (r.seq, serde_json::from_slice::<flexcomm_wire::Report>(&r.payload).unwrap().seq)).collect()
}

#[test]
fn a_lost_state_directory_takes_no_used_numbers() {
    let dir = folder();
    let mut spool = open(&dir);
    for _ in 0..3 {
        spool.append(Priority::Result, report).unwrap();
    }
    // The controller has 10 reports of an earlier life of this node: 1 to 3 are not these.
    spool.registered(10).unwrap();
    assert_eq!(numbers(&mut spool), [(11, 11), (12, 12), (13, 13)]);
    spool.registered(11).unwrap();
    assert_eq!(numbers(&mut spool), [(12, 12), (13, 13)], "a second registration is an acknowledgement");
    assert_eq!(numbers(&mut open(&dir)), [(12, 12), (13, 13)]);
}

/// The disk has less than the controller, and the agent restarts twice before it reaches the controller.
#[test]
fn a_power_failure_and_two_restarts_lose_no_result() {
    let dir = folder();
    let mut spool = open(&dir);
    spool.append(Priority::Result, report).unwrap();
    drop(spool);
    let mut spool = open(&dir);
    let second = spool.append(Priority::Result, report).unwrap().seq;
    drop(spool);
    let mut spool = open(&dir);
    let third = spool.append(Priority::Result, report).unwrap().seq;
    // Delivered in the first life, and gone with the kernel's cache.
    spool.registered(500).unwrap();
    assert_eq!(numbers(&mut spool), [(second, second), (third, third)]);
}

#[test]
fn a_damaged_acknowledgement_is_none() {
    let dir = folder();
    let mut spool = open(&dir);
    put(&mut spool, Priority::Result, b"x");
    spool.ack(1).unwrap();
    drop(spool);
    std::fs::write(dir.path().join("acked"), [0xff; 21]).unwrap();
    assert_eq!(waiting(&mut open(&dir)), [1]);
}

#[test]
fn an_ordinary_restart_keeps_its_numbers() {
    let dir = folder();
    let mut spool = open(&dir);
    for _ in 0..5 {
        spool.append(Priority::Result, report).unwrap();
    }
    let mut spool = {
        drop(spool);
        open(&dir)
    };
    spool.append(Priority::Result, report).unwrap();
    spool.registered(3).unwrap();
    let sixth = 5 + UNSEEN;
    assert_eq!(numbers(&mut spool), [(4, 4), (5, 5), (sixth, sixth)]);
    // A controller that lost its store knows nothing: what it acknowledged is not sent again.
    let mut spool = {
        drop(spool);
        open(&dir)
    };
    spool.registered(0).unwrap();
    assert_eq!(numbers(&mut spool), [(4, 4), (5, 5), (sixth, sixth)]);
}

fn last_segment(dir: &Path) -> PathBuf {
    let mut all: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.extension().is_some_and(|e| e == "seg"));
    all.sort();
    all.pop().unwrap()
}

#[derive(Debug, Clone)]
enum Step {
    Put(Priority, usize),
    Ack(u64),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<bool>(), 0usize..300).prop_map(|(kept, n)| Step::Put(if kept { Priority::Result } else { Priority::Telemetry }, n)),
        2 => (0u64..40).prop_map(Step::Ack),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However it is used and wherever its last segment is cut off: what was written whole and not acknowledged
    /// comes back in order, once, and no number is given twice.
    #[test]
    fn a_crash_at_any_byte_loses_only_the_cut_record(steps in prop::collection::vec(step(), 1..60), cut in any::<prop::sample::Index>()) {
        let dir = folder();
        let mut spool = open(&dir);
        let mut model: Vec<(u64, usize)> = Vec::new();
        let mut highest = 0;
        for step in steps {
            match step {
                Step::Put(priority, n) => {
                    let seq = put(&mut spool, priority, &vec![n as u8; n]);
                    prop_assert!(seq > highest);
                    highest = seq;
                    model.push((seq, n));
                }
                Step::Ack(seq) => {
                    spool.ack(seq).unwrap();
                    model.retain(|(s, _)| *s > seq);
                }
                Step::Restart => spool = { drop(spool); open(&dir) },
            }
            let found: Vec<_> = spool.batch(usize::MAX, usize::MAX).unwrap().iter().map(|r| (r.seq, r.payload.len())).collect();
            prop_assert_eq!(&found, &model);
            prop_assert_eq!(spool.len(), model.len() as u64);
        }
        drop(spool);
        if model.is_empty() {
            return Ok(());
        }
        let path = last_segment(dir.path());
        let bytes = std::fs::read(&path).unwrap();
        let cut = cut.index(bytes.len() + 1);
        std::fs::write(&path, &bytes[..cut]).unwrap();
        let whole: std::collections::BTreeSet<u64> = format::scan(&bytes[..cut]).0.iter().map(|r| r.seq).collect();
        let lost: Vec<u64> = format::scan(&bytes).0.iter().map(|r| r.seq).filter(|s| !whole.contains(s)).collect();
        let expected: Vec<u64> = model.iter().map(|(s, _)| *s).filter(|s| !lost.contains(s)).collect();
        let mut spool = open(&dir);
        prop_assert_eq!(waiting(&mut spool), expected.clone());
        let seq = put(&mut spool, Priority::Result, b"next");
        prop_assert!(expected.iter().all(|s| *s < seq));
        prop_assert_eq!(waiting(&mut open(&dir)).last().copied(), Some(seq));
    }
}
