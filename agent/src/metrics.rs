//! The agent's metrics, declared in one table whose doc comment is the help text.

use prometheus::{IntCounter, IntGauge, Registry, TextEncoder};

macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $kind:ident $field:ident),+ $(,)?) => {
        /// One handle per metric, registered in a registry of its own (several agents may share a process).
        #[derive(Debug, Clone)]
        pub struct Metrics {
            registry: Registry,
            $($(#[doc = $help])+ pub $field: metrics!(@type $kind),)+
        }

        impl Metrics {
            /// Names and kinds of all metrics.
            pub const TABLE: &'static [(&'static str, &'static str)] =
                &[$((concat!("flexcomm_agent_", stringify!($field)), stringify!($kind))),+];

            /// Registers all of them.
            pub fn new() -> Result<Self, prometheus::Error> {
                let registry = Registry::new();
                $(
                    let name = concat!("flexcomm_agent_", stringify!($field));
                    let $field = <metrics!(@type $kind)>::new(name, concat!($($help),+).trim())?;
                    registry.register(Box::new($field.clone()))?;
                )+
                Ok(Self { registry, $($field),+ })
            }
        }
    };
    (@type counter) => { IntCounter };
    (@type gauge) => { IntGauge };
}

metrics! {
    /// Whether the controller answers: 1 or 0.
    gauge controller_connected,
    /// Registrations that the controller accepted.
    counter registrations_total,
    /// Tries to reach the controller that failed.
    counter controller_errors_total,
    /// Tries that the controller answered with a refusal: wrong token, a name that is taken, another protocol.
    counter controller_refusals_total,
    /// Times the stream of orders was opened.
    counter stream_connects_total,
    /// Times orders were polled because the stream was down.
    counter orders_polled_total,
    /// Orders that replaced earlier ones.
    counter orders_accepted_total,
    /// Orders with an older epoch, ignored.
    counter orders_stale_total,
    /// Orders that could not be read or were over a limit, ignored.
    counter orders_invalid_total,
    /// Epoch of the orders in force.
    gauge orders_epoch,
    /// Decisions with an older version than trainers have, ignored.
    counter decisions_stale_total,
    /// Decisions whose digest or strategy is wrong, ignored.
    counter decisions_invalid_total,
    /// Decisions that were sent to the trainers of their job.
    counter decisions_published_total,
    /// Trial orders that are out of range or older than the last, ignored.
    counter trials_ignored_total,
    /// Reports waiting in the spool.
    gauge spool_reports,
    /// Bytes of the spool on disk.
    gauge spool_bytes,
    /// Telemetry dropped because the spool was full.
    counter spool_dropped_total,
    /// Events lost because even what may not be dropped fills the spool twice, or the disk.
    counter spool_refused_total,
    /// Reports for which a trainer's connection waited: the spool had no room for what may not be dropped.
    counter spool_waits_total,
    /// Bytes rejected at start because their checksum was wrong.
    counter spool_corrupt_bytes_total,
    /// Reports that could not be written to the spool.
    counter spool_errors_total,
    /// Reports that the controller has stored.
    counter reports_delivered_total,
    /// Reports that the controller rejected as invalid.
    counter reports_rejected_total,
    /// Echo requests that were answered.
    counter echo_answered_total,
    /// Echo requests that were given up.
    counter echo_lost_total,
    /// ICMP echoes to peers that answer no UDP echo.
    counter peers_pinged_total,
    /// Bytes spent on throughput tests.
    counter probe_bytes_total,
    /// Throughput tests that ended with a result.
    counter throughput_done_total,
    /// Throughput tests that failed.
    counter throughput_failed_total,
    /// Grants not used: expired, unknown peer, or over the budget share.
    counter grants_unused_total,
    /// Traceroutes that failed.
    counter trace_errors_total,
    /// Trainers connected now.
    gauge trainers,
    /// Trainers' connections that were refused or closed for a bad line.
    counter trainers_refused_total,
    /// Trainers' reports with absurd values, rejected.
    counter trainer_reports_rejected_total,
    /// Jobs of which orders are kept.
    gauge jobs,
    /// Orders that could not be kept or sent: too many jobs, too long, or a full disk.
    counter job_errors_total,
    /// Log lines dropped because stderr was closed or its reader was too slow.
    counter log_lines_dropped_total,
    /// Whether a shape is in force: 1 or 0.
    gauge shape_in_force,
    /// Shapes refused.
    counter shape_errors_total,
    /// Times the link was put back although the order stood: lease lost or controller away.
    counter shape_restores_total,
}

impl Metrics {
    /// Prometheus text.
    pub fn encode(&self) -> Result<String, prometheus::Error> {
        self.log_lines_dropped_total.inc_by(flexcomm_log::take_dropped());
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_shown_with_its_help() {
        let metrics = Metrics::new().unwrap();
        metrics.orders_stale_total.inc();
        let text = metrics.encode().unwrap();
        for (name, kind) in Metrics::TABLE {
            assert!(text.contains(&format!("# HELP {name} ")), "{name}");
            assert!(text.contains(&format!("# TYPE {name} {kind}")), "{name}");
            assert_eq!(*kind == "counter", name.ends_with("_total"), "{name}");
        }
        assert!(text.contains("flexcomm_agent_orders_stale_total 1"));
    }
}
