//! The paper's closed forms by themselves: of the parameter server, of dense allreduces (Table I) and compressed (section 3-D,
//! equations 4a and 4b), and the thresholds (5a) to (5c) that follow from comparing them. What is predicted agrees with them
//! (`problem/tests.rs`).

use super::*;
use proptest::prelude::{prop_assert, prop_assert_eq, prop_assume, proptest};

impl Net {
    /// From alpha in seconds, bandwidth in bit/s and the number of workers.
    pub(crate) fn new(alpha_s: f64, bandwidth_bps: f64, n: usize) -> Self {
        Self { alpha: alpha_s, beta: 8.0 / bandwidth_bps, n }
    }
}

/// Parameter server, one of the workers serves: 2a + 2(N-1)·M·b. Seconds for `m` bytes.
pub(crate) fn ps(net: Net, m: f64) -> f64 {
    if net.n < 2 { 0.0 } else { 2.0 * net.alpha + 2.0 * net.others() * m * net.beta }
}

/// Ring allreduce: 2(N-1)·a + 2(N-1)/N·M·b. Seconds for `m` bytes.
pub(crate) fn ring(net: Net, m: f64) -> f64 {
    2.0 * net.others() * net.alpha + 2.0 * net.others() / net.n.max(1) as f64 * m * net.beta
}

/// Tree allreduce: 2a·log N + 2 log N·M·b. Seconds for `m` bytes.
pub(crate) fn tree(net: Net, m: f64) -> f64 {
    2.0 * net.log() * (net.alpha + m * net.beta)
}

/// Section 3-D, compressed, by allgather (AG): a·log N + 2Mc·b·(N-1). `mc` = M·c in bytes; indices weigh as much again.
pub(crate) fn compressed_allgather(net: Net, mc: f64) -> f64 {
    allgather(net, 2.0 * mc)
}

/// (4a), AR-Topk with ring (ART-ring): a·[2(N-1) + log N] + Mc·b·[2(N-1)/N + log N]. `mc` = M·c in bytes.
pub(crate) fn art_ring(net: Net, mc: f64) -> f64 {
    broadcast(net, mc) + ring(net, mc)
}

/// (4b), AR-Topk with tree (ART-tree): 3a·log N + 3Mc·b·log N. `mc` = M·c in bytes.
pub(crate) fn art_tree(net: Net, mc: f64) -> f64 {
    broadcast(net, mc) + tree(net, mc)
}

/// (5a): ART-ring beats ART-tree when alpha/beta (bytes) is below this. `mc` = M·c in bytes, N ≥ 3
/// (with N = 2 both need the same latency terms and the form has no value: None).
pub(crate) fn threshold_ring_over_tree(n: usize, mc: f64) -> Option<f64> {
    let (log, others) = logs(n)?;
    (n >= 3).then(|| (log - others / n as f64) / (others - log) * mc)
}

/// (5b): ART-ring beats AG when alpha/beta (bytes) is below this. `mc` = M·c in bytes, N ≥ 2.
pub(crate) fn threshold_ring_over_allgather(n: usize, mc: f64) -> Option<f64> {
    let (log, others) = logs(n)?;
    Some((1.0 - 1.0 / n as f64 - log / (2.0 * others)) * mc)
}

/// (5c): ART-tree beats AG when alpha/beta (bytes) is below this. `mc` = M·c in bytes, N ≥ 2.
pub(crate) fn threshold_tree_over_allgather(n: usize, mc: f64) -> Option<f64> {
    let (log, others) = logs(n)?;
    Some((others / log - 1.5) * mc)
}

fn logs(n: usize) -> Option<(f64, f64)> {
    (n >= 2).then(|| ((n as f64).log2(), (n - 1) as f64))
}

const TABLE: &str = include_str!("../../../tests/data/flexible-table6.csv");

/// Workers of the paper's Table VI.
const N: usize = 8;

struct Row {
    net: Net,
    mc: f64,
    measured_ms: [f64; 3],
    text: String,
}

