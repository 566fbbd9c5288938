//! The live view: one row an epoch, one line an event. Pure: data in, text out.

use flexcomm_domain::{Bandwidth, Link, Seconds};
use flexcomm_wire::api::{DecisionView, JobView, LinkView};

/// What was set and what is known at one moment.
pub(crate) struct Moment<'a> {
    /// Epoch and last epoch, counted as the schedule counts.
    pub epoch: (u32, u32),
    /// As set.
    pub set: Link,
    /// How long ago; what is older was measured on another network.
    pub set_for: std::time::Duration,
    /// The link matrix.
    pub links: &'a [LinkView],
    /// The job.
    pub job: &'a JobView,
    /// The decision in force.
    pub decision: Option<&'a DecisionView>,
}

/// Titles of [`row`]'s columns, two lines.
pub(crate) const HEADER: [&str; 2] = [
    "        alpha           bandwidth                                          t_sync            t_step",
    "epoch   set    measured set      measured     compressor and collective    predicted median  predicted median  gain   loss   accuracy",
];

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|v| v.is_finite());
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn short_time(seconds: f64) -> String {
    match Seconds::new(seconds) {
        Ok(t) if t.get() >= 1.0 => format!("{:.2}s", t.get()),
        Ok(t) if t.get() >= 0.01 => format!("{:.1}ms", t.get() * 1e3),
        Ok(t) => format!("{:.2}ms", t.get() * 1e3),
        Err(_) => "?".into(),
    }
}

fn short_rate(bps: f64) -> String {
    match Bandwidth::new(bps) {
        Ok(b) if b.get() >= 1e9 => format!("{:.1}Gbit", b.get() / 1e9),
        Ok(b) if b.get() >= 1e8 => format!("{:.0}Mbit", b.get() / 1e6),
        Ok(b) => format!("{:.1}Mbit", b.get() / 1e6),
        Err(_) => "?".into(),
    }
}

fn micros(value: Option<f64>) -> String {
    value.map_or("-".into(), |us| short_time(us * 1e-6))
}

/// Median of (age in ms, value) that are younger than `set_for`, or, in parentheses, of the older ones.
fn measured(all: impl Iterator<Item = (f64, f64)>, set_for: std::time::Duration, show: fn(f64) -> String) -> String {
    let (new, old): (Vec<_>, Vec<_>) = all.partition(|(age_ms, _)| *age_ms < set_for.as_secs_f64() * 1e3);
    let median_of = |of: Vec<(f64, f64)>| median(of.into_iter().map(|(_, value)| value).collect());
    match (median_of(new), median_of(old)) {
        (Some(value), _) => show(value),
        (None, Some(value)) => format!("({})", show(value)),
        (None, None) => "-".into(),
    }
}

/// A strategy without its memory, which all that is decided by default have where they need one.
fn short_strategy(strategy: &str) -> String {
    strategy.replace("+ef(vanilla)", "")
}

/// One row of the table.
pub(crate) fn row(m: &Moment) -> String {
    let alpha = m.links.iter().map(|l| (l.latency_age_ms, l.latency_us * 1e-6));
    let bandwidth = m.links.iter().filter_map(|l| Some((l.bandwidth_age_ms?, l.bandwidth_bps?)));
    let strategy = m.decision.map_or("none/dense-ring".into(), |d| short_strategy(&d.strategy));
    let number = |v: Option<f64>, digits: usize| v.map_or("-".into(), |v| format!("{v:.digits$}"));
    format!(
        "{:>2}/{:<3}  {:<6} {:<8} {:<8} {:<12} {:<28} {:<9} {:<7} {:<9} {:<7} {:<6} {:<6} {}",
        m.epoch.0,
        m.epoch.1,
        short_time(m.set.alpha.get()),
        measured(alpha, m.set_for, short_time),
        short_rate(m.set.bandwidth.get()),
        measured(bandwidth, m.set_for, short_rate),
        strategy,
        micros(m.job.predicted_sync_us),
        micros(m.job.sync_us),
        micros(m.job.predicted_step_us),
        micros(m.job.step_us),
        number(m.job.gain, 3),
        number(m.job.loss, 3),
        m.job.accuracy.map_or("-".into(), |a| format!("{:.1}%", a * 100.0)),
    )
}

/// One line for a new decision.
pub(crate) fn decision(d: &DecisionView) -> String {
    let applied = d.applied_at_step.map_or("announced".into(), |s| format!("in force from step {s}"));
    format!(">> decision {}: {}, {applied}: {}", d.version, d.strategy, d.reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_rates_are_short() {
        assert_eq!(short_time(0.001), "1.00ms");
        assert_eq!(short_time(0.05), "50.0ms");
        assert_eq!(short_time(1.13), "1.13s");
        assert_eq!(short_time(f64::NAN), "?");
        assert_eq!(short_rate(250e6), "250Mbit");
        assert_eq!(short_rate(9.87e6), "9.9Mbit");
        assert_eq!(short_rate(-1.0), "?");
    }

    #[test]
    fn what_was_measured_before_the_links_were_set_stands_in_parentheses() {
        let seen = |ages: &[(f64, f64)]| measured(ages.iter().copied(), std::time::Duration::from_secs(2), short_time);
        assert_eq!(seen(&[(100.0, 0.001), (200.0, 0.003), (300.0, 0.002)]), "2.00ms");
        assert_eq!(seen(&[(2500.0, 0.001), (200.0, 0.05)]), "50.0ms");
        assert_eq!(seen(&[(2500.0, 0.001), (9e9, 0.001)]), "(1.00ms)");
        assert_eq!(seen(&[(1.0, f64::NAN)]), "-");
        assert_eq!(seen(&[]), "-");
    }

    #[test]
    fn median_ignores_nan() {
        assert_eq!(median(vec![f64::NAN, 3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![]), None);
    }
}
