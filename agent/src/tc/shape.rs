//! What a link is asked to look like, checked against the range that tc can express.

use flexcomm_domain::{Bandwidth, Invalid, Seconds};
use std::fmt;

/// Longest delay in seconds: the queue that holds it is bounded, and no real link is slower.
pub const MAX_DELAY_S: f64 = 10.0;
/// Highest rate in bit/s that burst and quantum are chosen for.
pub const MAX_RATE_BPS: f64 = 1e11;
/// Lowest rate in bit/s.
pub const MIN_RATE_BPS: f64 = 1e3;
/// Largest share of packets dropped: beyond it no TCP connection lives.
pub const MAX_LOSS: f64 = 0.9;
/// netem spreads delay evenly over mean ± sqrt(3) standard deviations.
pub(crate) const UNIFORM_HALF_WIDTH: f64 = 1.732_050_807_568_877_2;

/// How the egress of an interface is shaped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// One-way delay added to every packet, 0 to 10 s.
    pub delay: Seconds,
    /// Standard deviation of the delay; the spread is uniform over mean ± sqrt(3) deviations, so it is at most
    /// delay / sqrt(3). Packets overtake each other when it is larger than their distance.
    pub jitter: Seconds,
    /// Share of packets dropped at random, 0 to 0.9. What the stack hands down as one packet to be segmented by the
    /// device is kept or dropped as one.
    pub loss: f64,
    /// Rate in bit/s, 1 kbit/s to 100 Gbit/s.
    pub rate: Bandwidth,
}

impl Shape {
    /// A shape that only limits the rate; needs htb alone.
    pub fn rate_only(rate: Bandwidth) -> Self {
        Self { delay: Seconds::ZERO, jitter: Seconds::ZERO, loss: 0.0, rate }
    }

    /// Names the first value that is out of range.
    pub fn check(&self) -> Result<(), Invalid> {
        within("delay in seconds", self.delay.get(), 0.0, MAX_DELAY_S, "0 to 10")?;
        let widest = self.delay.get() / UNIFORM_HALF_WIDTH;
        within("jitter in seconds", self.jitter.get(), 0.0, widest, "0 to delay / sqrt(3)")?;
        within("loss", self.loss, 0.0, MAX_LOSS, "0 to 0.9")?;
        within("rate in bit/s", self.rate.get(), MIN_RATE_BPS, MAX_RATE_BPS, "1e3 to 1e11")
    }

    /// Whether netem is needed: htb alone neither delays nor drops.
    pub fn needs_netem(&self) -> bool {
        self.delay.get() > 0.0 || self.jitter.get() > 0.0 || self.loss > 0.0
    }
}

fn within(what: &'static str, value: f64, low: f64, high: f64, allowed: &'static str) -> Result<(), Invalid> {
    if (low..=high).contains(&value) { Ok(()) } else { Err(Invalid::Range { what, value, allowed: allowed.into() }) }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "delay {} jitter {} loss {} rate {}", self.delay, self.jitter, self.loss, self.rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(delay: f64, jitter: f64, loss: f64, rate: f64) -> Shape {
        Shape {
            delay: Seconds::new(delay).unwrap(),
            jitter: Seconds::new(jitter).unwrap(),
            loss,
            rate: Bandwidth::new(rate).unwrap(),
        }
    }

    #[test]
    fn out_of_range_is_named_with_its_value() {
        assert!(shape(0.001, 0.0005, 0.01, 1e9).check().is_ok());
        let cases = [
            (shape(11.0, 0.0, 0.0, 1e9), "delay in seconds is 11"),
            (shape(0.001, 0.0006, 0.0, 1e9), "jitter in seconds is 0.0006"),
            (shape(0.0, 0.0, 0.95, 1e9), "loss is 0.95"),
            (shape(0.0, 0.0, f64::NAN, 1e9), "loss is NaN"),
            (shape(0.0, 0.0, 0.0, 2e11), "rate in bit/s is 200000000000"),
        ];
        for (shape, expected) in cases {
            let text = shape.check().unwrap_err().to_string();
            assert!(text.starts_with(expected), "{text}");
        }
    }
}
