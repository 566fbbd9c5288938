//! The orders of the jobs on this node, for the connections of their trainers, and the last decision of each on disk.

use super::merge::{Rejected, merge};
use crate::files;
use crate::metrics::Metrics;
use crate::orders::MAX_JOBS;
use flexcomm_domain::{Digest, JobId, Plan, strategy_text};
use flexcomm_wire::{DecisionOrder, JobOrders, MAX_LINE, ToTrainer};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A job without trainers here of which the controller no longer speaks is forgotten after this long. Long enough
/// for a job that is started again under its name to keep its decision.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Most jobs of one user, those that are gone and not forgotten included: others always find room.
const MAX_JOBS_PER_USER: usize = MAX_JOBS / 2;

/// Largest file with a decision that is believed.
const MAX_DECISION: u64 = 64 * 1024;

/// A job's orders as the line that its trainers get.
pub(crate) type OrdersLine = Arc<[u8]>;

/// Why there are no orders for a job.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JobError {
    /// Too many jobs.
    #[error("keep orders for job {0}: there are {MAX_JOBS} jobs on this node already")]
    TooMany(JobId),
    /// Too many jobs of one user.
    #[error("keep orders for job {job}: user {uid} has {MAX_JOBS_PER_USER} jobs on this node already")]
    TooManyOfUser {
        /// Asked for.
        job: JobId,
        /// Whose trainer asked.
        uid: u32,
    },
    /// Longer than trainers read.
    #[error("send {bytes} bytes of orders for job {job}: at most {MAX_LINE} fit on a line")]
    Oversized {
        /// Whose they are.
        job: JobId,
        /// As many.
        bytes: usize,
    },
}

struct Job {
    orders: JobOrders,
    line: watch::Sender<OrdersLine>,
    last_trial: u64,
    /// Since when the controller no longer names it.
    gone_since: Option<Instant>,
    /// The user whose trainer came first, once one came.
    uid: Option<u32>,
}

/// All jobs.
pub(crate) struct Jobs {
    decisions: PathBuf,
    metrics: Metrics,
    jobs: BTreeMap<JobId, Job>,
}

impl Jobs {
    /// Begins with the decisions that an earlier agent left, so that trainers have them though the controller is away.
    pub(crate) fn open(state_dir: &Path, metrics: Metrics) -> std::io::Result<Self> {
        let decisions = state_dir.join("decisions");
        files::own_folder(&decisions, files::PRIVATE)?;
        let mut jobs = Self { decisions, metrics, jobs: BTreeMap::new() };
        for order in jobs.saved()? {
            let done = jobs.update(&order);
            // Until the controller names it.
            jobs.gone(&order.job, Instant::now());
            if let Err(error) = done {
                jobs.metrics.job_errors_total.inc();
                tracing::error!(job = %order.job, "failed to {error}");
            }
        }
        Ok(jobs)
    }

