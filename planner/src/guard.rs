//! Rolls back by itself: measured worse than predicted, or than dense, beyond a margin.
//!
//! Steps show a change of the network before probes do. So the guard acts on a regression once every link has been measured since
//! it began, and links that are moving are steady. It does not wait for a second measurement: the controller tests
//! links that disagree with steps as often as its budget allows, but an estimator that takes a fall for an outlier at
//! first may do so for any time. A strategy that is blamed meanwhile is cleared when the links show it ([`clears`]).
//!
//! Where links cannot be trusted, the steps in force still bound what the next larger ratio of the same compressor over the
//! same collective takes ([`Look::by_steps`]): where that is better already, nothing is waited for but the timeout.

use crate::blocks::{Blocked, Evidence, Failed, Scope};
use crate::decide::trusted;
use crate::memory::{LinkSummary, Regression};
use crate::solve::{Costs, Priced};
use crate::{Measured, Memory, Snapshot, gains, words};
use flexcomm_domain::{Gain, Seconds, Strategy, Timestamp};
use flexcomm_optimizer::Evaluated;

/// The guard's judgement of the strategy in force.
#[derive(Debug)]
pub(crate) enum Judgement {
    /// No regression, or not enough measured.
    Fine,
    /// Something is wrong, but it may be the network, whose new state the links do not show yet.
    Suspect,
    /// Something known is better: back to it.
    Roll(Box<Rollback>),
    /// It is worse than it should be, but nothing known is better.
    Stay(String),
}

/// Where to, what failed and why.
#[derive(Debug)]
pub(crate) struct Rollback {
    pub(crate) to: Priced,
    pub(crate) failed: Failed,
    pub(crate) why: String,
    /// Whether its cost follows from the steps in force alone.
    by_steps: bool,
}

/// A fallback with its cost, measured if it was in force on such links lately.
struct Fallback<'a> {
    to: &'a Priced,
    cost: f64,
    words: String,
    by_steps: bool,
}

/// Judges the strategy in force by what it was measured to cost.
pub(crate) fn judge(
    s: &Snapshot,
    memory: &mut Memory,
    costs: &Costs,
    links: &LinkSummary,
    now: Timestamp,
) -> Judgement {
    let applied = s.in_force.as_ref().is_some_and(|f| f.applied_at_step.is_some());
    let Some(m) = s.measured_now().filter(|m| applied && m.steps >= s.config.least_steps) else {
        // No news is no end of the regression.
        return Judgement::Fine;
    };
    let look = Look { s, memory, costs, links, now };
    let promised = memory.promise.filter(|p| p.version == m.version).map(|p| p.gain);
    let judgements = look.regressions(m, &costs.modelled, promised).map(|(scope, what)| look.roll(m, scope, what));
    // The first regression that has a way out, else the first.
    let Some(judgement) = judgements.min_by_key(|j| !matches!(j, Judgement::Roll(_))) else {
        memory.regression = None;
        if gains::settled(s, memory, now).is_some() {
            // Kept: how gains fall as training goes on is the usual choice's matter.
            memory.promise = None;
        }
        return Judgement::Fine;
    };
    let lasted = regressed_for(s, memory, now);
    let timeout = match &judgement {
        Judgement::Roll(r) if !r.by_steps && costs.sends_more(&r.to) => DOUBT,
        _ => 1.0,
    } * s.config.guard_timeout_s.get();
    let by_steps = matches!(&judgement, Judgement::Roll(r) if r.by_steps);
    let links_known = || memory.unsteady(&s.config, now).is_none() && measured_within(s, lasted);
    let due = lasted.get() >= timeout && (by_steps || links_known());
    if due { judgement } else { Judgement::Suspect }
}

/// Whether there would have been no regression on the links of now: they explain what was measured before they were known.
/// No links explain what compressing takes.
pub(crate) fn clears(look: &Look<'_>, blocked: &Blocked, evidence: &Evidence) -> bool {
    let predicted = look.costs.problem.evaluate(&blocked.strategy);
    blocked.scope != Scope::Compressor
        && predicted.is_ok_and(|p| look.regressions(&evidence.measured, &p, evidence.promised).next().is_none())
}

/// A fallback that sends more has so many times the timeout: if it is the network that has just become slower, that one
/// is worse still, whatever it took before, and estimates of links that a job fills follow late.
const DOUBT: f64 = 3.0;

/// How long steps of the version in force have shown a regression.
fn regressed_for(s: &Snapshot, memory: &mut Memory, now: Timestamp) -> Seconds {
    let version = s.version();
    let open = memory.regression.filter(|c| c.version == version);
    let since = open.unwrap_or(Regression { version, since: now });
    memory.regression = Some(since);
    now.since(since.since)
}

