//! A cache of what was read from the database: the loop looks several times a second, and each read is a way to the database's
//! thread and back.
//!
//! A cached read is never stale. No other process writes the file ([`super::lock`]), and this one writes through one connection
//! ([`super::write`]; its other one, which looks whether a restart would help, writes a counter that no cached read is of), whose
//! transactions name the tables that they write at most. [`WriteCounters`] counts each commit before the
//! next transaction can begin and before whoever waits for the commit goes on. A value is returned only while the counters of all
//! its tables are what they were before it was read, and is not kept where they moved meanwhile. A transaction that was rolled back
//! wrote nothing and counts nothing. After one whose outcome is not known (dropped, cancelled, panicked, COMMIT or ROLLBACK failed)
//! every read goes to the database until the next commit, which counts as a write of all tables.
//!
//! Damage on disk is no write: a row that is damaged after it was read is served as it was read, which is intact, until one of its
//! tables is written or the controller restarts. The read after that finds the damage (`checksum.rs`).

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::Result;
use crate::limits::MAX_JOBS;

/// A set of tables, in groups that are written together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tables(u8);

impl Tables {
    /// None that a cached read is of.
    pub(super) const NONE: Self = Self(0);
    /// The newest estimate of each link.
    pub(super) const LINKS: Self = Self(1);
    /// The newest test of each link.
    pub(super) const TESTS: Self = Self(2);
    /// Steps, loss and accuracy.
    pub(super) const STEPS: Self = Self(4);
    /// What the loop stores of a job between decisions: the planner's memory, intervals.
    pub(super) const MEMORY: Self = Self(8);
    /// All others.
    pub(super) const REST: Self = Self(16);
    /// All of them.
    pub(super) const ALL: Self = Self(31);

    const GROUPS: usize = 5;

    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn groups(self) -> impl Iterator<Item = usize> {
        (0..Self::GROUPS).filter(move |group| (self.0 >> group) & 1 == 1)
    }
}

/// How often each group of tables was written.
#[derive(Debug, Default)]
pub(super) struct WriteCounters {
    commits: [AtomicU64; Tables::GROUPS],
    /// Whether a transaction ended without it being known whether it was committed, and none was committed since.
    unknown: AtomicBool,
}

impl WriteCounters {
    /// A number that grows with every write of one of the tables; none while it is not known what is stored.
    pub(super) fn stamp(&self, tables: Tables) -> Option<u64> {
        let sum = tables.groups().map(|group| self.commits[group].load(Ordering::SeqCst)).sum();
        (!self.unknown.load(Ordering::SeqCst)).then_some(sum)
    }

    /// Counts a commit of these tables. To be called before another transaction can begin.
    pub(super) fn committed(&self, tables: Tables) {
        let unknown = self.unknown.load(Ordering::SeqCst);
        let tables = if unknown { Tables::ALL } else { tables };
        tables.groups().for_each(|group| _ = self.commits[group].fetch_add(1, Ordering::SeqCst));
        self.unknown.store(false, Ordering::SeqCst);
    }

    /// A transaction ended, and it is not known whether it was committed.
    pub(super) fn outcome_unknown(&self) {
        self.unknown.store(true, Ordering::SeqCst);
    }
}

/// Values of one cache at most. Each running job has up to two in each: trials are read by two limits, all else by job. Clients that
/// read of ended jobs or by other limits can fill the rest.
const CAPACITY: usize = 2 * MAX_JOBS;

/// One read's results by its arguments. Values are cloned at every read: what can be large is behind an `Arc`.
#[derive(Debug)]
pub(super) struct ReadCache<K, V> {
    tables: Tables,
    entries: Mutex<Entries<K, V>>,
}

#[derive(Debug)]
struct Entries<K, V> {
    /// [`WriteCounters::stamp`] when they were read.
    stamp: u64,
    values: BTreeMap<K, V>,
}

impl<K: Ord, V: Clone> ReadCache<K, V> {
    /// Of a read of no other tables than these.
    pub(super) fn of(tables: Tables) -> Self {
        Self { tables, entries: Mutex::new(Entries { stamp: 0, values: BTreeMap::new() }) }
    }

