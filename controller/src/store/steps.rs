//! The window of a job's newest steps, and loss and accuracy over all of them.

use flexcomm_domain::{JobId, Plan, Timestamp, Version};
use flexcomm_planner::LOSS_POINTS;
use flexcomm_wire::{StepRecord, StepsReport};
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::statement::{row, sql};
use super::{Result, Store, StoreError, json, stored};
use crate::limits::{MEASURED_STEPS, STEP_WINDOW};
use crate::measure::{self, Doubted, RecentSteps, StepSpan};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(super) const PROGRESS_POINTS: &str =
    "SELECT step, received_us, loss, accuracy FROM progress WHERE job = $1 ORDER BY step DESC LIMIT $2";

/// The newest steps of a job with a loss or an accuracy, oldest first.
pub type LossPoints = Arc<Vec<(u64, Option<f64>)>>;

/// The newest losses of a job as one row: hundreds of rows take longer to hand over than to read.
const LOSSES: &str = "SELECT json_group_array(json_array(step, loss)) FROM
     (SELECT step, loss FROM progress WHERE job = $1 ORDER BY step DESC LIMIT $2)";

/// Of every rank that has announced itself: its oldest and newest step, and when they arrived.
pub(super) const STEP_SPANS: &str = "SELECT rank,
        oldest, (SELECT received_us FROM steps WHERE job = $1 AND rank = spans.rank AND step = oldest) AS began,
        newest, (SELECT received_us FROM steps WHERE job = $1 AND rank = spans.rank AND step = newest) AS ended
     FROM (SELECT rank, (SELECT min(step) FROM steps WHERE job = $1 AND rank = ranks.rank) AS oldest,
        (SELECT max(step) FROM steps WHERE job = $1 AND rank = ranks.rank) AS newest
        FROM ranks WHERE job = $1) AS spans WHERE oldest IS NOT NULL";

/// Of every rank: the step up to which what is known of it still holds (`$4`: rank, newest step, when that arrived), and the
/// steps after it. Steps are only ever replaced together with all later ones of their rank, so those before one that is
/// still the same are the same, too.
///
/// One row of JSON: each row of a result crosses from SQLite's thread to this one by itself, which costs far more
/// than its content when hundreds of steps are read.
///
/// Made once each and in this order, which SQLite does not choose by itself: it would look at each known step of each rank
/// for every row of the window.
pub(super) const STEPS: &str = "WITH newest AS MATERIALIZED
        (SELECT value ->> 0 AS rank, value ->> 1 AS step, value ->> 2 AS received FROM json_each($4)),
    held AS MATERIALIZED (SELECT rank, coalesce((SELECT step FROM newest CROSS JOIN steps USING (rank, step)
            WHERE job = $1 AND newest.rank = ranks.rank AND received_us = received), $2 - 1) AS known
        FROM ranks WHERE job = $1)
    SELECT json_group_array(json_array(rank, known,
        (SELECT json_group_array(json_array(step, rank, version, strategy, received_us, compute_us, comp_us, sync_us,
            wait_us, step_us, gain, energy, bytes_sent, json(bucket_energies)))
         FROM steps WHERE job = $1 AND rank = held.rank AND step > held.known AND step < $3)))
    FROM held";

/// Steps read back: what is measured over two decisions, and what a few seconds of telemetry bring at once.
const LOOK_BACK: u64 = 4 * MEASURED_STEPS as u64;

/// Jobs whose windows are held in memory: more than run on most clusters at once, and a few hundred kB each at 16 ranks.
const MAX_WINDOWS: usize = 64;

/// Steps of a job that were read: the next look reads what is new. By step and rank.
#[derive(Debug)]
pub(super) struct Window {
    /// Nothing is missing from here on.
    from: u64,
    rows: BTreeMap<(u64, u32), StepRow>,
}

/// What [`STEPS`] reads of a rank: the rank, up to which step what is known of it holds (-1: not at all), what comes after.
type News = (u32, i64, Vec<StepRow>);

impl Window {
    fn new(from: u64) -> Self {
        Self { from, rows: BTreeMap::new() }
    }

