//! Predicted and measured time of runs of steps.

use flexcomm_domain::{JobId, Plan, Timestamp, Version};
use flexcomm_wire::api::IntervalView;
use sqlx::SqliteConnection;

use super::read_cache::Tables;
use super::statement::{row, sql};
use super::{JobRow, Result, Store};

pub(super) const NEWEST: &str = "SELECT * FROM intervals WHERE job = $1 ORDER BY id DESC LIMIT $2";

/// A closed interval.
#[derive(Debug, Clone, PartialEq)]
pub struct IntervalRow {
    /// The decision in force.
    pub version: Version,
    /// What ran.
    pub ran: Plan,
    /// First step.
    pub from_step: u64,
    /// Last step.
    pub to_step: u64,
    /// When it was closed.
    pub at: Timestamp,
    /// Of the collective.
    pub predicted_sync_us: Option<f64>,
    /// Median of [`crate::measure::WholeStep::sync_us`].
    pub measured_sync_us: f64,
    /// Of the step.
    pub predicted_step_us: Option<f64>,
    /// Median.
    pub measured_step_us: f64,
    /// Compress and decompress: median.
    pub comp_us: Option<f64>,
    /// Bytes that a rank sent per step: median.
    pub bytes_sent: Option<f64>,
    /// Median.
    pub gain: Option<f64>,
}

/// The interval that is being measured.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenInterval {
    /// The decision in force.
    pub version: Version,
    /// Its first step.
    pub from_step: u64,
    /// When it began.
    pub began: Timestamp,
    /// Of the collective, when it began.
    pub predicted_sync_us: Option<f64>,
    /// Of the step, when it began.
    pub predicted_step_us: Option<f64>,
}

row! {
    IntervalView {
        version, strategy, from_step, to_step, at_us, predicted_sync_us, measured_sync_us, predicted_step_us,
        measured_step_us, measured_comp_us: comp_us, bytes_sent, gain
    }
}
row! {
    OpenInterval {
        version, from_step, began: began_us, predicted_sync_us, predicted_step_us
    }
}
impl Store {
    /// The newest `limit` intervals, newest last.
    pub async fn intervals(&self, job: &JobId, limit: u32) -> Result<Vec<IntervalView>> {
        let mut rows = sql!("read intervals", NEWEST, job, limit).fetch_all(&self.read).await?;
        rows.reverse();
        Ok(rows)
    }

    /// The interval that is being measured.
    pub async fn open_interval(&self, job: &JobId) -> Result<Option<OpenInterval>> {
        let text = "SELECT * FROM open_intervals WHERE job = $1";
        let read = async { sql!("read the open interval", text, job).fetch_optional(&self.read).await };
        self.reads.open_interval.get(self.write.counters(), job.clone(), read).await
    }

    /// Closes intervals and opens the next: all or nothing.
    pub async fn put_intervals(&self, run: &JobRow, closed: &[IntervalRow], open: &OpenInterval) -> Result<()> {
        let mut tx = self.begin_for(run, "store intervals").await?;
        tx.tables = Tables::MEMORY;
        for interval in closed {
            put_closed(&mut tx, &run.job, interval).await?;
        }
        put_open(&mut tx, &run.job, open).await?;
        tx.commit().await
    }
}

async fn put_closed(db: &mut SqliteConnection, job: &JobId, i: &IntervalRow) -> Result<()> {
    let query = sql!(
        "store an interval",
        "INSERT INTO intervals (job, version, strategy, from_step, to_step, at_us, predicted_sync_us,
            measured_sync_us, predicted_step_us, measured_step_us, comp_us, bytes_sent, gain)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
        job,
        i.version,
        i.ran,
        i.from_step,
        i.to_step,
        i.at,
        i.predicted_sync_us,
        i.measured_sync_us,
        i.predicted_step_us,
        i.measured_step_us,
        i.comp_us,
        i.bytes_sent,
        i.gain,
    );
    query.execute(db).await
}

async fn put_open(db: &mut SqliteConnection, job: &JobId, open: &OpenInterval) -> Result<()> {
    let query = sql!(
        "store the open interval",
        "INSERT OR REPLACE INTO open_intervals (job, version, from_step, began_us, predicted_sync_us,
            predicted_step_us)
         VALUES ($1, $2, $3, $4, $5, $6)",
        job,
        open.version,
        open.from_step,
        open.began,
        open.predicted_sync_us,
        open.predicted_step_us,
    );
    query.execute(db).await
}
