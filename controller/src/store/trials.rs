//! Trials: what was asked for, what each rank found.

use flexcomm_domain::{JobId, Strategy, Timestamp};
use flexcomm_wire::{TrialOutcome, TrialReport};
use sqlx::SqliteConnection;
use std::sync::Arc;

use super::checksum::{Sealed, intact, sealed};
use super::statement::sql;
use super::write::Transaction;
use super::{JobRow, Result, Store, experiments, json, stored};
use crate::limits::{PROFILE_TRIALS, TRIALS};

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
    /// Microseconds that training stood still for it.
    pub cost_us: f64,
    /// When it arrived.
    pub received: Timestamp,
}

sealed! {
    /// A trial as it is stored.
    Raw of "trials" {
        job: String,
        id: u64,
        asked_us: Timestamp,
        why: String,
        state: String,
        candidates: String,
        iterations: u64,
        budget_ms: u64,
        ended_us: Option<Timestamp>,
        aborted: Option<String>,
    }
}

sealed! {
    /// What a rank found, as it is stored.
    RawReport of "trial_reports" {
        job: String,
        id: u64,
        rank: u64,
        outcomes: String,
        aborted: Option<String>,
        cost_us: f64,
        received_us: Timestamp,
    }
}

impl Raw {
    fn row(self, store: &Store) -> Result<TrialRow> {
        let operation = "read trials";
        store.damaged.check(&self, || format!("trial {} of job {}", self.id, self.job))?;
        Ok(TrialRow {
            id: self.id,
            asked: self.asked_us,
            why: self.why,
            state: self.state,
            candidates: stored(operation, "candidates", serde_json::from_str(&self.candidates))?,
            iterations: stored(operation, "iterations", self.iterations.try_into())?,
            budget_ms: self.budget_ms,
            ended: self.ended_us,
            aborted: self.aborted,
        })
    }

    /// Ends it, aborted or done; the checksum to store with it.
    fn end(&mut self, aborted: Option<&str>, now: Timestamp) -> Option<i64> {
        self.change(|row| {
            row.state = if aborted.is_some() { "aborted" } else { "done" }.to_owned();
            (row.aborted, row.ended_us) = (aborted.map(str::to_owned), Some(now));
        })
    }
}