    /// For [`STEPS`].
    fn newest(&self) -> Vec<(u32, u64, Timestamp)> {
        let newest: BTreeMap<u32, _> = self.rows.values().map(|row| (row.rank, (row.step, row.received))).collect();
        newest.into_iter().map(|(rank, (step, received))| (rank, step, received)).collect()
    }

    fn take(&mut self, from: u64, news: Vec<News>) {
        let holds: BTreeMap<u32, i64> = news.iter().map(|(rank, known, _)| (*rank, *known)).collect();
        let held = |step: u64, rank: u32| holds.get(&rank).is_some_and(|known| i128::from(step) <= i128::from(*known));
        self.rows.retain(|(step, rank), _| held(*step, *rank));
        self.rows.extend(news.into_iter().flat_map(|(_, _, rows)| rows).map(|row| ((row.step, row.rank), row)));
        self.rows = self.rows.split_off(&(from, 0));
        self.from = from;
    }
}

/// Stores a report: forgets what is of an earlier run of the job, stores, forgets what fell out of the window. All in one
/// query, since each is a way to the database's thread and back.
pub(super) const PUT_STEPS: [&str; 3] = [
    "DELETE FROM steps WHERE job = $1 AND rank = $2 AND step >= $7",
    "INSERT OR REPLACE INTO steps (job, rank, version, strategy, received_us, step, compute_us, comp_us, sync_us,
        wait_us, step_us, bytes_sent, gain, energy, bucket_energies)
     SELECT $1, $2, $3, $4, $5, value ->> 'step', value ->> 'compute_us', value ->> 'comp_us', value ->> 'sync_us',
        value ->> 'wait_us', value ->> 'step_us', value ->> 'bytes_sent', value ->> 'gain', value ->> 'energy',
        value -> 'bucket_energies'
     FROM json_each($6)",
    "DELETE FROM steps WHERE job = $1 AND rank = $2
        AND step <= (SELECT max(step) FROM steps WHERE job = $1 AND rank = $2) - $8",
];

/// One step on one rank: the fields in the order of the columns of [`STEPS`].
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
pub struct StepRow {
    /// Its number.
    pub step: u64,
    /// Which rank.
    pub rank: u32,
    /// The decision in force.
    pub version: Version,
    /// What ran.
    pub ran: Plan,
    /// When the report arrived.
    pub received: Timestamp,
    /// Forward and backward.
    pub compute_us: f64,
    /// Compress and decompress.
    pub comp_us: f64,
    /// From entry into the collective to its end.
    pub sync_us: f64,
    /// The part of it before the last rank entered, where known.
    pub wait_us: Option<f64>,
    /// All of it.
    pub step_us: f64,
    /// Energy kept, as a share.
    pub gain: f64,
    /// Of the compensated gradient, where the rank tells it.
    pub energy: Option<f64>,
    /// By this rank.
    pub bytes_sent: u64,
    /// ‖g_b‖² before error feedback by bucket, at some of the steps.
    pub bucket_energies: Option<Vec<f64>>,
}

/// How training went at a step.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ProgressRow {
    /// The step.
    pub step: u64,
    /// When the report arrived.
    pub at_us: u64,
    /// Training loss.
    pub loss: Option<f64>,
    /// Held-out accuracy.
    pub accuracy: Option<f64>,
}

/// The steps that are known of a rank.
struct RankSpan {
    rank: u32,
    oldest: u64,
    began: Timestamp,
    newest: u64,
    ended: Timestamp,
}

row!(RankSpan { rank, oldest, began, newest, ended });
row!(ProgressRow { step, at_us: received_us, loss, accuracy });

impl Store {
    /// Loss and accuracy over steps, the newest `limit` points, newest last.
    pub async fn progress(&self, job: &JobId, limit: u32) -> Result<Vec<ProgressRow>> {
        let mut rows = sql!("read a job's progress", PROGRESS_POINTS, job, limit).fetch_all(&self.read).await?;
        rows.reverse();
        Ok(rows)
    }

