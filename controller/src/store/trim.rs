//! What grows with time is cut now and then, not with every report: finding the end of a window costs as much as
//! the window is long.

use super::read_cache::Tables;
use super::statement::sql;
use super::{Result, Store};
use crate::limits::{INTERVALS, LINK_HISTORY, PROGRESS};

/// The rest of a job's curve beyond its newest points.
pub(super) const PROGRESS_SQL: &str = "DELETE FROM progress WHERE job = $1
    AND step <= (SELECT step FROM progress WHERE job = $1 ORDER BY step DESC LIMIT 1 OFFSET $2)";

/// The rest of a job's intervals beyond its newest ones.
pub(super) const INTERVALS_SQL: &str = "DELETE FROM intervals WHERE job = $1
    AND id <= (SELECT id FROM intervals WHERE job = $1 ORDER BY id DESC LIMIT 1 OFFSET $2)";

/// The rest of a link's past estimates beyond its newest ones.
pub(super) const LINK_HISTORY_SQL: &str = "DELETE FROM link_history WHERE src = $1 AND dst = $2
    AND id <= (SELECT id FROM link_history WHERE src = $1 AND dst = $2 ORDER BY id DESC LIMIT 1 OFFSET $3)";

impl Store {
    /// Forgets what is beyond the limits. Every statement is a transaction of its own, so that reports are stored in
    /// between.
    pub async fn trim(&self) -> Result<()> {
        let operation = "forget what is old";
        let jobs: Vec<String> = sql!(operation, "SELECT job FROM jobs").fetch_all(&self.read).await?;
        let links: Vec<(String, String)> = sql!(operation, "SELECT src, dst FROM links").fetch_all(&self.read).await?;
        for job in &jobs {
            self.write.execute(Tables::STEPS, sql!(operation, PROGRESS_SQL, job, PROGRESS)).await?;
            self.write.execute(Tables::MEMORY, sql!(operation, INTERVALS_SQL, job, INTERVALS)).await?;
        }
        for (src, dst) in &links {
            let statement = sql!(operation, LINK_HISTORY_SQL, src, dst, LINK_HISTORY);
            self.write.execute(Tables::NONE, statement).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::scratch;
    use super::*;
    use sqlx::Row;

    async fn count(store: &Store, table: &'static str) -> i64 {
        let text = match table {
            "progress" => "SELECT count(*), min(step) FROM progress",
            "intervals" => "SELECT count(*), min(from_step) FROM intervals",
            _ => "SELECT count(*), min(received_us) FROM link_history",
        };
        sqlx::query(text).fetch_one(&store.read).await.unwrap().get(0)
    }

    #[tokio::test]
    async fn only_what_is_beyond_the_limits_goes() {
        let (store, _dir) = scratch().await;
        for text in [
            "INSERT INTO jobs (job, world, gradient_values, backend, created_us) VALUES ('j', 1, 1, 'x', 0)",
            "INSERT INTO links VALUES ('a', 'b', 1, 1, 1, 1, 0, 0, 1, 0)",
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5003)
             INSERT INTO progress SELECT 'j', i, i, 0.5, NULL FROM n",
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5004)
             INSERT INTO intervals (job, version, strategy, from_step, to_step, at_us, measured_sync_us,
                measured_step_us) SELECT 'j', 1, 'none@1/dense-ring', i, i, i, 1, 1 FROM n",
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1026)
             INSERT INTO link_history (src, dst, received_us, latency_us) SELECT 'a', 'b', i, 1 FROM n",
            "INSERT INTO link_history (src, dst, received_us, latency_us) VALUES ('a', 'c', 1, 1)",
        ] {
            sqlx::query(text).execute(&mut *store.write.connection().await).await.unwrap();
        }
        store.trim().await.unwrap();
        let left = [count(&store, "progress").await, count(&store, "intervals").await, count(&store, "link").await];
        assert_eq!(left, [PROGRESS as i64, INTERVALS as i64, LINK_HISTORY as i64 + 1]);
        let newest = store.progress(&"j".parse().unwrap(), 1).await.unwrap();
        assert_eq!(newest[0].step, 5003);
    }

    /// What runs with every pass or report finds its rows by an index.
    #[tokio::test]
    async fn frequent_queries_scan_no_table() {
        let (store, _dir) = scratch().await;
        let texts = [
            PROGRESS_SQL,
            INTERVALS_SQL,
            LINK_HISTORY_SQL,
            super::super::intervals::NEWEST,
            super::super::steps::STEP_SPANS,
            super::super::steps::STEPS,
            super::super::steps::PROGRESS_POINTS,
            super::super::steps::PUT_STEPS[0],
            super::super::steps::PUT_STEPS[2],
            super::super::jobs::RUNNING,
            super::super::links::HISTORY,
        ];
        for text in texts {
            let plan = sqlx::query(sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}")));
            let rows = plan.fetch_all(&store.read).await.unwrap();
            let details: Vec<String> = rows.iter().map(|row| row.get("detail")).collect();
            // What was found already is scanned, values that are passed in (json_each), and an index that has only the rows that are wanted.
            let values = |d: &str| d.contains("VIRTUAL TABLE INDEX");
            let made = |d: &str| details.iter().any(|m| m.strip_prefix("MATERIALIZE ") == d.strip_prefix("SCAN "));
            let found = |d: &str| {
                d.starts_with("SCAN (subquery") || d.ends_with("USING INDEX jobs_running") || values(d) || made(d)
            };
            let scans = details.iter().filter(|d| d.starts_with("SCAN") && !found(d));
            assert_eq!(scans.count(), 0, "{text}: {details:#?}");
            let all_of_a_job = |d: &String| d.starts_with("SEARCH steps") && d.ends_with("(job=?)");
            assert!(!details.iter().any(all_of_a_job), "{text}: {details:#?}");
            assert!(details.iter().any(|d| d.contains("USING")), "{text}: {details:#?}");
        }
    }
}