impl RawReport {
    fn row(self, store: &Store) -> Result<TrialReportRow> {
        let operation = "read the results of trials";
        let name = || format!("what rank {} found in trial {} of job {}", self.rank, self.id, self.job);
        store.damaged.check(&self, name)?;
        Ok(TrialReportRow {
            id: self.id,
            rank: stored(operation, "rank", self.rank.try_into())?,
            outcomes: stored(operation, "outcomes", serde_json::from_str(&self.outcomes))?,
            aborted: self.aborted,
            cost_us: self.cost_us,
            received: self.received_us,
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
    /// The newest `limit` trials of a job, newest first, without those that are damaged. Only what the loop asks for is cached: a
    /// client chooses other limits.
    pub async fn trials(&self, job: &JobId, limit: u32) -> Result<Arc<Vec<TrialRow>>> {
        let text = "SELECT * FROM trials WHERE job = $1 ORDER BY id DESC LIMIT $2";
        let read = async {
            let rows: Vec<Raw> = sql!("read trials", text, job, limit).fetch_all(&self.read).await?;
            rows.into_iter().filter_map(|row| intact(row.row(self))).collect::<Result<_>>().map(Arc::new)
        };
        if limit > PROFILE_TRIALS {
            return read.await;
        }
        self.reads.trials.get(self.write.counters(), (job.clone(), limit), read).await
    }

    /// What the ranks found in the newest `trials` trials, by trial and rank, without what is damaged.
    pub async fn trial_reports(&self, job: &JobId, trials: u32) -> Result<Arc<Vec<TrialReportRow>>> {
        let text = "SELECT * FROM trial_reports WHERE job = $1
            AND id > (SELECT coalesce(max(id), 0) FROM trials WHERE job = $1) - $2 ORDER BY id, rank";
        let read = async {
            let query = sql!("read the results of trials", text, job, trials);
            let rows: Vec<RawReport> = query.fetch_all(&self.read).await?;
            rows.into_iter().filter_map(|row| intact(row.row(self))).collect::<Result<_>>().map(Arc::new)
        };
        if trials > PROFILE_TRIALS {
            return read.await;
        }
        self.reads.trial_reports.get(self.write.counters(), (job.clone(), trials), read).await
    }

    /// Asks for a trial; `None` when one is pending.
    pub async fn ask_trial(&self, run: &JobRow, new: &NewTrial<'_>, now: Timestamp) -> Result<Option<u64>> {
        let job = &run.job;
        let mut tx = self.begin_for(run, "store a trial").await?;
        // A damaged one is never read, so it never ends either.
        if pending(&mut tx, job).await?.iter().any(Raw::is_intact) {
            tx.roll_back().await;
            return Ok(None);
        }
        let id = newest(&mut tx, job).await? + 1;
        let raw = Raw {
            job: job.to_string(),
            id,
            asked_us: now,
            why: new.why.to_owned(),
            state: "pending".to_owned(),
            candidates: json(tx.operation, &new.candidates)?,
            iterations: new.iterations.into(),
            budget_ms: new.budget_ms,
            ended_us: None,
            aborted: None,
            seal: None,
        };
        raw.put_new(tx.operation).execute(&mut *tx).await?;
        for text in [
            "DELETE FROM trials WHERE job = $1 AND id + $2 <= $3",
            "DELETE FROM trial_reports WHERE job = $1 AND id + $2 <= $3",
        ] {
            sql!(tx.operation, text, job, TRIALS, id).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok(Some(id))
    }

    /// Ends a pending trial; false when it was not pending.
    pub async fn end_trial(&self, job: &JobId, id: u64, aborted: Option<&str>, now: Timestamp) -> Result<bool> {
        let mut tx = self.write.begin("end a trial").await?;
        let rows = pending(&mut tx, job).await?;
        let Some(mut row) = rows.into_iter().find(|row| row.id == id) else {
            tx.roll_back().await;
            return Ok(false);
        };
        let seal = row.end(aborted, now);
        row.put_changed(tx.operation, seal).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(true)
    }
}

async fn pending(db: &mut SqliteConnection, job: &JobId) -> Result<Vec<Raw>> {
    let text = "SELECT * FROM trials WHERE job = $1 AND state = 'pending'";
    sql!("look up the pending trial", text, job).fetch_all(db).await
}

/// Aborts what is pending of a job that has ended.
pub(super) async fn abort(db: &mut SqliteConnection, job: &JobId, why: &str, now: Timestamp) -> Result<()> {
    for mut row in pending(&mut *db, job).await? {
        let seal = row.end(Some(why), now);
        row.put_changed("abort a trial", seal).execute(&mut *db).await?;
    }
    Ok(())
}

/// Sets times of trials after `now` to it. How many rows.
pub(super) async fn shift_back(tx: &mut Transaction<'_>, now: Timestamp) -> Result<u64> {
    let query = sql!(tx.operation, "SELECT * FROM trials WHERE asked_us > $1 OR ended_us > $1", now);
    let rows: Vec<Raw> = query.fetch_all(&mut **tx).await?;
    let query = sql!(tx.operation, "SELECT * FROM trial_reports WHERE received_us > $1", now);
    let reports: Vec<RawReport> = query.fetch_all(&mut **tx).await?;
    let count = (rows.len() + reports.len()) as u64;
    for mut row in rows {
        let seal = row.change(|row| {
            (row.asked_us, row.ended_us) = (row.asked_us.min(now), row.ended_us.map(|at| at.min(now)));
        });
        row.put_changed(tx.operation, seal).execute(&mut **tx).await?;
    }
    for mut report in reports {
        let seal = report.change(|report| report.received_us = now);
        report.put_changed(tx.operation, seal).execute(&mut **tx).await?;
    }
    Ok(count)
}

/// Whether a trial was ever asked for.
pub(super) async fn exists(db: &mut SqliteConnection, job: &JobId, id: u64) -> Result<bool> {
    let text = "SELECT EXISTS (SELECT 1 FROM trials WHERE job = $1 AND id = $2)";
    sql!("look up a trial", text, job, id).fetch_one(db).await
}

/// Stores what a rank found.
pub(super) async fn put_report(db: &mut SqliteConnection, r: &TrialReport, now: Timestamp) -> Result<()> {
    let operation = "store the result of a trial";
    let raw = RawReport {
        job: r.job.to_string(),
        id: r.id,
        rank: r.rank.into(),
        outcomes: json(operation, &r.outcomes)?,
        aborted: r.aborted.clone(),
        cost_us: r.cost_us,
        received_us: now,
        seal: None,
    };
    raw.put(operation).execute(&mut *db).await?;
    experiments::put_trial(db, r).await
}

/// The newest trial of a job, whichever of its runs asked for it; 0 before the first.
pub(super) async fn newest(db: &mut SqliteConnection, job: &JobId) -> Result<u64> {
    let text = "SELECT max(coalesce((SELECT max(id) FROM trials WHERE job = $1), 0),
        coalesce((SELECT first_trial FROM jobs WHERE job = $1), 0))";
    sql!("read the newest trial", text, job).fetch_one(db).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_trial_is_written_once_and_a_changed_row_is_written_whole() {
        use super::super::checksum::tests::{filled, holds_every_column, is_written_once};
        let (store, _dir) = super::super::tests::scratch().await;
        filled(&store).await;
        holds_every_column::<Raw>(&store).await;
        holds_every_column::<RawReport>(&store).await;
        is_written_once::<Raw>(&store).await;
    }
}