    /// The newest losses by step, newest last.
    pub async fn losses(&self, job: &JobId) -> Result<LossPoints> {
        let read = async {
            let operation = "read a job's losses";
            let text: String = sql!(operation, LOSSES, job, LOSS_POINTS).fetch_one(&self.read).await?;
            let mut losses: Vec<(u64, Option<f64>)> = stored(operation, "row", serde_json::from_str(&text))?;
            losses.sort_unstable_by_key(|(step, _)| *step);
            Ok(Arc::new(losses))
        };
        self.reads.losses.get(self.write.counters(), job.clone(), read).await
    }

    /// The oldest and the newest step of each rank that has reported any.
    pub async fn step_spans(&self, job: &JobId) -> Result<Arc<BTreeMap<u32, StepSpan>>> {
        let read = async {
            let query = sql!("read which steps of a job are known", STEP_SPANS, job);
            let rows: Vec<RankSpan> = query.fetch_all(&self.read).await?;
            let span = |r: RankSpan| (r.rank, StepSpan { oldest: (r.oldest, r.began), newest: (r.newest, r.ended) });
            Ok::<_, StoreError>(Arc::new(rows.into_iter().map(span).collect()))
        };
        self.reads.step_spans.get(self.write.counters(), job.clone(), read).await
    }

    /// The newest steps of a job, as far as those ranks are concerned that are expected to report. Worked out once for what is stored:
    /// of most looks at a job whose steps take seconds nothing is new.
    pub async fn recent_steps(&self, job: &JobId, expected: &BTreeSet<u32>) -> Result<Arc<RecentSteps>> {
        let key = (job.clone(), expected.clone());
        let read = async { Ok(Arc::new(self.read_recent_steps(job, expected).await?)) };
        self.reads.recent_steps.get(self.write.counters(), key, read).await
    }

    async fn read_recent_steps(&self, job: &JobId, expected: &BTreeSet<u32>) -> Result<RecentSteps> {
        let spans = self.step_spans(job).await?;
        let spans: BTreeMap<u32, StepSpan> =
            spans.iter().filter(|(rank, _)| expected.contains(rank)).map(|(rank, span)| (*rank, *span)).collect();
        let newest = measure::job_step(&spans);
        let mut doubted = measure::astray(&spans, expected);
        let counts = |doubted: &[Doubted], rank: u32| doubted.iter().all(|d| d.rank != rank);
        // Up to where all of them have reported: reports come one after the other.
        let up_to = spans.iter().filter(|(rank, _)| counts(&doubted, **rank)).map(|(_, span)| span.newest.0).min();
        let Some(step) = up_to else { return Ok(RecentSteps { newest, whole: Vec::new(), doubted }) };
        let mut rows = self.steps(job, (step + 1).saturating_sub(LOOK_BACK), LOOK_BACK).await?;
        rows.retain(|row| counts(&doubted, row.rank));
        doubted.extend(measure::doubted(&rows, &spans));
        rows.retain(|row| counts(&doubted, row.rank));
        let expected = expected.iter().copied().filter(|rank| counts(&doubted, *rank)).collect();
        Ok(RecentSteps { newest, whole: measure::whole_steps(&rows, &expected), doubted })
    }

    /// Steps of a job from `from` on, ascending by step and rank, at most `steps` different ones.
    pub(super) async fn steps(&self, job: &JobId, from: u64, steps: u64) -> Result<Vec<StepRow>> {
        let to = from.saturating_add(steps);
        let known = self.windows.lock().remove(job).filter(|window| window.from <= from);
        let mut window = known.unwrap_or_else(|| Window::new(from));
        let newest = json("read steps", &window.newest())?;
        let query = sql!("read steps", STEPS, job, from, to, newest);
        let news: String = query.fetch_one(&self.read).await?;
        window.take(from, stored("read steps", "row", serde_json::from_str(&news))?);
        let rows = window.rows.range(..(to, 0)).map(|(_, row)| row.clone()).collect();
        let mut windows = self.windows.lock();
        windows.insert(job.clone(), window);
        if windows.len() > MAX_WINDOWS
            && let Some(other) = windows.keys().find(|other| *other != job).cloned()
        {
            windows.remove(&other);
        }
        Ok(rows)
    }
}