    fn saved(&self) -> std::io::Result<Vec<JobOrders>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.decisions)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".json"));
            let Some(job) = name.and_then(|name| JobId::new(name).ok()) else { continue };
            match read_decision(&path, &job) {
                Ok(decision) => found.push(JobOrders { job, decision: Some(decision), trial: None }),
                Err(why) => {
                    self.metrics.decisions_invalid_total.inc();
                    tracing::warn!(path = %path.display(), why, "a saved decision was rejected");
                }
            }
        }
        Ok(found)
    }

    /// The orders of a job, now and from now on, for a trainer of user `uid`. When there are too many jobs, the one that is
    /// gone for longest and has no trainer in `live` makes room; when this user has too many, one of his own.
    pub(crate) fn subscribe(
        &mut self,
        job: &JobId,
        uid: u32,
        live: &BTreeSet<JobId>,
    ) -> Result<watch::Receiver<OrdersLine>, JobError> {
        if !self.jobs.contains_key(job) {
            let mine = self.jobs.values().filter(|job| job.uid == Some(uid)).count();
            if mine >= MAX_JOBS_PER_USER && !self.forget_longest_gone(live, |job| job.uid == Some(uid)) {
                return Err(JobError::TooManyOfUser { job: job.clone(), uid });
            }
            if self.jobs.len() >= MAX_JOBS && !self.forget_longest_gone(live, |_| true) {
                return Err(JobError::TooMany(job.clone()));
            }
        }
        let job = self.job(job)?;
        job.uid.get_or_insert(uid);
        Ok(job.line.subscribe())
    }

    /// Forgets the job that is gone for longest among those without a trainer; whether there was one.
    fn forget_longest_gone(&mut self, live: &BTreeSet<JobId>, of: impl Fn(&Job) -> bool) -> bool {
        let gone = self.jobs.iter().filter(|(name, job)| !live.contains(name) && of(job));
        let longest = gone.filter_map(|(name, job)| Some((job.gone_since?, name.clone()))).min();
        longest.inspect(|(_, name)| self.forget(name)).is_some()
    }

    fn job(&mut self, name: &JobId) -> Result<&mut Job, JobError> {
        if !self.jobs.contains_key(name) {
            if self.jobs.len() >= MAX_JOBS {
                return Err(JobError::TooMany(name.clone()));
            }
            let orders = JobOrders { job: name.clone(), decision: None, trial: None };
            let line = watch::Sender::new(to_line(&orders)?);
            let gone_since = Some(Instant::now());
            self.jobs.insert(name.clone(), Job { orders, line, last_trial: 0, gone_since, uid: None });
            self.metrics.jobs.set(self.jobs.len() as i64);
        }
        // Inserted just now when it was missing.
        self.jobs.get_mut(name).ok_or_else(|| JobError::TooMany(name.clone()))
    }

    /// Passes on what is new in a job's orders; what must not be followed is counted.
    pub(crate) fn update(&mut self, new: &JobOrders) -> Result<(), JobError> {
        let (metrics, decisions) = (self.metrics.clone(), self.decisions.clone());
        let job = self.job(&new.job)?;
        job.gone_since = None;
        let (merged, rejected) = merge(&job.orders, job.last_trial, new);
        for part in rejected {
            count(&metrics, &new.job, &part);
        }
        if merged == job.orders {
            return Ok(());
        }
        job.line.send_replace(to_line(&merged)?);
        job.last_trial = merged.trial.as_ref().map_or(job.last_trial, |trial| trial.id);
        let decided = merged.decision != job.orders.decision;
        job.orders = merged;
        if let (true, Some(decision)) = (decided, &job.orders.decision) {
            metrics.decisions_published_total.inc();
            tracing::info!(job = %new.job, version = decision.version, reason = decision.reason, "decision published");
            save(&decisions, &new.job, decision, &metrics);
        }
        Ok(())
    }

    /// The controller no longer names a job.
    pub(crate) fn gone(&mut self, job: &JobId, now: Instant) {
        if let Some(job) = self.jobs.get_mut(job) {
            job.gone_since.get_or_insert(now);
        }
    }

    /// Forgets jobs that are long gone and have no trainer here.
    pub(crate) fn tick(&mut self, now: Instant, live: &BTreeSet<JobId>) {
        let long_gone = |job: &Job| job.gone_since.is_some_and(|at| now.duration_since(at) >= FORGET_AFTER);
        let forgotten = self.jobs.iter().filter(|(name, job)| !live.contains(name) && long_gone(job));
        let forgotten: Vec<JobId> = forgotten.map(|(name, _)| name.clone()).collect();
        for name in forgotten {
            self.forget(&name);
        }
    }

    fn forget(&mut self, name: &JobId) {
        if self.jobs.remove(name).is_none() {
            return;
        }
        match std::fs::remove_file(decision_path(&self.decisions, name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(job = %name, "failed to remove what is left of a job: {error}");
            }
            _ => tracing::info!(job = %name, "job forgotten"),
        }
        self.metrics.jobs.set(self.jobs.len() as i64);
    }
}

fn to_line(orders: &JobOrders) -> Result<OrdersLine, JobError> {
    let line = super::to_line(&ToTrainer::Orders(orders.clone()));
    if line.len() > MAX_LINE {
        return Err(JobError::Oversized { job: orders.job.clone(), bytes: line.len() });
    }
    Ok(line.into())
}

fn decision_path(folder: &Path, job: &JobId) -> PathBuf {
    folder.join(format!("{job}.json"))
}

