//! What the planner remembers from one call to the next. The caller stores it and hands it back unread.

use crate::beliefs::Beliefs;
use crate::loss::LossWatch;
use crate::{JobPolicy, PolicyConfig};
use flexcomm_domain::{LinkMatrix, Plan, Strategy, Timestamp};
use serde::{Deserialize, Serialize};

/// Everything that is carried over. `Default` is a planner that knows nothing: safe after any loss.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Which run it is of: [`crate::Snapshot::begun`].
    #[serde(skip_serializing_if = "is_unknown")]
    pub begun: Timestamp,
    /// What is believed of network, compressors and gains.
    pub beliefs: Beliefs,
    /// From when the dwell time of the strategy in force counts.
    pub dwell_from: Option<Timestamp>,
    /// The links as they were believed to be at the last change at which they were known, or at the first.
    pub links: Option<LinkSummary>,
    /// When that was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub links_at: Option<Timestamp>,
    /// The job's policy at the last change, without a pin that was not followed, and what was minimised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<(JobPolicy, PolicyConfig)>,
    /// What is known of trials.
    pub trial: TrialMemory,
    /// The loss before a strategy under which it rose: until it is as low again, nothing is compressed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_limit: Option<f64>,
    /// Whether the loss falls at all.
    #[serde(skip_serializing_if = "LossWatch::is_new")]
    pub loss_watch: LossWatch,
    /// Strategies that were in force, and when they were left, the newest last.
    pub left: Vec<(Strategy, Timestamp)>,
}

/// So many of them are remembered.
const MOST_LEFT: usize = 32;
/// Ratios of which one is at most so many times the other are near.
const NEAR: f64 = 2.0;

/// Mean and worst of the links between a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkSummary {
    /// Mean one-way latency, seconds.
    pub alpha_mean_s: f64,
    /// Highest one-way latency, seconds.
    pub alpha_worst_s: f64,
    /// Bandwidth that moves the same bytes in the mean time, bit/s.
    pub bandwidth_mean_bps: f64,
    /// Lowest bandwidth, bit/s.
    pub bandwidth_worst_bps: f64,
}

impl LinkSummary {
    /// Of all links between different ranks; with one rank, of its own.
    pub fn of(matrix: &LinkMatrix) -> Self {
        let (mut count, mut alpha, mut beta) = (0.0, 0.0, 0.0);
        for link in matrix.between() {
            count += 1.0;
            alpha += link.alpha.get();
            beta += link.bandwidth.beta();
        }
        let worst = matrix.worst();
        Self {
            alpha_mean_s: alpha / count,
            alpha_worst_s: worst.alpha.get(),
            bandwidth_mean_bps: 8.0 * count / beta,
            bandwidth_worst_bps: worst.bandwidth.get(),
        }
    }
}

/// What is known of the trials that were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TrialMemory {
    /// When the last one was asked for.
    pub asked_at: Option<Timestamp>,
    /// Whether its answer is still awaited.
    pub pending: bool,
    /// When the trial of the newest answer that was seen ended.
    pub answered_at: Option<Timestamp>,
    /// How many were given up one after the other.
    pub given_up: u32,
    /// What the pending one is expected to take of training by the model, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_s: Option<f64>,
    /// How many times what the model says live trials took, the newest counting half; at least 1, and absent before the first. A later
    /// run begins with its square root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<f64>,
}

fn is_unknown(begun: &Timestamp) -> bool {
    *begun == Timestamp::default()
}

/// Whether they are of the same compressor over the same collective, at ratios near one another.
fn is_near(a: &Strategy, b: &Strategy) -> bool {
    let apart = (a.cr().get() / b.cr().get()).ln().abs();
    a.selector() == b.selector() && a.collective() == b.collective() && apart <= NEAR.ln()
}

impl Memory {
    /// In a run that began then: of an earlier one, or of a job that is like this one, stays what it tells of this one.
    pub(crate) fn in_run(self, begun: Timestamp) -> Self {
        if self.begun == begun {
            return self;
        }
        let trial = TrialMemory { slowdown: self.trial.slowdown.map(f64::sqrt), ..TrialMemory::default() };
        // What an earlier run left was left once.
        let mut left: Vec<(Strategy, Timestamp)> = Vec::new();
        for (strategy, _) in self.left {
            if !left.iter().any(|(known, _)| is_near(known, &strategy)) {
                left.push((strategy, begun));
            }
        }
        Self { begun, beliefs: self.beliefs.carried_over(), trial, left, ..Self::default() }
    }

