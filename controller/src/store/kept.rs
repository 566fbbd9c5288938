//! What was read is kept in memory until something that it depends on is written: the loop looks several times a second, and
//! each look at the database is a way to its thread and back.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::Result;

/// Parts of the database that are written apart from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parts(u8);

impl Parts {
    /// Nothing that is kept.
    pub(super) const NONE: Self = Self(0);
    /// The newest estimate of each link.
    pub(super) const LINKS: Self = Self(1);
    /// The newest test of each link.
    pub(super) const TESTS: Self = Self(2);
    /// Steps, and how training goes.
    pub(super) const STEPS: Self = Self(4);
    /// What the loop remembers of a job: the planner's memory, intervals, coefficients.
    pub(super) const MEMORY: Self = Self(8);
    /// Everything else.
    pub(super) const REST: Self = Self(16);
    /// Anything.
    pub(super) const ALL: Self = Self(31);

    const COUNT: usize = 5;

    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn numbers(self) -> impl Iterator<Item = usize> {
        (0..Self::COUNT).filter(move |number| (self.0 >> number) & 1 == 1)
    }
}

/// How often each part was written.
#[derive(Debug, Default)]
pub(super) struct Written {
    times: [AtomicU64; Parts::COUNT],
    /// A transaction ended without saying whether it was committed: nothing is kept until the next one is.
    unsure: AtomicBool,
}

impl Written {
    /// Only grows, with every write of one of the parts; none while it is not known what is stored.
    pub(super) fn stamp(&self, parts: Parts) -> Option<u64> {
        let sum = parts.numbers().map(|number| self.times[number].load(Ordering::SeqCst)).sum();
        (!self.unsure.load(Ordering::SeqCst)).then_some(sum)
    }

    /// These parts were written. While this runs, no other transaction commits.
    pub(super) fn committed(&self, parts: Parts) {
        let unsure = self.unsure.load(Ordering::SeqCst);
        let parts = if unsure { Parts::ALL } else { parts };
        parts.numbers().for_each(|number| _ = self.times[number].fetch_add(1, Ordering::SeqCst));
        self.unsure.store(false, Ordering::SeqCst);
    }

    /// It is not known whether something was written.
    pub(super) fn is_unsure(&self) {
        self.unsure.store(true, Ordering::SeqCst);
    }
}

/// Entries that are kept at most: jobs come and go, and whoever asks chooses limits.
const MOST: usize = 256;

/// What was read of some parts, by what was asked for.
#[derive(Debug)]
pub(super) struct Kept<K, V> {
    parts: Parts,
    entries: Mutex<Entries<K, V>>,
}

#[derive(Debug)]
struct Entries<K, V> {
    /// [`Written::stamp`] when they were read.
    stamp: u64,
    known: BTreeMap<K, V>,
}

impl<K: Ord, V: Clone> Kept<K, V> {
    /// What depends on these parts alone.
    pub(super) fn of(parts: Parts) -> Self {
        Self { parts, entries: Mutex::new(Entries { stamp: 0, known: BTreeMap::new() }) }
    }

    /// What is kept, or else read.
    pub(super) async fn get(&self, written: &Written, key: K, read: impl Future<Output = Result<V>>) -> Result<V> {
        let stamp = written.stamp(self.parts);
        if let Some(stamp) = stamp {
            let entries = self.entries.lock();
            if let Some(found) = entries.known.get(&key).filter(|_| entries.stamp == stamp) {
                return Ok(found.clone());
            }
        }
        let value = read.await?;
        // What was written while it was read may be in it or not.
        if let Some(stamp) = stamp.filter(|stamp| written.stamp(self.parts) == Some(*stamp)) {
            self.put(stamp, key, value.clone());
        }
        Ok(value)
    }

    fn put(&self, stamp: u64, key: K, value: V) {
        let mut entries = self.entries.lock();
        if entries.stamp < stamp || entries.known.len() >= MOST {
            entries.known.clear();
        }
        if entries.stamp <= stamp {
            entries.stamp = stamp;
            entries.known.insert(key, value);
        }
    }

    /// Takes over what a transaction has just written, where what it changes is kept. `before`: the stamp without it.
    pub(super) fn change(&self, written: &Written, before: Option<u64>, change: impl FnOnce(&mut BTreeMap<K, V>)) {
        let mut entries = self.entries.lock();
        if let Some(after) = written.stamp(self.parts).filter(|_| Some(entries.stamp) == before) {
            change(&mut entries.known);
            entries.stamp = after;
        }
    }

    pub(super) fn parts(&self) -> Parts {
        self.parts
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::scratch;
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[tokio::test]
    async fn what_is_kept_is_read_again_once_it_was_written() {
        let (written, kept) = (Written::default(), Kept::of(Parts::LINKS.and(Parts::REST)));
        let reads = AtomicU32::new(0);
        let read = async |during: &dyn Fn()| {
            let read = async {
                during();
                Ok(reads.fetch_add(1, Ordering::SeqCst))
            };
            kept.get(&written, "key", read).await.unwrap()
        };
        let nothing = || {};
        assert_eq!([read(&nothing).await, read(&nothing).await], [0, 0]);
        written.committed(Parts::STEPS.and(Parts::TESTS));
        assert_eq!(read(&nothing).await, 0);
        written.committed(Parts::LINKS);
        assert_eq!([read(&nothing).await, read(&nothing).await], [1, 1]);
        // Written while it was read.
        written.committed(Parts::ALL);
        assert_eq!([read(&|| written.committed(Parts::REST)).await, read(&nothing).await], [2, 3]);
        // Not known whether anything was written, until something was.
        written.is_unsure();
        assert_eq!([read(&nothing).await, read(&nothing).await], [4, 5]);
        written.committed(Parts::NONE);
        assert_eq!([read(&nothing).await, read(&nothing).await], [6, 6]);
        // What is written is taken over where nothing else was written since.
        let before = written.stamp(kept.parts());
        written.committed(Parts::LINKS);
        kept.change(&written, before, |known| known.values_mut().for_each(|value| *value = 60));
        assert_eq!(read(&nothing).await, 60);
        written.committed(Parts::REST);
        written.committed(Parts::LINKS);
        kept.change(&written, before, |known| known.values_mut().for_each(|value| *value = 61));
        assert_eq!(read(&nothing).await, 7);
    }

    #[tokio::test]
    async fn a_transaction_that_was_dropped_may_have_been_committed() {
        let (store, _dir) = scratch().await;
        let stamp = || store.write.written().stamp(Parts::ALL);
        let before = stamp().unwrap();
        drop(store.write.begin("write").await.unwrap());
        assert_eq!(stamp(), None);
        store.raise("x", 1, 0).await.unwrap();
        assert!(stamp().unwrap() > before);
    }
}
