//! What a live trial measures. Its caller takes a snapshot of everything that training depends on before it, and puts that back
//! after each candidate and at its end, bit for bit. Time is given.

use crate::agreement::TrialTick;
use crate::message::{AbortCause, TrialPlan};
use crate::telemetry::LEAST_GAIN;
use flexcomm_domain::{Energy, JobId, Rank};
use flexcomm_wire::{TrialOutcome, TrialReport};
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// What one iteration of a candidate showed on this rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Of this rank's gradient.
    pub energy: Energy,
    /// Compress and decompress, in microseconds.
    pub comp_us: f64,
    /// The collective, in microseconds.
    pub sync_us: f64,
    /// What this rank sent.
    pub bytes: u64,
}

/// A point in time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Clocks {
    /// On any steady clock.
    pub steady: Duration,
    /// What the process has had of processors by then; none where time is simulated.
    pub processor: Option<Duration>,
}

impl Clocks {
    /// Now, which is so much on a steady clock.
    pub fn read(steady: Duration) -> Self {
        Self { steady, processor: clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok().map(Duration::from) }
    }

    /// So much on a steady clock, in a simulation.
    pub fn simulated(steady: Duration) -> Self {
        Self { steady, processor: None }
    }
}

/// The averages of a trial under way on one rank. Which iteration runs and when it ends is the agreement's business.
#[derive(Debug)]
pub struct Trial {
    plan: TrialPlan,
    started: Clocks,
    sums: Vec<Sum>,
    bytes: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    iterations: u32,
    gain: f64,
    energy: f64,
    comp_us: f64,
    sync_us: f64,
}

impl Trial {
    /// Of this plan, from now on.
    pub fn start(plan: TrialPlan, now: Clocks) -> Self {
        let sums = vec![Sum::default(); plan.candidates.len()];
        Self { plan, started: now, sums, bytes: 0 }
    }

    /// Whether the time budget is used up. Rank 0 then asks the agreement to abort; other ranks do nothing.
    pub fn over_budget(&self, now: Duration) -> bool {
        now.saturating_sub(self.started.steady) > Duration::from_millis(self.plan.budget_ms)
    }

    /// Takes in an iteration.
    pub fn record(&mut self, tick: TrialTick, measured: Measured) {
        self.bytes = self.bytes.saturating_add(measured.bytes);
        if let Some(sum) = self.sums.get_mut(tick.candidate) {
            sum.iterations += 1;
            sum.gain += measured.energy.gain().clamp(LEAST_GAIN, 1.0);
            sum.energy += measured.energy.compensated;
            sum.comp_us += measured.comp_us;
            sum.sync_us += measured.sync_us;
        }
    }

    /// Reports the averages of the candidates that ran at least once.
    pub fn finish(self, who: (&JobId, Rank), aborted: Option<AbortCause>, now: Clocks) -> TrialReport {
        let ran = self.plan.candidates.iter().zip(&self.sums).filter(|(_, sum)| sum.iterations > 0);
        let mean = |total: f64, sum: &Sum| total / f64::from(sum.iterations);
        let outcomes = ran.map(|(strategy, sum)| TrialOutcome {
            strategy: (*strategy).into(),
            gain: mean(sum.gain, sum),
            energy: Some(mean(sum.energy, sum)).filter(|energy| energy.is_finite()),
            shadow_gain: None,
            shadow_energy: None,
            comp_us: mean(sum.comp_us, sum),
            sync_us: mean(sum.sync_us, sum),
            iterations: sum.iterations,
        });
        let cpu = now.processor.zip(self.started.processor).map(|(now, then)| now.saturating_sub(then));
        TrialReport {
            job: who.0.clone(),
            rank: who.1.0,
            id: self.plan.id,
            outcomes: outcomes.collect(),
            aborted: aborted.map(|cause| cause.as_str().to_owned()),
            cost_us: now.steady.saturating_sub(self.started.steady).as_secs_f64() * 1e6,
            bytes: Some(self.bytes),
            cpu_us: cpu.map(|cpu| cpu.as_secs_f64() * 1e6),
            shadow_us: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Strategy;

    fn plan() -> TrialPlan {
        let candidates = ["topk@0.1/allgather", "topk@0.01/allgather", "none@1/dense-tree"];
        let candidates = candidates.iter().map(|s| s.parse::<Strategy>().unwrap()).collect();
        TrialPlan::new(9, candidates, 2, 50).unwrap()
    }

    fn at(steady_ms: u64, processor_ms: u64) -> Clocks {
        let [steady, processor] = [steady_ms, processor_ms].map(Duration::from_millis);
        Clocks { steady, processor: Some(processor) }
    }

    fn run(ticks: u32) -> Trial {
        let mut trial = Trial::start(plan(), at(1000, 500));
        for i in 0..ticks {
            let energy = Energy { sent: 1.0 + f64::from(i), compensated: 2.0 + 2.0 * f64::from(i) };
            let measured = Measured { energy, comp_us: f64::from(i), sync_us: 10.0, bytes: 7 };
            let (candidate, within) = ((i / 2) as usize, i % 2);
            trial.record(TrialTick { candidate, iteration: i, within, last: within == 1 }, measured);
        }
        trial
    }

    #[test]
    fn averages_per_candidate() {
        let who = JobId::new("j").unwrap();
        let report = run(6).finish((&who, Rank(2)), None, at(1030, 520));
        assert_eq!((report.id, report.rank, report.aborted, report.cost_us), (9, 2, None, 30_000.0));
        assert_eq!((report.bytes, report.cpu_us), (Some(42), Some(20_000.0)));
        let comp: Vec<_> = report.outcomes.iter().map(|o| (o.comp_us, o.gain, o.energy, o.iterations)).collect();
        assert_eq!(comp, [(0.5, 0.5, Some(3.0), 2), (2.5, 0.5, Some(7.0), 2), (4.5, 0.5, Some(11.0), 2)]);
    }

    #[test]
    fn an_aborted_trial_reports_what_ran() {
        let trial = run(3);
        assert!(!trial.over_budget(Duration::from_millis(1050)));
        assert!(trial.over_budget(Duration::from_millis(1051)));
        let who = JobId::new("j").unwrap();
        let now = Clocks::simulated(Duration::from_millis(1051));
        let report = trial.finish((&who, Rank(0)), Some(AbortCause::Budget), now);
        assert_eq!(report.cpu_us, None);
        assert_eq!(report.outcomes.iter().map(|o| o.iterations).collect::<Vec<_>>(), [2, 1]);
        assert!(report.aborted.unwrap().contains("budget"));
    }
}
