//! What the network should look like (lab only), who follows, and what was rejected.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::api::ScenarioSet;
use sqlx::SqliteConnection;

use super::{Result, Store, json, signed, sql, stored, unsigned};

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

impl Store {
    /// The scenario in force, if one was ever set.
    pub async fn scenario(&self) -> Result<Option<ScenarioRow>> {
        let operation = "read the scenario";
        let row: Option<(i64, Option<String>)> = sqlx::query_as("SELECT order_id, wanted FROM scenario WHERE id = 1")
            .fetch_optional(&self.read)
            .await
            .map_err(sql(operation))?;
        let Some((id, wanted)) = row else { return Ok(None) };
        let wanted = wanted.map(|text| stored(operation, "scenario", serde_json::from_str(&text))).transpose()?;
        Ok(Some(ScenarioRow { id: unsigned(id), wanted }))
    }

    /// Sets or, with `None`, ends the scenario; the order gets a new id.
    pub async fn put_scenario(&self, wanted: Option<&ScenarioSet>, now: Timestamp) -> Result<u64> {
        let operation = "store the scenario";
        let on_error = sql(operation);
        let text = wanted.map(|w| json(operation, w)).transpose()?;
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let (id,): (i64,) = sqlx::query_as(
            "INSERT INTO scenario (id, order_id, wanted, set_us) VALUES (1, 1, $1, $2)
             ON CONFLICT (id) DO UPDATE SET order_id = order_id + 1, wanted = excluded.wanted, set_us = excluded.set_us
             RETURNING order_id",
        )
        .bind(text)
        .bind(signed(now.0))
        .fetch_one(&mut *tx)
        .await
        .map_err(&on_error)?;
        tx.commit().await.map_err(&on_error)?;
        Ok(unsigned(id))
    }

    /// What each node said last.
    pub async fn shape_reports(&self) -> Result<Vec<ShapeRow>> {
        let operation = "read the shape reports";
        let rows: Vec<(String, i64, Option<String>)> =
            sqlx::query_as("SELECT node, order_id, error FROM shape_reports ORDER BY node")
                .fetch_all(&self.read)
                .await
                .map_err(sql(operation))?;
        let row = |(node, id, error): (String, i64, Option<String>)| {
            Ok(ShapeRow { node: stored(operation, "node name", node.parse())?, id: unsigned(id), error })
        };
        rows.into_iter().map(row).collect()
    }

    /// What was rejected, by reason.
    pub async fn rejected(&self) -> Result<Vec<RejectedRow>> {
        let rows: Vec<(String, i64, String, i64)> =
            sqlx::query_as("SELECT reason, count, last_detail, last_us FROM set_aside ORDER BY reason")
                .fetch_all(&self.read)
                .await
                .map_err(sql("read what was rejected"))?;
        let row = |(reason, count, last_detail, last): (String, i64, String, i64)| RejectedRow {
            reason,
            count: unsigned(count),
            last_detail,
            last_us: unsigned(last),
        };
        Ok(rows.into_iter().map(row).collect())
    }
}

/// Stores what a node said about a shape order; an older order's report does not replace a newer one's.
pub(super) async fn put_shape(
    db: &mut SqliteConnection,
    node: &NodeName,
    (id, error): (u64, Option<&str>),
    now: Timestamp,
) -> Result<()> {
    sqlx::query(
        "INSERT INTO shape_reports (node, order_id, error, received_us) VALUES ($1, $2, $3, $4)
         ON CONFLICT (node) DO UPDATE SET order_id = excluded.order_id, error = excluded.error,
            received_us = CASE WHEN excluded.order_id > order_id THEN excluded.received_us ELSE received_us END
         WHERE excluded.order_id >= order_id",
    )
    .bind(node.as_str())
    .bind(signed(id))
    .bind(error)
    .bind(signed(now.0))
    .execute(db)
    .await
    .map_err(sql("store a shape report"))?;
    Ok(())
}

/// Counts a report that is not stored.
pub(super) async fn count_rejected(
    db: &mut SqliteConnection,
    reason: &str,
    detail: &str,
    now: Timestamp,
) -> Result<()> {
    sqlx::query(
        "INSERT INTO set_aside (reason, count, last_detail, last_us) VALUES ($1, 1, $2, $3)
         ON CONFLICT (reason) DO UPDATE SET count = count + 1, last_detail = excluded.last_detail,
            last_us = excluded.last_us",
    )
    .bind(reason)
    .bind(detail)
    .bind(signed(now.0))
    .execute(db)
    .await
    .map_err(sql("count what was rejected"))?;
    Ok(())
}
