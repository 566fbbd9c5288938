//! Samples of real transfers: what the job's own collectives tell about a link, for free.

use crate::{above_zero, within};
use flexcomm_domain::Invalid;
use serde::{Deserialize, Serialize};

/// Longest transfer that counts, seconds: beyond it the job was suspended, not slow.
pub const MAX_TRANSFER_S: f64 = 3600.0;
/// Most bytes of one transfer that count: beyond it a counter was misread.
pub const MAX_TRANSFER_BYTES: f64 = 1e15;
/// Most message rounds in one transfer: a ring of 4096 ranks has 8190.
pub const MAX_ROUNDS: f64 = 16_384.0;

/// One observed transfer over a link: `seconds ≈ rounds * alpha + bytes * beta`, and more when anything waited.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    bytes: f64,
    seconds: f64,
    rounds: f64,
}

impl Transfer {
    /// `bytes` over the link in `seconds`, of which `rounds` times one latency: 1 for a single message; 2(N-1) for
    /// a ring's allreduce; 0 for a piece in the midst of a stream, timed from the end of the piece before.
    pub fn new(bytes: f64, seconds: f64, rounds: f64) -> Result<Self, Invalid> {
        above_zero("bytes of a transfer", bytes, MAX_TRANSFER_BYTES)?;
        above_zero("seconds of a transfer", seconds, MAX_TRANSFER_S)?;
        within("rounds of a transfer", rounds, 0.0..=MAX_ROUNDS)?;
        Ok(Self { bytes, seconds, rounds })
    }

    /// Bytes over the link.
    pub fn bytes(&self) -> f64 {
        self.bytes
    }

    /// How long it took.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Whether it is a piece of a stream and long enough for its size to be no advantage.
    pub fn is_stream(&self) -> bool {
        self.rounds == 0.0 && self.seconds >= STREAM_S
    }

    /// No latency can be above this: nothing is faster than the link. `None` when it contains none.
    pub fn alpha_bound(&self) -> Option<f64> {
        (self.rounds > 0.0).then(|| self.seconds / self.rounds)
    }

    /// Seconds per byte once `alpha` is taken off; `None` when latency is most of the time, because then a small
    /// error of alpha is a large one of beta.
    pub fn beta(&self, alpha: f64) -> Option<f64> {
        let rest = self.seconds - self.rounds * alpha;
        (rest > LEAST_SHARE * self.seconds).then(|| rest / self.bytes)
    }
}

/// A piece of a stream lasts this long or longer, seconds: a burst of a few packets may be faster than the link.
pub const STREAM_S: f64 = 0.04;

/// Share of a transfer's time that must be the bytes' own.
const LEAST_SHARE: f64 = 0.4;

/// Slope and intercept of `seconds` over `bytes` by Theil and Sen: the median of the slopes of all pairs that
/// differ enough in size. `None` without such pairs. Stands up to 29 % of arbitrary outliers.
pub fn theil_sen(points: &[Transfer]) -> Option<(f64, f64)> {
    /// A pair of nearly equal sizes says nothing about the slope.
    const LEAST_RATIO: f64 = 1.5;
    let mut slopes = Vec::new();
    for (i, a) in points.iter().enumerate() {
        for b in &points[i + 1..] {
            if a.bytes.max(b.bytes) >= LEAST_RATIO * a.bytes.min(b.bytes) {
                slopes.push((a.seconds - b.seconds) / (a.bytes - b.bytes));
            }
        }
    }
    let slope = crate::stats::median(&slopes)?;
    let rests: Vec<f64> = points.iter().map(|p| p.seconds - slope * p.bytes).collect();
    Some((slope, crate::stats::median(&rests)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_the_impossible() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Transfer::new(bad, 1.0, 1.0).is_err());
            assert!(Transfer::new(1.0, bad, 1.0).is_err());
            assert!(Transfer::new(1.0, 1.0, bad).is_err() || bad == 0.0);
        }
        let text = Transfer::new(1.0, -2.0, 1.0).unwrap_err().to_string();
        assert_eq!(text, "seconds of a transfer is -2, allowed is above 0 and at most 3600");
    }

    #[test]
    fn beta_takes_latency_off() {
        let t = Transfer::new(1e6, 0.81, 2.0).unwrap();
        assert!((t.beta(0.005).unwrap() - 0.8e-6).abs() < 1e-12);
        assert_eq!(t.beta(0.3), None);
    }

    #[test]
    fn regression_survives_outliers() {
        let points: Vec<Transfer> = (1..=20)
            .map(|i| {
                let bytes = 1e5 * f64::from(i);
                let late = if i % 4 == 0 { 3.0 } else { 0.0 };
                Transfer::new(bytes, 0.05 + bytes * 8e-7 + late, 1.0).unwrap()
            })
            .collect();
        let (beta, alpha) = theil_sen(&points).unwrap();
        assert!((beta / 8e-7 - 1.0).abs() < 0.15, "{beta}");
        assert!((alpha / 0.05 - 1.0).abs() < 0.5, "{alpha}");
        assert_eq!(theil_sen(&points[..1]), None);
    }
}
