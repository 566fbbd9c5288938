//! The pages of the jobs on this node, and the last decision of each on disk.

use super::merge::{SetAside, merge};
use crate::files;
use crate::metrics::Metrics;
use crate::orders::MAX_JOBS;
use flexcomm_domain::JobId;
use flexcomm_page::PageWriter;
use flexcomm_wire::{DecisionOrder, JobOrders};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A job without trainers here of which the controller no longer speaks is forgotten after this long. Long enough
/// for a job that is started again under its name to keep its decision.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Most jobs of one user, those that are gone and not forgotten included: others always find room.
const MAX_JOBS_PER_USER: usize = MAX_JOBS / 2;

/// Largest file with a decision that is believed.
const MAX_DECISION: u64 = 64 * 1024;

/// Why a job got no page.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PageError {
    /// Too many jobs.
    #[error("make a page for job {0}: there are {MAX_JOBS} jobs on this node already")]
    TooMany(JobId),
    /// Too many jobs of one user.
    #[error("make a page for job {job}: user {uid} has {MAX_JOBS_PER_USER} jobs on this node already")]
    TooManyOfUser {
        /// Asked for.
        job: JobId,
        /// Whose trainer asked.
        uid: u32,
    },
    /// The page itself.
    #[error(transparent)]
    Create(#[from] flexcomm_page::CreateError),
}

struct JobPage {
    writer: PageWriter,
    orders: JobOrders,
    last_trial: u64,
    /// Since when the controller no longer speaks of it.
    gone_since: Option<Instant>,
    /// The user whose trainer came first, once one came.
    uid: Option<u32>,
}

/// All pages.
pub(crate) struct Pages {
    folder: PathBuf,
    decisions: PathBuf,
    metrics: Metrics,
    jobs: BTreeMap<JobId, JobPage>,
}

impl Pages {
    /// Makes the folders and publishes the decisions that an earlier agent left, so that trainers have them though
    /// the controller is away.
    pub(crate) fn open(run_dir: &Path, state_dir: &Path, metrics: Metrics) -> std::io::Result<Self> {
        let (folder, decisions) = (run_dir.join("pages"), state_dir.join("decisions"));
        files::own_folder(&folder, files::SHARED)?;
        files::own_folder(&decisions, files::PRIVATE)?;
        let mut pages = Self { folder, decisions, metrics, jobs: BTreeMap::new() };
        for order in pages.saved()? {
            let done = pages.update(&order);
            // Until the controller speaks of it.
            pages.gone(&order.job, Instant::now());
            if let Err(error) = done {
                pages.metrics.page_errors_total.inc();
                tracing::error!(job = %order.job, "failed to {error}");
            }
        }
        Ok(pages)
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
                    tracing::warn!(path = %path.display(), why, "a saved decision was set aside");
                }
            }
        }
        Ok(found)
    }

    /// The page of a job for a trainer of user `uid`, made when there is none. When there are too many, the job that is
    /// gone for longest and has no trainer in `live` makes room; when this user has too many, one of his own.
    pub(crate) fn path(&mut self, job: &JobId, uid: u32, live: &BTreeSet<JobId>) -> Result<PathBuf, PageError> {
        if !self.jobs.contains_key(job) {
            let mine = self.jobs.values().filter(|page| page.uid == Some(uid)).count();
            if mine >= MAX_JOBS_PER_USER && !self.forget_longest_gone(live, |page| page.uid == Some(uid)) {
                return Err(PageError::TooManyOfUser { job: job.clone(), uid });
            }
            if self.jobs.len() >= MAX_JOBS && !self.forget_longest_gone(live, |_| true) {
                return Err(PageError::TooMany(job.clone()));
            }
        }
        let page = self.page(job)?;
        page.uid.get_or_insert(uid);
        Ok(page.writer.path().to_owned())
    }

    /// Forgets the job that is gone for longest among those without a trainer; whether there was one.
    fn forget_longest_gone(&mut self, live: &BTreeSet<JobId>, of: impl Fn(&JobPage) -> bool) -> bool {
        let gone = self.jobs.iter().filter(|(job, page)| !live.contains(job) && of(page));
        let longest = gone.filter_map(|(job, page)| Some((page.gone_since?, job.clone()))).min();
        longest.inspect(|(_, job)| self.forget(job)).is_some()
    }

    fn page(&mut self, job: &JobId) -> Result<&mut JobPage, PageError> {
        if !self.jobs.contains_key(job) {
            if self.jobs.len() >= MAX_JOBS {
                return Err(PageError::TooMany(job.clone()));
            }
            let mut writer = PageWriter::create(&self.folder.join(format!("{job}.page")))?;
            let orders = JobOrders { job: job.clone(), decision: None, trial: None };
            publish(&mut writer, &orders, &self.metrics);
            writer.beat(crate::clock::now_us());
            let gone_since = Some(Instant::now());
            self.jobs.insert(job.clone(), JobPage { writer, orders, last_trial: 0, gone_since, uid: None });
            self.metrics.pages.set(self.jobs.len() as i64);
        }
        // Inserted just now when it was missing.
        self.jobs.get_mut(job).ok_or_else(|| PageError::TooMany(job.clone()))
    }

    /// Publishes what is new in a job's orders; what must not be followed is counted.
    pub(crate) fn update(&mut self, new: &JobOrders) -> Result<(), PageError> {
        let (metrics, decisions) = (self.metrics.clone(), self.decisions.clone());
        let page = self.page(&new.job)?;
        page.gone_since = None;
        let (merged, aside) = merge(&page.orders, page.last_trial, new);
        for part in aside {
            count(&metrics, &new.job, &part);
        }
        if merged == page.orders {
            return Ok(());
        }
        publish(&mut page.writer, &merged, &metrics);
        page.last_trial = merged.trial.as_ref().map_or(page.last_trial, |trial| trial.id);
        let decided = merged.decision != page.orders.decision;
        page.orders = merged;
        if let (true, Some(decision)) = (decided, &page.orders.decision) {
            metrics.decisions_published_total.inc();
            tracing::info!(job = %new.job, version = decision.version, reason = decision.reason, "decision published");
            save(&decisions, &new.job, decision, &metrics);
        }
        Ok(())
    }

    /// The controller no longer speaks of a job.
    pub(crate) fn gone(&mut self, job: &JobId, now: Instant) {
        if let Some(page) = self.jobs.get_mut(job) {
            page.gone_since.get_or_insert(now);
        }
    }

    /// Signs of life on every page; forgets jobs that are long gone and have no trainer here.
    pub(crate) fn tick(&mut self, now: Instant, live: &BTreeSet<JobId>) {
        let now_us = crate::clock::now_us();
        let forgotten: Vec<JobId> = self
            .jobs
            .iter()
            .inspect(|(_, page)| page.writer.beat(now_us))
            .filter(|(job, page)| {
                !live.contains(job) && page.gone_since.is_some_and(|at| now.duration_since(at) >= FORGET_AFTER)
            })
            .map(|(job, _)| job.clone())
            .collect();
        for job in forgotten {
            self.forget(&job);
        }
    }

    fn forget(&mut self, job: &JobId) {
        let Some(page) = self.jobs.remove(job) else { return };
        let removed = page.writer.retire().and_then(|()| std::fs::remove_file(decision_path(&self.decisions, job)));
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%job, "failed to remove what is left of a job: {error}");
            }
            _ => tracing::info!(%job, "job forgotten"),
        }
        self.metrics.pages.set(self.jobs.len() as i64);
    }
}

