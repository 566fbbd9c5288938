//! Statements with their values and with what they are for, which errors name; rows as what they are.

use flexcomm_domain::{JobId, NodeName, Plan, RunId, Strategy, Timestamp, Version};
use flexcomm_planner::JobPolicy;
use flexcomm_wire::StrategyWire;
use flexcomm_wire::api::ScenarioSet;
use serde::de::DeserializeOwned;
use sqlx::error::BoxDynError;
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Column, ColumnIndex, Decode, Row as _, SqlSafeStr, Sqlite, SqliteExecutor, TypeInfo, ValueRef};

use super::{Result, StoreError};

/// A value as SQLite has it. Its integers are signed: of unsigned ones the bits are kept.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Null,
    Text(String),
    Number(i64),
    Real(f64),
}

/// What was read of a value, or why it is no such one.
type Read<T> = std::result::Result<T, BoxDynError>;

/// What can be bound to a statement.
pub(super) trait ToValue {
    fn to_value(&self) -> Value;
}

/// What a column can be read as.
pub(super) trait FromValue: Sized {
    fn from_value(value: Value) -> Read<Self>;
}

impl<T: ToValue + ?Sized> ToValue for &T {
    fn to_value(&self) -> Value {
        T::to_value(self)
    }
}

impl<T: ToValue> ToValue for Option<T> {
    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::to_value)
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: Value) -> Read<Self> {
        if value == Value::Null { Ok(None) } else { T::from_value(value).map(Some) }
    }
}

impl ToValue for str {
    fn to_value(&self) -> Value {
        Value::Text(self.to_owned())
    }
}

impl FromValue for String {
    fn from_value(value: Value) -> Read<Self> {
        if let Value::Text(text) = value { Ok(text) } else { Err(format!("{value:?} is no text").into()) }
    }
}

impl ToValue for f64 {
    fn to_value(&self) -> Value {
        Value::Real(*self)
    }
}

impl FromValue for f64 {
    fn from_value(value: Value) -> Read<Self> {
        if let Value::Real(real) = value { Ok(real) } else { Err(format!("{value:?} is no number").into()) }
    }
}

impl ToValue for i64 {
    fn to_value(&self) -> Value {
        Value::Number(*self)
    }
}

impl FromValue for i64 {
    fn from_value(value: Value) -> Read<Self> {
        if let Value::Number(number) = value { Ok(number) } else { Err(format!("{value:?} is no integer").into()) }
    }
}

/// Types that are stored as their text.
macro_rules! as_text {
    ($($type:ty),+) => {
        $(impl ToValue for $type {
            fn to_value(&self) -> Value {
                Value::Text(self.to_string())
            }
        }

        impl FromValue for $type {
            fn from_value(value: Value) -> Read<Self> {
                Ok(String::from_value(value)?.parse()?)
            }
        })+
    };
}

/// Types that are stored as an integer: how it is made of them, and how they are made of it.
macro_rules! as_number {
    ($($type:ty: $to:expr, $from:expr;)+) => {
        $(impl ToValue for $type {
            fn to_value(&self) -> Value {
                let to: fn(Self) -> i64 = $to;
                Value::Number(to(*self))
            }
        }

        impl FromValue for $type {
            fn from_value(value: Value) -> Read<Self> {
                let from: fn(i64) -> std::result::Result<Self, std::num::TryFromIntError> = $from;
                Ok(from(i64::from_value(value)?)?)
            }
        })+
    };
}

/// Types that are read from JSON.
macro_rules! as_json {
    ($([$($parameter:tt)*] $type:ty),+) => {
        $(impl<$($parameter)*> FromValue for $type {
            fn from_value(value: Value) -> Read<Self> {
                Ok(serde_json::from_str(&String::from_value(value)?)?)
            }
        })+
    };
}

as_text!(JobId, NodeName, Plan, RunId, Strategy, std::net::IpAddr);
as_number! {
    bool: i64::from, |number| Ok(number != 0);
    u16: i64::from, u16::try_from;
    u32: i64::from, u32::try_from;
    u64: |number| number as i64, |number| Ok(number as u64);
    Timestamp: |at| at.0 as i64, |number| Ok(Self(number as u64));
    Version: |version| version.0 as i64, |number| Ok(Self(number as u64));
}

impl FromValue for StrategyWire {
    fn from_value(value: Value) -> Read<Self> {
        Plan::from_value(value).map(|plan| Self::from(&plan))
    }
}

as_json!([] JobPolicy, [] ScenarioSet, [T: DeserializeOwned] Vec<T>);

impl ToValue for String {
    fn to_value(&self) -> Value {
        self.as_str().to_value()
    }
}

/// What a row can be read as; see [`row!`].
pub(super) trait Row: Sized {
    fn read(row: &SqliteRow) -> sqlx::Result<Self>;
}

/// Of one column.
impl<T: FromValue> Row for T {
    fn read(row: &SqliteRow) -> sqlx::Result<Self> {
        column(row, 0)
    }
}

impl<A: FromValue, B: FromValue> Row for (A, B) {
    fn read(row: &SqliteRow) -> sqlx::Result<Self> {
        Ok((column(row, 0)?, column(row, 1)?))
    }
}

/// One column of a row.
pub(super) fn column<T: FromValue>(row: &SqliteRow, index: impl ColumnIndex<SqliteRow> + Copy) -> sqlx::Result<T> {
    let raw = row.try_get_raw(index)?;
    let stored = raw.type_info().into_owned();
    let value = match stored.name() {
        _ if raw.is_null() => Ok(Value::Null),
        "TEXT" => <String as Decode<Sqlite>>::decode(raw).map(Value::Text),
        "REAL" => <f64 as Decode<Sqlite>>::decode(raw).map(Value::Real),
        _ => <i64 as Decode<Sqlite>>::decode(raw).map(Value::Number),
    };
    let name = || row.try_column(index).map_or_else(|_| "value".to_owned(), |column| column.name().to_owned());
    value.and_then(T::from_value).map_err(|source| sqlx::Error::ColumnDecode { index: name(), source })
}

