//! Whether the report's numbers are numbers, and those of the decision.

use super::Findings;
use crate::{Outcome, Snapshot};
use flexcomm_domain::Decision;

pub(super) fn finite(outcome: &Outcome, found: &mut Findings) {
    let r = &outcome.report;
    let all = r.alternatives.iter().chain(&r.in_force).chain(&r.best);
    for a in all {
        let times = [a.t_comp_s, a.t_sync_s, a.t_step_s, a.gain.get(), a.variance];
        let ok = times.iter().chain(&a.score).all(|v| v.is_finite() && *v >= 0.0);
        found.expect(ok, "finite", || format!("{}: {times:?}, score {:?}", a.plan, a.score));
        let lost = a.inverse_gain.unwrap_or(1.0);
        found.expect(lost.is_finite() && lost >= 1.0 - 1e-9, "finite", || format!("{}: 1/gain is {lost}", a.plan));
        let (saves, sure) = (a.saves.unwrap_or_default(), a.sure.unwrap_or_default());
        let is_valid = saves.is_finite() && (0.0..=1.0).contains(&sure);
        found.expect(is_valid, "finite", || format!("{}: saves {saves} with probability {sure}", a.plan));
        let whole = !a.plan.is_dense() || a.t_comp_s == 0.0 && a.gain.get() == 1.0;
        found.expect(whole, "finite", || format!("dense takes {} s and keeps {}", a.t_comp_s, a.gain.get()));
    }
    for (what, seconds) in [("a horizon", r.horizon_s), ("a test's worth", r.test_worth_s)] {
        found.expect(seconds.is_finite() && seconds >= 0.0, "finite", || format!("{what} of {seconds} s"));
    }
    found.expect(!r.why.is_empty(), "report", || "no reason is given".into());
}

/// What is chosen is the report's, and its step is the sum of its parts.
/// What is pinned needs no prediction.
pub(super) fn chosen(s: &Snapshot, outcome: &Outcome, d: &Decision, pinned: bool, found: &mut Findings) {
    let r = &outcome.report;
    found.expect(r.chosen == d.plan, "report", || format!("reports {} but decides {}", r.chosen, d.plan));
    let Some(a) = r.alternatives.iter().find(|a| a.plan == d.plan) else {
        return found.expect(pinned, "report", || format!("no predicted times for {}", d.plan));
    };
    // Before the first step it is whatever it is believed to be.
    let compute_s = s.compute.map_or(a.t_step_s - a.t_comp_s - a.t_sync_s, |c| c.get());
    let step_s = compute_s + a.t_comp_s + a.t_sync_s;
    found.expect(compute_s >= 0.0 && (a.t_step_s - step_s).abs() <= 1e-6 * step_s, "report", || {
        format!("{}: t_step {} s, its parts are {step_s} s", a.plan, a.t_step_s)
    });
}
