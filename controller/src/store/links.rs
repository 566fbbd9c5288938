//! Links: the newest estimate of each, its tests, its path, its history.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::LinkReport;
use sqlx::SqliteConnection;

use super::{Result, Store, signed, sql, stored, time};

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

/// The newest active test of a directed link.
#[derive(Debug, Clone, PartialEq)]
pub struct TestRow {
    /// From this node
    pub src: NodeName,
    /// to this one.
    pub dst: NodeName,
    /// As measured, bit/s.
    pub bandwidth_bps: f64,
    /// The same of the test before, bit/s.
    pub previous_bps: Option<f64>,
    /// When the report arrived.
    pub received: Timestamp,
    /// The estimated latency at that time.
    pub latency_us: Option<f64>,
    /// The estimated bandwidth at that time, bit/s.
    pub estimate_bps: Option<f64>,
}

/// A past estimate.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LinkPoint {
    /// When it arrived.
    pub at_us: u64,
    /// alpha.
    pub latency_us: f64,
    /// 8 / beta.
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

#[derive(sqlx::FromRow)]
struct Raw {
    src: String,
    dst: String,
    latency_us: f64,
    latency_confidence: f64,
    latency_age_ms: f64,
    bandwidth_bps: Option<f64>,
    bandwidth_confidence: f64,
    bandwidth_age_ms: f64,
    jitter_us: f64,
    loss_out: f64,
    loss_back: f64,
    received_us: i64,
}

impl Raw {
    fn row(self) -> Result<LinkRow> {
        let operation = "read the links";
        let dst: NodeName = stored(operation, "node name", self.dst.parse())?;
        Ok(LinkRow {
            src: stored(operation, "node name", self.src.parse())?,
            report: LinkReport {
                peer: dst.clone(),
                latency_us: self.latency_us,
                latency_confidence: self.latency_confidence,
                latency_age_ms: self.latency_age_ms,
                bandwidth_bps: self.bandwidth_bps,
                bandwidth_confidence: self.bandwidth_confidence,
                bandwidth_age_ms: self.bandwidth_age_ms,
                jitter_us: self.jitter_us,
                loss_out: self.loss_out,
                loss_back: self.loss_back,
            },
            dst,
            received: time(self.received_us),
        })
    }
}

#[derive(sqlx::FromRow)]
struct RawTest {
    src: String,
    dst: String,
    bandwidth_bps: f64,
    previous_bps: Option<f64>,
    received_us: i64,
    latency_us: Option<f64>,
    estimate_bps: Option<f64>,
}

impl RawTest {
    fn row(self) -> Result<TestRow> {
        let operation = "read the tests of links";
        Ok(TestRow {
            src: stored(operation, "node name", self.src.parse())?,
            dst: stored(operation, "node name", self.dst.parse())?,
            bandwidth_bps: self.bandwidth_bps,
            previous_bps: self.previous_bps,
            received: time(self.received_us),
            latency_us: self.latency_us,
            estimate_bps: self.estimate_bps,
        })
    }
}

impl Store {
    /// The newest estimate of every link.
    pub async fn links(&self) -> Result<Vec<LinkRow>> {
        let rows: Vec<Raw> = sqlx::query_as("SELECT * FROM links ORDER BY src, dst")
            .fetch_all(&self.read)
            .await
            .map_err(sql("read the links"))?;
        rows.into_iter().map(Raw::row).collect()
    }

    /// The newest active test of every link that was tested.
    pub async fn link_tests(&self) -> Result<Vec<TestRow>> {
        let operation = "read the tests of links";
        let query = "SELECT src, dst, bandwidth_bps, previous_bps, received_us, latency_us, estimate_bps
             FROM link_tests ORDER BY src, dst";
        let rows: Vec<RawTest> = sqlx::query_as(query).fetch_all(&self.read).await.map_err(sql(operation))?;
        rows.into_iter().map(RawTest::row).collect()
    }

    /// Past estimates of one link, oldest first, the newest `limit` of them.
    pub async fn link_history(&self, src: &NodeName, dst: &NodeName, limit: u32) -> Result<Vec<LinkPoint>> {
        let mut rows: Vec<(i64, f64, Option<f64>)> = sqlx::query_as(HISTORY)
            .bind(src.as_str())
            .bind(dst.as_str())
            .bind(limit)
            .fetch_all(&self.read)
            .await
            .map_err(sql("read a link's history"))?;
        rows.reverse();
        let point = |(at, latency_us, bandwidth_bps)| LinkPoint { at_us: time(at).0, latency_us, bandwidth_bps };
        Ok(rows.into_iter().map(point).collect())
    }

