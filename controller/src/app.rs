//! What handlers and the loop share.

use flexcomm_domain::{JobId, Timestamp};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, Semaphore, watch};

use crate::clock::Clock;
use crate::config::Config;
use crate::grants::{Pair, Scheduler};
use crate::metrics::Counters;
use crate::presence::Presence;
use crate::publish::{EPOCH_STEP, Publisher};
use crate::store::{Result, Store};

/// Everything. What must survive is in the store; the rest is filled again within a second of a restart.
#[derive(Debug)]
pub struct App {
    /// As configured.
    pub config: Config,
    /// The controller's time.
    pub clock: Clock,
    /// What survives.
    pub store: Store,
    /// Who is there.
    pub presence: Presence,
    /// Orders on their way.
    pub publisher: Publisher,
    /// Throughput tests.
    pub grants: Mutex<Scheduler>,
    /// What the loop saw last, by job.
    pub board: Mutex<BTreeMap<JobId, Board>>,
    /// Counters of this process.
    pub counters: Counters,
    /// Wakes the loop.
    pub wake: Notify,
    /// Bounds the order streams.
    pub streams: Semaphore,
    /// True when the process ends: streams close.
    pub stopping: watch::Sender<bool>,
}

/// The last look at a job.
#[derive(Debug, Clone, Default)]
pub struct Board {
    /// When.
    pub at: Timestamp,
    /// What the job waits for; empty when it waits for nothing.
    pub waiting: Vec<String>,
    /// The planner's report.
    pub report: serde_json::Value,
    /// `change` or why not, as a label.
    pub verdict: String,
    /// The collective under the decision in force, predicted for now.
    pub predicted_sync_us: Option<f64>,
    /// The step under the decision in force, predicted for now.
    pub predicted_step_us: Option<f64>,
    /// The least step time among the alternatives over the one in force; absent before the first solve.
    pub alternatives: Vec<flexcomm_planner::Alternative>,
    /// Whether measured and predicted time of the collective differ by more than the suspect threshold.
    pub deviates: bool,
}

impl App {
    /// Opens the store and takes up what is there.
    pub async fn open(config: Config) -> Result<Self> {
        let store = Store::open(&config.db).await?;
        let clock = Clock::start(store.newest_time().await?);
        let now = clock.now();
        let epoch = store.raise("orders_epoch", EPOCH_STEP, now.0).await?;
        let presence = Presence::new(config.dead_after);
        for node in store.nodes().await? {
            // Owners from before the restart have the usual time to be heard of before another may take the name.
            let _ = presence.claim(&node.node, node.instance, now);
        }
        let mut grants = Scheduler::new(config.probes.clone(), epoch);
        for test in store.link_tests().await? {
            grants.seed(Pair::new(&test.src, &test.dst), test.received);
        }
        Ok(Self {
            clock,
            store,
            presence,
            publisher: Publisher::new(epoch),
            grants: Mutex::new(grants),
            board: Mutex::default(),
            counters: Counters::new(),
            wake: Notify::new(),
            streams: Semaphore::new(crate::limits::MAX_STREAMS),
            stopping: watch::Sender::new(false),
            config,
        })
    }

    /// What the loop saw last.
    pub fn boards(&self) -> MutexGuard<'_, BTreeMap<JobId, Board>> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The throughput tests.
    pub fn scheduler(&self) -> MutexGuard<'_, Scheduler> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