/// Stores steps and forgets those that fell out of the window.
pub(super) async fn put_steps(db: &mut SqliteConnection, r: &StepsReport, ran: &Plan, now: Timestamp) -> Result<()> {
    let operation = "store steps";
    // Steps only go forward: what this rank reported beyond them is of an earlier run of the job.
    let first = r.steps.first().map_or(u64::MAX >> 1, |s| s.step);
    let (text, records) = (AssertSqlSafe(PUT_STEPS.join("; ")), json(operation, &r.steps)?);
    let query = sql!(operation, text, r.job, r.rank, r.version, ran, now, records, first, STEP_WINDOW);
    query.execute(&mut *db).await?;
    put_progress(db, r, now).await
}

/// Stores the newest loss of a report, and every accuracy: it is measured seldom. Most reports have neither.
async fn put_progress(db: &mut SqliteConnection, r: &StepsReport, now: Timestamp) -> Result<()> {
    let operation = "store a job's progress";
    let last = r.steps.iter().rposition(|s| s.loss.is_some());
    let points = r.steps.iter().enumerate().filter(|(i, s)| Some(*i) == last || s.accuracy.is_some());
    for (_, s) in points {
        let text = "INSERT INTO progress (job, step, received_us, loss, accuracy) VALUES ($1, $2, $3, $4, $5)
            ON CONFLICT (job, step) DO UPDATE SET received_us = excluded.received_us,
                loss = coalesce(excluded.loss, loss), accuracy = coalesce(excluded.accuracy, accuracy)";
        sql!(operation, text, r.job, s.step, now, s.loss, s.accuracy).execute(&mut *db).await?;
    }
    let newest = |f: fn(&StepRecord) -> Option<f64>| r.steps.iter().rev().find_map(f);
    let (loss, accuracy) = (newest(|s| s.loss), newest(|s| s.accuracy));
    if loss.is_none() && accuracy.is_none() {
        return Ok(());
    }
    let text = "UPDATE jobs SET loss = coalesce($2, loss), accuracy = coalesce($3, accuracy) WHERE job = $1";
    sql!(operation, text, r.job, loss, accuracy).execute(db).await
}

#[cfg(test)]
mod tests {
    use super::super::jobs;
    use super::super::tests::{alone, begun, scratch};
    use super::*;