/// Reads a type from the columns of its fields, or from others (`field: column`); after `;` come fields that are rows by
/// themselves, or that a function makes of the row (`field by function`).
macro_rules! row {
    (@column $field:ident) => {
        stringify!($field)
    };
    (@column $field:ident $column:ident) => {
        stringify!($column)
    };
    (@nested $row:ident) => {
        $crate::store::statement::Row::read($row)?
    };
    (@nested $row:ident $by:path) => {
        $by($row)?
    };
    ($type:ident { $($field:ident $(: $column:ident)?),+ $(; $($nested:ident $(by $by:path)?),+)? }) => {
        impl $crate::store::statement::Row for $type {
            fn read(row: &sqlx::sqlite::SqliteRow) -> sqlx::Result<Self> {
                use $crate::store::statement::column;
                Ok(Self {
                    $($field: column(row, $crate::store::statement::row!(@column $field $($column)?))?,)+
                    $($($nested: $crate::store::statement::row!(@nested row $($by)?),)+)?
                })
            }
        }
    };
}
pub(super) use row;

/// A statement with its values.
pub(super) struct Statement {
    pub(super) operation: &'static str,
    query: Query<'static, Sqlite, SqliteArguments>,
}

/// What it is for (completes "failed to ..."), its text, and the values of `$1`, `$2`, ...
macro_rules! sql {
    ($operation:expr, $text:expr $(, $value:expr)* $(,)?) => {
        $crate::store::statement::Statement::new(
            $operation,
            $text,
            vec![$($crate::store::statement::ToValue::to_value(&$value)),*],
        )
    };
}
pub(super) use sql;

impl Statement {
    pub(super) fn new(operation: &'static str, text: impl SqlSafeStr, values: Vec<Value>) -> Self {
        let bind = |query: Query<'static, Sqlite, SqliteArguments>, value| match value {
            Value::Null => query.bind(None::<i64>),
            Value::Text(text) => query.bind(text),
            Value::Number(number) => query.bind(number),
            Value::Real(real) => query.bind(real),
        };
        Self { operation, query: values.into_iter().fold(sqlx::query(text), bind) }
    }

    pub(super) async fn execute(self, db: impl SqliteExecutor<'_>) -> Result<()> {
        self.affected(db).await.map(|_| ())
    }

    /// How many rows it changed.
    pub(super) async fn affected(self, db: impl SqliteExecutor<'_>) -> Result<u64> {
        self.query.execute(db).await.map(|done| done.rows_affected()).map_err(failed(self.operation))
    }

    pub(super) async fn fetch_all<T: Row + Send + Unpin>(self, db: impl SqliteExecutor<'_>) -> Result<Vec<T>> {
        self.query.try_map(|row: SqliteRow| T::read(&row)).fetch_all(db).await.map_err(failed(self.operation))
    }

    pub(super) async fn fetch_one<T: Row + Send + Unpin>(self, db: impl SqliteExecutor<'_>) -> Result<T> {
        self.query.try_map(|row: SqliteRow| T::read(&row)).fetch_one(db).await.map_err(failed(self.operation))
    }

    pub(super) async fn fetch_optional<T: Row + Send + Unpin>(self, db: impl SqliteExecutor<'_>) -> Result<Option<T>> {
        self.query.try_map(|row: SqliteRow| T::read(&row)).fetch_optional(db).await.map_err(failed(self.operation))
    }
}

/// Adds to an SQL error what was tried.
pub(super) fn failed(operation: &'static str) -> impl Fn(sqlx::Error) -> StoreError {
    move |error| match error {
        sqlx::Error::ColumnDecode { index, source } => {
            StoreError::Stored { operation, what: index, why: source.to_string() }
        }
        source => StoreError::Sql { operation, source },
    }
}

#[cfg(test)]
mod tests {
    use super::super::read_cache::Tables;
    use super::super::tests::scratch;

    #[tokio::test]
    async fn what_does_not_read_back_is_named_by_operation_and_column() {
        let (store, _dir) = scratch().await;
        let insert =
            "INSERT INTO ranks (job, rank, node, codecs, collectives, seen_us) VALUES ($1, $2, $3, $4, $5, $6)";
        let row = |rank: u64, node: &'static str, codecs: &'static str, collectives: &'static str| {
            sql!("write", insert, "j", rank, node, codecs, collectives, 1u64)
        };
        let job = "j".parse().unwrap();
        for (rank, node, codecs, collectives, said) in [
            (0, "a b", "[]", "[]", "read a job's ranks: stored node is not valid: node name \"a b\" is not valid"),
            (1 << 32, "a", "[]", "[]", "read a job's ranks: stored rank is not valid: "),
            (0, "a", "[]", "[", "read a job's ranks: stored collectives is not valid: EOF"),
            (0, "a", "[", "[]", "read a job's ranks: stored codecs is not valid: EOF"),
        ] {
            store.write.execute(Tables::ALL, row(rank, node, codecs, collectives)).await.unwrap();
            let error = store.ranks(&job).await.unwrap_err().to_string();
            assert!(error.starts_with(said), "{error}");
            store.write.execute(Tables::ALL, sql!("write", "DELETE FROM ranks")).await.unwrap();
        }
        store.write.execute(Tables::ALL, row(0, "a", "[]", "[]")).await.unwrap();
        assert_eq!(store.ranks(&job).await.unwrap().len(), 1);
    }
}
