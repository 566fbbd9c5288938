//! When a link's estimate is worth a report: pure.

use flexcomm_wire::LinkReport;
use std::time::Duration;

/// Shortest time between two reports of one link.
const SOONEST: Duration = Duration::from_millis(200);

/// Whether `new` should be reported, `since` after `last` was.
pub(crate) fn due(last: Option<&LinkReport>, new: &LinkReport, since: Duration, interval: Duration) -> bool {
    let Some(last) = last else { return true };
    if since >= interval {
        return true;
    }
    since >= SOONEST.min(interval) && new.is_news_after(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(latency_us: f64) -> LinkReport {
        LinkReport {
            peer: "b".parse().unwrap(),
            latency_us,
            latency_confidence: 1.0,
            latency_age_ms: 0.0,
            jitter_us: 0.0,
            loss_out: 0.0,
            loss_back: 0.0,
            by_icmp: false,
        }
    }

    #[test]
    fn noise_waits_and_changes_do_not() {
        let second = Duration::from_secs(1);
        let (last, soon) = (report(1000.0), Duration::from_millis(300));
        assert!(due(None, &last, Duration::ZERO, second));
        assert!(!due(Some(&last), &last, soon, second));
        assert!(due(Some(&last), &last, second, second));
        assert!(!due(Some(&last), &report(1090.0), soon, second));
        assert!(due(Some(&last), &report(1500.0), soon, second));
        assert!(!due(Some(&last), &report(1500.0), Duration::from_millis(50), second));
        assert!(!due(Some(&report(20.0)), &report(90.0), soon, second), "within noise for a rack");
        let mut lossy = report(1000.0);
        lossy.loss_back = 0.5;
        assert!(due(Some(&last), &lossy, soon, second));
    }
}
