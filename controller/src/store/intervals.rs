//! Predicted and measured time of runs of steps, and the coefficients fitted to them.

use flexcomm_domain::{JobId, Strategy, Timestamp, Version};
use flexcomm_optimizer::{CoefficientBook, Sample, Terms};

use sqlx::SqliteConnection;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::checksum::{checksum, intact};
use super::{JobRow, Result, Store, json, signed, sql, stored, time, unsigned};

pub(super) const NEWEST: &str =
    "SELECT version, strategy, from_step, to_step, at_us, predicted_sync_us, measured_sync_us,
    predicted_step_us, measured_step_us, settled, alpha_s, beta_s, model_sync_us,
    comp_us, bytes_sent, gain FROM intervals
    WHERE job = $1 ORDER BY id DESC LIMIT $2";

pub(super) const UNFITTED: &str = "SELECT id, strategy, at_us, measured_sync_us, alpha_s, beta_s FROM intervals
    WHERE job = $1 AND settled AND NOT fitted AND at_us <= $2 AND alpha_s IS NOT NULL AND beta_s IS NOT NULL
    ORDER BY id LIMIT 256";

pub(super) const UNSETTLE: &str =
    "UPDATE intervals SET settled = 0 WHERE job = $1 AND settled AND (at_us >= $2 OR NOT fitted)";

/// A closed interval.
#[derive(Debug, Clone, PartialEq)]
pub struct IntervalRow {
    /// The decision in force.
    pub version: Version,
    /// What ran.
    pub ran: Strategy,
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
    pub strategy: Strategy,
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

#[derive(sqlx::FromRow)]
struct Raw {
    version: i64,
    strategy: String,
    from_step: i64,
    to_step: i64,
    at_us: i64,
    predicted_sync_us: Option<f64>,
    measured_sync_us: f64,
    predicted_step_us: Option<f64>,
    measured_step_us: f64,
    settled: bool,
    alpha_s: Option<f64>,
    beta_s: Option<f64>,
    model_sync_us: Option<f64>,
    comp_us: Option<f64>,
    bytes_sent: Option<f64>,
    gain: Option<f64>,
}

fn terms((alpha_s, beta_s): (Option<f64>, Option<f64>)) -> Option<Terms> {
    alpha_s.zip(beta_s).map(|(alpha_s, beta_s)| Terms { alpha_s, beta_s })
}

#[derive(sqlx::FromRow)]
struct RawOpen {
    version: i64,
    from_step: i64,
    began_us: i64,
    predicted_sync_us: Option<f64>,
    predicted_step_us: Option<f64>,
    alpha_s: Option<f64>,
    beta_s: Option<f64>,
    model_sync_us: Option<f64>,
    moved_us: i64,
}

const COEFFICIENTS: &str = "coefficients";

impl Store {
    /// The newest `limit` intervals, newest last.
    pub async fn intervals(&self, job: &JobId, limit: u32) -> Result<Vec<IntervalRow>> {
        let operation = "read intervals";
        let query = sqlx::query_as(NEWEST).bind(job.as_str()).bind(limit);
        let mut rows: Vec<Raw> = query.fetch_all(&self.read).await.map_err(sql(operation))?;
        rows.reverse();
        let row = |r: Raw| {
            Ok(IntervalRow {
                version: Version(unsigned(r.version)),
                ran: stored(operation, "strategy", r.strategy.parse())?,
                from_step: unsigned(r.from_step),
                to_step: unsigned(r.to_step),
                at: time(r.at_us),
                predicted_sync_us: r.predicted_sync_us,
                measured_sync_us: r.measured_sync_us,
                predicted_step_us: r.predicted_step_us,
                measured_step_us: r.measured_step_us,
                comp_us: r.comp_us,
                bytes_sent: r.bytes_sent,
                gain: r.gain,
                settled: r.settled,
                terms: terms((r.alpha_s, r.beta_s)),
                model_sync_us: r.model_sync_us,
            })
        };
        rows.into_iter().map(row).collect()
    }

    /// The interval that is being measured.
    pub async fn open_interval(&self, job: &JobId) -> Result<Option<OpenInterval>> {
        let row: Option<RawOpen> = sqlx::query_as(
            "SELECT version, from_step, began_us, predicted_sync_us, predicted_step_us, alpha_s, beta_s,
             model_sync_us, moved_us FROM open_intervals WHERE job = $1",
        )
        .bind(job.as_str())
        .fetch_optional(&self.read)
        .await
        .map_err(sql("read the open interval"))?;
        Ok(row.map(|r| OpenInterval {
            version: Version(unsigned(r.version)),
            from_step: unsigned(r.from_step),
            began: time(r.began_us),
            predicted_sync_us: r.predicted_sync_us,
            predicted_step_us: r.predicted_step_us,
            terms: terms((r.alpha_s, r.beta_s)),
            model_sync_us: r.model_sync_us,
            moved: time(r.moved_us),
        }))
    }

    /// Closes intervals and opens the next: all or nothing.
    pub async fn put_intervals(&self, run: &JobRow, closed: &[IntervalRow], open: &OpenInterval) -> Result<()> {
        let operation = "store intervals";
        let mut tx = self.begin_for(run, operation).await?;
        for interval in closed {
            put_closed(&mut tx, &run.job, interval).await?;
        }
        put_open(&mut tx, &run.job, open).await?;
        tx.commit().await.map_err(sql(operation))
    }

