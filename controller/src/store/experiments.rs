//! What experiments take, per job: the seconds, bytes and processor time of throughput tests and trials.

use flexcomm_domain::{JobId, NodeName};
use flexcomm_wire::{ThroughputReport, TrialReport};
use sqlx::SqliteConnection;

use super::statement::{row, sql};
use super::{Result, Store};

/// What all experiments of one kind took since a job's run began.
#[derive(Debug, Clone, PartialEq)]
pub struct ExperimentRow {
    /// `throughput-test`, `live-trial` or `shadow-trial`.
    pub kind: String,
    /// How many.
    pub count: u64,
    /// Seconds: of tests those that they lasted, of live trials those without training, of shadow trials those of rank 0's steps.
    pub seconds: f64,
    /// Bytes that tests sent, of tests that failed at most, and that rank 0 sent in live trials; `None` of shadow trials, and where no
    /// report says.
    pub bytes: Option<u64>,
    /// Processor time of tests, at the end that began them, and of rank 0 in trials; `None` where no report says.
    pub cpu_s: Option<f64>,
}

row!(ExperimentRow { kind, count, seconds, bytes, cpu_s });

impl Store {
    /// What a job's experiments took, by kind.
    pub async fn experiments(&self, job: &JobId) -> Result<Vec<ExperimentRow>> {
        // Of trials what is not known is stored as 0.
        let text = "SELECT kind, sum(count) AS count, sum(seconds) AS seconds,
            CASE kind WHEN 'throughput-test' THEN sum(bytes) ELSE nullif(sum(bytes), 0) END AS bytes,
            CASE kind WHEN 'throughput-test' THEN sum(cpu_s) ELSE nullif(sum(cpu_s), 0.0) END AS cpu_s
            FROM experiments WHERE job = $1 GROUP BY kind";
        sql!("read what experiments took", text, job).fetch_all(&self.read).await
    }
}

/// Adds a test to what each job took that runs on both nodes. What never began took nothing.
pub(super) async fn add_test(db: &mut SqliteConnection, node: &NodeName, r: &ThroughputReport) -> Result<()> {
    if r.took_us.is_none() && r.bytes == 0 {
        return Ok(());
    }
    let text = "INSERT INTO experiments (job, kind, id, count, seconds, bytes, cpu_s)
        SELECT job, 'throughput-test', 0, 1, $3, $4, $5 FROM jobs WHERE ended_us IS NULL
            AND EXISTS (SELECT 1 FROM ranks WHERE ranks.job = jobs.job AND node = $1 AND left_us IS NULL)
            AND EXISTS (SELECT 1 FROM ranks WHERE ranks.job = jobs.job AND node = $2 AND left_us IS NULL)
        ON CONFLICT (job, kind, id) DO UPDATE SET count = count + 1, seconds = seconds + excluded.seconds,
            bytes = min(bytes + excluded.bytes, 1 << 62), cpu_s = cpu_s + excluded.cpu_s";
    let seconds = |us: Option<f64>| us.unwrap_or_default() * 1e-6;
    let (took_s, cpu_s) = (seconds(r.took_us), seconds(r.cpu_us));
    sql!("store what a test took", text, node, r.peer, took_s, r.bytes, cpu_s).execute(db).await
}

/// Takes note of what a trial took by rank 0's newest report of it: all ranks are in it together. Bytes and processor time that the report
/// does not have are stored as 0 and read as absent.
pub(super) async fn put_trial(db: &mut SqliteConnection, r: &TrialReport) -> Result<()> {
    if r.rank != 0 {
        return Ok(());
    }
    let ran = r.cost_us > 0.0;
    let shadowed = r.outcomes.iter().any(|outcome| outcome.shadow_gain.is_some());
    let shadow_us = r.shadow_us.unwrap_or_default();
    let (bytes, cpu_us) = (r.bytes.unwrap_or_default(), r.cpu_us.unwrap_or_default());
    let kinds = [
        ("live-trial", ran, r.cost_us, bytes, cpu_us),
        // They run on the rank's processors, and send next to nothing.
        ("shadow-trial", shadowed, shadow_us, 0, shadow_us),
    ];
    for (kind, _, us, bytes, cpu_us) in kinds.into_iter().filter(|(_, has, ..)| *has) {
        let text = "INSERT OR REPLACE INTO experiments (job, kind, id, count, seconds, bytes, cpu_s)
            VALUES ($1, $2, $3, 1, $4, $5, $6)";
        sql!("store what a trial took", text, r.job, kind, r.id, us * 1e-6, bytes, cpu_us * 1e-6)
            .execute(&mut *db)
            .await?;
    }
    Ok(())
}
