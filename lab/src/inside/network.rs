//! Nodes as network namespaces on one bridge. Shaping is not done here: the agents do it.

use anyhow::Result;

use super::system::{sh, sh_line};
use crate::plan::{HUB, LabPlan, TAP_ADDR, UML_ADDR, node_addr, node_name};

/// Largest burst a socket hands to the device: real NICs send packets one by one, and a 64 KB burst would
/// take 50 ms at 10 Mbit/s.
const GSO_SEGMENTS: &str = "4";

/// Per namespace: keep the congestion window over a training step's pauses and between connections, since a
/// long-lived data-centre transport would; allow unprivileged ping.
const SYSCTLS: [&str; 5] = [
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_no_metrics_save=1",
    "net.ipv4.ping_group_range=0 2147483647",
    "net.ipv4.tcp_rmem=4096 1048576 16777216",
    "net.ipv4.tcp_wmem=4096 1048576 16777216",
];

/// Builds bridge and nodes.
pub(crate) fn build(plan: &LabPlan) -> Result<()> {
    if plan.uml {
        sh_line(&format!("ip addr add {UML_ADDR}/30 dev vec0"))?;
        sh_line("ip link set vec0 up")?;
        sh_line(&format!("ip route add default via {TAP_ADDR}"))?;
    }
    sh_line("ip link add br0 type bridge")?;
    sh_line(&format!("ip addr add {HUB}/24 dev br0"))?;
    sh_line("ip link set br0 up")?;
    for i in 0..plan.nodes {
        add_node(i)?;
    }
    Ok(())
}

fn add_node(i: usize) -> Result<()> {
    let name = node_name(i);
    let addr = node_addr(i);
    sh_line(&format!("ip netns add {name}"))?;
    sh_line(&format!("ip link add p{name} type veth peer name eth0 netns {name}"))?;
    sh_line(&format!("ip link set p{name} master br0 up"))?;
    sh_line(&format!("ip -n {name} link set lo up"))?;
    sh_line(&format!("ip -n {name} link set eth0 gso_max_segs {GSO_SEGMENTS}"))?;
    sh_line(&format!("ip -n {name} addr add {addr}/24 dev eth0"))?;
    sh_line(&format!("ip -n {name} link set eth0 up"))?;
    for setting in SYSCTLS {
        sh("ip", &["netns", "exec", &name, "/sbin/sysctl", "-q", "-w", setting])?;
    }
    Ok(())
}