fn rows() -> Vec<Row> {
    let parse = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        let v: Vec<f64> = cells[1..].iter().map(|c| c.parse().unwrap()).collect();
        Row {
            net: Net::new(v[1] * 1e-3, v[2] * 1e9, N),
            mc: 4.0 * v[0] * 1e6 * v[3],
            measured_ms: [v[4], v[5], v[6]],
            text: line.to_owned(),
        }
    };
    TABLE.lines().filter(|l| !l.starts_with('#')).skip(1).map(parse).collect()
}

fn argmin(values: [f64; 3]) -> usize {
    (0..3).min_by(|&a, &b| values[a].total_cmp(&values[b])).unwrap()
}

#[test]
fn agrees_with_every_row_of_table_6() {
    let rows = rows();
    assert_eq!(rows.len(), 27);
    let mut worst = 0.0_f64;
    for row in rows {
        let t = [compressed_allgather, art_ring, art_tree].map(|f| f(row.net, row.mc) * 1e3);
        assert_eq!(argmin(t), argmin(row.measured_ms), "another collective is fastest in {}: {t:?}", row.text);
        for (model, measured) in t.into_iter().zip(row.measured_ms) {
            worst = worst.max((model / measured - 1.0).abs());
            assert!((model / measured - 1.0).abs() < 0.11, "{model} ms against {measured} ms in {}", row.text);
        }
    }
    assert!(worst > 0.05, "the paper's own figures are off by more: is the table the one we think?");
}

#[test]
fn one_worker_talks_to_nobody() {
    let net = Net::new(0.001, 1e9, 1);
    for f in [ps, ring, tree, broadcast, allgather, compressed_allgather, art_ring, art_tree] {
        assert_eq!(f(net, 1e6), 0.0);
    }
}

#[test]
fn small_worlds_have_no_ring_tree_threshold() {
    assert_eq!(threshold_ring_over_tree(2, 1e6), None);
    assert_eq!(threshold_ring_over_allgather(1, 1e6), None);
}

/// A difference this small relative to the costs is rounding, not an order.
fn distinct(a: f64, b: f64) -> bool {
    (a - b).abs() > 1e-9 * a.max(b)
}

proptest! {
    #[test]
    fn thresholds_agree_with_costs(
        alpha in 1e-6..0.2f64, bandwidth in 1e6..1e12f64, n in 3usize..512, m in 1e3..1e10f64, c in 1e-4..1.0f64
    ) {
        let net = Net::new(alpha, bandwidth, n);
        let mc = m * c;
        let ratio = net.alpha / net.beta;
        let (ag, ar, at) = (compressed_allgather(net, mc), art_ring(net, mc), art_tree(net, mc));
        prop_assume!(distinct(ag, ar) && distinct(ag, at) && distinct(ar, at));
        prop_assert_eq!(ratio < threshold_ring_over_tree(n, mc).unwrap(), ar < at);
        prop_assert_eq!(ratio < threshold_ring_over_allgather(n, mc).unwrap(), ar < ag);
        prop_assert_eq!(ratio < threshold_tree_over_allgather(n, mc).unwrap(), at < ag);
    }

    #[test]
    fn thresholds_are_where_costs_cross(
        bandwidth in 1e6..1e12f64, n in 3usize..512, mc in 1e3..1e9f64, off in 1e-6..0.05f64
    ) {
        type Cost = fn(Net, f64) -> f64;
        type Threshold = fn(usize, f64) -> Option<f64>;
        let each: [(Threshold, Cost, Cost); 3] = [
            (threshold_ring_over_tree, art_ring, art_tree),
            (threshold_ring_over_allgather, art_ring, compressed_allgather),
            (threshold_tree_over_allgather, art_tree, compressed_allgather),
        ];
        for (threshold, first, second) in each {
            let at = threshold(n, mc).unwrap();
            for (factor, wins) in [(1.0 - off, true), (1.0 + off, false)] {
                let beta = 8.0 / bandwidth;
                let net = Net { alpha: at * factor * beta, beta, n };
                // Below 0 there is no latency at which the first would win.
                prop_assert!(at <= 0.0 || (first(net, mc) < second(net, mc)) == wins, "{net:?} {factor}");
            }
        }
    }
}
