//! Links: the newest estimate of each, its tests, its path, its history.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::{LinkReport, PathReport, ThroughputReport};
use sqlx::{AssertSqlSafe, SqliteConnection};
use std::sync::Arc;

use super::read_cache::Tables;
use super::statement::{Statement, ToValue, row, sql};
use super::{Result, Store, experiments, json};

pub(super) const HISTORY: &str = "SELECT received_us, latency_us, bandwidth_bps FROM link_history
    WHERE src = $1 AND dst = $2 ORDER BY id DESC LIMIT $3";

/// The newest estimate of a directed link, with the controller's time of arrival.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkRow {
    /// From this node
    pub src: NodeName,
    /// to this one.
    pub dst: NodeName,
    /// As reported; `peer` is `dst`.
    pub report: LinkReport,
    /// When it arrived.
    pub received: Timestamp,
}

/// What a shaper's token bucket has saved up passes at once: a test of fewer bytes that took fewer seconds tells little of a link that it finds
/// fast.
const SHORT_BYTES: f64 = 4_194_304.0;
const SHORT_S: f64 = 0.01;

/// The newest throughput test of a directed link by one of its ends, or its newest that was a lower bound, or short.
#[derive(Debug, Clone, PartialEq)]
pub struct TestRow {
    /// From this node
    pub src: NodeName,
    /// to this one.
    pub dst: NodeName,
    /// Which of them made it.
    pub reporter: NodeName,
    /// As measured, bit/s.
    pub bandwidth_bps: f64,
    /// Whether the link may be faster.
    pub is_lower_bound: bool,
    /// Whether it was over so soon that a shaper's token bucket may have let all of it pass.
    pub is_short: bool,
    /// When the report arrived.
    pub received: Timestamp,
    /// The estimated latency at that time.
    pub latency_us: Option<f64>,
}

/// A past estimate.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LinkPoint {
    /// When it arrived.
    pub at_us: u64,
    /// alpha.
    pub latency_us: f64,
    /// As the newest throughput test found it that was no lower bound, where there was one, bit/s.
    pub bandwidth_bps: Option<f64>,
}

/// The hops of a path.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PathRow {
    /// From this node
    pub from: NodeName,
    /// to this one.
    pub to: NodeName,
    /// Hop by hop; null where one did not answer.
    pub hops: Vec<Option<std::net::IpAddr>>,
    /// When the report arrived.
    pub at_us: u64,
}

row! {
    LinkReport {
        peer: dst, latency_us, latency_confidence, latency_age_ms, jitter_us, loss_out, loss_back, by_icmp
    }
}
row!(LinkRow { src, dst, received: received_us; report });
row!(TestRow { src, dst, reporter, bandwidth_bps, is_lower_bound, is_short, received: received_us, latency_us });
row!(LinkPoint { at_us: received_us, latency_us, bandwidth_bps });
row!(PathRow { from: src, to: dst, hops, at_us: received_us });

impl Store {
    /// The newest estimate of every link.
    pub async fn links(&self) -> Result<Arc<Vec<LinkRow>>> {
        let text = "SELECT * FROM links ORDER BY src, dst";
        let read = async { sql!("read the links", text).fetch_all(&self.read).await.map(Arc::new) };
        self.reads.links.get(self.write.counters(), (), read).await
    }

    /// The newest test of every link by each of its ends that has made one.
    pub async fn link_tests(&self) -> Result<Arc<Vec<TestRow>>> {
        let text = "SELECT * FROM link_tests ORDER BY src, dst, reporter, is_lower_bound, is_short";
        let read = async { sql!("read the tests of links", text).fetch_all(&self.read).await.map(Arc::new) };
        self.reads.link_tests.get(self.write.counters(), (), read).await
    }

    /// Past estimates of one link, oldest first, the newest `limit` of them.
    pub async fn link_history(&self, src: &NodeName, dst: &NodeName, limit: u32) -> Result<Vec<LinkPoint>> {
        let mut rows = sql!("read a link's history", HISTORY, src, dst, limit).fetch_all(&self.read).await?;
        rows.reverse();
        Ok(rows)
    }

    /// The newest path of every link that was traced.
    pub async fn paths(&self) -> Result<Vec<PathRow>> {
        sql!("read the paths", "SELECT * FROM paths ORDER BY src, dst").fetch_all(&self.read).await
    }

    /// What each node may still spend on throughput tests, in seconds' worth. Of nodes that were forgotten only
    /// debts are kept.
    pub async fn probe_accounts(&self) -> Result<Vec<(NodeName, f64)>> {
        let mut tx = self.write.begin("read the accounts of probing").await?;
        let forget = "DELETE FROM probe_accounts WHERE level_s >= 0 AND node NOT IN (SELECT node FROM nodes)";
        sql!(tx.operation, forget).execute(&mut *tx).await?;
        let query = sql!(tx.operation, "SELECT node, level_s FROM probe_accounts");
        let accounts = query.fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(accounts)
    }

