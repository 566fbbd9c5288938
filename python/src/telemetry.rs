//! Deferred telemetry: a session's events are reported in order, although the times of a GPU's steps are known a step or two late.

use crate::session::Session;
use flexcomm_trainer::{AbortCause, Clocks, Costs, InForce, Tick, Trial, TrialTick};
use pyo3::prelude::*;
use std::time::Duration;

/// A trial that is over, but for iterations whose times are not known yet.
pub struct Ended {
    pub trial: Trial,
    pub cause: Option<AbortCause>,
    pub at: Clocks,
}

/// What is reported after all that was deferred before it.
#[expect(clippy::large_enum_variant, reason = "nearly all are the large one")]
pub enum Event {
    /// A step that trained, what ran in it, its loss. None: it ran something else than agreed, and is not reported.
    Step(Costs, Option<(Tick, Option<f64>)>),
    /// A trial's iteration.
    Iteration(Costs, TrialTick),
    /// A decision is in force.
    Applied(Box<InForce>),
    /// Boxed: rare, and large beside the others.
    Ended(Box<Ended>),
}

/// Seconds of a step by the device's clock.
#[derive(Debug, Clone, Copy, FromPyObject)]
pub struct Times {
    compute: f64,
    compress: f64,
    sync: f64,
    step: f64,
}

impl Times {
    fn durations(self) -> Option<[Duration; 4]> {
        let [compute, compress, sync, step] = [self.compute, self.compress, self.sync, self.step]
            .map(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Some([compute?, compress?, sync?, step?])
    }
}

impl Event {
    fn complete(&mut self, times: [Duration; 4]) {
        if let Self::Step(costs, _) | Self::Iteration(costs, _) = self {
            [costs.compute, costs.comp, costs.sync, costs.step] = times;
        }
    }
}

impl Session {
    /// Reports it after all that waits; once `ticket` is resolved, where a device has its times.
    pub fn defer(&mut self, ticket: Option<u64>, event: Event) {
        self.deferred.push(ticket, event);
        self.report_resolved();
    }

    /// The times of a step are known, or will never be.
    pub fn resolve(&mut self, ticket: u64, times: Option<Times>) {
        match times.and_then(Times::durations) {
            Some(times) => _ = self.deferred.resolve(ticket, |event| event.complete(times)),
            None => self.deferred.forget(ticket),
        }
        self.report_resolved();
    }

    /// The end of the job: what is not known now goes unreported.
    pub fn flush(&mut self) {
        self.deferred.forget_all();
        self.report_resolved();
        self.reporter.finish();
    }

    fn report_resolved(&mut self) {
        while let Some(event) = self.deferred.pop() {
            match event {
                Event::Step(costs, step) => {
                    if let Some((tick, loss)) = step {
                        self.reporter.step((tick.version, tick.plan), costs.record(tick.step, loss, None));
                    }
                    self.last = Some(costs);
                }
                Event::Iteration(costs, at) => {
                    self.record(&costs, at);
                    self.last = Some(costs);
                }
                Event::Applied(in_force) => self.reporter.applied(&in_force),
                Event::Ended(ended) => self.report_trial(*ended),
            }
        }
    }

    /// Of the oldest trial that is not reported: iterations come before their trial's end.
    fn record(&mut self, costs: &Costs, at: TrialTick) {
        let ended = self.deferred.iter_mut().find_map(|event| match event {
            Event::Ended(ended) => Some(&mut ended.trial),
            _ => None,
        });
        if let Some(trial) = ended.or(self.trial.as_mut()) {
            trial.record(at, costs.measured());
        }
    }

    fn report_trial(&mut self, ended: Ended) {
        self.reporter.trial(ended.trial.finish((&self.job, self.rank), ended.cause, ended.at));
    }
}
