//! Networks that a job had before. What alternates (another job that comes and goes, day and night) is known again by its latency, or by
//! what steps take on it.

use crate::joint::Normal;
use serde::{Deserialize, Serialize};

/// Most that are remembered.
const MOST: usize = 8;
/// Latencies of one network differ by less, in logarithms,
const SAME_LATENCY: f64 = 0.15;
/// and its bandwidths by less.
const SAME_BANDWIDTH: f64 = 0.4;
/// By how much the bandwidth of one that comes back may be another, in logarithms.
const DOUBT: f64 = 0.2;

/// Whether two latencies, in logarithms, may be those of one network.
pub fn is_same_latency(a: f64, b: f64) -> bool {
    (a - b).abs() < SAME_LATENCY
}

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// Logarithm of the mean latency in seconds.
    pub latency: f64,
    /// Of seconds per byte, in logarithms.
    pub bandwidth: Normal,
}

/// The newest last.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Networks {
    seen: Vec<Network>,
}

impl Network {
    /// Whether both may be the same.
    pub fn is_same(&self, other: &Self) -> bool {
        is_same_latency(self.latency, other.latency)
            && (self.bandwidth.mean - other.bandwidth.mean).abs() < SAME_BANDWIDTH
    }
}

impl Networks {
    /// Whether none was seen before.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Remembers one that was left; of one that was known, what was believed last.
    pub fn remember(&mut self, left: Network) {
        self.seen.retain(|known| !known.is_same(&left));
        if self.seen.len() >= MOST {
            self.seen.remove(0);
        }
        self.seen.push(left);
    }

    /// What the bandwidth is where the latency is so and one of those is back that pass: mean and standard deviation over them.
    pub fn recall(&self, latency: f64, passes: impl Fn(&Network) -> bool) -> Option<Normal> {
        let alike = |known: &&Network| is_same_latency(known.latency, latency) && passes(known);
        let alike: Vec<Normal> = self.seen.iter().filter(alike).map(|known| known.bandwidth).collect();
        let count = alike.len() as f64;
        let mean = alike.iter().map(|b| b.mean).sum::<f64>() / count;
        let variance = alike.iter().map(|b| (b.mean - mean).powi(2) + b.sd * b.sd).sum::<f64>() / count;
        (count > 0.0).then(|| Normal::new(mean, variance.sqrt().hypot(DOUBT)))
    }

    /// Makes every number one of single precision.
    pub fn round(&mut self) {
        for Network { latency, bandwidth } in &mut self.seen {
            for number in [latency, &mut bandwidth.mean, &mut bandwidth.sd] {
                *number = f64::from(*number as f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(latency_s: f64, bandwidth: f64) -> Network {
        Network { latency: latency_s.ln(), bandwidth: Normal::new(bandwidth, 0.1) }
    }

    #[test]
    fn one_latency_recalls_its_bandwidth_and_two_networks_of_one_latency_both() {
        let mut networks = Networks::default();
        assert_eq!(networks.recall(-7.0, |_| true), None);
        for (latency_s, bandwidth) in [(1e-3, -18.0), (5e-2, -20.0), (1e-3, -18.1)] {
            networks.remember(network(latency_s, bandwidth));
        }
        assert_eq!(networks.seen.len(), 2, "it was the first again");
        let recalled = networks.recall(1.05e-3f64.ln(), |_| true).unwrap();
        assert!((recalled.mean + 18.1).abs() < 1e-9 && recalled.sd < 0.3, "{recalled:?}");
        assert_eq!(networks.recall(2e-3f64.ln(), |_| true), None);
        networks.remember(network(1e-3, -22.1));
        let both = networks.recall(1e-3f64.ln(), |_| true).unwrap();
        assert!((both.mean + 20.1).abs() < 1e-9 && both.sd > 1.9, "{both:?}");
        let slow = networks.recall(1e-3f64.ln(), |known| known.bandwidth.mean > -20.0).unwrap();
        assert!((slow.mean + 18.1).abs() < 1e-9, "{slow:?}");
    }

    #[test]
    fn the_oldest_is_forgotten() {
        let mut networks = Networks::default();
        for i in 0..12 {
            networks.remember(network(1e-3 * 2f64.powi(i), -18.0));
        }
        assert_eq!(networks.seen.len(), MOST);
        assert_eq!(networks.recall(1e-3f64.ln(), |_| true), None);
    }
}