    /// Stores what moved, all or nothing.
    pub async fn put_probe_accounts(&self, moved: &[(NodeName, f64)], now: Timestamp) -> Result<()> {
        if moved.is_empty() {
            return Ok(());
        }
        let mut tx = self.write.begin("store the accounts of probing").await?;
        tx.tables = Tables::NONE;
        for (node, level_s) in moved {
            let text = "INSERT OR REPLACE INTO probe_accounts (node, level_s, stored_us) VALUES ($1, $2, $3)";
            sql!(tx.operation, text, node, level_s, now).execute(&mut *tx).await?;
        }
        tx.commit().await
    }
}

/// Estimates that one query stores: its text and its values stay small.
const AT_ONCE: usize = 16;

/// Stores estimates and adds them to the history; how many were stored: those whose peer never registered
/// are left out. Few queries: each is a way to the database's thread and back, and links are reported more often than all else.
pub(super) async fn put(
    db: &mut SqliteConnection,
    src: &NodeName,
    reports: &[LinkReport],
    now: Timestamp,
) -> Result<usize> {
    let mut stored = 0;
    for reports in reports.chunks(AT_ONCE) {
        let (mut texts, mut values) = (Vec::new(), vec![src.to_value(), now.to_value()]);
        for r in reports {
            let first = values.len();
            let value = |number: usize| first + number;
            let [peer, latency] = [1, 2].map(value);
            let columns: Vec<String> = (2..=8).map(|number| format!("${}", value(number))).collect();
            texts.push(format!(
                "INSERT OR REPLACE INTO links (src, dst, received_us, latency_us, latency_confidence, latency_age_ms,
                    jitter_us, loss_out, loss_back, by_icmp)
                 SELECT $1, node, $2, {} FROM nodes WHERE node = ${peer};
                 INSERT INTO link_history (src, dst, received_us, latency_us, bandwidth_bps)
                 SELECT $1, node, $2, ${latency}, (SELECT bandwidth_bps FROM link_tests WHERE src = $1 AND dst = ${peer}
                    ORDER BY is_lower_bound OR is_short, received_us DESC LIMIT 1) FROM nodes WHERE node = ${peer}",
                columns.join(", ")
            ));
            values.push(r.peer.to_value());
            let numbers = [r.latency_us, r.latency_confidence, r.latency_age_ms, r.jitter_us, r.loss_out, r.loss_back];
            values.extend(numbers.map(|value| value.to_value()));
            values.push(r.by_icmp.to_value());
        }
        // Two rows of each.
        stored += Statement::new("store links", AssertSqlSafe(texts.join("; ")), values).affected(&mut *db).await?
            as usize
            / 2;
    }
    Ok(stored)
}

/// Takes what was just stored into the rows of [`Store::links`], in their order; whether it is news.
pub(super) fn take(rows: &mut Vec<LinkRow>, new: LinkRow) -> bool {
    match rows.binary_search_by(|row| (&row.src, &row.dst).cmp(&(&new.src, &new.dst))) {
        Ok(at) => {
            let last = std::mem::replace(&mut rows[at], new);
            rows[at].report.is_news_after(&last.report)
        }
        Err(at) => {
            rows.insert(at, new);
            true
        }
    }
}

/// Stores what a test found of both ways.
pub(super) async fn put_tests(
    db: &mut SqliteConnection,
    node: &NodeName,
    r: &ThroughputReport,
    now: Timestamp,
) -> Result<()> {
    let [out_bytes, back_bytes] = r.bytes_of_ways();
    let out = (r.out_bps, r.out_is_lower_bound, out_bytes);
    let back = (r.back_bps, r.back_is_lower_bound, back_bytes);
    for (way, (bps, is_lower_bound, bytes)) in [((node, &r.peer), out), ((&r.peer, node), back)] {
        if let Some(bps) = bps {
            let is_short = (bytes as f64) < SHORT_BYTES && bytes as f64 * 8.0 / bps < SHORT_S;
            put_test(db, (way, node), (bps, is_lower_bound, is_short), now).await?;
        }
    }
    experiments::add_test(db, node, r).await
}

/// Stores what a test found of one direction.
async fn put_test(
    db: &mut SqliteConnection,
    ((src, dst), reporter): ((&NodeName, &NodeName), &NodeName),
    (bps, is_lower_bound, is_short): (f64, bool, bool),
    now: Timestamp,
) -> Result<()> {
    let text = "INSERT OR REPLACE INTO link_tests
            (src, dst, reporter, bandwidth_bps, is_lower_bound, is_short, received_us, latency_us)
        VALUES ($1, $2, $3, $4, $5, $6, $7, (SELECT latency_us FROM links WHERE src = $1 AND dst = $2))";
    sql!("store a test of a link", text, src, dst, reporter, bps, is_lower_bound, is_short, now).execute(db).await
}

/// Stores a path.
pub(super) async fn put_path(db: &mut SqliteConnection, src: &NodeName, r: &PathReport, now: Timestamp) -> Result<()> {
    let operation = "store a path";
    let text = "INSERT OR REPLACE INTO paths (src, dst, hops, received_us) VALUES ($1, $2, $3, $4)";
    sql!(operation, text, src, r.peer, json(operation, &r.hops)?, now).execute(db).await
}
