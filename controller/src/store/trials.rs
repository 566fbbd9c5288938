//! Trials: what was asked for, what each rank found.

use flexcomm_domain::{JobId, Strategy, Timestamp};
use flexcomm_wire::{TrialOutcome, TrialReport};
use sqlx::SqliteConnection;

use super::{Result, Store, json, signed, sql, stored, time, unsigned};
use crate::limits::TRIALS;

/// A trial.
#[derive(Debug, Clone, PartialEq)]
pub struct TrialRow {
    /// Only grows within the job.
    pub id: u64,
    /// When it was asked for.
    pub asked: Timestamp,
    /// One sentence why.
    pub why: String,
    /// `pending`, `done` or `aborted`.
    pub state: String,
    /// What is to be tried.
    pub candidates: Vec<Strategy>,
    /// Iterations per candidate.
    pub iterations: u32,
    /// The trial stops after this much time.
    pub budget_ms: u64,
    /// When it was done or aborted.
    pub ended: Option<Timestamp>,
    /// Why it did not run all candidates.
    pub aborted: Option<String>,
}

/// What one rank found.
#[derive(Debug, Clone, PartialEq)]
pub struct TrialReportRow {
    /// Which trial.
    pub id: u64,
    /// Which rank.
    pub rank: u32,
    /// One per candidate that ran.
    pub outcomes: Vec<TrialOutcome>,
    /// Why it did not run all of them.
    pub aborted: Option<String>,
    /// When it arrived.
    pub received: Timestamp,
}

#[derive(sqlx::FromRow)]
struct Raw {
    id: i64,
    asked_us: i64,
    why: String,
    state: String,
    candidates: String,
    iterations: i64,
    budget_ms: i64,
    ended_us: Option<i64>,
    aborted: Option<String>,
}

impl Raw {
    fn row(self) -> Result<TrialRow> {
        let operation = "read trials";
        Ok(TrialRow {
            id: unsigned(self.id),
            asked: time(self.asked_us),
            why: self.why,
            state: self.state,
            candidates: stored(operation, "candidates", serde_json::from_str(&self.candidates))?,
            iterations: stored(operation, "iterations", self.iterations.try_into())?,
            budget_ms: unsigned(self.budget_ms),
            ended: self.ended_us.map(time),
            aborted: self.aborted,
        })
    }
}

/// A trial that should run.
#[derive(Debug, Clone)]
pub struct NewTrial<'a> {
    /// At most [`flexcomm_wire::MAX_CANDIDATES`].
    pub candidates: &'a [Strategy],
    /// Iterations per candidate.
    pub iterations: u32,
    /// The trial stops after this much time.
    pub budget_ms: u64,
    /// One sentence why.
    pub why: &'a str,
}

impl Store {
    /// The newest `limit` trials of a job, newest first.
    pub async fn trials(&self, job: &JobId, limit: u32) -> Result<Vec<TrialRow>> {
        let rows: Vec<Raw> = sqlx::query_as(
            "SELECT id, asked_us, why, state, candidates, iterations, budget_ms, ended_us, aborted FROM trials
             WHERE job = $1 ORDER BY id DESC LIMIT $2",
        )
        .bind(job.as_str())
        .bind(limit)
        .fetch_all(&self.read)
        .await
        .map_err(sql("read trials"))?;
        rows.into_iter().map(Raw::row).collect()
    }

