//! Shadow trials of a live trial's candidates: over the steps of training after it they show what each keeps once its own
//! residual has grown, and complete the trial's report.

use super::report::LEAST_GAIN;
use flexcomm_domain::Strategy;
use flexcomm_exchange::{ExchangeError, Param, Shadow};
use flexcomm_trainer::TrialPlan;
use flexcomm_wire::{StrategyWire, TrialReport};

/// Steps that they go on for: five of the paper's live trials.
const STEPS: u64 = 50;

/// When the report is completed: early, since a decision waits for it, and at the end.
const REPORTED_AT: [u64; 2] = [20, STEPS];

/// Share of the gradient that they look at, where that is enough for an estimate.
const SHARE: f64 = 0.25;

/// A rank's shadow trials.
pub struct Shadows {
    params: Vec<Param>,
    seed: u64,
    running: Option<(Shadow, Vec<Strategy>)>,
    /// The newest trial's.
    report: Option<TrialReport>,
}

impl Shadows {
    /// None yet; samples are drawn by `seed`.
    pub fn new(params: Vec<Param>, seed: u64) -> Self {
        Self { params, seed, running: None, report: None }
    }

    /// A trial begins. Dense loses nothing, and what AR-Topk keeps depends on other ranks: they have no shadow.
    pub fn watch(&mut self, plan: &TrialPlan) {
        let followed = |strategy: &&Strategy| !strategy.is_dense() && !strategy.collective().is_art();
        let strategies: Vec<Strategy> = plan.candidates.iter().filter(followed).copied().collect();
        let specs: Vec<_> = strategies.iter().map(|strategy| *strategy.spec()).collect();
        self.report = None;
        self.running = (!specs.is_empty()).then(|| (Shadow::new(&specs, SHARE, self.seed), strategies));
    }

    /// The trial has ended with this report.
    pub fn complete_later(&mut self, report: TrialReport) {
        self.report = Some(report);
    }

    /// Takes in a step of training: its gradient, and the residual after it, with which the shadows begin at the first step; the
    /// next one's gradient is the first that they see. Answers the report when there is something to add.
    pub fn observe(
        &mut self,
        gradient: &[f32],
        residual: impl FnOnce() -> Vec<f32>,
    ) -> Result<Option<TrialReport>, ExchangeError> {
        let Some((shadow, strategies)) = &mut self.running else { return Ok(None) };
        if shadow.begins(0) {
            shadow.begin(0, &self.params, &residual())?;
            return Ok(None);
        }
        let before = shadow.steps();
        shadow.observe(0, &self.params, &[], gradient)?;
        shadow.end_step();
        if shadow.steps() == before || !REPORTED_AT.contains(&shadow.steps()) {
            return Ok(None);
        }
        let mut report = self.report.clone();
        for (strategy, gain) in strategies.iter().zip(shadow.gains()) {
            let wire = StrategyWire::from(*strategy);
            let outcomes = report.iter_mut().flat_map(|report| &mut report.outcomes);
            for outcome in outcomes.filter(|outcome| outcome.strategy == wire) {
                outcome.shadow_gain = Some(gain.recent.clamp(LEAST_GAIN, 1.0));
            }
        }
        if shadow.steps() >= STEPS {
            self.running = None;
        }
        Ok(report)
    }
}
