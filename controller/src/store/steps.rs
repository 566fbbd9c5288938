//! The window of a job's newest steps, and loss and accuracy over all of them.

use flexcomm_domain::{JobId, Strategy, Timestamp, Version};
use flexcomm_wire::{StepRecord, StepsReport};
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::statement::{row, sql};
use super::{Result, Store, json, stored};
use crate::limits::STEP_WINDOW;
use crate::measure::StepSpan;
use std::collections::BTreeMap;

pub(super) const PROGRESS_POINTS: &str =
    "SELECT step, received_us, loss, accuracy FROM progress WHERE job = $1 ORDER BY step DESC LIMIT $2";

/// Of every rank that has announced itself: its oldest and newest step, and when they arrived.
pub(super) const STEP_SPANS: &str = "SELECT rank,
        oldest, (SELECT received_us FROM steps WHERE job = $1 AND rank = spans.rank AND step = oldest) AS began,
        newest, (SELECT received_us FROM steps WHERE job = $1 AND rank = spans.rank AND step = newest) AS ended
     FROM (SELECT rank, (SELECT min(step) FROM steps WHERE job = $1 AND rank = ranks.rank) AS oldest,
        (SELECT max(step) FROM steps WHERE job = $1 AND rank = ranks.rank) AS newest
        FROM ranks WHERE job = $1) AS spans WHERE oldest IS NOT NULL";

/// One row of JSON: each row of a result crosses from SQLite's thread to this one by itself, which costs far more
/// than its content when hundreds of steps are read every second.
pub(super) const STEPS: &str =
    "SELECT json_group_array(json_array(step, rank, version, strategy, received_us, compute_us,
        comp_us, sync_us, wait_us, step_us, gain, energy, bytes_sent))
    FROM (SELECT * FROM steps WHERE job = $1 AND step >= $2 AND step < $3 ORDER BY step, rank)";

/// Stores a report: forgets what is of an earlier run of the job, stores, forgets what fell out of the window. All in one
/// query, since each is a way to the database's thread and back.
pub(super) const PUT_STEPS: [&str; 3] = [
    "DELETE FROM steps WHERE job = $1 AND rank = $2 AND step >= $7",
    "INSERT OR REPLACE INTO steps (job, rank, version, strategy, received_us, step, compute_us, comp_us, sync_us,
        wait_us, step_us, bytes_sent, gain, energy)
     SELECT $1, $2, $3, $4, $5, value ->> 'step', value ->> 'compute_us', value ->> 'comp_us', value ->> 'sync_us',
        value ->> 'wait_us', value ->> 'step_us', value ->> 'bytes_sent', value ->> 'gain', value ->> 'energy'
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
    pub ran: Strategy,
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

    /// The oldest and the newest step of each rank that has reported any.
    pub async fn step_spans(&self, job: &JobId) -> Result<BTreeMap<u32, StepSpan>> {
        let query = sql!("read which steps of a job are known", STEP_SPANS, job);
        let rows: Vec<RankSpan> = query.fetch_all(&self.read).await?;
        let span = |r: RankSpan| (r.rank, StepSpan { oldest: (r.oldest, r.began), newest: (r.newest, r.ended) });
        Ok(rows.into_iter().map(span).collect())
    }

    /// Steps of a job from `from` on, ascending by step and rank, at most `steps` different ones.
    pub async fn steps(&self, job: &JobId, from: u64, steps: u64) -> Result<Vec<StepRow>> {
        let query = sql!("read steps", STEPS, job, from, from.saturating_add(steps));
        let rows: String = query.fetch_one(&self.read).await?;
        stored("read steps", "row", serde_json::from_str(&rows))
    }
}

/// Stores steps and forgets those that fell out of the window.
pub(super) async fn put_steps(
    db: &mut SqliteConnection,
    r: &StepsReport,
    ran: &Strategy,
    now: Timestamp,
) -> Result<()> {
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
