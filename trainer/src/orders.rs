//! What the agent publishes for this job, read from the shared page. Costs one atomic load and one
//! comparison while nothing changes, never waits, and never makes training fail: what cannot be read or is
//! not valid is set aside with a line in the log, and the last good orders stay.

use crate::message::TrialPlan;
use flexcomm_domain::{Decision, Invalid, JobId, RunId, Strategy, Timestamp};
use flexcomm_page::{PageReader, ReadError};
use flexcomm_wire::{JobOrders, TrialOrder};
use std::path::{Path, PathBuf};

/// Least time between two attempts to open the page: an open is a few system calls.
const REOPEN_US: u64 = 500_000;

/// A page that could not be opened for this long, though an agent has named it, is told of.
const UNREADABLE_US: u64 = 3_000_000;

/// A page whose writer has been silent for this long may have been replaced under its name.
const SILENT_US: u64 = 5_000_000;

/// Valid orders that were not there at the last look.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct News {
    /// The decision that should be in force. May repeat or go backwards: the agreement fences it.
    pub decision: Option<Decision>,
    /// The trial that should run. The agreement runs each once.
    pub trial: Option<TrialPlan>,
}

/// A job's orders on this node.
#[derive(Debug)]
pub struct OrdersReader {
    job: JobId,
    run: Option<RunId>,
    path: Option<PathBuf>,
    page: Option<PageReader>,
    seen: u64,
    buffer: Vec<u8>,
    last_try: Option<Timestamp>,
    /// Since when there is no page, and whether that was told.
    missing: Option<(Timestamp, bool)>,
    set_aside: u64,
}

impl OrdersReader {
    /// Nothing is opened before [`OrdersReader::set_path`].
    pub fn new(job: JobId) -> Self {
        Self {
            job,
            run: None,
            path: None,
            page: None,
            seen: 0,
            buffer: Vec::new(),
            last_try: None,
            missing: None,
            set_aside: 0,
        }
    }

    /// Which run of the job this is: what was decided for another one, and lies on the page still, is not followed.
    pub fn set_run(&mut self, run: RunId) {
        self.run = Some(run);
    }

    /// Whether orders are for this run; those without a run are of a controller older than run ids.
    fn is_ours(&self, run: Option<RunId>) -> bool {
        run.is_none() || self.run.is_none() || run == self.run
    }

    /// Where the agent's welcome said the page is. A path that is known already changes nothing.
    pub fn set_path(&mut self, path: &Path) {
        if self.path.as_deref() != Some(path) {
            self.path = Some(path.to_owned());
            self.page = None;
            self.last_try = None;
            self.missing = None;
        }
    }

    /// Whether it was told that the page cannot be read, and it still cannot.
    pub fn is_missing(&self) -> bool {
        self.missing.is_some_and(|(_, told)| told)
    }

    /// How many orders were not valid so far.
    pub fn set_aside(&self) -> u64 {
        self.set_aside
    }

    /// What has changed since the last look. `now` is the time of day.
    pub fn poll(&mut self, now: Timestamp) -> Option<News> {
        let silent = self.page.as_ref().is_none_or(|page| now.0 > page.heartbeat_us().saturating_add(SILENT_US));
        if silent {
            self.reopen(now);
        }
        let page = self.page.as_mut()?;
        let counter = page.counter();
        if counter == self.seen || counter % 2 == 1 {
            return None;
        }
        match page.read(&mut self.buffer) {
            Ok(counter) => {
                self.seen = counter;
                self.parse()
            }
            Err(ReadError::Retired) => {
                self.page = None;
                None
            }
            Err(ReadError::Busy | ReadError::Unpublished) => None,
            Err(error @ ReadError::Corrupt { .. }) => {
                self.seen = counter;
                self.reject(&error)
            }
        }
    }

    fn reopen(&mut self, now: Timestamp) {
        let due = |last: Timestamp| now.0 < last.0 || now.0 - last.0 >= REOPEN_US;
        let Some(path) = &self.path else { return };
        if !self.last_try.is_none_or(due) {
            return;
        }
        self.last_try = Some(now);
        match PageReader::open(path) {
            Ok(page) => {
                // Another file counts anew; the same one is merely read once more.
                self.page = Some(page);
                self.seen = 0;
                self.missing = None;
            }
            Err(error) if self.page.is_none() => self.miss(now, &error),
            // An agent that is gone has left its page behind.
            Err(error) => tracing::debug!(%error, "orders cannot be read anew"),
        }
    }