    /// The newest path of every link that was traced.
    pub async fn paths(&self) -> Result<Vec<PathRow>> {
        let operation = "read the paths";
        let rows: Vec<(String, String, String, i64)> =
            sqlx::query_as("SELECT src, dst, hops, received_us FROM paths ORDER BY src, dst")
                .fetch_all(&self.read)
                .await
                .map_err(sql(operation))?;
        let row = |(src, dst, hops, at): (String, String, String, i64)| {
            Ok(PathRow {
                from: stored(operation, "node name", src.parse())?,
                to: stored(operation, "node name", dst.parse())?,
                hops: stored(operation, "path", serde_json::from_str(&hops))?,
                at_us: time(at).0,
            })
        };
        rows.into_iter().map(row).collect()
    }
}

impl Store {
    /// What each node may still spend on throughput tests, in seconds' worth. Of nodes that were forgotten only
    /// debts are kept.
    pub async fn probe_accounts(&self) -> Result<Vec<(NodeName, f64)>> {
        let operation = "read the accounts of probing";
        let on_error = sql(operation);
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        sqlx::query("DELETE FROM probe_accounts WHERE level_s >= 0 AND node NOT IN (SELECT node FROM nodes)")
            .execute(&mut *tx)
            .await
            .map_err(&on_error)?;
        let rows: Vec<(String, f64)> =
            sqlx::query_as("SELECT node, level_s FROM probe_accounts").fetch_all(&mut *tx).await.map_err(&on_error)?;
        tx.commit().await.map_err(&on_error)?;
        let row = |(node, level_s): (String, f64)| Ok((stored(operation, "node name", node.parse())?, level_s));
        rows.into_iter().map(row).collect()
    }

    /// Stores what moved, all or nothing.
    pub async fn put_probe_accounts(&self, moved: &[(NodeName, f64)], now: Timestamp) -> Result<()> {
        if moved.is_empty() {
            return Ok(());
        }
        let on_error = sql("store the accounts of probing");
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        for (node, level_s) in moved {
            sqlx::query("INSERT OR REPLACE INTO probe_accounts (node, level_s, stored_us) VALUES ($1, $2, $3)")
                .bind(node.as_str())
                .bind(level_s)
                .bind(signed(now.0))
                .execute(&mut *tx)
                .await
                .map_err(&on_error)?;
        }
        tx.commit().await.map_err(&on_error)
    }
}

/// Stores an estimate and adds it to the history; false when its peer never registered. One query: each is a way to the
/// database's thread and back, and links are reported more often than all else.
pub(super) async fn put(db: &mut SqliteConnection, src: &NodeName, r: &LinkReport, now: Timestamp) -> Result<bool> {
    let done = sqlx::query(
        "INSERT OR REPLACE INTO links (src, dst, latency_us, latency_confidence, latency_age_ms, bandwidth_bps,
            bandwidth_confidence, bandwidth_age_ms, jitter_us, loss_out, loss_back, received_us)
         SELECT $1, node, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12 FROM nodes WHERE node = $2;
         INSERT INTO link_history (src, dst, received_us, latency_us, bandwidth_bps)
         SELECT $1, node, $12, $3, $6 FROM nodes WHERE node = $2",
    )
    .bind(src.as_str())
    .bind(r.peer.as_str())
    .bind(r.latency_us)
    .bind(r.latency_confidence)
    .bind(r.latency_age_ms)
    .bind(r.bandwidth_bps)
    .bind(r.bandwidth_confidence)
    .bind(r.bandwidth_age_ms)
    .bind(r.jitter_us)
    .bind(r.loss_out)
    .bind(r.loss_back)
    .bind(signed(now.0))
    .execute(db)
    .await
    .map_err(sql("store a link"))?;
    Ok(done.rows_affected() > 0)
}

/// Stores the result of an active test of one direction.
pub(super) async fn put_test(
    db: &mut SqliteConnection,
    (src, dst): (&NodeName, &NodeName),
    bps: f64,
    now: Timestamp,
) -> Result<()> {
    sqlx::query(
        "INSERT OR REPLACE INTO link_tests (src, dst, bandwidth_bps, received_us, latency_us, estimate_bps, previous_bps)
         VALUES ($1, $2, $3, $4, (SELECT latency_us FROM links WHERE src = $1 AND dst = $2),
            (SELECT bandwidth_bps FROM links WHERE src = $1 AND dst = $2),
            (SELECT bandwidth_bps FROM link_tests WHERE src = $1 AND dst = $2))",
    )
    .bind(src.as_str())
    .bind(dst.as_str())
    .bind(bps)
    .bind(signed(now.0))
    .execute(db)
    .await
    .map_err(sql("store a test of a link"))?;
    Ok(())
}

/// Stores a path.
pub(super) async fn put_path(
    db: &mut SqliteConnection,
    (src, dst): (&NodeName, &NodeName),
    hops: &str,
    now: Timestamp,
) -> Result<()> {
    sqlx::query("INSERT OR REPLACE INTO paths (src, dst, hops, received_us) VALUES ($1, $2, $3, $4)")
        .bind(src.as_str())
        .bind(dst.as_str())
        .bind(hops)
        .bind(signed(now.0))
        .execute(db)
        .await
        .map_err(sql("store a path"))?;
    Ok(())
}
