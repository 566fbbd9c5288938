//! Trials: what was asked for, what each rank found.

use flexcomm_domain::{JobId, Strategy, Timestamp};
use flexcomm_wire::{TrialOutcome, TrialReport};
use sqlx::SqliteConnection;

use super::checksum::{Field, Row, intact};
use super::{JobRow, Result, Store, json, signed, sql, stored, time, unsigned};
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
    job: String,
    id: i64,
    asked_us: i64,
    why: String,
    state: String,
    candidates: String,
    iterations: i64,
    budget_ms: i64,
    ended_us: Option<i64>,
    aborted: Option<String>,
    #[sqlx(rename = "seal")]
    checksum: Option<i64>,
}

const TABLE: &str = "trials";

/// The columns of [`Raw`].
macro_rules! columns {
    () => {
        "job, id, asked_us, why, state, candidates, iterations, budget_ms, ended_us, aborted, seal"
    };
}

impl Raw {
    fn row(self, store: &Store) -> Result<TrialRow> {
        let operation = "read trials";
        let named = || format!("trial {} of job {}", unsigned(self.id), self.job);
        store.damaged.check((TABLE, &self.fields()), self.checksum, named)?;
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

impl Row for Raw {
    const TABLE: &'static str = TABLE;

    fn fields(&self) -> Vec<Field<'_>> {
        vec![
            (&self.job).into(),
            self.id.into(),
            self.asked_us.into(),
            (&self.why).into(),
            (&self.state).into(),
            (&self.candidates).into(),
            self.iterations.into(),
            self.budget_ms.into(),
            self.ended_us.into(),
            (&self.aborted).into(),
        ]
    }

    fn stored(&self) -> Option<i64> {
        self.checksum
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
    /// The newest `limit` trials of a job, newest first, without those that are damaged.
    pub async fn trials(&self, job: &JobId, limit: u32) -> Result<Vec<TrialRow>> {
        let rows: Vec<Raw> =
            sqlx::query_as(concat!("SELECT ", columns!(), " FROM trials WHERE job = $1 ORDER BY id DESC LIMIT $2"))
                .bind(job.as_str())
                .bind(limit)
                .fetch_all(&self.read)
                .await
                .map_err(sql("read trials"))?;
        rows.into_iter().filter_map(|row| intact(row.row(self))).collect()
    }

    /// What the ranks found in the newest `trials` trials, by trial and rank, without what is damaged.
    pub async fn trial_reports(&self, job: &JobId, trials: u32) -> Result<Vec<TrialReportRow>> {
        let operation = "read the results of trials";
        let rows: Vec<RawReport> = sqlx::query_as(
            "SELECT job, id, rank, outcomes, aborted, cost_us, received_us, seal FROM trial_reports
             WHERE job = $1 AND id > (SELECT coalesce(max(id), 0) FROM trials WHERE job = $1) - $2 ORDER BY id, rank",
        )
        .bind(job.as_str())
        .bind(trials)
        .fetch_all(&self.read)
        .await
        .map_err(sql(operation))?;
        let row = |raw: RawReport| {
            let named = || format!("what rank {} found in trial {} of job {job}", raw.rank, unsigned(raw.id));
            self.damaged.check((REPORTS, &raw.fields()), raw.checksum, named)?;
            Ok(TrialReportRow {
                id: unsigned(raw.id),
                rank: stored(operation, "rank", raw.rank.try_into())?,
                outcomes: stored(operation, "outcomes", serde_json::from_str(&raw.outcomes))?,
                aborted: raw.aborted,
                received: time(raw.received_us),
            })
        };
        rows.into_iter().filter_map(|raw| intact(row(raw))).collect()
    }

    /// Asks for a trial; `None` when one is pending.
    pub async fn ask_trial(&self, run: &JobRow, new: &NewTrial<'_>, now: Timestamp) -> Result<Option<u64>> {
        let operation = "store a trial";
        let on_error = sql(operation);
        let job = &run.job;
        let mut tx = self.begin_for(run, operation).await?;
        let pending: Vec<Raw> =
            sqlx::query_as(concat!("SELECT ", columns!(), " FROM trials WHERE job = $1 AND state = 'pending'"))
                .bind(job.as_str())
                .fetch_all(&mut *tx)
                .await
                .map_err(&on_error)?;
        // A damaged one is never read, so it never ends either.
        if pending.iter().any(Raw::is_intact) {
            return Ok(None);
        }
        let id = newest(&mut tx, job).await? + 1;
        let raw = Raw {
            job: job.to_string(),
            id: signed(id),
            asked_us: signed(now.0),
            why: new.why.to_owned(),
            state: "pending".to_owned(),
            candidates: json(operation, &new.candidates)?,
            iterations: i64::from(new.iterations),
            budget_ms: signed(new.budget_ms),
            ended_us: None,
            aborted: None,
            checksum: None,
        };
        sqlx::query(
            "INSERT INTO trials (job, id, asked_us, why, state, candidates, iterations, budget_ms, seal)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        )
        .bind(&raw.job)
        .bind(raw.id)
        .bind(raw.asked_us)
        .bind(&raw.why)
        .bind(&raw.state)
        .bind(&raw.candidates)
        .bind(raw.iterations)
        .bind(raw.budget_ms)
        .bind(raw.checksum())
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
        let on_error = sql("end a trial");
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let raw: Option<Raw> = sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM trials WHERE job = $1 AND id = $2 AND state = 'pending'"
        ))
        .bind(job.as_str())
        .bind(signed(id))
        .fetch_optional(&mut *tx)
        .await
        .map_err(&on_error)?;
        let Some(mut raw) = raw else { return Ok(false) };
        let checksum = raw.change(|raw| {
            raw.state = if aborted.is_some() { "aborted" } else { "done" }.to_owned();
            (raw.aborted, raw.ended_us) = (aborted.map(str::to_owned), Some(signed(now.0)));
        });
        sqlx::query("UPDATE trials SET state = $3, aborted = $4, ended_us = $5, seal = $6 WHERE job = $1 AND id = $2")
            .bind(&raw.job)
            .bind(raw.id)
            .bind(&raw.state)
            .bind(&raw.aborted)
            .bind(raw.ended_us)
            .bind(checksum)
            .execute(&mut *tx)
            .await
            .map_err(&on_error)?;
        tx.commit().await.map_err(&on_error)?;
        Ok(true)
    }
}

#[derive(sqlx::FromRow)]
struct RawReport {
    job: String,
    id: i64,
    rank: i64,
    outcomes: String,
    aborted: Option<String>,
    cost_us: f64,
    received_us: i64,
    #[sqlx(rename = "seal")]
    checksum: Option<i64>,
}

const REPORTS: &str = "trial_reports";

impl Row for RawReport {
    const TABLE: &'static str = REPORTS;