    /// What it tells of a job of another size or model on the same backend, whose run began then: how collectives behave, and on the same kind
    /// of machine how fast it compresses.
    #[must_use]
    pub fn of_another_job(self, begun: Timestamp, same_machine: bool) -> Self {
        Self { begun, beliefs: self.beliefs.of_another_job(same_machine), ..Self::default() }
    }

    /// The plan is in force no longer. Of a plan by bucket it is known what it costs by what its strategies cost.
    pub(crate) fn leave(&mut self, plan: &Plan, now: Timestamp) {
        let Some(strategy) = plan.alike() else { return };
        self.left.push((*strategy, now));
        let first = self.left.len().saturating_sub(MOST_LEFT);
        self.left.drain(..first);
    }

    /// How often a plan, or one of the same compressor over the same collective at a ratio near its own, was left within so many seconds:
    /// what one shows tells of the other.
    pub(crate) fn times_left(&self, plan: &Plan, now: Timestamp, within_s: f64) -> usize {
        let Some(is) = plan.alike() else { return 0 };
        let left = self.left.iter().filter(|(strategy, at)| is_near(is, strategy) && now.since(*at).get() <= within_s);
        left.count()
    }

    /// Brings every remembered time to the present: after a clock that jumped back, nothing lies in the future.
    pub(crate) fn clamp_times(&mut self, now: Timestamp) {
        let cap = |at: &mut Option<Timestamp>| *at = at.map(|t| t.min(now));
        cap(&mut self.dwell_from);
        cap(&mut self.links_at);
        cap(&mut self.trial.asked_at);
        self.left.iter_mut().for_each(|(_, at)| *at = (*at).min(now));
        self.beliefs.clamp_times(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_earlier_builds_remembered_is_read() {
        let text = r#"{"held_back":{"margin":0.1,"cause":"links"},"guard_spoke":2,"dwell_from":5,"trial":{"given_up":2,"cost_s":1.5},
            "blocked":[{"strategy":"none/dense-ring","scope":"collective","until":9,"strikes":4,"why":"slow"}]}"#;
        let memory: Memory = serde_json::from_str(text).unwrap();
        assert_eq!((memory.dwell_from, memory.trial.given_up), (Some(Timestamp(5)), 2));
        let now = serde_json::to_string(&memory).unwrap();
        assert_eq!(serde_json::from_str::<Memory>(&now).unwrap(), memory);
    }

    #[test]
    fn of_another_run_stay_beliefs_alone() {
        let trial = TrialMemory { given_up: 3, ..TrialMemory::default() };
        let memory = Memory { begun: Timestamp(1), dwell_from: Some(Timestamp(9)), trial, ..Memory::default() };
        assert_eq!(memory.clone().in_run(Timestamp(1)), memory);
        assert_eq!(memory.in_run(Timestamp(2)), Memory { begun: Timestamp(2), ..Memory::default() });
    }

    #[test]
    fn what_was_left_is_counted_with_what_is_near_it_and_the_oldest_are_forgotten() {
        let mut memory = Memory::default();
        let plan =
            |k: usize| format!("topk(k={:.3})+ef(vanilla)/allgather", (k + 1) as f64 / 1000.0).parse::<Plan>().unwrap();
        let second = |s: usize| Timestamp(s as u64 * 1_000_000);
        for k in 0..MOST_LEFT {
            memory.leave(&plan(k), second(k));
        }
        memory.leave(&plan(30), second(40));
        memory.leave(&format!("none/dense-ring | {}", plan(7)).parse().unwrap(), second(41));
        assert_eq!(memory.left.len(), MOST_LEFT);
        let times = |k, within_s| memory.times_left(&plan(k), second(40), within_s);
        assert_eq!(times(0, 100.0), 1, "0.002: 0.001 is forgotten");
        assert_eq!([times(9, 4.0), times(30, 9.0)], [0, 2], "0.031 once more before, and 0.032");
        let later = memory.clone().in_run(second(50));
        let of_later = |k, s: usize| later.times_left(&plan(k), second(s), 8.0);
        assert_eq!(
            [of_later(30, 50), of_later(30, 58), of_later(30, 59)],
            [1, 1, 0],
            "what is near counts once, since it began"
        );
        memory.clamp_times(second(3));
        assert!(memory.left.iter().all(|(_, at)| *at <= second(3)));
    }

    #[test]
    fn a_clock_that_jumped_back_leaves_nothing_in_the_future() {
        let mut memory = Memory { dwell_from: Some(Timestamp(9_000_000)), ..Memory::default() };
        memory.clamp_times(Timestamp(1_000_000));
        assert_eq!(memory.dwell_from, Some(Timestamp(1_000_000)));
    }
}
