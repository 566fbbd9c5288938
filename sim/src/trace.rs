//! Random network traces: schedules drawn from a seed.

use crate::schedule::{Phase, Schedule};
use flexcomm_domain::{Bandwidth, Seconds};
use rand::{Rng, RngCore};

/// Latencies of random traces, seconds: a rack to another continent.
const ALPHA: (f64, f64) = (100e-6, 0.1);
/// Bandwidths of random traces, bit/s: a poor uplink to a data centre's NIC.
const BANDWIDTH: (f64, f64) = (100e6, 100e9);

/// `phases` phases of 2 to 12 epochs, latency and bandwidth each log-uniform; in one phase of four only one of
/// the two changes.
pub fn random(phases: usize, rng: &mut (impl RngCore + ?Sized)) -> Schedule {
    let mut drawn: Vec<Phase> = Vec::with_capacity(phases);
    let mut next = 0;
    for i in 0..phases.max(1) {
        let mut alpha = Seconds::new(log_uniform(ALPHA, rng)).unwrap_or(Seconds::ZERO);
        let mut bandwidth = Bandwidth::new(log_uniform(BANDWIDTH, rng)).ok();
        if let Some(last) = drawn.last() {
            match rng.random_range(0..8) {
                0 => alpha = last.alpha,
                1 => bandwidth = Some(last.bandwidth),
                _ => {}
            }
        }
        let Some(bandwidth) = bandwidth else { continue };
        let epochs = rng.random_range(2..=12);
        drawn.push(Phase {
            label: format!("trace {i}"),
            first_epoch: next,
            last_epoch: next + epochs - 1,
            alpha,
            bandwidth,
            jitter: Seconds::ZERO,
            loss: 0.0,
        });
        next += epochs;
    }
    Schedule::from_phases("random", drawn)
}

fn log_uniform((low, high): (f64, f64), rng: &mut (impl RngCore + ?Sized)) -> f64 {
    (rng.random_range(low.ln()..=high.ln())).exp().clamp(low, high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn the_same_seed_is_the_same_trace() {
        let draw = |seed| random(20, &mut ChaCha8Rng::seed_from_u64(seed));
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert_eq!(draw(7).phases().len(), 20);
        assert_eq!(draw(7).at(0).first_epoch, 0);
    }
}