    /// Without a page there is nothing to do but go on; the next attempt is not far.
    fn miss(&mut self, now: Timestamp, error: &dyn std::fmt::Display) {
        let (since, told) = *self.missing.get_or_insert((now, false));
        if !told && now.0.saturating_sub(since.0) >= UNREADABLE_US {
            self.missing = Some((since, true));
            tracing::warn!(job = %self.job, %error, "the agent is there, but the page with its decisions cannot be read: none is \
                followed, training goes on as it is. Let this process's user read the agent's run directory, and mount it \
                beside the socket where the process runs in a container");
        }
    }

    fn parse(&mut self) -> Option<News> {
        let orders: JobOrders = match serde_json::from_slice(&self.buffer) {
            Ok(orders) => orders,
            Err(error) => return self.reject(&error),
        };
        if orders.job != self.job {
            return self.reject(&format!("they are for job {}, this is job {}", orders.job, self.job));
        }
        let decision =
            match orders.decision.filter(|d| self.is_ours(d.run)).map(|d| d.to_decision(&self.job)).transpose() {
                Ok(decision) => decision,
                Err(error) => self.reject(&error),
            };
        let trial = match orders.trial.as_ref().filter(|t| self.is_ours(t.run)).map(to_plan).transpose() {
            Ok(trial) => trial,
            Err(error) => self.reject(&error),
        };
        Some(News { decision, trial })
    }

    fn reject<T>(&mut self, why: &dyn std::fmt::Display) -> Option<T> {
        self.set_aside += 1;
        tracing::warn!(job = %self.job, %why, "orders are not valid and are set aside; training goes on as before");
        None
    }
}

