//! Which crate may depend on which, read off `cargo metadata`.

use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Allowed arrows between our crates (without the `flexcomm-` prefix).
const ALLOWED: &[(&str, &[&str])] = &[
    ("domain", &[]),
    ("log", &[]),
    ("signals", &[]),
    ("wire", &["domain"]),
    ("gpu-kernels", &["domain", "compression"]),
    ("collectives", &["domain"]),
    ("compression", &["domain"]),
    ("estimation", &["domain"]),
    ("optimizer", &["domain", "collectives", "estimation"]),
    ("planner", &["domain", "estimation", "optimizer"]),
    ("sim", &["domain", "estimation", "optimizer", "planner"]),
    ("truth", &[]),
    (
        "suite",
        &[
            "domain",
            "signals",
            "wire",
            "collectives",
            "compression",
            "exchange",
            "trainer",
            "probes",
            "agent",
            "controller",
            "lab",
            "truth",
        ],
    ),
    ("probes", &["domain"]),
    ("trainer", &["domain", "wire"]),
    ("nccl-tuner", &[]),
    ("exchange", &["domain", "compression", "gpu-kernels"]),
    ("bench", &["domain", "signals", "compression", "gpu-kernels"]),
    ("python", &["domain", "wire", "trainer", "compression", "gpu-kernels", "exchange", "planner"]),
    ("agent", &["domain", "log", "wire", "probes"]),
    ("controller", &["domain", "log", "wire", "estimation", "optimizer", "planner"]),
    ("lab", &["domain", "signals", "wire", "trainer", "compression", "exchange", "collectives", "sim"]),
];

/// Crates without IO, clock or ambient randomness.
pub(crate) const PURE: &[&str] =
    &["domain", "wire", "collectives", "compression", "estimation", "optimizer", "planner", "sim", "truth"];

/// As pure, but that kernels are launched: what loads and compiles them is gpu-kernels'.
const LAUNCHES: &str = "exchange";

/// As pure in their sources: the rest of the crate has IO.
pub(crate) const PURE_SOURCES: &[&str] = &[
    "exchange/src/",
    "probes/src/",
    "trainer/src/agreement.rs",
    "trainer/src/answer.rs",
    "trainer/src/control.rs",
    "trainer/src/costs.rs",
    "trainer/src/message.rs",
    "trainer/src/orders.rs",
    "trainer/src/pace.rs",
    "trainer/src/trial.rs",
];

/// Parts of them that have sockets, threads and clocks.
pub(crate) const EDGES: &[&str] = &["probes/src/edge/"];

/// What must not be anywhere below a pure crate.
const IMPURE: &[&str] = &[
    "tokio",
    "axum",
    "hyper",
    "reqwest",
    "sqlx",
    "sqlx-core",
    "cudarc",
    "socket2",
    "mio",
    "nix",
    "rtnetlink",
    "surge-ping",
    "memmap2",
];

/// Every breach as one line.
pub(crate) fn check() -> Result<Vec<String>> {
    let metadata = metadata()?;
    let names = names(&metadata)?;
    let edges = edges(&metadata)?;
    let mut breaches = Vec::new();
    for (crate_name, allowed) in ALLOWED {
        let id = ids(&names, &format!("flexcomm-{crate_name}"));
        for dependency in id.iter().filter_map(|id| edges.get(id)).flatten() {
            if let Some(ours) = names[dependency].strip_prefix("flexcomm-")
                && !allowed.contains(&ours)
            {
                breaches.push(format!("{crate_name} depends on {ours}: the arrow points the wrong way"));
            }
        }
    }
    for pure in PURE.iter().chain([&LAUNCHES]) {
        for id in ids(&names, &format!("flexcomm-{pure}")) {
            let below = reach(&edges, &id);
            breaches.extend(
                below
                    .iter()
                    .filter(|id| IMPURE.contains(&names[*id].as_str()))
                    .filter(|id| *pure != LAUNCHES || names[*id] != "cudarc")
                    .map(|id| format!("{pure} is pure but links {}", names[id])),
            );
        }
    }
    Ok(breaches)
}

fn metadata() -> Result<Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo).args(["metadata", "--format-version", "1", "--locked"]).output()?;
    anyhow::ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("cargo metadata")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn names(metadata: &Value) -> Result<BTreeMap<String, String>> {
    let packages = metadata["packages"].as_array().context("packages")?;
    Ok(packages.iter().map(|p| (text(&p["id"]), text(&p["name"]))).collect())
}

/// Normal (not dev, not build) dependencies of each package.
fn edges(metadata: &Value) -> Result<BTreeMap<String, Vec<String>>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("resolve.nodes")?;
    let normal =
        |dep: &&Value| dep["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().any(|k| k["kind"].is_null()));
    let targets = |node: &Value| {
        let deps = node["deps"].as_array().cloned().unwrap_or_default();
        deps.iter().filter(normal).map(|dep| text(&dep["pkg"])).collect()
    };
    Ok(nodes.iter().map(|node| (text(&node["id"]), targets(node))).collect())
}

fn ids(names: &BTreeMap<String, String>, name: &str) -> Vec<String> {
    names.iter().filter(|(_, n)| *n == name).map(|(id, _)| id.clone()).collect()
}

fn reach(edges: &BTreeMap<String, Vec<String>>, from: &str) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    let mut open = vec![from.to_owned()];
    while let Some(id) = open.pop() {
        for next in edges.get(&id).into_iter().flatten() {
            if seen.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    seen
}