    fn fields(&self) -> Vec<Field<'_>> {
        vec![
            (&self.job).into(),
            self.id.into(),
            self.rank.into(),
            (&self.outcomes).into(),
            (&self.aborted).into(),
            self.cost_us.into(),
            self.received_us.into(),
        ]
    }

    fn stored(&self) -> Option<i64> {
        self.checksum
    }
}

/// Sets times of trials after `now` to it. How many rows.
pub(super) async fn shift_back(db: &mut SqliteConnection, now: i64) -> std::result::Result<u64, sqlx::Error> {
    let rows: Vec<Raw> =
        sqlx::query_as(concat!("SELECT ", columns!(), " FROM trials WHERE asked_us > $1 OR ended_us > $1"))
            .bind(now)
            .fetch_all(&mut *db)
            .await?;
    let reports: Vec<RawReport> = sqlx::query_as(
        "SELECT job, id, rank, outcomes, aborted, cost_us, received_us, seal FROM trial_reports WHERE received_us > $1",
    )
    .bind(now)
    .fetch_all(&mut *db)
    .await?;
    let count = (rows.len() + reports.len()) as u64;
    for mut row in rows {
        let checksum = row.change(|row| {
            (row.asked_us, row.ended_us) = (row.asked_us.min(now), row.ended_us.map(|at| at.min(now)));
        });
        sqlx::query("UPDATE trials SET asked_us = $3, ended_us = $4, seal = $5 WHERE job = $1 AND id = $2")
            .bind(&row.job)
            .bind(row.id)
            .bind(row.asked_us)
            .bind(row.ended_us)
            .bind(checksum)
            .execute(&mut *db)
            .await?;
    }
    for mut report in reports {
        let checksum = report.change(|report| report.received_us = now);
        sqlx::query("UPDATE trial_reports SET received_us = $4, seal = $5 WHERE job = $1 AND id = $2 AND rank = $3")
            .bind(&report.job)
            .bind(report.id)
            .bind(report.rank)
            .bind(now)
            .bind(checksum)
            .execute(&mut *db)
            .await?;
    }
    Ok(count)
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
    let raw = RawReport {
        job: r.job.to_string(),
        id: signed(r.id),
        rank: i64::from(r.rank),
        outcomes: json(operation, &r.outcomes)?,
        aborted: r.aborted.clone(),
        cost_us: r.cost_us,
        received_us: signed(now.0),
        checksum: None,
    };
    sqlx::query(
        "INSERT OR REPLACE INTO trial_reports (job, id, rank, outcomes, aborted, cost_us, received_us, seal)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(&raw.job)
    .bind(raw.id)
    .bind(raw.rank)
    .bind(&raw.outcomes)
    .bind(&raw.aborted)
    .bind(raw.cost_us)
    .bind(raw.received_us)
    .bind(raw.checksum())
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