fn publish(writer: &mut PageWriter, orders: &JobOrders, metrics: &Metrics) {
    let done = serde_json::to_vec(orders)
        .map_err(|e| e.to_string())
        .and_then(|bytes| writer.publish(&bytes).map_err(|e| e.to_string()));
    if let Err(error) = done {
        metrics.page_errors_total.inc();
        tracing::error!(job = %orders.job, "failed to {error}");
    }
}

fn decision_path(folder: &Path, job: &JobId) -> PathBuf {
    folder.join(format!("{job}.json"))
}

fn save(folder: &Path, job: &JobId, decision: &DecisionOrder, metrics: &Metrics) {
    let bytes = serde_json::to_vec(decision).unwrap_or_default();
    if let Err(error) = files::replace(&decision_path(folder, job), &bytes) {
        // It is on the page all the same: a full disk must not hold up training.
        metrics.page_errors_total.inc();
        tracing::error!(%job, "failed to save decision {}: {error}", decision.version);
    }
}

fn read_decision(path: &Path, job: &JobId) -> Result<DecisionOrder, String> {
    let length = std::fs::metadata(path).map_err(|e| e.to_string())?.len();
    if length > MAX_DECISION {
        return Err(format!("{length} bytes, at most {MAX_DECISION} are read"));
    }
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    let decision: DecisionOrder = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    decision.to_decision(job).map_err(|e| e.to_string())?;
    Ok(decision)
}

fn count(metrics: &Metrics, job: &JobId, part: &SetAside) {
    let (counter, why) = match part {
        SetAside::StaleDecision(why) => (&metrics.decisions_stale_total, why),
        SetAside::InvalidDecision(why) => (&metrics.decisions_invalid_total, why),
        SetAside::Trial(why) => (&metrics.trials_ignored_total, why),
    };
    counter.inc();
    tracing::warn!(%job, why, "a part of a job's orders was set aside");
}

#[cfg(test)]
mod tests {
    use super::super::merge::tests::decision;
    use super::*;
    use flexcomm_page::{PageReader, ReadError};