fn save(folder: &Path, job: &JobId, decision: &DecisionOrder, metrics: &Metrics) {
    let bytes = serde_json::to_vec(decision).unwrap_or_default();
    if let Err(error) = files::replace(&decision_path(folder, job), &bytes) {
        // Trainers have it all the same: a full disk must not hold up training.
        metrics.job_errors_total.inc();
        tracing::error!(%job, "failed to save decision {}: {error}", decision.version);
    }
}

/// What the digest of a saved decision is of.
#[derive(serde::Deserialize)]
struct SavedStrategy {
    #[serde(deserialize_with = "strategy_text")]
    strategy: String,
}

fn read_decision(path: &Path, job: &JobId) -> Result<DecisionOrder, String> {
    let length = std::fs::metadata(path).map_err(|e| e.to_string())?.len();
    if length > MAX_DECISION {
        return Err(format!("{length} bytes, at most {MAX_DECISION} are read"));
    }
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    let mut decision: DecisionOrder = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    let SavedStrategy { strategy } = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    if Digest::of(&strategy) == Digest(decision.digest) {
        // Protocol 1 had another text of the same strategy, and its digest.
        decision.digest = Plan::try_from(&decision.strategy).map_err(|e| e.to_string())?.digest().0;
    }
    decision.to_decision(job).map_err(|e| e.to_string())?;
    Ok(decision)
}

fn count(metrics: &Metrics, job: &JobId, part: &Rejected) {
    let (counter, why) = match part {
        Rejected::StaleDecision(why) => (&metrics.decisions_stale_total, why),
        Rejected::InvalidDecision(why) => (&metrics.decisions_invalid_total, why),
        Rejected::Trial(why) => (&metrics.trials_ignored_total, why),
    };
    counter.inc();
    tracing::warn!(%job, why, "a part of a job's orders was rejected");
}

#[cfg(test)]
mod tests {
    use super::super::merge::tests::decision;
    use super::*;

    /// What a trainer that comes now gets first.
    fn sent(jobs: &mut Jobs) -> JobOrders {
        read(&jobs.subscribe(&"j".parse().unwrap(), 0, &BTreeSet::new()).unwrap().borrow())
    }

    fn read(line: &[u8]) -> JobOrders {
        let Ok(ToTrainer::Orders(orders)) = serde_json::from_slice(line) else { panic!("{line:?}") };
        orders
    }

    fn open(dir: &tempfile::TempDir) -> Jobs {
        Jobs::open(&dir.path().join("state"), Metrics::new().unwrap()).unwrap()
    }

    fn orders(version: u64) -> JobOrders {
        JobOrders { job: "j".parse().unwrap(), decision: Some(decision(version, "topk@0.01/allgather")), trial: None }
    }