fn to_plan(order: &TrialOrder) -> Result<TrialPlan, Invalid> {
    let candidates = order.candidates.iter().map(Strategy::try_from).collect::<Result<_, _>>()?;
    TrialPlan::new(order.id, candidates, order.iterations, order.budget_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Version;
    use flexcomm_page::PageWriter;
    use flexcomm_wire::DecisionOrder;

    fn orders(version: u64) -> JobOrders {
        let decision = Decision {
            job: JobId::new("j").unwrap(),
            version: Version(version),
            parent: Version(0),
            strategy: "topk@0.1/allgather".parse().unwrap(),
            decided_at: Timestamp(0),
            reason: String::new(),
        };
        let job = decision.job.clone();
        JobOrders { job, decision: Some(DecisionOrder::from(&decision)), trial: None }
    }

    fn publish(page: &mut PageWriter, orders: &JobOrders) {
        page.publish(&serde_json::to_vec(orders).unwrap()).unwrap();
    }

    fn version(news: Option<News>) -> Option<u64> {
        news.and_then(|n| n.decision).map(|d| d.version.0)
    }

    #[test]
    fn news_come_once_and_bad_ones_never() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.page");
        let mut reader = OrdersReader::new(JobId::new("j").unwrap());
        assert_eq!(reader.poll(Timestamp(0)), None, "no path yet");
        reader.set_path(&path);
        assert_eq!(reader.poll(Timestamp(0)), None, "no page yet");
        let mut page = PageWriter::create(&path).unwrap();
        page.beat(1_000_000);
        publish(&mut page, &orders(1));
        assert_eq!(reader.poll(Timestamp(10)), None, "opened at most every half second");
        let now = Timestamp(1_000_000);
        assert_eq!(version(reader.poll(now)), Some(1));
        assert_eq!(reader.poll(now), None);

        let mut forged = orders(2);
        forged.decision.as_mut().unwrap().strategy.0 = "topk(k=0.5)+ef(vanilla)/allgather".into();
        publish(&mut page, &forged);
        assert_eq!(version(reader.poll(now)), None);
        page.publish(b"not json").unwrap();
        assert_eq!(reader.poll(now), None);
        publish(&mut page, &JobOrders { job: JobId::new("other").unwrap(), ..orders(3) });
        assert_eq!(reader.poll(now), None);
        assert_eq!(reader.set_aside(), 3);
        publish(&mut page, &orders(4));
        assert_eq!(version(reader.poll(now)), Some(4));
    }

    /// The page keeps the orders of the run before until those of this one arrive.
    #[test]
    fn orders_of_another_run_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.page");
        let mut page = PageWriter::create(&path).unwrap();
        let mut reader = OrdersReader::new(JobId::new("j").unwrap());
        reader.set_path(&path);
        reader.set_run(RunId(2));
        for (run, version, followed) in [(Some(RunId(1)), 5, None), (Some(RunId(2)), 6, Some(6)), (None, 7, Some(7))] {
            let mut given = orders(version);
            given.decision.as_mut().unwrap().run = run;
            let candidates = vec![Strategy::DENSE_RING.into()];
            given.trial = Some(TrialOrder { run, id: version, candidates, iterations: 10, budget_ms: 100 });
            publish(&mut page, &given);
            let news = reader.poll(Timestamp(1)).unwrap();
            assert_eq!(news.trial.map(|t| t.id), followed, "{run:?}");
            assert_eq!(news.decision.map(|d| d.version.0), followed, "{run:?}");
        }
        assert_eq!(reader.set_aside(), 0, "it is no fault");
    }

    #[test]
    fn a_page_that_cannot_be_read_is_told_of_after_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.page");
        let mut reader = OrdersReader::new(JobId::new("j").unwrap());
        reader.set_path(&path);
        let missing: Vec<bool> = (1..=8)
            .map(|half_second| {
                assert_eq!(reader.poll(Timestamp(500_000 * half_second)), None);
                reader.is_missing()
            })
            .collect();
        assert_eq!(missing, [false, false, false, false, false, false, true, true]);
        let mut page = PageWriter::create(&path).unwrap();
        page.beat(5_000_000);
        publish(&mut page, &orders(1));
        assert_eq!(version(reader.poll(Timestamp(5_000_000))), Some(1));
        assert!(!reader.is_missing());
    }

    #[test]
    fn a_valid_trial_survives_a_bad_decision() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.page");
        let mut page = PageWriter::create(&path).unwrap();
        let mut both = orders(1);
        both.decision.as_mut().unwrap().digest ^= 1;
        let candidates = vec![Strategy::DENSE_RING.into()];
        both.trial = Some(TrialOrder { run: None, id: 3, candidates, iterations: 10, budget_ms: 100 });
        publish(&mut page, &both);
        let mut reader = OrdersReader::new(JobId::new("j").unwrap());
        reader.set_path(&path);
        let news = reader.poll(Timestamp(1)).unwrap();
        assert_eq!((news.decision, news.trial.unwrap().id), (None, 3));
        both.trial.as_mut().unwrap().iterations = 0;
        publish(&mut page, &both);
        assert_eq!(reader.poll(Timestamp(1)), Some(News::default()));
        assert_eq!(reader.set_aside(), 3);
    }

    #[test]
    fn a_page_that_went_away_and_came_back_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.page");
        let mut page = PageWriter::create(&path).unwrap();
        page.beat(1_000_000);
        publish(&mut page, &orders(1));
        let mut reader = OrdersReader::new(JobId::new("j").unwrap());
        reader.set_path(&path);
        assert_eq!(version(reader.poll(Timestamp(1_000_000))), Some(1));

        page.retire().unwrap();
        assert_eq!(reader.poll(Timestamp(1_100_000)), None);
        let mut page = PageWriter::create(&path).unwrap();
        page.beat(2_000_000);
        publish(&mut page, &orders(2));
        assert_eq!(version(reader.poll(Timestamp(2_000_000))), Some(2));

        // The agent was killed and its run directory emptied: no mark, only silence.
        drop(page);
        std::fs::remove_file(&path).unwrap();
        let mut page = PageWriter::create(&path).unwrap();
        page.beat(8_000_000);
        publish(&mut page, &orders(3));
        assert_eq!(reader.poll(Timestamp(2_600_000)), None, "the old file is not silent for long yet");
        assert_eq!(version(reader.poll(Timestamp(8_000_000))), Some(3));
    }
}
