//! What handlers and the loop share.

use flexcomm_domain::{JobId, Timestamp};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::{Notify, Semaphore, watch};

use crate::api::auth::Token;
use crate::api::host::Hosts;
use crate::clock::{self, Clock};
use crate::config::Config;
use crate::doubts::{Doubt, Doubts};
use crate::echoes::Echoes;
use crate::grants::{Pair, Scheduler};
use crate::memories::Memories;
use crate::metrics::Counters;
use crate::missing::{self, Noted, Sight};
use crate::presence::Presence;
use crate::publish::{EPOCH_STEP, Publisher};
use crate::reported::Reported;
use crate::store::{JobRow, RankRow, Store};
use crate::{ConfigError, ServeError};

/// Everything. What must survive is in the store; the rest is known again within seconds of a restart.
#[derive(Debug)]
pub struct App {
    /// As configured.
    pub config: Config,
    /// The cluster's token.
    pub token: Token,
    /// The names that requests may be for.
    pub hosts: Hosts,
    /// The controller's time.
    pub clock: Clock,
    /// What survives.
    pub store: Store,
    /// Who is there.
    pub presence: Presence,
    /// Orders on their way.
    pub publisher: Publisher,
    /// Throughput tests.
    pub scheduler: Mutex<Scheduler>,
    /// How often agents are told to echo and to trace.
    pub echoes: Mutex<Echoes>,
    /// What the loop saw last, by job.
    pub statuses: Mutex<BTreeMap<JobId, JobStatus>>,
    /// What the planner remembers of running jobs.
    pub(crate) memories: Mutex<Memories>,
    /// How far the ranks of jobs have reported their steps.
    pub(crate) reported: Mutex<Reported>,
    /// Nodes of jobs that were missing at the last look.
    pub(crate) missing: Mutex<Noted>,
    /// Nodes of jobs whose reports were not counted at the last look.
    pub(crate) doubts: Mutex<Doubts>,
    /// Counters of this process.
    pub counters: Counters,
    /// Held by a pass of the loop: what it stores of a job must not come after the job was deleted.
    pub(crate) passing: tokio::sync::Mutex<()>,
    /// Wakes the loop.
    pub wake: Notify,
    /// Bounds the order streams.
    pub streams: Arc<Semaphore>,
    /// Bounds the bytes of large bodies that are held at once.
    pub bodies: Arc<Semaphore>,
    /// True when the process ends: streams close.
    pub stopping: watch::Sender<bool>,
}

/// The last look at a job.
#[derive(Debug, Clone, Default)]
pub struct JobStatus {
    /// When.
    pub at: Timestamp,
    /// What the job waits for; empty when it waits for nothing.
    pub waiting: Vec<String>,
    /// Nodes whose reports are not counted, for a while already.
    pub doubts: Vec<Doubt>,
    /// The planner's report; absent before the first look.
    pub report: Option<Arc<flexcomm_planner::Report>>,
    /// What the report is of, where nothing was decided: snapshots of decisions are in the store.
    pub undecided: Option<Arc<flexcomm_planner::Snapshot>>,
    /// The collective under the decision in force, as predicted before the steps of the interval that is open.
    pub predicted_sync_us: Option<f64>,
    /// The same of the step.
    pub predicted_step_us: Option<f64>,
    /// Whether measured and predicted time of the collective differ by more than the suspect threshold.
    pub deviates: bool,
}

/// Brings times that an earlier start stored under a wrong wall clock back to now: what waits for a time to pass, as the
/// planner's dwell, would wait for years.
async fn heal_times(store: &Store) -> Result<(), ServeError> {
    let (newest, wall) = (store.newest_time().await?, clock::wall());
    if clock::stored_ahead(newest, wall) {
        let changed = store.shift_back(wall).await?;
        let (newest, wall) = (clock::rfc3339(newest), clock::rfc3339(wall));
        tracing::warn!(
            changed,
            "stored times reach to {newest}, the wall clock says {wall}: an earlier start ran under a wrong clock; times \
             after now are set to now, and what the planner remembered is forgotten"
        );
    }
    Ok(())
}

impl App {
    /// Opens the store and takes up what is there. The token's file is made last of all that can fail.
    pub async fn open(config: Config) -> Result<Self, ServeError> {
        let store = Store::open(&config.db).await?;
        heal_times(&store).await?;
        let clock = Clock::start(store.newest_time().await?);
        Self::with(config, store, clock, Token::read_or_make).await
    }

    /// Takes up what is in a store. The token is asked for last of all that can fail.
    pub(crate) async fn with(
        config: Config,
        store: Store,
        clock: Clock,
        token: impl FnOnce(&Path) -> std::io::Result<Token>,
    ) -> Result<Self, ServeError> {
        let now = clock.now();
        let epoch = store.raise("orders_epoch", EPOCH_STEP, now.0).await?;
        let presence = Presence::new(config.dead_after);
        for node in store.nodes().await? {
            // Owners from before the restart have the usual time to be heard of before another may take the name.
            let _ = presence.claim(&node.node, (node.instance, &[]), now);
        }
        let mut scheduler = Scheduler::new(config.probes.clone(), epoch);
        for test in store.link_tests().await?.iter() {
            scheduler.seed(Pair::new(&test.src, &test.dst), test.received);
        }
        for (node, level_s) in store.probe_accounts().await? {
            scheduler.restore(node, level_s, now);
        }
        let token = token(&config.token_file)
            .map_err(|e| ConfigError::Token { path: config.token_file.clone(), why: e.to_string() })?;
        Ok(Self {
            token,
            hosts: Hosts::new(&config.allowed_hosts),
            clock,
            store,
            presence,
            publisher: Publisher::new(epoch),
            scheduler: Mutex::new(scheduler),
            echoes: Mutex::new(Echoes::configured(&config.probes)),
            statuses: Mutex::default(),
            memories: Mutex::default(),
            reported: Mutex::default(),
            missing: Mutex::default(),
            doubts: Mutex::default(),
            counters: Counters::new(),
            passing: tokio::sync::Mutex::default(),
            wake: Notify::new(),
            streams: Arc::new(Semaphore::new(crate::limits::MAX_STREAMS)),
            bodies: Arc::new(Semaphore::new(crate::limits::BODY_BUDGET)),
            stopping: watch::Sender::new(false),
            config,
        })
    }

    /// How much of a job its agents show now.
    pub(crate) fn sight(&self, job: &JobRow, ranks: &[RankRow]) -> Sight {
        let now = self.clock.now();
        missing::sight(job, ranks, now, |rank| match self.presence.get(&rank.node, now) {
            Some((_, true)) => None,
            Some((seen, false)) => Some(seen.last),
            None => Some(rank.seen),
        })
    }
}
