//! Network traces over epochs as data: the paper's C1 and C2, scaled, stretched, or read from a file.
//!
//! A schedule knows nothing of planners or costs; the lab plays the same ones with real tc.

use flexcomm_domain::{Bandwidth, Invalid, Link, Seconds};
use serde::{Deserialize, Serialize};

/// Most phases in one schedule: more is a mistake in a generated file, not a scenario a person can follow.
pub const MAX_PHASES: usize = 1_000;
/// Most epochs in one schedule, for the same reason.
pub const MAX_EPOCHS: u32 = 1_000_000;

/// Some epochs with the same links.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// A few words for people, for example `low latency, high bandwidth`.
    pub label: String,
    /// First epoch with these links.
    pub first_epoch: u32,
    /// Last epoch with these links, included.
    pub last_epoch: u32,
    /// One-way latency in seconds.
    pub alpha: Seconds,
    /// Bandwidth in bit/s.
    pub bandwidth: Bandwidth,
    /// Standard deviation of the latency in seconds.
    pub jitter: Seconds,
    /// Share of packets lost, 0 to below 1.
    pub loss: f64,
}

impl Phase {
    /// How many epochs it lasts.
    pub fn epochs(&self) -> u32 {
        self.last_epoch - self.first_epoch + 1
    }

    /// alpha and bandwidth as a link.
    pub fn link(&self) -> Link {
        Link { alpha: self.alpha, bandwidth: self.bandwidth }
    }
}

/// Phases one after the other, without gaps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    name: String,
    phases: Vec<Phase>,
}

/// Why a schedule was refused. Completes "failed to read the schedule: ...".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// Not TOML, an unknown key, or a value of the wrong type; the text names line and key.
    #[error("{0}")]
    Toml(String),
    /// A value that does not fit its quantity.
    #[error("phase {phase}: {key}: {source}")]
    Value {
        /// Number of the phase, from 1.
        phase: usize,
        /// Which key.
        key: &'static str,
        /// What was wrong with it.
        source: Invalid,
    },
    /// A count outside its range.
    #[error("{what} is {value}, allowed is {least} to {most}")]
    Count {
        /// Which count.
        what: &'static str,
        /// As given.
        value: u64,
        /// Least allowed.
        least: u64,
        /// Most allowed.
        most: u64,
    },
    /// The rate divisor was not a positive number, or moved a rate out of range.
    #[error("rate divisor {divisor}: {why}")]
    Divisor {
        /// As given.
        divisor: f64,
        /// What was wrong.
        why: String,
    },
}

/// C1 of the paper: 50 epochs, numbered from 1.
pub fn c1() -> Schedule {
    let (low, high) = (0.001, 0.050);
    let (slow, fast) = (1e9, 25e9);
    Schedule::fixed(
        "c1",
        1,
        &[
            ("low latency, high bandwidth", 12, low, fast),
            ("low latency, low bandwidth", 12, low, slow),
            ("high latency, low bandwidth", 12, high, slow),
            ("high latency, high bandwidth", 14, high, fast),
        ],
    )
}

/// C2 of the paper: 50 epochs, numbered from 0. The paper does not give the moderate phase; 10 ms and
/// 10 Gbit/s are taken for it.
pub fn c2() -> Schedule {
    let good = ("low latency, high bandwidth", 0.001, 25e9);
    let moderate = ("moderate latency and bandwidth", 0.010, 10e9);
    let bad = ("high latency, low bandwidth", 0.050, 1e9);
    let phase = |(label, alpha, rate), epochs| (label, epochs, alpha, rate);
    Schedule::fixed("c2", 0, &[phase(good, 12), phase(moderate, 8), phase(bad, 8), phase(moderate, 8), phase(good, 14)])
}

impl Schedule {
    /// From constants of this file, which are in range.
    fn fixed(name: &str, first_epoch: u32, phases: &[(&str, u32, f64, f64)]) -> Self {
        let mut next = first_epoch;
        let phases = phases
            .iter()
            .filter_map(|&(label, epochs, alpha, bandwidth)| {
                let link = Link::new(alpha, bandwidth).ok()?;
                let first = next;
                next += epochs;
                Some(Phase {
                    label: label.to_owned(),
                    first_epoch: first,
                    last_epoch: next - 1,
                    alpha: link.alpha,
                    bandwidth: link.bandwidth,
                    jitter: Seconds::ZERO,
                    loss: 0.0,
                })
            })
            .collect();
        Self { name: name.to_owned(), phases }
    }

