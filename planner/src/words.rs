//! Numbers and strategies as people read them.

use crate::memory::LinkSummary;
use flexcomm_domain::{Plan, Strategy};
use flexcomm_optimizer::Evaluated;

/// Three significant digits without trailing zeros: `41`, `1.13`, `0.011`.
pub(crate) fn number(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let digits = (2 - value.abs().log10().floor() as i32).clamp(0, 12);
    let text = format!("{value:.*}", digits as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// `350 µs`, `41 ms`, `1.13 s`, `12 min`.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 600.0 => format!("{} min", number(s / 60.0)),
        s if s >= 0.9995 => format!("{} s", number(s)),
        s if s >= 0.9995e-3 => format!("{} ms", number(s * 1e3)),
        s => format!("{} µs", number(s * 1e6)),
    }
}

/// `250 Mbit/s`, `1.5 Gbit/s`.
pub(crate) fn rate(bps: f64) -> String {
    match bps {
        b if b >= 0.9995e9 => format!("{} Gbit/s", number(b / 1e9)),
        b if b >= 0.9995e6 => format!("{} Mbit/s", number(b / 1e6)),
        b => format!("{} kbit/s", number(b / 1e3)),
    }
}

/// `12 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{} %", number((share * 1000.0).round() / 10.0))
}

/// Most runs of buckets that a sentence names.
const MOST_RUNS: usize = 4;

/// As its strategies are read, those of buckets in turn with their number: `2 buckets dense by dense-ring, then topk at CR 0.01 by
/// allgather`.
pub(crate) fn plan(plan: &Plan) -> String {
    let mut runs: Vec<String> = plan
        .runs()
        .map(|(buckets, of)| match buckets {
            1 => format!("1 bucket {}", strategy(of)),
            n => format!("{n} buckets {}", strategy(of)),
        })
        .collect();
    if let Some(last) = runs.last_mut() {
        *last = strategy(plan.last());
    }
    let more = runs.len().saturating_sub(MOST_RUNS);
    if more > 0 {
        runs.splice(MOST_RUNS - 1..runs.len() - 1, [format!("{} others", more + 1)]);
    }
    runs.join(", then ")
}

/// `topk at CR 0.011 by allgather`, `topk at CR 0.1 by art-ring (star)`, `dense by dense-ring`.
fn strategy(s: &Strategy) -> String {
    match (s.is_dense(), s.selection()) {
        (true, _) => format!("dense by {}", s.collective()),
        (false, Some(selection)) => format!("{} by {} ({selection})", compressor(s), s.collective()),
        (false, None) => format!("{} by {}", compressor(s), s.collective()),
    }
}

/// `topk at CR 0.011`; a compressor without a ratio with its parameters: `powersgd(rank=2)+ef(vanilla)`.
fn compressor(s: &Strategy) -> String {
    match s.spec().ratio() {
        Some(cr) => format!("{} at CR {cr}", s.spec().compressor().name),
        None => s.spec().to_string(),
    }
}

/// ` at gain 0.21`; nothing where nothing is lost.
pub(crate) fn kept(what: &Evaluated) -> String {
    match what.gain.get() {
        1.0 => String::new(),
        gain => format!(" at gain {}", number(gain)),
    }
}

/// Links have moved when mean or worst differ by this share: two estimates that are each 10 % off differ by 22 % at most.
const MOVED: f64 = 0.25;
/// Changes of latency below this many seconds are a rack's jitter.
const LATENCY_FLOOR_S: f64 = 50e-6;

/// How much larger the larger of two positive numbers is, as a share: 0.25 for (4, 5) and for (5, 4).
fn relative(a: f64, b: f64) -> f64 {
    a.max(b) / a.min(b) - 1.0
}

/// What moved most between two states of the links; empty where nothing did.
pub(crate) fn links_moved(from: &LinkSummary, to: &LinkSummary) -> String {
    let mut parts = Vec::new();
    let moved = |what: &str, (a, b): (f64, f64), shown: fn(f64) -> String| {
        format!("{what} {} from {} to {}", if b > a { "rose" } else { "fell" }, shown(a), shown(b))
    };
    let latency = |what: &str, a: f64, b: f64| moved(what, (a, b), time);
    let bandwidth = |what: &str, a: f64, b: f64| moved(what, (a, b), rate);
    let far = |a: f64, b: f64| relative(a, b) >= MOVED;
    let late = |a: f64, b: f64| far(a, b) && (a - b).abs() >= LATENCY_FLOOR_S;
    if far(from.bandwidth_mean_bps, to.bandwidth_mean_bps) {
        parts.push(bandwidth("bandwidth", from.bandwidth_mean_bps, to.bandwidth_mean_bps));
    } else if far(from.bandwidth_worst_bps, to.bandwidth_worst_bps) {
        parts.push(bandwidth("the slowest link's bandwidth", from.bandwidth_worst_bps, to.bandwidth_worst_bps));
    }
    if late(from.alpha_mean_s, to.alpha_mean_s) {
        parts.push(latency("latency", from.alpha_mean_s, to.alpha_mean_s));
    } else if late(from.alpha_worst_s, to.alpha_worst_s) {
        parts.push(latency("the slowest link's latency", from.alpha_worst_s, to.alpha_worst_s));
    }
    parts.join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(number(0.0), "0");
        assert_eq!(number(0.011), "0.011");
        assert_eq!(number(1.126), "1.13");
        assert_eq!(number(250.04), "250");
        assert_eq!(number(12345.6), "12346");
        assert_eq!(time(0.041), "41 ms");
        assert_eq!(time(1.13), "1.13 s");
        assert_eq!(time(0.9999), "1 s");
        assert_eq!(time(35e-5), "350 µs");
        assert_eq!(time(720.0), "12 min");
        assert_eq!(rate(25e9), "25 Gbit/s");
        assert_eq!(rate(1e7), "10 Mbit/s");
        assert_eq!(percent(0.1234), "12.3 %");
        assert_eq!(strategy(&"topk@0.1/art-ring:star".parse().unwrap()), "topk at CR 0.1 by art-ring (star)");
        assert_eq!(strategy(&Strategy::DENSE_RING), "dense by dense-ring");
    }

    #[test]
    fn ten_percent_of_noise_on_both_sides_is_no_move() {
        let of = |alpha: f64, bandwidth: f64| LinkSummary {
            alpha_mean_s: alpha,
            alpha_worst_s: alpha,
            bandwidth_mean_bps: bandwidth,
            bandwidth_worst_bps: bandwidth,
        };
        assert_eq!(links_moved(&of(0.9e-3, 0.9e9), &of(1.1e-3, 1.1e9)), "");
        assert_eq!(links_moved(&of(1e-5, 1e9), &of(5e-5, 1e9)), "", "a rack's jitter");
        let moved = links_moved(&of(1e-3, 1e9), &of(1e-2, 1e8));
        assert_eq!(moved, "bandwidth fell from 1 Gbit/s to 100 Mbit/s and latency rose from 1 ms to 10 ms");
    }
}
