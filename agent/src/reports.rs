//! Where every part of the agent leaves what it observed.

use crate::clock::now_us;
use crate::metrics::Metrics;
use crate::spool::format::Record;
use crate::spool::{Priority, Spool, SpoolError};
use flexcomm_wire::{Report, ReportBody};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// The spool behind a lock; the delivery is notified of each report. Appending takes microseconds; it may be called from
/// asynchronous code.
#[derive(Debug)]
pub(crate) struct ReportLog {
    spool: Mutex<Spool>,
    pub(crate) new: Notify,
    /// Notified when there may be room for a report that waits.
    room: Notify,
    metrics: Metrics,
}

/// How often a report that found no room is tried again when nothing was delivered: a disk has room again for other
/// reasons, too.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// What may be dropped or refused when the spool is full.
fn priority(body: &ReportBody) -> Priority {
    match body {
        ReportBody::Link(_) | ReportBody::Throughput(_) | ReportBody::Path(_) | ReportBody::Steps(_) => {
            Priority::Telemetry
        }
        ReportBody::Applied(_) | ReportBody::Trial(_) | ReportBody::JobSeen(_) => Priority::Result,
        ReportBody::JobLeft { .. } | ReportBody::Shape(_) => Priority::Event,
    }
}

/// A report for which there is no room now.
#[derive(Debug)]
pub(crate) struct Unspooled {
    pub(crate) body: ReportBody,
    pub(crate) error: SpoolError,
}

impl ReportLog {
    pub(crate) fn new(spool: Spool, metrics: Metrics) -> Arc<Self> {
        metrics.spool_corrupt_bytes_total.inc_by(spool.corrupt_bytes);
        let log = Arc::new(Self { spool: Mutex::new(spool), new: Notify::new(), room: Notify::new(), metrics });
        log.show();
        log
    }

    fn lock(&self) -> MutexGuard<'_, Spool> {
        // A panic while the lock was held leaves at worst a record that was written and not counted.
        self.spool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spools one report. What cannot be spooled is counted and logged: there is nobody to give it back to.
    pub(crate) fn push(&self, body: ReportBody) {
        if let Err(unspooled) = self.offer(body) {
            self.lost(&unspooled);
        }
    }

    fn lost(&self, unspooled: &Unspooled) {
        self.metrics.spool_refused_total.inc();
        tracing::error!("a report is lost: failed to {}", unspooled.error);
    }

    /// Spools one report; while there is no room for it, whoever brought it waits. Where `is_last` says that nobody will
    /// bring it again, it may take an event's room.
    pub(crate) async fn keep(&self, mut body: ReportBody, is_last: impl Fn() -> bool) {
        let mut waits = false;
        loop {
            // Before the try: what is delivered meanwhile is not missed.
            let room = self.room.notified();
            let (last, kept) = (is_last(), priority(&body) == Priority::Result);
            let offered = if last && kept { self.offer_as(Priority::Event, body) } else { self.offer(body) };
            match offered {
                Ok(()) => return,
                Err(unspooled) if last => return self.lost(&unspooled),
                Err(unspooled) if !waits => {
                    self.metrics.spool_waits_total.inc();
                    let error = unspooled.error;
                    tracing::warn!("a trainer's reports are not read until there is room: failed to {error}");
                    (body, waits) = (unspooled.body, true);
                }
                Err(unspooled) => body = unspooled.body,
            }
            let _ = tokio::time::timeout(TRY_AGAIN, room).await;
        }
    }

    /// Those that wait try again now.
    pub(crate) fn wake(&self) {
        self.room.notify_waiters();
    }

    /// Spools one report or gives it back when there is no room. What never finds room and telemetry that cannot be
    /// written are counted and logged.
    pub(crate) fn offer(&self, body: ReportBody) -> Result<(), Box<Unspooled>> {
        self.offer_as(priority(&body), body)
    }

    fn offer_as(&self, priority: Priority, body: ReportBody) -> Result<(), Box<Unspooled>> {
        let mut report = Report { seq: 0, at_us: now_us(), body };
        let appended = self.lock().append(priority, |seq| {
            report.seq = seq;
            serde_json::to_vec(&report).unwrap_or_default()
        });
        self.show();
        match appended {
            Ok(done) => {
                self.metrics.spool_dropped_total.inc_by(done.dropped);
                self.new.notify_one();
                Ok(())
            }
            Err(error) if priority == Priority::Telemetry || matches!(error, SpoolError::TooLong { .. }) => {
                self.metrics.spool_errors_total.inc();
                tracing::error!("a report is lost: failed to {error}");
                Ok(())
            }
            Err(error) => Err(Box::new(Unspooled { body: report.body, error })),
        }
    }

    fn show(&self) {
        let spool = self.lock();
        self.metrics.spool_reports.set(spool.len() as i64);
        self.metrics.spool_bytes.set(spool.bytes() as i64);
    }

    /// See [`Spool::fill_reserve`]. Touches the disk.
    pub(crate) fn fill_reserve(&self) {
        self.lock().fill_reserve();
    }

    /// Reports waiting.
    pub(crate) fn waiting(&self) -> u64 {
        self.lock().len()
    }

    /// The oldest ones.
    pub(crate) fn batch(&self, most: usize, most_bytes: usize) -> Result<Vec<Record>, SpoolError> {
        self.lock().batch(most, most_bytes)
    }

    /// Up to `seq` all is stored or was rejected. Touches the disk.
    pub(crate) fn ack(&self, seq: u64) -> Result<(), SpoolError> {
        let done = self.lock().ack(seq);
        self.show();
        self.wake();
        done
    }

    /// See [`Spool::registered`]. Touches the disk.
    pub(crate) fn registered(&self, stored: u64) -> Result<(), SpoolError> {
        let done = self.lock().registered(stored);
        self.show();
        self.wake();
        done
    }

    /// Whether something that may not be lost was written since the last [`Self::sync`].
    pub(crate) fn is_unsynced(&self) -> bool {
        self.lock().is_unsynced()
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
