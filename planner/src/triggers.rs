//! What makes the planner look again.

use crate::memory::{LinkSummary, relative};
use crate::{Memory, Snapshot, words};
use flexcomm_domain::Timestamp;
use serde::{Deserialize, Serialize};

/// One reason to look again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Trigger {
    /// Nothing has been decided yet.
    First,
    /// Latency or bandwidth moved beyond the threshold.
    Links {
        /// In words with numbers.
        what: String,
    },
    /// The gain in force moved beyond the threshold: a trial is asked for, and its profile is what makes
    /// the planner solve again.
    Gain {
        /// At the last reference.
        from: f64,
        /// Now.
        to: f64,
    },
    /// A trial brought a new profile.
    Profile,
    /// The predicted step time of the strategy in force moved although the links did not: fitted
    /// coefficients, compute time or message sizes changed.
    Model {
        /// Predicted when last solved, seconds.
        from_s: f64,
        /// Predicted now, seconds.
        to_s: f64,
    },
    /// A better strategy was deferred the last time, or the guard has rolled back: due now.
    #[serde(alias = "held-back")]
    Deferred {
        /// What had moved, in words.
        cause: String,
    },
    /// The strategy in force is no longer offered by the job or allowed by the settings.
    Withdrawn,
    /// The policy does not admit the strategy in force any more: its gain fell below the floor.
    NotAdmitted {
        /// Its gain.
        gain: f64,
    },
    /// It is slower than it should be.
    Guard {
        /// In words with numbers.
        what: String,
    },
    /// What was rolled back may be tried again before its time: the links have moved since.
    Unblocked {
        /// Which and why, in words.
        what: String,
    },
    /// Nothing moved, but it has been a while.
    Review,
}

impl Trigger {
    /// Whether this one calls for solving again.
    pub fn solves(&self) -> bool {
        !matches!(self, Self::Gain { .. })
    }

    /// Whether the world moved, so that the small margin is enough.
    pub fn moved(&self) -> bool {
        matches!(
            self,
            Self::First
                | Self::Links { .. }
                | Self::Model { .. }
                | Self::Withdrawn
                | Self::NotAdmitted { .. }
                | Self::Unblocked { .. }
        )
    }

    /// The beginning of a sentence.
    pub fn words(&self) -> String {
        match self {
            Self::First => "first decision".into(),
            Self::Links { what } | Self::Guard { what } | Self::Unblocked { what } => what.clone(),
            Self::Gain { from, to } => {
                format!("the gain in force moved from {} to {}", words::number(*from), words::number(*to))
            }
            Self::Profile => "a trial measured new gains".into(),
            Self::Model { from_s, to_s } => format!(
                "the predicted step time of the strategy in force moved from {} to {}",
                words::time(*from_s),
                words::time(*to_s)
            ),
            Self::Deferred { cause } => cause.clone(),
            Self::Withdrawn => "the strategy in force is no longer offered".into(),
            Self::NotAdmitted { gain } => {
                format!(
                    "the strategy in force keeps {} of the gradient, less than the policy admits",
                    words::number(*gain)
                )
            }
            Self::Review => "regular review".into(),
        }
    }
}

/// Everything that calls for another look, in the order in which sentences name it.
pub(crate) fn find(s: &Snapshot, memory: &Memory, links: &LinkSummary, step_s: f64, now: Timestamp) -> Vec<Trigger> {
    let config = &s.config;
    let mut found = Vec::new();
    if s.in_force.is_none() {
        found.push(Trigger::First);
    }
    let links_moved = memory.links.filter(|b| b.moved(links, config.link_change, config.latency_floor_s.get()));
    if let Some(before) = links_moved {
        let what = words::links_moved(&before, links, config.link_change, config.latency_floor_s.get());
        found.push(Trigger::Links { what });
    } else if let Some(from_s) = memory.predicted_step_s.filter(|b| relative(*b, step_s) >= config.link_change) {
        found.push(Trigger::Model { from_s, to_s: step_s });
    }
    if memory.solved_at.is_some() && s.profiles.measured_at != memory.profile_at {
        found.push(Trigger::Profile);
    }
    // Gains of the long run move together as training goes on, and the one in force shows by how much.
    found.extend(gain(s, memory, now).filter(|_| !s.profiles.long_run));
    if let Some(deferred) = &memory.deferred {
        found.push(Trigger::Deferred { cause: deferred.cause.clone() });
    }
    let since = memory.solved_at.map(|at| now.since(at).get());
    if s.in_force.is_some() && found.is_empty() && since.is_none_or(|t| t >= config.review_s.get()) {
        found.push(Trigger::Review);
    }
    found
}

/// The gain in force against its reference, once enough steps are measured.
fn gain(s: &Snapshot, memory: &Memory, now: Timestamp) -> Option<Trigger> {
    let measured = crate::gains::settled(s, memory, now)?;
    let reference = memory.gain.filter(|g| g.version == measured.version)?;
    let (from, to) = (reference.gain.get(), measured.gain.get());
    (relative(from, to) >= s.config.gain_change).then_some(Trigger::Gain { from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_triggers_of_earlier_builds_are_read() {
        let found: Trigger = serde_json::from_str(r#"{"kind":"held-back","cause":"links"}"#).unwrap();
        assert_eq!(found, Trigger::Deferred { cause: "links".to_owned() });
        assert!(serde_json::to_string(&found).unwrap().contains("\"deferred\""));
    }
}