    /// The cached value, or else the one that `read` reads.
    pub(super) async fn get(
        &self,
        counters: &WriteCounters,
        key: K,
        read: impl Future<Output = Result<V>>,
    ) -> Result<V> {
        let stamp = counters.stamp(self.tables);
        if let Some(stamp) = stamp {
            let entries = self.entries.lock();
            if let Some(found) = entries.values.get(&key).filter(|_| entries.stamp == stamp) {
                return Ok(found.clone());
            }
        }
        let value = read.await?;
        // What was written while it was read may be in it or not.
        if let Some(stamp) = stamp.filter(|stamp| counters.stamp(self.tables) == Some(*stamp)) {
            self.put(stamp, key, value.clone());
        }
        Ok(value)
    }

    fn put(&self, stamp: u64, key: K, value: V) {
        let mut entries = self.entries.lock();
        if entries.stamp < stamp {
            entries.values.clear();
        }
        if entries.stamp <= stamp {
            entries.stamp = stamp;
            // The first by key, not the oldest: of more keys than there is room for, read one after the other again and again,
            // most are then still there.
            if entries.values.len() >= CAPACITY && !entries.values.contains_key(&key) {
                entries.values.pop_first();
            }
            entries.values.insert(key, value);
        }
    }

    /// Takes over what a transaction has just written, where the value that it changes is cached. `before`: the stamp without it.
    pub(super) fn change(
        &self,
        counters: &WriteCounters,
        before: Option<u64>,
        change: impl FnOnce(&mut BTreeMap<K, V>),
    ) {
        let mut entries = self.entries.lock();
        if let Some(after) = counters.stamp(self.tables).filter(|_| Some(entries.stamp) == before) {
            change(&mut entries.values);
            entries.stamp = after;
        }
    }

    pub(super) fn tables(&self) -> Tables {
        self.tables
    }
}