    fn read(path: &Path) -> JobOrders {
        let mut bytes = Vec::new();
        PageReader::open(path).unwrap().read(&mut bytes).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    fn open(dir: &tempfile::TempDir) -> Pages {
        Pages::open(&dir.path().join("run"), &dir.path().join("state"), Metrics::new().unwrap()).unwrap()
    }

    fn orders(version: u64) -> JobOrders {
        JobOrders { job: "j".parse().unwrap(), decision: Some(decision(version, "topk@0.01/allgather")), trial: None }
    }

    #[test]
    fn the_last_decision_survives_a_restart_of_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let mut pages = open(&dir);
        let path = pages.path(&"j".parse().unwrap(), 0, &BTreeSet::new()).unwrap();
        assert_eq!(read(&path).decision, None);
        pages.update(&orders(3)).unwrap();
        assert_eq!(read(&path), orders(3));
        drop(pages);
        // A reboot empties the tmpfs.
        std::fs::remove_dir_all(dir.path().join("run")).unwrap();
        let mut pages = open(&dir);
        assert_eq!(read(&path), orders(3));
        pages.update(&orders(2)).unwrap();
        assert_eq!(read(&path), orders(3));
        assert_eq!(pages.metrics.decisions_stale_total.get(), 1);
    }

    #[test]
    fn damaged_saved_decisions_are_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let mut pages = open(&dir);
        pages.update(&orders(3)).unwrap();
        drop(pages);
        let saved = dir.path().join("state/decisions/j.json");
        let text = std::fs::read_to_string(&saved).unwrap().replace("0.01", "0.02");
        std::fs::write(&saved, text).unwrap();
        std::fs::write(dir.path().join("state/decisions/k.json"), "{").unwrap();
        let pages = open(&dir);
        assert_eq!((pages.jobs.len(), pages.metrics.decisions_invalid_total.get()), (0, 2));
    }

    #[test]
    fn jobs_that_are_long_gone_are_forgotten_unless_trainers_live() {
        let dir = tempfile::tempdir().unwrap();
        let mut pages = open(&dir);
        let (job, now) = ("j".parse().unwrap(), Instant::now());
        pages.update(&orders(1)).unwrap();
        let path = pages.path(&job, 0, &BTreeSet::new()).unwrap();
        let mut reader = PageReader::open(&path).unwrap();
        pages.gone(&job, now);
        pages.tick(now + FORGET_AFTER, &[job.clone()].into());
        assert!(path.exists() && reader.heartbeat_us() > 0);
        pages.tick(now + FORGET_AFTER / 2, &BTreeSet::new());
        assert!(path.exists());
        pages.tick(now + FORGET_AFTER, &BTreeSet::new());
        assert!(!path.exists());
        assert_eq!(reader.read(&mut Vec::new()), Err(ReadError::Retired));
        assert_eq!(open(&dir).jobs.len(), 0);
    }

    #[test]
    fn jobs_are_bounded_and_dead_ones_make_room() {
        let dir = tempfile::tempdir().unwrap();
        let mut pages = open(&dir);
        let all: BTreeSet<JobId> = (0..MAX_JOBS).map(|i| format!("job{i}").parse().unwrap()).collect();
        for (i, job) in (0..).zip(&all) {
            pages.path(job, i % 3, &all).unwrap();
        }
        let more: JobId = "more".parse().unwrap();
        assert!(matches!(pages.path(&more, 9, &all), Err(PageError::TooMany(_))));
        let mut live = all.clone();
        let dead: JobId = "job7".parse().unwrap();
        live.remove(&dead);
        pages.path(&more, 9, &live).unwrap();
        assert!(pages.jobs.len() == MAX_JOBS && !pages.jobs.contains_key(&dead));
    }

    #[test]
    fn one_user_leaves_room_for_the_jobs_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut pages = open(&dir);
        let other: JobId = "other".parse().unwrap();
        pages.path(&other, 1, &BTreeSet::new()).unwrap();
        let mine: BTreeSet<JobId> = (0..MAX_JOBS_PER_USER).map(|i| format!("job{i}").parse().unwrap()).collect();
        mine.iter().for_each(|job| drop(pages.path(job, 0, &mine).unwrap()));
        let more: JobId = "more".parse().unwrap();
        let error = pages.path(&more, 0, &mine).unwrap_err();
        assert!(error.to_string().contains("user 0 has 32 jobs"), "{error}");
        pages.path(&"another".parse().unwrap(), 1, &mine).unwrap();
        // Names that come and go push out this user's own, not the other's, though that is gone for longest.
        pages.path(&more, 0, &BTreeSet::new()).unwrap();
        assert!(pages.jobs.contains_key(&other) && pages.jobs.len() == MAX_JOBS_PER_USER + 2);
    }

    #[test]
    fn saved_decisions_of_which_nobody_speaks_are_forgotten_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        open(&dir).update(&orders(3)).unwrap();
        let mut pages = open(&dir);
        pages.tick(Instant::now() + FORGET_AFTER, &BTreeSet::new());
        assert_eq!((pages.jobs.len(), open(&dir).jobs.len()), (0, 0));
    }
}