    /// What is read on top of what was read before is what is stored, whatever was written in between.
    #[tokio::test]
    async fn steps_that_were_read_before_are_those_that_are_stored() {
        let (store, _dir) = scratch().await;
        let job = begun(&store, Timestamp(0)).await.job;
        let put = async |rank: u32, (from, to): (u64, u64), now: u64| {
            let record = |step| StepRecord {
                step,
                compute_us: now as f64,
                sync_us: 1.0 / 3.0,
                step_us: 4.0,
                bytes_sent: 1,
                gain: 1.0,
                ..StepRecord::default()
            };
            let (steps, strategy) = ((from..to).map(record).collect(), Plan::DENSE_RING);
            let report = StepsReport { job: job.clone(), rank, version: 0, strategy: (&strategy).into(), steps };
            let mut tx = store.write.begin("store steps").await.unwrap();
            let seen = flexcomm_wire::Hello { rank, world: 3, ..alone(job.clone()) };
            jobs::join(&mut tx, &"n".parse().unwrap(), &seen, Timestamp(now)).await.unwrap();
            put_steps(&mut tx, &report, &strategy, Timestamp(now)).await.unwrap();
            tx.commit().await.unwrap();
        };
        let same = async |from: u64, count: u64, rows: usize| {
            let found = store.steps(&job, from, count).await.unwrap();
            store.windows.lock().clear();
            assert_eq!(found, store.steps(&job, from, count).await.unwrap(), "{from} {count}");
            assert_eq!(found.len(), rows, "{found:?}");
            found
        };
        same(0, 10, 0).await;
        put(0, (0, 5), 1).await;
        put(1, (0, 3), 2).await;
        same(0, 10, 8).await;
        put(1, (3, 6), 3).await;
        assert!(same(0, 10, 11).await.is_sorted_by_key(|row| (row.step, row.rank)));
        // A rank that is new and behind, the end of the window before what is stored, its start moving on and back.
        put(2, (0, 2), 4).await;
        same(0, 4, 10).await;
        same(1, 9, 10).await;
        same(4, 10, 3).await;
        put(2, (2, 6), 5).await;
        same(5, 10, 2).await;
        same(0, 10, 17).await;
        // A rank that begins again, before and at what was read of it.
        put(0, (2, 7), 6).await;
        assert_eq!(same(0, 10, 19).await[6].compute_us, 6.0);
        put(0, (6, 7), 7).await;
        same(0, 10, 19).await;
        put(0, (0, 1), 8).await;
        same(0, 10, 13).await;
        // The newest steps are worked out once for what is stored and who is expected.
        let recent = async |ranks: &[u32]| {
            let expected = ranks.iter().copied().collect();
            store.recent_steps(&job, &expected).await.unwrap()
        };
        let (two, three) = (recent(&[1, 2]).await, recent(&[0, 1, 2]).await);
        assert_eq!((two.whole.len(), three.whole.len()), (6, 1));
        assert!(Arc::ptr_eq(&two, &recent(&[1, 2]).await) && Arc::ptr_eq(&three, &recent(&[0, 1, 2]).await));
        put(0, (1, 6), 9).await;
        assert_eq!(recent(&[0, 1, 2]).await.whole.len(), 6);
        store.delete_job(&job, &[]).await.unwrap();
        assert!(store.steps(&job, 0, 10).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn the_newest_losses_are_read_oldest_first_whatever_else_is_known_of_their_steps() {
        let (store, _dir) = scratch().await;
        let job = begun(&store, Timestamp(0)).await.job;
        assert!(store.losses(&job).await.unwrap().is_empty());
        // Some steps have an accuracy alone.
        let loss = |step: u64| (!step.is_multiple_of(10)).then_some(step as f64 / 1024.0);
        for step in 0..LOSS_POINTS as u64 + 3 {
            let (loss, accuracy) = (loss(step), Some(0.5).filter(|_| loss(step).is_none()));
            let steps = vec![StepRecord { step, gain: 1.0, loss, accuracy, ..StepRecord::default() }];
            let report =
                StepsReport { job: job.clone(), rank: 0, version: 0, strategy: (&Plan::DENSE_RING).into(), steps };
            let mut tx = store.write.begin("store steps").await.unwrap();
            put_progress(&mut tx, &report, Timestamp(step)).await.unwrap();
            tx.commit().await.unwrap();
        }
        let losses = store.losses(&job).await.unwrap();
        assert_eq!(*losses, (3..LOSS_POINTS as u64 + 3).map(|step| (step, loss(step))).collect::<Vec<_>>());
    }

    /// Passes over more jobs than there are windows find most of them there.
    #[tokio::test]
    async fn a_window_more_than_there_is_room_for_drops_another_one() {
        let (store, _dir) = scratch().await;
        let jobs: Vec<JobId> = (0..MAX_WINDOWS + 3).map(|i| format!("j{i}").parse().unwrap()).collect();
        for job in jobs.iter().chain(&jobs) {
            store.steps(job, 0, 10).await.unwrap();
            assert!(store.windows.lock().contains_key(job));
        }
        assert_eq!(store.windows.lock().len(), MAX_WINDOWS);
    }

    #[tokio::test]
    async fn a_look_reads_only_what_is_new() {
        let window = |steps: std::ops::Range<u64>| {
            let row = |step| crate::measure::tests::row(step, 0, 0, 1.0);
            let mut window = Window::new(0);
            window.take(0, vec![(0, -1, steps.map(row).collect())]);
            window
        };
        assert_eq!(window(0..5).newest().iter().map(|(rank, step, _)| (*rank, *step)).collect::<Vec<_>>(), [(0, 4)]);
        let mut known = window(0..5);
        known.take(2, vec![(0, 4, vec![])]);
        assert_eq!(known.rows.len(), 3, "what holds is not read again");
    }
}