/// Whether latency and bandwidth of every link were measured within that time, or it is so long that they will not be.
fn measured_within(s: &Snapshot, time: Seconds) -> bool {
    s.links.as_ref().is_some_and(|l| l.oldest < time) || time >= s.config.max_link_age_s
}

/// What measured steps are compared with.
pub(crate) struct Look<'a> {
    pub(crate) s: &'a Snapshot,
    pub(crate) memory: &'a Memory,
    pub(crate) costs: &'a Costs,
    pub(crate) links: &'a LinkSummary,
    pub(crate) now: Timestamp,
}

impl Look<'_> {
    /// All that is wrong with the strategy in force, and which part of it is to blame.
    fn regressions(
        &self,
        m: &Measured,
        predicted: &Evaluated,
        promised: Option<Gain>,
    ) -> impl Iterator<Item = (Scope, String)> {
        let keeps_less = promised.and_then(|promised| self.keeps_less(m, predicted, promised));
        [self.too_slow(m, predicted), self.worse_than_dense(m, predicted), keeps_less].into_iter().flatten()
    }

    /// Too much is lost: what its steps keep makes them worth less than they were chosen for.
    fn keeps_less(&self, m: &Measured, predicted: &Evaluated, promised: Gain) -> Option<(Scope, String)> {
        let limit = self.worth(&predicted.strategy, m.t_step, promised) * (1.0 + self.s.config.guard_dense_margin);
        let text = format!(
            "{} keeps {} of the gradient, was chosen for {}",
            words::strategy(&predicted.strategy),
            words::number(m.gain.get()),
            words::number(promised.get())
        );
        (self.worth(&predicted.strategy, m.t_step, m.gain) > limit).then_some((Scope::Gain, text))
    }

    /// Step and communication both take longer than predicted: a slow optimizer or loader is no regression.
    fn too_slow(&self, m: &Measured, predicted: &Evaluated) -> Option<(Scope, String)> {
        let beyond = |is: f64, was: f64| {
            is > was * (1.0 + self.s.config.guard_margin) && is - was > self.s.config.guard_floor_s.get()
        };
        let step = beyond(m.t_step.get(), predicted.t_step.get());
        let own = (m.t_comp.get() + m.t_sync.get(), predicted.t_comp.get() + predicted.t_sync.get());
        let text = format!(
            "{} was measured at {} per step over {} steps against {} predicted",
            words::strategy(&predicted.strategy),
            words::time(m.t_step.get()),
            m.steps,
            words::time(predicted.t_step.get())
        );
        (step && beyond(own.0, own.1)).then(|| (culprit(m, predicted), text))
    }

    fn worse_than_dense(&self, m: &Measured, p: &Evaluated) -> Option<(Scope, String)> {
        let strategy = p.strategy;
        let dense = self.costs.dense().filter(|_| !strategy.is_dense())?;
        if self.costs.contradicted.is_some() && self.seen(&dense.strategy()).is_none() {
            return None;
        }
        let reference = self.cost_of(dense);
        let ours = self.worth(&strategy, m.t_step, m.gain);
        let limit = reference.cost * (1.0 + self.s.config.guard_dense_margin);
        if ours <= limit || ours - reference.cost <= self.s.config.guard_floor_s.get() {
            return None;
        }
        let lost = m.gain.get() < 0.9 * p.gain.get();
        let text = format!(
            "{} was measured at {} per step at gain {}, worth less than dense, {}",
            words::strategy(&strategy),
            words::time(m.t_step.get()),
            words::number(m.gain.get()),
            reference.words
        );
        Some((if lost { Scope::Gain } else { culprit(m, p) }, text))
    }

    fn roll(&self, m: &Measured, scope: Scope, regression: String) -> Judgement {
        let strategy = self.costs.in_force.strategy();
        let ours = self.worth(&strategy, m.t_step, m.gain);
        let previous = |p: &Priced| p.score.is_some() && self.is_previous(&p.strategy());
        let open = |p: &Priced| !p.blocked && !scope.covers(&strategy, &p.strategy());
        let known = self.costs.all.iter().filter(|p| p.what.strategy.is_dense() || previous(p));
        // What is predicted on links that cannot be trusted, or that steps contradict, is nothing to go back to.
        let trusted = self.s.links.as_ref().is_some_and(|l| trusted(self.s, l, self.now).is_ok());
        let sure = trusted && self.costs.contradicted.is_none();
        let usable = known.filter(|p| p.strategy() != strategy).filter_map(|p| {
            let seen = self.seen(&p.strategy()).is_some();
            (seen || sure && open(p)).then(|| self.cost_of(p))
        });
        let larger = self.costs.all.iter().filter(|p| !sure && self.is_larger(p));
        let next = larger.min_by(|a, b| a.strategy().cr().get().total_cmp(&b.strategy().cr().get()));
        let next = next.filter(|p| p.score.is_some() && open(p)).and_then(|p| self.by_steps(m, p));
        let better = |b: &Fallback<'_>| b.cost < ours * (1.0 - self.s.config.hysteresis);
        let best = usable.chain(next).min_by(|a, b| a.cost.total_cmp(&b.cost)).filter(better);
        // Once something is left, it is left for the best that remains. That one alone is no reason to leave: a model that
        // has just been found wrong predicts it.
        let remains = best.as_ref().filter(|_| sure).and_then(|_| self.costs.pick(self.s, open));
        let remains = remains.as_ref().map(|p| self.cost_of(p));
        match best.into_iter().chain(remains).min_by(|a, b| a.cost.total_cmp(&b.cost)) {
            Some(b) => {
                let to = b.to.strategy();
                let back = if to.is_dense() || self.is_previous(&to) { "back" } else { "on" };
                let why = format!("{regression}; {back} to {}, {}", words::strategy(&to), b.words);
                let promised = self.memory.promise.filter(|p| p.version == m.version).map(|p| p.gain);
                let evidence = Evidence { links: *self.links, measured: *m, promised };
                let failed = Failed { strategy, scope, why: regression, evidence };
                Judgement::Roll(Box::new(Rollback { to: b.to.clone(), failed, why, by_steps: b.by_steps }))
            }
            None => Judgement::Stay(format!("{regression}; nothing known is better")),
        }
    }

    fn is_previous(&self, strategy: &Strategy) -> bool {
        self.memory.previous.as_ref() == Some(strategy)
    }

    /// Its measurement, if the links have not moved since.
    fn seen(&self, strategy: &Strategy) -> Option<&Measured> {
        let config = &self.s.config;
        let seen = self.memory.seen.iter().find(|x| x.strategy == *strategy)?;
        let moved = seen.links.moved(self.links, config.link_change, config.latency_floor_s.get());
        (!moved).then_some(&seen.cost)
    }

    fn cost_of<'a>(&self, p: &'a Priced) -> Fallback<'a> {
        let (t_step, gain, words) = match self.seen(&p.strategy()) {
            Some(m) => (m.t_step, m.gain, format!("measured at {} per step", words::time(m.t_step.get()))),
            None => (p.what.t_step, p.what.gain, format!("predicted {}", p.words())),
        };
        Fallback { to: p, cost: self.worth(&p.strategy(), t_step, gain), words, by_steps: false }
    }

    /// Whether it is the compressor in force over the same collective at a larger ratio.
    fn is_larger(&self, p: &Priced) -> bool {
        let (from, to) = (self.costs.in_force.strategy(), p.strategy());
        to.cr() > from.cr() && to.selector() == from.selector() && to.collective() == from.collective()
    }

    /// The next larger ratio by the steps in force: its collective takes longer by as much as it sends more, or less. That
    /// bounds every term of the unfitted model. A network that lets short bursts through faster breaks it, and so it is
    /// used for one ratio at a time.
    fn by_steps<'a>(&self, m: &Measured, p: &'a Priced) -> Option<Fallback<'a>> {
        let times = p.strategy().cr().get() / self.costs.in_force.strategy().cr().get();
        let compressing = (p.what.t_comp.get() - self.costs.modelled.t_comp.get()).max(0.0);
        let most = Seconds::new(m.t_step.get() + compressing + (times - 1.0) * m.t_sync.get()).ok()?;
        let (time, gain) = (words::time(most.get()), words::number(p.what.gain.get()));
        let words = format!("by these steps at most {time} per step at gain {gain}");
        Some(Fallback { to: p, cost: self.worth(&p.strategy(), most, p.what.gain), words, by_steps: true })
    }

    /// What the progress of a dense step takes, in seconds. The guard judges every policy's choice by it: a policy says what
    /// is wanted, this says whether it is slow. A gain below a policy's floor is left by the usual choice, and nothing
    /// is rolled back to that the policy would leave at once.
    fn worth(&self, strategy: &Strategy, t_step: Seconds, gain: Gain) -> f64 {
        let quality = self.costs.problem.quality(strategy, gain);
        self.s.config.policy.time_to_quality().seconds(t_step.get(), &quality)
    }
}

/// What took longer than predicted; if nothing did, too much is lost for what it takes.
fn culprit(m: &Measured, p: &Evaluated) -> Scope {
    let (sync, comp) = (m.t_sync.get() - p.t_sync.get(), m.t_comp.get() - p.t_comp.get());
    if p.strategy.is_dense() {
        Scope::Collective
    } else if sync.max(comp) <= 0.0 {
        Scope::Gain
    } else if sync >= comp {
        Scope::Collective
    } else {
        Scope::Compressor
    }
}
