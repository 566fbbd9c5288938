//! Predicted and measured time of runs of steps, and the coefficients fitted to them.

use flexcomm_domain::{JobId, Plan, Timestamp, Version};
use flexcomm_optimizer::{CoefficientBook, Sample, Terms};
use flexcomm_wire::api::IntervalView;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::checksum::{Sealed, intact, sealed};
use super::read_cache::Tables;
use super::statement::{column, row, sql};
use super::{JobRow, Result, Store, json, stored};

pub(super) const NEWEST: &str = "SELECT * FROM intervals WHERE job = $1 ORDER BY id DESC LIMIT $2";

pub(super) const UNFITTED: &str =
    "SELECT id, strategy, at_us, measured_sync_us * 1e-6 AS measured_s, alpha_s, beta_s FROM intervals
    WHERE job = $1 AND settled AND NOT fitted AND at_us <= $2 AND alpha_s IS NOT NULL AND beta_s IS NOT NULL
    AND instr(strategy, ' | ') = 0
    ORDER BY id LIMIT 256";

pub(super) const UNSETTLE: &str =
    "UPDATE intervals SET settled = 0 WHERE job = $1 AND settled AND (at_us >= $2 OR NOT fitted)";

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
    /// Minimum over ranks per step, then the median.
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
    /// Whether links and decision had been settled since before it began.
    pub settled: bool,
    /// The model's terms when it began.
    pub terms: Option<Terms>,
    /// Of the collective, by the model alone.
    pub model_sync_us: Option<f64>,
}

/// An interval that the coefficients are to be fitted to.
#[derive(Debug, Clone, PartialEq)]
pub struct Unfitted {
    /// Row.
    pub id: i64,
    /// What ran.
    pub strategy: Plan,
    /// When it was closed.
    pub at: Timestamp,
    /// Terms and time.
    pub sample: Sample,
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
    /// The model's terms when it began.
    pub terms: Option<Terms>,
    /// Of the collective, when it began, by the model alone.
    pub model_sync_us: Option<f64>,
    /// The last time that decision or links moved.
    pub moved: Timestamp,
}

row! {
    IntervalView {
        version, strategy, from_step, to_step, at_us, predicted_sync_us, measured_sync_us, predicted_step_us,
        measured_step_us, measured_comp_us: comp_us, bytes_sent, gain, settled, model_sync_us
    }
}
row! {
    OpenInterval {
        version, from_step, began: began_us, predicted_sync_us, predicted_step_us, model_sync_us, moved: moved_us; terms by known_terms
    }
}
row!(Unfitted { id, strategy, at: at_us; sample });
row!(Sample { measured_s; terms });
row!(Terms { alpha_s, beta_s });

/// The model's terms, where it had any.
fn known_terms(row: &SqliteRow) -> sqlx::Result<Option<Terms>> {
    let (alpha_s, beta_s) = (column::<Option<f64>>(row, "alpha_s")?, column::<Option<f64>>(row, "beta_s")?);
    Ok(alpha_s.zip(beta_s).map(|(alpha_s, beta_s)| Terms { alpha_s, beta_s }))
}

