//! Nodes: who registered, and up to where its reports are stored.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::Register;
use std::net::IpAddr;
use std::sync::Arc;

use super::statement::{row, sql};
use super::{Result, Store};
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

row! {
    NodeRow {
        node, instance, addr, echo_port, throughput_port, may_shape, software, registered: registered_us, acked_seq
    }
}

impl Store {
    /// All nodes by name.
    pub async fn nodes(&self) -> Result<Vec<NodeRow>> {
        sql!("read the nodes", "SELECT * FROM nodes ORDER BY node").fetch_all(&self.read).await
    }

    /// All nodes by name, as they registered: how far their reports are stored may be of some time ago.
    pub async fn nodes_as_registered(&self) -> Result<Arc<Vec<NodeRow>>> {
        let read = async { self.nodes().await.map(Arc::new) };
        self.reads.nodes.get(self.write.counters(), (), read).await
    }

    /// One node.
    pub async fn node(&self, node: &NodeName) -> Result<Option<NodeRow>> {
        sql!("read a node", "SELECT * FROM nodes WHERE node = $1", node).fetch_optional(&self.read).await
    }

    /// Stores a registration; a later one of the same name replaces it and keeps the acknowledged number.
    pub async fn register(&self, r: &Register, now: Timestamp) -> Result<Registration> {
        let mut tx = self.write.begin("register a node").await?;
        let query = sql!(tx.operation, "SELECT count(*) FROM nodes WHERE node <> $1", r.node);
        let others: u64 = query.fetch_one(&mut *tx).await?;
        if others >= MAX_NODES as u64 {
            tx.roll_back().await;
            return Ok(Registration::Full);
        }
        let software: String = r.software.chars().take(MAX_TEXT).collect();
        let text = "INSERT INTO nodes
            (node, instance, addr, echo_port, throughput_port, may_shape, software, registered_us)
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
            ON CONFLICT (node) DO UPDATE SET instance = excluded.instance, addr = excluded.addr,
                echo_port = excluded.echo_port, throughput_port = excluded.throughput_port,
                may_shape = excluded.may_shape, software = excluded.software, registered_us = excluded.registered_us
            RETURNING acked_seq";
        let Register { node, instance, addr, echo_port, throughput_port, may_shape, .. } = r;
        let query =
            sql!(tx.operation, text, node, instance, addr, echo_port, throughput_port, may_shape, software, now);
        let acked = query.fetch_one(&mut *tx).await?;
        tx.commit().await?;
        Ok(Registration::Done(acked))
    }

    /// Forgets a node and its links. Its jobs' history stays.
    pub async fn forget_node(&self, node: &NodeName) -> Result<bool> {
        let mut tx = self.write.begin("forget a node").await?;
        for text in [
            "DELETE FROM links WHERE src = $1 OR dst = $1",
            "DELETE FROM link_tests WHERE src = $1 OR dst = $1",
            "DELETE FROM link_history WHERE src = $1 OR dst = $1",
            "DELETE FROM paths WHERE src = $1 OR dst = $1",
            "DELETE FROM shape_reports WHERE node = $1",
        ] {
            sql!(tx.operation, text, node).execute(&mut *tx).await?;
        }
        let gone = sql!(tx.operation, "DELETE FROM nodes WHERE node = $1", node).affected(&mut *tx).await?;
        tx.commit().await?;
        Ok(gone > 0)
    }
}