    #[test]
    fn the_last_decision_survives_a_restart_of_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let mut jobs = open(&dir);
        assert_eq!(sent(&mut jobs).decision, None);
        jobs.update(&orders(3)).unwrap();
        assert_eq!(sent(&mut jobs), orders(3));
        drop(jobs);
        let mut jobs = open(&dir);
        assert_eq!(sent(&mut jobs), orders(3));
        jobs.update(&orders(2)).unwrap();
        assert_eq!(sent(&mut jobs), orders(3));
        assert_eq!(jobs.metrics.decisions_stale_total.get(), 1);
    }

    #[test]
    fn a_decision_by_bucket_survives_a_restart_of_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let by_bucket = JobOrders {
            decision: Some(decision(3, "2x none/dense-ring | topk(k=0.01)+ef(vanilla)/allgather")),
            ..orders(3)
        };
        open(&dir).update(&by_bucket).unwrap();
        assert_eq!(sent(&mut open(&dir)), by_bucket);
    }

    #[test]
    fn a_trainer_hears_of_every_change_and_of_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let mut jobs = open(&dir);
        let mut trainer = jobs.subscribe(&"j".parse().unwrap(), 0, &BTreeSet::new()).unwrap();
        for (version, heard) in [(3, true), (3, false), (2, false), (4, true)] {
            jobs.update(&orders(version)).unwrap();
            assert_eq!(trainer.has_changed().unwrap(), heard, "version {version}");
            assert_eq!(read(&trainer.borrow_and_update()).decision.unwrap().version, version.max(3));
        }
        let mut long = orders(5);
        let zeros = "0".repeat(MAX_LINE);
        long.decision.as_mut().unwrap().strategy.0 = format!("topk@0.01{zeros}/allgather");
        let error = jobs.update(&long).unwrap_err().to_string();
        assert!(error.contains("bytes of orders for job j") && !trainer.has_changed().unwrap(), "{error}");
    }

    #[test]
    fn damaged_saved_decisions_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let mut jobs = open(&dir);
        jobs.update(&orders(3)).unwrap();
        drop(jobs);
        let saved = dir.path().join("state/decisions/j.json");
        let text = std::fs::read_to_string(&saved).unwrap().replace("0.01", "0.02");
        std::fs::write(&saved, text).unwrap();
        std::fs::write(dir.path().join("state/decisions/k.json"), "{").unwrap();
        let jobs = open(&dir);
        assert_eq!((jobs.jobs.len(), jobs.metrics.decisions_invalid_total.get()), (0, 2));
    }

    #[test]
    fn jobs_that_are_long_gone_are_forgotten_unless_trainers_live() {
        let dir = tempfile::tempdir().unwrap();
        let mut jobs = open(&dir);
        let (job, now) = ("j".parse().unwrap(), Instant::now());
        jobs.update(&orders(1)).unwrap();
        let trainer = jobs.subscribe(&job, 0, &BTreeSet::new()).unwrap();
        jobs.gone(&job, now);
        jobs.tick(now + FORGET_AFTER, &[job.clone()].into());
        jobs.tick(now + FORGET_AFTER / 2, &BTreeSet::new());
        assert!(trainer.has_changed().is_ok());
        jobs.tick(now + FORGET_AFTER, &BTreeSet::new());
        assert!(trainer.has_changed().is_err(), "it is forgotten");
        assert_eq!(open(&dir).jobs.len(), 0);
    }

    #[test]
    fn jobs_are_bounded_and_dead_ones_make_room() {
        let dir = tempfile::tempdir().unwrap();
        let mut jobs = open(&dir);
        let all: BTreeSet<JobId> = (0..MAX_JOBS).map(|i| format!("job{i}").parse().unwrap()).collect();
        for (i, job) in (0..).zip(&all) {
            jobs.subscribe(job, i % 3, &all).unwrap();
        }
        let more: JobId = "more".parse().unwrap();
        assert!(matches!(jobs.subscribe(&more, 9, &all), Err(JobError::TooMany(_))));
        let mut live = all.clone();
        let dead: JobId = "job7".parse().unwrap();
        live.remove(&dead);
        jobs.subscribe(&more, 9, &live).unwrap();
        assert!(jobs.jobs.len() == MAX_JOBS && !jobs.jobs.contains_key(&dead));
    }

    #[test]
    fn one_user_leaves_room_for_the_jobs_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut jobs = open(&dir);
        let other: JobId = "other".parse().unwrap();
        jobs.subscribe(&other, 1, &BTreeSet::new()).unwrap();
        let mine: BTreeSet<JobId> = (0..MAX_JOBS_PER_USER).map(|i| format!("job{i}").parse().unwrap()).collect();
        mine.iter().for_each(|job| drop(jobs.subscribe(job, 0, &mine).unwrap()));
        let more: JobId = "more".parse().unwrap();
        let error = jobs.subscribe(&more, 0, &mine).unwrap_err();
        assert!(error.to_string().contains("user 0 has 32 jobs"), "{error}");
        jobs.subscribe(&"another".parse().unwrap(), 1, &mine).unwrap();
        // Names that come and go push out this user's own, not the other's, though that is gone for longest.
        jobs.subscribe(&more, 0, &BTreeSet::new()).unwrap();
        assert!(jobs.jobs.contains_key(&other) && jobs.jobs.len() == MAX_JOBS_PER_USER + 2);
    }

    #[test]
    fn saved_decisions_of_which_nobody_speaks_are_forgotten_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        open(&dir).update(&orders(3)).unwrap();
        let mut jobs = open(&dir);
        jobs.tick(Instant::now() + FORGET_AFTER, &BTreeSet::new());
        assert_eq!((jobs.jobs.len(), open(&dir).jobs.len()), (0, 0));
    }
}