sealed! {
    /// The fitted coefficients, as JSON.
    Book of "coefficients" { book: String }
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

    /// Settled intervals closed before `before` that the coefficients were not fitted to, oldest first.
    pub async fn unfitted(&self, job: &JobId, before: Timestamp) -> Result<Vec<Unfitted>> {
        sql!("read intervals to fit", UNFITTED, job, before).fetch_all(&self.read).await
    }

    /// Stores the coefficients and which intervals of the job they were now fitted to.
    pub async fn put_fit(&self, job: &JobId, fitted: &[Unfitted], book: &CoefficientBook) -> Result<()> {
        let mut tx = self.write.begin("store the coefficients").await?;
        tx.tables = Tables::MEMORY;
        let row = Book { book: json(tx.operation, book)?, seal: None };
        let text = "INSERT OR REPLACE INTO coefficients (id, book, seal) VALUES (1, $1, $2)";
        sql!(tx.operation, text, row.book, row.checksum()).execute(&mut *tx).await?;
        for row in fitted {
            let text = "UPDATE intervals SET fitted = 1 WHERE job = $1 AND id = $2";
            sql!(tx.operation, text, job, row.id).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        *self.book.lock() = Some(Arc::new(book.clone()));
        Ok(())
    }

    /// What was measured since `since` is no longer called settled, nor what waits to be fitted: the links had moved before
    /// it was seen.
    pub async fn unsettle(&self, job: &JobId, since: Timestamp) -> Result<()> {
        let statement = sql!("unsettle intervals", UNSETTLE, job, since);
        self.write.execute(Tables::MEMORY, statement).await.map(|_| ())
    }

    /// The fitted coefficients; the prior before anything was measured. Read back from disk once: this process is
    /// the only one that writes them.
    pub async fn coefficients(&self) -> Result<Arc<CoefficientBook>> {
        let kept = self.book.lock().clone();
        if let Some(book) = kept {
            return Ok(book);
        }
        let operation = "read the coefficients";
        let row: Option<Book> = sql!(operation, "SELECT * FROM coefficients").fetch_optional(&self.read).await?;
        let checked = |row: Book| self.damaged.check(&row, || "the fitted coefficients".to_owned()).map(|()| row.book);
        // A damaged book is as good as none: the next fit stores it anew.
        let book = match row.and_then(|row| intact(checked(row))).transpose()? {
            Some(text) => stored(operation, "book", serde_json::from_str(&text))?,
            None => CoefficientBook::default(),
        };
        self.book_reads.fetch_add(1, Ordering::Relaxed);
        let mut kept = self.book.lock();
        // What was stored in between is newer.
        Ok(kept.get_or_insert_with(|| Arc::new(book)).clone())
    }

    /// How often the coefficients were read back, and so fitted anew to all they were fitted to.
    #[cfg(test)]
    pub fn book_reads(&self) -> u64 {
        self.book_reads.load(Ordering::Relaxed)
    }
}

async fn put_closed(db: &mut SqliteConnection, job: &JobId, i: &IntervalRow) -> Result<()> {
    let query = sql!(
        "store an interval",
        "INSERT INTO intervals (job, version, strategy, from_step, to_step, at_us, predicted_sync_us,
            measured_sync_us, predicted_step_us, measured_step_us, settled, alpha_s, beta_s, model_sync_us,
            comp_us, bytes_sent, gain)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
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
        i.settled,
        i.terms.map(|t| t.alpha_s),
        i.terms.map(|t| t.beta_s),
        i.model_sync_us,
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
            predicted_step_us, alpha_s, beta_s, model_sync_us, moved_us)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        job,
        open.version,
        open.from_step,
        open.began,
        open.predicted_sync_us,
        open.predicted_step_us,
        open.terms.map(|t| t.alpha_s),
        open.terms.map(|t| t.beta_s),
        open.model_sync_us,
        open.moved,
    );
    query.execute(db).await
}

#[cfg(test)]
mod tests {
    use super::super::tests::{begun, scratch};
    use super::*;
    use flexcomm_domain::Collective;

    /// What took the model by surprise waits until the links are measured again; when they have moved, it is nothing to fit to.
    #[tokio::test]
    async fn links_that_moved_unsettle_what_waits_to_be_fitted() {
        let (store, _dir) = scratch().await;
        let job = JobId::new("j").unwrap();
        let interval = |at_s: u64| IntervalRow {
            version: flexcomm_domain::Version(1),
            ran: Plan::DENSE_RING,
            from_step: at_s,
            to_step: at_s,
            at: Timestamp(at_s * 1_000_000),
            predicted_sync_us: None,
            measured_sync_us: 1.0,
            predicted_step_us: None,
            measured_step_us: 1.0,
            comp_us: None,
            bytes_sent: None,
            gain: None,
            settled: true,
            terms: Some(Terms { alpha_s: 1.0, beta_s: 1.0 }),
            model_sync_us: None,
        };
        let open = OpenInterval {
            version: flexcomm_domain::Version(1),
            from_step: 99,
            began: Timestamp(0),
            predicted_sync_us: None,
            predicted_step_us: None,
            terms: None,
            model_sync_us: None,
            moved: Timestamp(0),
        };
        store.put_intervals(&begun(&store, Timestamp(0)).await, &[10, 20, 30].map(interval), &open).await.unwrap();
        let all = store.unfitted(&job, Timestamp(u64::MAX >> 1)).await.unwrap();
        store.put_fit(&job, &all[..1], &CoefficientBook::default()).await.unwrap();
        store.unsettle(&job, Timestamp(25_000_000)).await.unwrap();
        let settled: Vec<bool> = store.intervals(&job, 9).await.unwrap().iter().map(|i| i.settled).collect();
        assert_eq!(settled, [true, false, false], "the first was as predicted, and is fitted to");
    }

    #[tokio::test]
    async fn coefficients_are_read_back_once_and_what_is_stored_is_what_is_kept() {
        let (store, dir) = scratch().await;
        assert_eq!(*store.coefficients().await.unwrap(), CoefficientBook::default());
        let mut book = CoefficientBook::default();
        let terms = Terms { alpha_s: 1e-3, beta_s: 2e-3 };
        for i in 0..20 {
            let sample = Sample { terms, measured_s: 4e-3 + f64::from(i) * 1e-5 };
            assert!(book.observe(Collective::DenseRing, "x", sample));
            store.put_fit(&JobId::new("j").unwrap(), &[], &book).await.unwrap();
            assert_eq!(*store.coefficients().await.unwrap(), book);
        }
        assert_eq!(store.book_reads(), 1);
        store.close().await;
        let again = Store::open(&dir.path().join("test.db")).await.unwrap();
        assert_eq!(*again.coefficients().await.unwrap(), book);
    }
}
