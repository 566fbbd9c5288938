//! What Prometheus sees: declared in one table, whose documentation is the help text.
//!
//! Gauges are made anew for every scrape from what the API would answer: a node, link or job that is gone has
//! no series left behind. No label is named `job` or `instance`: Prometheus sets these for every target it scrapes and renames
//! what a target gave to `exported_job`.

use prometheus::{Encoder, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder};

macro_rules! table {
    ($($(#[doc = $help:literal])+ $constant:ident = $name:literal [$($label:literal),*];)+) => {
        $($(#[doc = $help])+ pub const $constant: Metric =
            Metric { name: $name, help: concat!($($help),+).trim_ascii(), labels: &[$($label),*] };)+

        /// Every metric.
        #[cfg(test)]
        pub const TABLE: &[Metric] = &[$($constant),+];
    };
}

/// A metric's name, help and labels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    /// With unit, as Prometheus asks for.
    pub name: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Names of its labels.
    pub labels: &'static [&'static str],
}

table! {
    /// Whether the agent's last heartbeat or report is fresh.
    NODE_LIVE = "flexcomm_node_live" ["node"];
    /// Seconds since the agent's last heartbeat or report.
    NODE_HEARTBEAT_AGE = "flexcomm_node_heartbeat_age_seconds" ["node"];
    /// Reports waiting in the agent's spool.
    NODE_SPOOLED = "flexcomm_node_spooled_reports" ["node"];
    /// Newest report of the agent that is stored.
    NODE_ACKED = "flexcomm_node_acked_reports_total" ["node"];
    /// One-way latency of a directed link.
    LINK_LATENCY = "flexcomm_link_latency_seconds" ["from", "to"];
    /// Bandwidth of a directed link as its throughput tests found it, in bits per second.
    LINK_BANDWIDTH = "flexcomm_link_bandwidth_bits_per_second" ["from", "to"];
    /// Age of the newest latency sample of a directed link.
    LINK_LATENCY_AGE = "flexcomm_link_latency_age_seconds" ["from", "to"];
    /// Age of the newest throughput test of a directed link.
    LINK_BANDWIDTH_AGE = "flexcomm_link_bandwidth_age_seconds" ["from", "to"];
    /// Share of echoes lost on the way out of a directed link.
    LINK_LOSS = "flexcomm_link_loss_ratio" ["from", "to"];
    /// Ranks of the job.
    JOB_WORLD = "flexcomm_job_ranks" ["training_job"];
    /// Ranks of the job whose trainers are connected.
    JOB_LIVE = "flexcomm_job_live_ranks" ["training_job"];
    /// Nodes of the job whose agents are silent, and one more where no agent has announced some ranks.
    JOB_MISSING = "flexcomm_job_missing_nodes" ["training_job"];
    /// Seconds since the silent agent of a node of the job sent something.
    JOB_MISSING_FOR = "flexcomm_job_missing_node_seconds" ["training_job", "node"];
    /// 1 for each node whose reports on a job are contradicted and not counted; see `doubted` in the job's view.
    JOB_DOUBTED = "flexcomm_job_doubted" ["training_job", "node"];
    /// Newest step of the job.
    JOB_STEP = "flexcomm_job_step" ["training_job"];
    /// Newest training loss of the job.
    JOB_LOSS = "flexcomm_job_loss" ["training_job"];
    /// Newest held-out accuracy of the job, 0 to 1.
    JOB_ACCURACY = "flexcomm_job_accuracy_ratio" ["training_job"];
    /// Compression gain of the newest steps, 0 to 1.
    JOB_GAIN = "flexcomm_job_gain_ratio" ["training_job"];
    /// Share of the gradient's values that the strategy in force sends: 1 for dense, and for what sends less of each value or low-rank factors.
    JOB_CR = "flexcomm_job_compression_ratio" ["training_job"];
    /// Version of the decision in force.
    JOB_VERSION = "flexcomm_job_decision_version" ["training_job"];
    /// 1 for the strategy in force.
    JOB_STRATEGY = "flexcomm_job_strategy_info" ["training_job", "compressor", "collective", "selection"];
    /// 1 for what the last look at the job led to: change, or why not.
    JOB_VERDICT = "flexcomm_job_verdict_info" ["training_job", "verdict"];
    /// Measured time per step, by part: compute, compress, sync, step.
    JOB_MEASURED = "flexcomm_job_measured_seconds" ["training_job", "part"];
    /// Predicted time per step, by part: sync, step.
    JOB_PREDICTED = "flexcomm_job_predicted_seconds" ["training_job", "part"];
    /// Trials of the job, by state.
    JOB_TRIALS = "flexcomm_job_trials" ["training_job", "state"];
    /// Reports that were not stored, by reason.
    REJECTED_REPORTS = "flexcomm_rejected_reports_total" ["reason"];
    /// Whether the store works.
    STORE_READY = "flexcomm_store_ready" [];
    /// Rows of the database whose checksum did not fit since the start; none of them is used.
    DAMAGED = "flexcomm_store_damaged_rows" [];
    /// Passes of the decision loop that failed.
    PASS_FAILURES = "flexcomm_loop_failures_total" [];
    /// Decisions that the checker refused.
    REFUSED = "flexcomm_refused_decisions_total" [];
    /// Requests that were refused, by kind of problem.
    REFUSED_REQUESTS = "flexcomm_refused_requests_total" ["problem"];
    /// Connections closed at once because too many were open, by limit: source, overall.
    REFUSED_CONNECTIONS = "flexcomm_refused_connections_total" ["limit"];
    /// Log lines dropped because stderr was closed or its reader was too slow.
    LOG_DROPPED = "flexcomm_log_lines_dropped_total" [];
    /// Reports that came a second time and were dropped.
    REPEATED = "flexcomm_repeated_reports_total" [];
    /// Order streams that are open.
    STREAMS = "flexcomm_order_streams" [];
    /// Time of a pass of the decision loop.
    PASS_SECONDS = "flexcomm_loop_pass_seconds" [];
}

/// Counters of this process; they start at 0 with it.
#[derive(Debug)]
pub struct Counters {
    /// See [`PASS_FAILURES`].
    pub pass_failures: IntCounter,
    /// See [`REFUSED`].
    pub refused_decisions: IntCounter,
    /// See [`REFUSED_REQUESTS`].
    pub refused_requests: IntCounterVec,
    /// See [`REFUSED_CONNECTIONS`].
    pub refused_connections: IntCounterVec,
    /// See [`LOG_DROPPED`].
    pub log_dropped: IntCounter,
    /// See [`REPEATED`].
    pub repeated: IntCounter,
    /// See [`PASS_SECONDS`].
    pub pass_seconds: Histogram,
}

impl Counters {
    /// All 0.
    pub fn new() -> Self {
        let counter = |m: Metric| IntCounter::new(m.name, m.help).expect("the table's names are valid");
        let counters =
            |m: Metric| IntCounterVec::new(Opts::new(m.name, m.help), m.labels).expect("the table's names are valid");
        let buckets = vec![0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0];
        let options = HistogramOpts::new(PASS_SECONDS.name, PASS_SECONDS.help).buckets(buckets);
        Self {
            pass_failures: counter(PASS_FAILURES),
            refused_decisions: counter(REFUSED),
            refused_requests: counters(REFUSED_REQUESTS),
            refused_connections: counters(REFUSED_CONNECTIONS),
            log_dropped: counter(LOG_DROPPED),
            repeated: counter(REPEATED),
            pass_seconds: Histogram::with_opts(options).expect("the table's names are valid"),
        }
    }
}

/// One scrape.
#[derive(Debug)]
pub struct Scrape {
    registry: Registry,
    gauges: Vec<(Metric, GaugeVec)>,
}

impl Scrape {
    /// Nothing set yet; the process's counters are in it.
    pub fn new(counters: &Counters) -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        registry.register(Box::new(counters.pass_failures.clone()))?;
        registry.register(Box::new(counters.refused_decisions.clone()))?;
        registry.register(Box::new(counters.refused_requests.clone()))?;
        registry.register(Box::new(counters.refused_connections.clone()))?;
        counters.log_dropped.inc_by(flexcomm_log::take_dropped());
        registry.register(Box::new(counters.log_dropped.clone()))?;
        registry.register(Box::new(counters.repeated.clone()))?;
        registry.register(Box::new(counters.pass_seconds.clone()))?;
        Ok(Self { registry, gauges: Vec::new() })
    }

    /// Sets one series.
    pub fn set(&mut self, metric: Metric, labels: &[&str], value: f64) -> Result<(), prometheus::Error> {
        let known = self.gauges.iter().position(|(m, _)| *m == metric);
        let index = match known {
            Some(index) => index,
            None => {
                let gauge = GaugeVec::new(Opts::new(metric.name, metric.help), metric.labels)?;
                self.registry.register(Box::new(gauge.clone()))?;
                self.gauges.push((metric, gauge));
                self.gauges.len() - 1
            }
        };
        self.gauges[index].1.get_metric_with_label_values(labels)?.set(value);
        Ok(())
    }

    /// Sets one series when there is a value.
    pub fn maybe(&mut self, metric: Metric, labels: &[&str], value: Option<f64>) -> Result<(), prometheus::Error> {
        value.map_or(Ok(()), |value| self.set(metric, labels, value))
    }

    /// Prometheus' text. What is called a counter (`_total`) is declared as one.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        let mut bytes = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok(text.replace("_total gauge\n", "_total counter\n"))
    }
}

#[cfg(test)]
mod dashboards;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        let mut names: Vec<_> = TABLE.iter().map(|m| m.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TABLE.len());
        for metric in TABLE {
            assert!(metric.help.trim().ends_with('.') && metric.name.starts_with("flexcomm_"), "{metric:?}");
        }
    }

    #[test]
    fn series_that_are_not_set_are_not_there() {
        let counters = Counters::new();
        let mut scrape = Scrape::new(&counters).unwrap();
        scrape.set(NODE_LIVE, &["a"], 1.0).unwrap();
        scrape.set(REJECTED_REPORTS, &["malformed"], 3.0).unwrap();
        scrape.maybe(JOB_LOSS, &["j"], None).unwrap();
        let text = scrape.text().unwrap();
        assert!(text.contains("flexcomm_node_live{node=\"a\"} 1\n"), "{text}");
        assert!(text.contains("# TYPE flexcomm_rejected_reports_total counter\n") && !text.contains("job_loss"));
        assert!(scrape.set(NODE_LIVE, &["a", "b"], 1.0).is_err());
        assert!(!Scrape::new(&counters).unwrap().text().unwrap().contains("node_live"));
    }
}
