//! Nodes: who registered, and up to where its reports are stored.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::Register;
use std::net::IpAddr;

use super::{Result, Store, signed, sql, stored, time, unsigned};
use crate::limits::{MAX_NODES, MAX_TEXT};

/// A registered node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeRow {
    /// Its name.
    pub node: NodeName,
    /// The process that registered last.
    pub instance: u64,
    /// Where its peers reach it.
    pub addr: IpAddr,
    /// UDP port of its echo responder.
    pub echo_port: u16,
    /// TCP port of its throughput server.
    pub throughput_port: u16,
    /// Whether its configuration allows shaping.
    pub may_shape: bool,
    /// flexcomm's version there.
    pub software: String,
    /// When it registered.
    pub registered: Timestamp,
    /// Reports up to here are stored.
    pub acked_seq: u64,
}

/// What became of a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// Stored; reports up to here are there already.
    Done(u64),
    /// There are [`MAX_NODES`] others.
    Full,
}

#[derive(sqlx::FromRow)]
struct Raw {
    node: String,
    instance: i64,
    addr: String,
    echo_port: i64,
    throughput_port: i64,
    may_shape: bool,
    software: String,
    registered_us: i64,
    acked_seq: i64,
}

impl Raw {
    fn row(self) -> Result<NodeRow> {
        let operation = "read the nodes";
        Ok(NodeRow {
            node: stored(operation, "node name", self.node.parse())?,
            instance: unsigned(self.instance),
            addr: stored(operation, "address", self.addr.parse())?,
            echo_port: stored(operation, "port", self.echo_port.try_into())?,
            throughput_port: stored(operation, "port", self.throughput_port.try_into())?,
            may_shape: self.may_shape,
            software: self.software,
            registered: time(self.registered_us),
            acked_seq: unsigned(self.acked_seq),
        })
    }
}

impl Store {
    /// All nodes by name.
    pub async fn nodes(&self) -> Result<Vec<NodeRow>> {
        let rows: Vec<Raw> = sqlx::query_as("SELECT * FROM nodes ORDER BY node")
            .fetch_all(&self.read)
            .await
            .map_err(sql("read the nodes"))?;
        rows.into_iter().map(Raw::row).collect()
    }

    /// One node.
    pub async fn node(&self, node: &NodeName) -> Result<Option<NodeRow>> {
        let row: Option<Raw> = sqlx::query_as("SELECT * FROM nodes WHERE node = $1")
            .bind(node.as_str())
            .fetch_optional(&self.read)
            .await
            .map_err(sql("read a node"))?;
        row.map(Raw::row).transpose()
    }

    /// Stores a registration; a later one of the same name replaces it and keeps the acknowledged number.
    pub async fn register(&self, r: &Register, now: Timestamp) -> Result<Registration> {
        let on_error = sql("register a node");
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let (others,): (i64,) = sqlx::query_as("SELECT count(*) FROM nodes WHERE node <> $1")
            .bind(r.node.as_str())
            .fetch_one(&mut *tx)
            .await
            .map_err(&on_error)?;
        if others as usize >= MAX_NODES {
            return Ok(Registration::Full);
        }
        let software: String = r.software.chars().take(MAX_TEXT).collect();
        let (acked,): (i64,) = sqlx::query_as(
            "INSERT INTO nodes (node, instance, addr, echo_port, throughput_port, may_shape, software, registered_us)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
             ON CONFLICT (node) DO UPDATE SET instance = excluded.instance, addr = excluded.addr,
                echo_port = excluded.echo_port, throughput_port = excluded.throughput_port,
                may_shape = excluded.may_shape, software = excluded.software, registered_us = excluded.registered_us
             RETURNING acked_seq",
        )
        .bind(r.node.as_str())
        .bind(signed(r.instance))
        .bind(r.addr.to_string())
        .bind(i64::from(r.echo_port))
        .bind(i64::from(r.throughput_port))
        .bind(r.may_shape)
        .bind(software)
        .bind(signed(now.0))
        .fetch_one(&mut *tx)
        .await
        .map_err(&on_error)?;
        tx.commit().await.map_err(&on_error)?;
        Ok(Registration::Done(unsigned(acked)))
    }

    /// Forgets a node and its links. Its jobs' history stays.
    pub async fn forget_node(&self, node: &NodeName) -> Result<bool> {
        let on_error = sql("forget a node");
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        for text in [
            "DELETE FROM links WHERE src = $1 OR dst = $1",
            "DELETE FROM link_tests WHERE src = $1 OR dst = $1",
            "DELETE FROM link_history WHERE src = $1 OR dst = $1",
            "DELETE FROM paths WHERE src = $1 OR dst = $1",
            "DELETE FROM shape_reports WHERE node = $1",
        ] {
            sqlx::query(text).bind(node.as_str()).execute(&mut *tx).await.map_err(&on_error)?;
        }
        let gone = sqlx::query("DELETE FROM nodes WHERE node = $1")
            .bind(node.as_str())
            .execute(&mut *tx)
            .await
            .map_err(&on_error)?;
        tx.commit().await.map_err(&on_error)?;
        Ok(gone.rows_affected() > 0)
    }
}
