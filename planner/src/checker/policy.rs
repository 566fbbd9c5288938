//! What the job's policy forbids.

use super::Findings;
use crate::{Outcome, Snapshot};
use flexcomm_domain::spec::MemoryKind;
use flexcomm_domain::{Decision, Plan, Strategy, Timestamp};
use flexcomm_estimation::Quality;

/// Rounding of what a report says.
const SLACK: f64 = 1e-9;

/// What is pinned now and can be run by the job.
pub(super) fn pin(s: &Snapshot, now: Timestamp) -> Option<&Plan> {
    let pin = s.policy.pin.as_ref().filter(|pin| pin.until.is_none_or(|until| until > now))?;
    let has_dense = s.offer.collectives.iter().any(|c| c.is_allreduce());
    let runs = |x: &Strategy| match x.is_dense() {
        true => s.offer.collectives.contains(&x.collective()) || !has_dense && *x == Strategy::DENSE_RING,
        false => {
            s.ranks >= 2
                && s.offer.collectives.contains(&x.collective())
                && s.offer.codecs.keys().any(|family| *family == x.family())
        }
    };
    let momenta = |x: &&Strategy| x.spec().memory().is_some_and(|(kind, _)| kind == MemoryKind::Dgc);
    let strategies = pin.plan.strategies();
    let mixed = ![0, strategies.len()].contains(&strategies.iter().filter(momenta).count());
    let fits = strategies.len() <= s.buckets.len().max(1);
    (fits && !mixed && strategies.iter().all(runs)).then_some(&pin.plan)
}

/// Where the policy observes, nothing is decided; where it pins, nothing else is; and neither asks for a trial.
pub(super) fn untouched(s: &Snapshot, outcome: &Outcome, pin: Option<&Plan>, found: &mut Findings) {
    let decided = outcome.decision().map(|d| &d.plan);
    let idle = decided.is_none() && outcome.trial.is_none();
    found.expect(!s.policy.observe || idle, "observe", || {
        "the policy observes, and something is decided or tried".into()
    });
    let Some(pin) = pin else { return };
    let follows = decided.is_none_or(|plan| plan == pin) && outcome.trial.is_none();
    found.expect(follows, "pin", || format!("{pin} is pinned, and something else is decided or tried"));
}

/// What compresses keeps and takes what the policy demands, by what the report expects of it.
pub(super) fn limits(s: &Snapshot, outcome: &Outcome, d: &Decision, found: &mut Findings) {
    let expected = outcome.report.alternatives.iter().find(|a| a.plan == d.plan);
    let Some(a) = expected.filter(|a| !a.plan.is_dense()) else { return };
    if let Some(most) = s.policy.most_overhead {
        let fits = a.t_comp_s <= (most + SLACK) * a.t_step_s;
        found.expect(fits, "limits", || format!("{} compresses for {} s of {} s", a.plan, a.t_comp_s, a.t_step_s));
    }
    if let Some(least) = s.policy.least_gain {
        let alike = a.plan.alike().map(|strategy| {
            let quality = Quality { variance: a.variance, ..Quality::of(strategy, a.gain, s.ranks as usize) };
            quality.effective_gain()
        });
        let gain = alike.unwrap_or_else(|| a.inverse_gain.map_or(0.0, f64::recip));
        found.expect(gain >= least - SLACK, "limits", || format!("{} keeps {gain}, least is {least}", a.plan));
    }
}