    /// What the ranks found in the newest `trials` trials, by trial and rank.
    pub async fn trial_reports(&self, job: &JobId, trials: u32) -> Result<Vec<TrialReportRow>> {
        let operation = "read the results of trials";
        type Row = (i64, i64, String, Option<String>, i64);
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT id, rank, outcomes, aborted, received_us FROM trial_reports
             WHERE job = $1 AND id > (SELECT coalesce(max(id), 0) FROM trials WHERE job = $1) - $2 ORDER BY id, rank",
        )
        .bind(job.as_str())
        .bind(trials)
        .fetch_all(&self.read)
        .await
        .map_err(sql(operation))?;
        let row = |(id, rank, outcomes, aborted, at): Row| {
            Ok(TrialReportRow {
                id: unsigned(id),
                rank: stored(operation, "rank", rank.try_into())?,
                outcomes: stored(operation, "outcomes", serde_json::from_str(&outcomes))?,
                aborted,
                received: time(at),
            })
        };
        rows.into_iter().map(row).collect()
    }

    /// Asks for a trial; `None` when one is pending.
    pub async fn ask_trial(&self, job: &JobId, new: &NewTrial<'_>, now: Timestamp) -> Result<Option<u64>> {
        let operation = "store a trial";
        let on_error = sql(operation);
        let mut tx = self.write.begin_with("BEGIN IMMEDIATE").await.map_err(&on_error)?;
        let (pending,): (i64,) = sqlx::query_as("SELECT count(*) FROM trials WHERE job = $1 AND state = 'pending'")
            .bind(job.as_str())
            .fetch_one(&mut *tx)
            .await
            .map_err(&on_error)?;
        if pending > 0 {
            return Ok(None);
        }
        let id = newest(&mut tx, job).await? + 1;
        sqlx::query(
            "INSERT INTO trials (job, id, asked_us, why, state, candidates, iterations, budget_ms)
             VALUES ($1, $2, $3, $4, 'pending', $5, $6, $7)",
        )
        .bind(job.as_str())
        .bind(signed(id))
        .bind(signed(now.0))
        .bind(new.why)
        .bind(json(operation, &new.candidates)?)
        .bind(i64::from(new.iterations))
        .bind(signed(new.budget_ms))
        .execute(&mut *tx)
        .await
        .map_err(&on_error)?;
        for text in [
            "DELETE FROM trials WHERE job = $1 AND id + $2 <= $3",
            "DELETE FROM trial_reports WHERE job = $1 AND id + $2 <= $3",
        ] {
            let query = sqlx::query(text).bind(job.as_str()).bind(signed(TRIALS)).bind(signed(id));
            query.execute(&mut *tx).await.map_err(&on_error)?;
        }
        tx.commit().await.map_err(&on_error)?;
        Ok(Some(id))
    }

    /// Ends a pending trial; false when it was not pending.
    pub async fn end_trial(&self, job: &JobId, id: u64, aborted: Option<&str>, now: Timestamp) -> Result<bool> {
        let done = sqlx::query(
            "UPDATE trials SET state = $3, aborted = $4, ended_us = $5 WHERE job = $1 AND id = $2 AND state = 'pending'",
        )
        .bind(job.as_str())
        .bind(signed(id))
        .bind(if aborted.is_some() { "aborted" } else { "done" })
        .bind(aborted)
        .bind(signed(now.0))
        .execute(&self.write)
        .await
        .map_err(sql("end a trial"))?;
        Ok(done.rows_affected() > 0)
    }
}

/// Whether a trial was ever asked for.
pub(super) async fn exists(db: &mut SqliteConnection, job: &JobId, id: u64) -> Result<bool> {
    let row: Option<(i64,)> = sqlx::query_as("SELECT id FROM trials WHERE job = $1 AND id = $2")
        .bind(job.as_str())
        .bind(signed(id))
        .fetch_optional(db)
        .await
        .map_err(sql("look up a trial"))?;
    Ok(row.is_some())
}

/// Stores what a rank found.
pub(super) async fn put_report(db: &mut SqliteConnection, r: &TrialReport, now: Timestamp) -> Result<()> {
    let operation = "store the result of a trial";
    sqlx::query(
        "INSERT OR REPLACE INTO trial_reports (job, id, rank, outcomes, aborted, cost_us, received_us)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(r.job.as_str())
    .bind(signed(r.id))
    .bind(i64::from(r.rank))
    .bind(json(operation, &r.outcomes)?)
    .bind(&r.aborted)
    .bind(r.cost_us)
    .bind(signed(now.0))
    .execute(db)
    .await
    .map_err(sql(operation))?;
    Ok(())
}
/// The newest trial of a job, whichever of its runs asked for it; 0 before the first.
pub(super) async fn newest(db: &mut SqliteConnection, job: &JobId) -> Result<u64> {
    let (id,): (i64,) = sqlx::query_as(
        "SELECT max(coalesce((SELECT max(id) FROM trials WHERE job = $1), 0),
            coalesce((SELECT first_trial FROM jobs WHERE job = $1), 0))",
    )
    .bind(job.as_str())
    .fetch_one(db)
    .await
    .map_err(sql("read the newest trial"))?;
    Ok(unsigned(id))
}
