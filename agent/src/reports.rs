//! Where every part of the agent leaves what it observed.

use crate::clock::now_us;
use crate::metrics::Metrics;
use crate::spool::format::{Class, Record};
use crate::spool::{Spool, SpoolError};
use flexcomm_wire::{Report, ReportBody};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The spool behind a lock, with a bell for the delivery. Appending takes microseconds; it may be called from
/// asynchronous code.
#[derive(Debug)]
pub(crate) struct ReportLog {
    spool: Mutex<Spool>,
    pub(crate) bell: Notify,
    metrics: Metrics,
}

/// What may be dropped when the spool is full.
fn class(body: &ReportBody) -> Class {
    match body {
        ReportBody::Link(_) | ReportBody::Throughput(_) | ReportBody::Path(_) | ReportBody::Steps(_) => {
            Class::Telemetry
        }
        ReportBody::JobSeen(_)
        | ReportBody::JobLeft { .. }
        | ReportBody::Applied(_)
        | ReportBody::Trial(_)
        | ReportBody::Shape(_) => Class::Kept,
    }
}

impl ReportLog {
    pub(crate) fn new(spool: Spool, metrics: Metrics) -> Arc<Self> {
        metrics.spool_corrupt_bytes_total.inc_by(spool.corrupt_bytes);
        let log = Arc::new(Self { spool: Mutex::new(spool), bell: Notify::new(), metrics });
        log.show();
        log
    }

    fn lock(&self) -> MutexGuard<'_, Spool> {
        // A panic while the lock was held leaves at worst a record that was written and not counted.
        self.spool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spools one report. What cannot be spooled is counted and logged: there is nobody to give it back to.
    pub(crate) fn push(&self, body: ReportBody) {
        let class = class(&body);
        let report = |seq| serde_json::to_vec(&Report { seq, at_us: now_us(), body }).unwrap_or_default();
        let appended = self.lock().append(class, report);
        match appended {
            Ok(done) => self.metrics.spool_dropped_total.inc_by(done.dropped),
            Err(error @ SpoolError::Full { .. }) => {
                self.metrics.spool_refused_total.inc();
                tracing::error!("failed to {error}");
            }
            Err(error) => {
                self.metrics.spool_errors_total.inc();
                tracing::error!("failed to {error}");
            }
        }
        self.show();
        self.bell.notify_one();
    }

    fn show(&self) {
        let spool = self.lock();
        self.metrics.spool_reports.set(spool.len() as i64);
        self.metrics.spool_bytes.set(spool.bytes() as i64);
    }

    /// Reports waiting.
    pub(crate) fn waiting(&self) -> u64 {
        self.lock().len()
    }

    /// The oldest ones.
    pub(crate) fn batch(&self, most: usize, most_bytes: usize) -> Result<Vec<Record>, SpoolError> {
        self.lock().batch(most, most_bytes)
    }

    /// Up to `seq` all is stored or was set aside. Touches the disk.
    pub(crate) fn ack(&self, seq: u64) -> Result<(), SpoolError> {
        let done = self.lock().ack(seq);
        self.show();
        done
    }

    /// See [`Spool::registered`]. Touches the disk.
    pub(crate) fn registered(&self, stored: u64) -> Result<(), SpoolError> {
        let done = self.lock().registered(stored);
        self.show();
        done
    }

    /// Brings to the disk what was written since the last time. Blocks on the disk, outside of the lock.
    pub(crate) fn sync(&self) {
        let file = self.lock().take_unsynced();
        if let Some(file) = file
            && let Err(error) = file.sync_data()
        {
            self.metrics.spool_errors_total.inc();
            tracing::error!("failed to fsync the spool: {error}");
        }
    }
}
