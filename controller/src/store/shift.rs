//! Times that were stored under a wall clock that was ahead. Nothing but waiting and showing depends on them: order comes
//! from versions and row numbers.

use flexcomm_domain::Timestamp;
use sqlx::AssertSqlSafe;

use super::statement::sql;
use super::{Result, Store, decisions, trials};

/// Every column that is a time, of tables without checksums: durations are REAL.
const TIMES: &str = "SELECT t.name, c.name FROM sqlite_schema t JOIN pragma_table_info(t.name) c
    WHERE t.type = 'table' AND c.type = 'INTEGER' AND c.name LIKE '%\\_us' ESCAPE '\\'
      AND NOT EXISTS (SELECT 1 FROM pragma_table_info(t.name) s WHERE s.name = 'seal')";

impl Store {
    /// Sets every stored time after `now` to it, and forgets what the planner remembers, which has times inside. How many
    /// times were changed.
    pub async fn shift_back(&self, now: Timestamp) -> Result<u64> {
        let mut tx = self.write.begin("bring stored times back to now").await?;
        let mut changed = decisions::shift_back(&mut tx, now).await? + trials::shift_back(&mut tx, now).await?;
        let times: Vec<(String, String)> = sql!(tx.operation, TIMES).fetch_all(&mut *tx).await?;
        for (table, column) in times {
            // Names from the schema, which only migrations write.
            let update = AssertSqlSafe(format!("UPDATE {table} SET {column} = $1 WHERE {column} > $1"));
            changed += sql!(tx.operation, update, now).affected(&mut *tx).await?;
        }
        sql!(tx.operation, "DELETE FROM planner_memory").execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::jobs;
    use super::super::tests::scratch;
    use super::*;
    use flexcomm_domain::RunId;
    use flexcomm_wire::Hello;

    /// Runs of one job that all began after now are still told apart, in their order.
    #[tokio::test]
    async fn runs_that_began_in_the_future_stay_apart() {
        let (store, _dir) = scratch().await;
        let seen = |run| Hello { run: Some(RunId(run)), ..Hello::new("j".parse().unwrap(), (0, 1), 1, "x") };
        let mut tx = store.write.begin("begin jobs").await.unwrap();
        for run in 1..=3 {
            jobs::begin(&mut tx, &seen(run), Timestamp(1000 + run)).await.unwrap();
        }
        tx.commit().await.unwrap();
        store.shift_back(Timestamp(10)).await.unwrap();
        let runs = store.runs(&seen(1).job).await.unwrap();
        let found: Vec<_> = runs.iter().map(|r| (r.run, r.began, r.ended)).collect();
        assert_eq!(found, [2, 1].map(|run| (Some(RunId(run)), Timestamp(10), Timestamp(10))));
        assert_eq!(store.job(&seen(1).job).await.unwrap().unwrap().created, Timestamp(10));
    }
}
