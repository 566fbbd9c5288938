//! What the network should look like (lab only), who follows, and what was rejected.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::ShapeReport;
use flexcomm_wire::api::ScenarioSet;
use sqlx::SqliteConnection;

use super::statement::{Statement, row, sql};
use super::{Result, Store, json};
use crate::reports::Rejected;

/// The scenario as ordered.
#[derive(Debug, Clone, PartialEq)]
pub struct ScenarioRow {
    /// The order's id.
    pub id: u64,
    /// What is wanted; absent after DELETE.
    pub wanted: Option<ScenarioSet>,
}

/// What a node said about a shape order.
#[derive(Debug, Clone, PartialEq)]
pub struct ShapeRow {
    /// Which node.
    pub node: NodeName,
    /// Which order.
    pub id: u64,
    /// Why it was refused.
    pub error: Option<String>,
}

/// Reports that were not stored, for one reason.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct RejectedRow {
    /// Which reason.
    pub reason: String,
    /// How many.
    pub count: u64,
    /// The newest one's detail.
    pub last_detail: String,
    /// When the newest one came.
    pub last_us: u64,
}

row!(ScenarioRow { id: order_id, wanted });
row!(ShapeRow { node, id: order_id, error });
row!(RejectedRow { reason, count, last_detail, last_us });

impl Store {
    /// The scenario in force, if one was ever set.
    pub async fn scenario(&self) -> Result<Option<ScenarioRow>> {
        sql!("read the scenario", "SELECT * FROM scenario WHERE id = 1").fetch_optional(&self.read).await
    }

    /// Sets or, with `None`, ends the scenario; the order gets a new id.
    pub async fn put_scenario(&self, wanted: Option<&ScenarioSet>, now: Timestamp) -> Result<u64> {
        let mut tx = self.write.begin("store the scenario").await?;
        let wanted = wanted.map(|wanted| json(tx.operation, wanted)).transpose()?;
        let text = "INSERT INTO scenario (id, order_id, wanted, set_us) VALUES (1, 1, $1, $2)
            ON CONFLICT (id) DO UPDATE SET order_id = order_id + 1, wanted = excluded.wanted, set_us = excluded.set_us
            RETURNING order_id";
        let id = sql!(tx.operation, text, wanted, now).fetch_one(&mut *tx).await?;
        tx.commit().await?;
        Ok(id)
    }

    /// What each node said last.
    pub async fn shape_reports(&self) -> Result<Vec<ShapeRow>> {
        sql!("read the shape reports", "SELECT * FROM shape_reports ORDER BY node").fetch_all(&self.read).await
    }

    /// What was rejected, by reason.
    pub async fn rejected(&self) -> Result<Vec<RejectedRow>> {
        sql!("read what was rejected", "SELECT * FROM set_aside ORDER BY reason").fetch_all(&self.read).await
    }
}

/// Stores what a node said about a shape order; an older order's report does not replace a newer one's.
pub(super) async fn put_shape(
    db: &mut SqliteConnection,
    node: &NodeName,
    r: &ShapeReport,
    now: Timestamp,
) -> Result<()> {
    let text = "INSERT INTO shape_reports (node, order_id, error, received_us) VALUES ($1, $2, $3, $4)
        ON CONFLICT (node) DO UPDATE SET order_id = excluded.order_id, error = excluded.error,
            received_us = CASE WHEN excluded.order_id > order_id THEN excluded.received_us ELSE received_us END
        WHERE excluded.order_id >= order_id";
    sql!("store a shape report", text, node, r.id, r.error, now).execute(db).await
}

/// Counts a report that is not stored.
pub(super) fn count_rejected(rejected: &Rejected, now: Timestamp) -> Statement {
    let text = "INSERT INTO set_aside (reason, count, last_detail, last_us) VALUES ($1, 1, $2, $3)
        ON CONFLICT (reason) DO UPDATE SET count = count + 1, last_detail = excluded.last_detail,
            last_us = excluded.last_us";
    sql!("count what was rejected", text, rejected.reason.as_str(), rejected.detail, now)
}