    /// From phases that follow each other without gaps; at least one.
    pub(crate) fn from_phases(name: &str, phases: Vec<Phase>) -> Self {
        debug_assert!(!phases.is_empty() && phases.windows(2).all(|w| w[1].first_epoch == w[0].last_epoch + 1));
        Self { name: name.to_owned(), phases }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The phases in order.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// Number of the first epoch: 1 for C1, 0 for C2, as the paper counts.
    pub fn first_epoch(&self) -> u32 {
        self.phases.first().map_or(0, |p| p.first_epoch)
    }

    /// How many epochs all phases last together.
    pub fn epochs(&self) -> u32 {
        self.phases.iter().map(Phase::epochs).sum()
    }

    /// The phase of an epoch, counted as the schedule counts; before the first and after the last, the nearest.
    pub fn at(&self, epoch: u32) -> &Phase {
        let found = self.phases.iter().find(|p| epoch <= p.last_epoch);
        found.unwrap_or(&self.phases[self.phases.len() - 1])
    }

    /// Every rate divided by `rate_divisor`: with bytes divided alike, every time stays as it was.
    pub fn scaled(&self, rate_divisor: f64) -> Result<Self, ScheduleError> {
        let refuse = |why: String| ScheduleError::Divisor { divisor: rate_divisor, why };
        if !(rate_divisor.is_finite() && rate_divisor > 0.0) {
            return Err(refuse("must be a positive number".into()));
        }
        let mut scaled = self.clone();
        for phase in &mut scaled.phases {
            phase.bandwidth =
                Bandwidth::new(phase.bandwidth.get() / rate_divisor).map_err(|e| refuse(e.to_string()))?;
        }
        Ok(scaled)
    }

    /// The same trace over `epochs` epochs in all, every phase keeping its share, at least one epoch each.
    pub fn stretched(&self, epochs: u32) -> Result<Self, ScheduleError> {
        let least = self.phases.len() as u64;
        count("number of epochs", u64::from(epochs), least, u64::from(MAX_EPOCHS))?;
        let total = u64::from(self.epochs());
        let (start, count) = (self.first_epoch(), self.phases.len() as u32);
        let (mut seen, mut next) = (0u64, start);
        let mut stretched = self.clone();
        for (i, phase) in stretched.phases.iter_mut().enumerate() {
            seen += u64::from(phase.epochs());
            let fair = (seen * u64::from(epochs) + total / 2) / total;
            let room_for_rest = epochs - (count - 1 - i as u32);
            let end = (start + fair as u32).clamp(next + 1, start + room_for_rest);
            phase.first_epoch = next;
            phase.last_epoch = end - 1;
            next = end;
        }
        Ok(stretched)
    }

    /// Reads a schedule from TOML:
    ///
    /// ```toml
    /// name = "a storm"
    /// first_epoch = 1          # optional, 0 when absent
    ///
    /// [[phase]]
    /// epochs = 4
    /// latency = "1ms"          # one way
    /// bandwidth = "25gbit"
    /// label = "calm"           # optional
    /// jitter = "100us"         # optional
    /// loss = 0.001             # optional, share of packets
    /// ```
    pub fn from_toml(text: &str) -> Result<Self, ScheduleError> {
        let raw: RawSchedule = toml::from_str(text).map_err(|e| ScheduleError::Toml(e.to_string()))?;
        raw.check()
    }
}

/// A schedule as written, inside other files too.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawSchedule {
    name: String,
    #[serde(default)]
    first_epoch: u32,
    phase: Vec<RawPhase>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPhase {
    epochs: u32,
    latency: String,
    bandwidth: String,
    label: Option<String>,
    jitter: Option<String>,
    #[serde(default)]
    loss: f64,
}

impl RawSchedule {
    /// Checks every value; the first bad one is named with its phase and key.
    pub(crate) fn check(self) -> Result<Schedule, ScheduleError> {
        count("number of phases", self.phase.len() as u64, 1, MAX_PHASES as u64)?;
        count("first_epoch", u64::from(self.first_epoch), 0, u64::from(MAX_EPOCHS))?;
        let mut next = self.first_epoch;
        let mut phases = Vec::with_capacity(self.phase.len());
        for (i, raw) in self.phase.into_iter().enumerate() {
            let phase = raw.check(i + 1, next)?;
            next = phase.last_epoch + 1;
            count("number of epochs", u64::from(next - self.first_epoch), 1, u64::from(MAX_EPOCHS))?;
            phases.push(phase);
        }
        Ok(Schedule { name: self.name, phases })
    }
}

impl RawPhase {
    fn check(self, number: usize, first_epoch: u32) -> Result<Phase, ScheduleError> {
        let value = |key| move |source| ScheduleError::Value { phase: number, key, source };
        count("epochs of a phase", u64::from(self.epochs), 1, u64::from(MAX_EPOCHS))?;
        if !(0.0..1.0).contains(&self.loss) {
            let source =
                Invalid::Range { what: "share of packets lost", value: self.loss, allowed: "0 to below 1".into() };
            return Err(value("loss")(source));
        }
        let alpha: Seconds = self.latency.parse().map_err(value("latency"))?;
        let bandwidth: Bandwidth = self.bandwidth.parse().map_err(value("bandwidth"))?;
        Ok(Phase {
            label: self.label.unwrap_or_else(|| format!("{alpha}, {bandwidth}")),
            first_epoch,
            last_epoch: first_epoch + (self.epochs - 1),
            alpha,
            bandwidth,
            jitter: self.jitter.as_deref().map_or(Ok(Seconds::ZERO), str::parse).map_err(value("jitter"))?,
            loss: self.loss,
        })
    }
}

fn count(what: &'static str, value: u64, least: u64, most: u64) -> Result<(), ScheduleError> {
    if (least..=most).contains(&value) { Ok(()) } else { Err(ScheduleError::Count { what, value, least, most }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    fn to_toml(schedule: &Schedule) -> String {
        let mut text = format!("name = {:?}\nfirst_epoch = {}\n", schedule.name, schedule.first_epoch());
        for p in &schedule.phases {
            text += &format!(
                "\n[[phase]]\nepochs = {}\nlatency = \"{}s\"\nbandwidth = \"{}bit\"\nlabel = {:?}\njitter = \"{}s\"\nloss = {:?}\n",
                p.epochs(),
                p.alpha.get(),
                p.bandwidth.get(),
                p.label,
                p.jitter.get(),
                p.loss
            );
        }
        text
    }

    #[test]
    fn the_papers_schedules() {
        let at = |s: &Schedule, epoch| (s.at(epoch).alpha.get(), s.at(epoch).bandwidth.get());
        let c1 = c1();
        assert_eq!((c1.phases().len(), c1.epochs(), c1.first_epoch()), (4, 50, 1));
        assert_eq!(at(&c1, 1), (0.001, 25e9));
        assert_eq!(at(&c1, 12), (0.001, 25e9));
        assert_eq!(at(&c1, 13), (0.001, 1e9));
        assert_eq!(at(&c1, 25), (0.050, 1e9));
        assert_eq!(at(&c1, 37), (0.050, 25e9));
        assert_eq!(at(&c1, 99), (0.050, 25e9));
        let c2 = c2();
        assert_eq!((c2.phases().len(), c2.epochs(), c2.first_epoch()), (5, 50, 0));
        assert_eq!(at(&c2, 11), (0.001, 25e9));
        assert_eq!(at(&c2, 12), (0.010, 10e9));
        assert_eq!(at(&c2, 20), (0.050, 1e9));
        assert_eq!(at(&c2, 28), (0.010, 10e9));
        assert_eq!(at(&c2, 36), (0.001, 25e9));
    }

    #[test]
    fn errors_name_the_key() {
        let one = |line: &str| {
            let text = format!("name = \"x\"\n[[phase]]\nepochs = 1\nlatency = \"1ms\"\nbandwidth = \"1gbit\"\n{line}");
            Schedule::from_toml(&text)
        };
        assert!(one("").is_ok());
        let typo = one("bandwith = \"2gbit\"").unwrap_err().to_string();
        assert!(typo.contains("bandwith"), "{typo}");
        let jitter = one("jitter = \"fast\"").unwrap_err().to_string();
        assert!(jitter.contains("phase 1: jitter") && jitter.contains("fast"), "{jitter}");
        assert!(one("loss = 1.0").unwrap_err().to_string().contains("loss"));
        assert!(Schedule::from_toml("name = \"x\"\nphase = []").is_err());
        assert!(c1().scaled(0.0).is_err() && c1().scaled(f64::NAN).is_err() && c1().scaled(1e9).is_err());
        assert!(c1().stretched(3).is_err());
    }

    proptest! {
        #[test]
        fn stretching_keeps_order_and_total(epochs in 5u32..2000) {
            for schedule in [c1(), c2()] {
                let stretched = schedule.stretched(epochs).unwrap();
                prop_assert_eq!(stretched.epochs(), epochs);
                let mut next = schedule.first_epoch();
                for (phase, original) in stretched.phases().iter().zip(schedule.phases()) {
                    prop_assert_eq!(phase.first_epoch, next);
                    prop_assert!(phase.last_epoch >= phase.first_epoch);
                    prop_assert_eq!(phase.link(), original.link());
                    next = phase.last_epoch + 1;
                }
            }
        }

        #[test]
        fn toml_round_trips(divisor in 0.01..1e4f64, epochs in 5u32..300) {
            let schedule = c2().scaled(divisor).unwrap().stretched(epochs).unwrap();
            let back = Schedule::from_toml(&to_toml(&schedule)).unwrap();
            prop_assert_eq!(back.phases().len(), schedule.phases().len());
            for (a, b) in back.phases().iter().zip(schedule.phases()) {
                prop_assert_eq!((a.first_epoch, a.last_epoch, &a.label), (b.first_epoch, b.last_epoch, &b.label));
                prop_assert!((a.bandwidth.get() / b.bandwidth.get() - 1.0).abs() < 1e-12);
            }
        }
    }
}