    /// Settled intervals closed before `before` that the coefficients were not fitted to, oldest first.
    pub async fn unfitted(&self, job: &JobId, before: Timestamp) -> Result<Vec<Unfitted>> {
        let operation = "read intervals to fit";
        let query = sqlx::query_as(UNFITTED).bind(job.as_str()).bind(signed(before.0));
        let rows: Vec<(i64, String, i64, f64, f64, f64)> = query.fetch_all(&self.read).await.map_err(sql(operation))?;
        let row = |(id, strategy, at_us, us, alpha_s, beta_s): (i64, String, i64, f64, f64, f64)| {
            let sample = Sample { terms: Terms { alpha_s, beta_s }, measured_s: us * 1e-6 };
            Ok(Unfitted { id, strategy: stored(operation, "strategy", strategy.parse())?, at: time(at_us), sample })
        };
        rows.into_iter().map(row).collect()
    }

    /// Stores the coefficients and which intervals of the job they were now fitted to: all up to row `up_to`
    /// that [`Store::unfitted`] listed.
    pub async fn put_fit(&self, job: &JobId, fitted: &[Unfitted], book: &CoefficientBook) -> Result<()> {
        let operation = "store the coefficients";
        let on_error = sql(operation);
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let text = json(operation, book)?;
        sqlx::query("INSERT OR REPLACE INTO coefficients (id, book, seal) VALUES (1, $1, $2)")
            .bind(&text)
            .bind(checksum(COEFFICIENTS, &[(&text).into()]))
            .execute(&mut *tx)
            .await
            .map_err(&on_error)?;
        for row in fitted {
            let query = sqlx::query("UPDATE intervals SET fitted = 1 WHERE job = $1 AND id = $2");
            query.bind(job.as_str()).bind(row.id).execute(&mut *tx).await.map_err(&on_error)?;
        }
        tx.commit().await.map_err(&on_error)?;
        self.keep_book(Arc::new(book.clone()));
        Ok(())
    }

    fn keep_book(&self, book: Arc<CoefficientBook>) {
        *self.book.lock().unwrap_or_else(PoisonError::into_inner) = Some(book);
    }

    /// What was measured since `since` is no longer called settled, nor what waits to be fitted: the links had moved before
    /// it was seen.
    pub async fn unsettle(&self, job: &JobId, since: Timestamp) -> Result<()> {
        let on_error = sql("unsettle intervals");
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let query = sqlx::query(UNSETTLE).bind(job.as_str()).bind(signed(since.0));
        query.execute(&mut *tx).await.map_err(&on_error)?;
        tx.commit().await.map_err(&on_error)
    }

    /// The fitted coefficients; the prior before anything was measured. Read back from disk once: this process is
    /// the only one that writes them.
    pub async fn coefficients(&self) -> Result<Arc<CoefficientBook>> {
        let kept = self.book.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(book) = kept {
            return Ok(book);
        }
        let operation = "read the coefficients";
        let row: Option<(String, Option<i64>)> = sqlx::query_as("SELECT book, seal FROM coefficients WHERE id = 1")
            .fetch_optional(&self.read)
            .await
            .map_err(sql(operation))?;
        let checked = |(text, stored): (String, Option<i64>)| {
            let named = || "the fitted coefficients".to_owned();
            self.damaged.check((COEFFICIENTS, &[(&text).into()]), stored, named).map(|()| text)
        };
        // A damaged book is as good as none: the next fit stores it anew.
        let book = match row.and_then(|row| intact(checked(row))).transpose()? {
            Some(text) => stored(operation, "book", serde_json::from_str(&text))?,
            None => CoefficientBook::default(),
        };
        self.book_reads.fetch_add(1, Ordering::Relaxed);
        let mut kept = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        // What was stored in between is newer.
        Ok(kept.get_or_insert_with(|| Arc::new(book)).clone())
    }

    /// How often the coefficients were read back, and so fitted anew to all they were fitted to.
    pub fn book_reads(&self) -> u64 {
        self.book_reads.load(Ordering::Relaxed)
    }
}

async fn put_closed(db: &mut SqliteConnection, job: &JobId, i: &IntervalRow) -> Result<()> {
    sqlx::query(
        "INSERT INTO intervals (job, version, strategy, from_step, to_step, at_us, predicted_sync_us,
            measured_sync_us, predicted_step_us, measured_step_us, settled, alpha_s, beta_s, model_sync_us,
            comp_us, bytes_sent, gain)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
    )
    .bind(job.as_str())
    .bind(signed(i.version.0))
    .bind(i.ran.to_string())
    .bind(signed(i.from_step))
    .bind(signed(i.to_step))
    .bind(signed(i.at.0))
    .bind(i.predicted_sync_us)
    .bind(i.measured_sync_us)
    .bind(i.predicted_step_us)
    .bind(i.measured_step_us)
    .bind(i.settled)
    .bind(i.terms.map(|t| t.alpha_s))
    .bind(i.terms.map(|t| t.beta_s))
    .bind(i.model_sync_us)
    .bind(i.comp_us)
    .bind(i.bytes_sent)
    .bind(i.gain)
    .execute(db)
    .await
    .map_err(sql("store an interval"))?;
    Ok(())
}

async fn put_open(db: &mut SqliteConnection, job: &JobId, open: &OpenInterval) -> Result<()> {
    sqlx::query(
        "INSERT OR REPLACE INTO open_intervals (job, version, from_step, began_us, predicted_sync_us,
            predicted_step_us, alpha_s, beta_s, model_sync_us, moved_us)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
    )
    .bind(job.as_str())
    .bind(signed(open.version.0))
    .bind(signed(open.from_step))
    .bind(signed(open.began.0))
    .bind(open.predicted_sync_us)
    .bind(open.predicted_step_us)
    .bind(open.terms.map(|t| t.alpha_s))
    .bind(open.terms.map(|t| t.beta_s))
    .bind(open.model_sync_us)
    .bind(signed(open.moved.0))
    .execute(db)
    .await
    .map_err(sql("store the open interval"))?;
    Ok(())
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
            ran: Strategy::DENSE_RING,
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