#[cfg(test)]
mod tests {
    use super::super::statement::sql;
    use super::super::tests::{alone, begun, register, scratch};
    use super::super::{Deletion, Incoming, Ingest, JobRow, NewDecision, NewTrial, Registration, StoreError};
    use super::*;
    use crate::limits::{MAX_NODES, PROFILE_TRIALS};
    use flexcomm_domain::{Decision, NodeName, Strategy, Timestamp, Version};
    use flexcomm_wire::{LinkReport, MAX_SEQ_STEP, ReportBody};
    use futures_util::FutureExt;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, AtomicUsize};

    #[tokio::test]
    async fn a_cached_read_is_read_again_once_it_was_written() {
        let (counters, cache) = (WriteCounters::default(), ReadCache::of(Tables::LINKS.and(Tables::REST)));
        let reads = AtomicU32::new(0);
        let read = async |during: &dyn Fn()| {
            let read = async {
                during();
                Ok(reads.fetch_add(1, Ordering::SeqCst))
            };
            cache.get(&counters, "key", read).await.unwrap()
        };
        let nothing = || {};
        assert_eq!([read(&nothing).await, read(&nothing).await], [0, 0]);
        counters.committed(Tables::STEPS.and(Tables::TESTS));
        assert_eq!(read(&nothing).await, 0);
        counters.committed(Tables::LINKS);
        assert_eq!([read(&nothing).await, read(&nothing).await], [1, 1]);
        // Written while it was read.
        counters.committed(Tables::ALL);
        assert_eq!([read(&|| counters.committed(Tables::REST)).await, read(&nothing).await], [2, 3]);
        // Not known whether anything was written, until something was.
        counters.outcome_unknown();
        assert_eq!([read(&nothing).await, read(&nothing).await], [4, 5]);
        counters.committed(Tables::NONE);
        assert_eq!([read(&nothing).await, read(&nothing).await], [6, 6]);
        // What is written is taken over where nothing else was written since.
        let before = counters.stamp(cache.tables());
        counters.committed(Tables::LINKS);
        cache.change(&counters, before, |values| values.values_mut().for_each(|value| *value = 60));
        assert_eq!(read(&nothing).await, 60);
        counters.committed(Tables::REST);
        counters.committed(Tables::LINKS);
        cache.change(&counters, before, |values| values.values_mut().for_each(|value| *value = 61));
        assert_eq!(read(&nothing).await, 7);
    }

    #[tokio::test]
    async fn a_full_cache_loses_one_value_for_each_new_key() {
        let (counters, cache) = (WriteCounters::default(), ReadCache::of(Tables::REST));
        let reads = AtomicUsize::new(0);
        // So many of these keys are read from the database.
        let misses = async |keys: std::ops::Range<usize>| {
            let before = reads.load(Ordering::SeqCst);
            for key in keys {
                let read = async {
                    reads.fetch_add(1, Ordering::SeqCst);
                    Ok(key)
                };
                assert_eq!(cache.get(&counters, key, read).await.unwrap(), key);
            }
            reads.load(Ordering::SeqCst) - before
        };
        assert_eq!(misses(0..CAPACITY).await, CAPACITY);
        assert_eq!(misses(0..CAPACITY).await, 0);
        // As when two read the same at once.
        cache.put(counters.stamp(Tables::REST).unwrap(), 7, 7);
        assert_eq!(misses(0..CAPACITY).await, 0, "a key that is there takes no other's room");
        assert_eq!(misses(CAPACITY..CAPACITY + 1).await, 1);
        assert_eq!(misses(1..CAPACITY + 1).await, 0, "one value makes room");
        // More keys than there is room for, again and again.
        misses(0..CAPACITY + 50).await;
        assert!(misses(0..CAPACITY + 50).await <= 100);
    }

    /// What the loop reads of each of many jobs is there in its next pass.
    #[tokio::test]
    async fn each_running_job_has_room_for_what_the_loop_reads() {
        let (store, _dir) = scratch().await;
        let text = format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {MAX_JOBS})
             INSERT INTO jobs (job, world, gradient_values, backend, created_us) SELECT 'j' || i, 1, 1, 'x', i FROM n"
        );
        sqlx::query(sqlx::AssertSqlSafe(text)).execute(&mut *store.write.connection().await).await.unwrap();
        store.raise("x", 1, 0).await.unwrap();
        let pass = async || {
            let jobs = store.running_jobs().await.unwrap();
            assert_eq!(jobs.len(), MAX_JOBS);
            let mut read = Vec::new();
            for row in jobs.iter() {
                let trials =
                    [store.trials(&row.job, 1).await.unwrap(), store.trials(&row.job, PROFILE_TRIALS).await.unwrap()];
                read.push((store.ranks(&row.job).await.unwrap(), store.step_spans(&row.job).await.unwrap(), trials));
            }
            (jobs, read)
        };
        let (first, second) = (pass().await, pass().await);
        assert!(Arc::ptr_eq(&first.0, &second.0));
        for (a, b) in first.1.iter().zip(&second.1) {
            assert!(Arc::ptr_eq(&a.0, &b.0) && Arc::ptr_eq(&a.1, &b.1));
            assert!(a.2.iter().zip(&b.2).all(|(a, b)| Arc::ptr_eq(a, b)));
        }
        // By a limit that only a client asks for nothing is kept.
        let of_client = async || store.trials(&first.0[0].job, PROFILE_TRIALS + 1).await.unwrap();
        assert!(!Arc::ptr_eq(&of_client().await, &of_client().await));
    }

    /// Whoever is refused, again and again, makes nothing slower: what was read stays valid, and the connection open.
    #[tokio::test]
    async fn what_is_refused_wrote_nothing() {
        let (store, _dir) = scratch().await;
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        let run = begun(&store, Timestamp(0)).await;
        for name in ["a", "b"] {
            store.register(&register(name), Timestamp(0)).await.unwrap();
        }
        let others = format!(
            "WITH RECURSIVE n(i) AS (SELECT 3 UNION ALL SELECT i + 1 FROM n WHERE i < {MAX_NODES})
             INSERT INTO nodes (node, instance, addr, echo_port, throughput_port, may_shape, software, registered_us)
             SELECT 'n' || i, 1, '10.0.0.1', 1, 2, 0, '', 0 FROM n"
        );
        let mut connection = store.write.connection().await;
        sqlx::query(sqlx::AssertSqlSafe(others)).execute(&mut *connection).await.unwrap();
        // It is gone with its connection.
        sqlx::query("CREATE TEMP TABLE here (x)").execute(&mut *connection).await.unwrap();
        drop(connection);
        let decision = Decision {
            job: run.job.clone(),
            version: Version(1),
            parent: Version(0),
            plan: flexcomm_domain::Plan::DENSE_RING,
            decided_at: Timestamp(1),
            reason: "r".into(),
        };
        let decision = NewDecision { decision: &decision, seed: 0, report: "{}", memory: "{}", snapshot: "{}" };
        store.put_decision(&run, &decision).await.unwrap();
        let trial = NewTrial { candidates: &[Strategy::DENSE_RING], iterations: 1, budget_ms: 1, why: "w" };
        store.ask_trial(&run, &trial, Timestamp(1)).await.unwrap();

        let (links, jobs) = (store.links().await.unwrap(), store.running_jobs().await.unwrap());
        let before = store.write.counters().stamp(Tables::ALL);
        assert!(before.is_some());
        let link = ReportBody::Link(LinkReport {
            peer: node("b"),
            latency_us: 1.0,
            latency_confidence: 1.0,
            latency_age_ms: 1.0,
            jitter_us: 0.0,
            loss_out: 0.0,
            loss_back: 0.0,
            by_icmp: false,
        });
        let hello = ReportBody::JobSeen(alone("other".parse().unwrap()));
        // One that stores something before it is refused.
        let jumps = [(1, link), (2, hello.clone()), (3 + MAX_SEQ_STEP, hello)];
        let jumps: Vec<Incoming> = jumps.map(|(seq, body)| Incoming { seq, body: Ok(body) }).into();
        let replaced = JobRow { created: Timestamp(9), ..run.clone() };
        for _ in 0..3 {
            let stranger = store.ingest((&node("a"), 2), vec![], &[], Timestamp(2)).await.unwrap();
            assert_eq!(stranger, Ingest::Stranger);
            let jump = store.ingest((&node("a"), 1), jumps.clone(), &[], Timestamp(2)).await.unwrap();
            assert!(matches!(jump, Ingest::Jump { from: 2, .. }), "{jump:?}");
            let error = store.put_planner_memory(&replaced, "{}").await.unwrap_err();
            assert!(matches!(error, StoreError::Replaced { .. }), "{error}");
            let error = store.put_decision(&run, &decision).await.unwrap_err();
            assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
            assert_eq!(store.ask_trial(&run, &trial, Timestamp(2)).await.unwrap(), None);
            assert!(!store.end_trial(&run.job, 7, None, Timestamp(2)).await.unwrap());
            assert_eq!(store.register(&register("c"), Timestamp(2)).await.unwrap(), Registration::Full);
            assert_eq!(store.delete_job(&"k".parse().unwrap(), &[]).await.unwrap(), Deletion::Unknown);
        }
        assert_eq!(store.write.counters().stamp(Tables::ALL), before);
        assert!(Arc::ptr_eq(&store.links().await.unwrap(), &links));
        assert!(Arc::ptr_eq(&store.running_jobs().await.unwrap(), &jobs));
        assert!(store.write.commits(), "no write failed");
        assert_eq!(store.nodes().await.unwrap().iter().find(|row| row.node == node("a")).unwrap().acked_seq, 0);
        assert_eq!((links.len(), store.jobs().await.unwrap().len()), (0, 1));
        sqlx::query("SELECT * FROM here").execute(&mut *store.write.connection().await).await.unwrap();
    }

    /// Dropped, cancelled, panicked, or its ROLLBACK failed: what was read before counts for nothing until the next commit.
    #[tokio::test]
    async fn a_transaction_that_ended_otherwise_may_have_been_committed() {
        let (store, _dir) = scratch().await;
        let store = Arc::new(store);
        let stamp = || store.write.counters().stamp(Tables::ALL);
        let begin = async || store.write.begin("write").await.unwrap();
        for how in ["dropped", "cancelled", "rolled back badly", "panicked"] {
            let (before, links) = (stamp().unwrap(), store.links().await.unwrap());
            match how {
                "dropped" => drop(begin().await),
                "cancelled" => {
                    let text = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)
                        SELECT count(*) FROM n; COMMIT";
                    let slowly = begin().await.commit_by(sql!("commit", text), || ());
                    assert!(slowly.now_or_never().is_none());
                }
                "panicked" => {
                    let store = Arc::clone(&store);
                    let panics = async move {
                        let _tx = store.write.begin("write").await.unwrap();
                        panic!("on purpose");
                    };
                    assert!(tokio::spawn(panics).await.is_err());
                }
                _ => {
                    let mut tx = begin().await;
                    sqlx::query("ROLLBACK").execute(&mut *tx).await.unwrap();
                    tx.roll_back().await;
                }
            }
            assert_eq!(stamp(), None, "{how}");
            assert!(!Arc::ptr_eq(&store.links().await.unwrap(), &links), "{how}");
            store.raise("x", 1, 0).await.unwrap();
            assert!(stamp().unwrap() > before, "{how}");
        }
    }
}
