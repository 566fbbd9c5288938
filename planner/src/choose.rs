//! Whether the best candidate is worth a change: margin, cost of switching, dwell, the last one applied.

use crate::memory::{DeferredChange, LinkSummary};
use crate::solve::{self, Costs, Priced};
use crate::{Keep, Memory, Snapshot, Trigger, words};
use flexcomm_domain::{LinkMatrix, Timestamp};

/// A change that is not made, and why.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) keep: Keep,
    pub(crate) why: String,
    /// What to look at again, if it is only a matter of time.
    pub(crate) deferred: Option<DeferredChange>,
}

impl Hold {
    fn new(keep: Keep, why: String) -> Self {
        Self { keep, why, deferred: None }
    }
}

/// A change that is worth it.
#[derive(Debug)]
pub(crate) struct Take {
    pub(crate) to: Priced,
    pub(crate) why: String,
}

/// The first decision of a job: the best candidate, or dense when compression wins less than the margin.
pub(crate) fn first(s: &Snapshot, costs: &Costs, head: &str) -> Result<Take, Hold> {
    let best = costs.best.as_ref().ok_or_else(nothing_open)?;
    let dense = costs.dense().unwrap_or(&costs.in_force);
    if best.what.strategy.is_dense() || best.cost() > dense.cost() * (1.0 - s.config.hysteresis) {
        let why = format!(
            "{head}; {} predicted {}; no compression is better by {} or more",
            words::strategy(&dense.strategy()),
            dense.words(),
            words::percent(s.config.hysteresis)
        );
        return Ok(Take { to: dense.clone(), why });
    }
    let why = sentence(s, head, best, dense, "for");
    Ok(Take { to: best.clone(), why })
}

/// Every later decision.
pub(crate) fn next(s: &Snapshot, m: &Memory, costs: &Costs, found: &[Trigger], now: Timestamp) -> Result<Take, Hold> {
    let best = costs.best.as_ref().ok_or_else(nothing_open)?;
    let current = &costs.in_force;
    if best.strategy() == current.strategy() {
        // Of candidates that are priced on links which the steps contradict, none can be better.
        return Err(contradicted(costs)
            .map(|what| Hold::new(Keep::LinksContradicted, format!("nothing is compared: {what}")))
            .unwrap_or_else(|| Hold::new(Keep::AlreadyBest, already_best(s, costs, found))));
    }
    let margin = margin(s, m, found, best);
    let effective = |p: &Priced| p.what.quality().effective_gain();
    if costs.offered && current.score.is_some() {
        worth_it(s, best, current, margin)?;
    } else if costs.offered && best.score.is_none() && effective(best) <= effective(current) {
        return Err(Hold::new(Keep::AlreadyBest, "no candidate is admitted by the policy and none keeps more".into()));
    }
    let head = heading(found);
    let deferred = |keep, what: String| {
        let why = format!("{}, but {what}", sentence(s, &head, best, current, "for the one in force,"));
        Err(Hold { keep, why, deferred: Some(DeferredChange { margin, cause: head.clone() }) })
    };
    let since = m.dwell_from.map_or(0.0, |from| now.since(from).get());
    if since < s.config.dwell_s.get() && m.dwell_waived != Some(s.version()) {
        let dwell = words::time(s.config.dwell_s.get());
        return deferred(
            Keep::Dwell,
            format!("that one has been chosen for {} of at least {dwell}", words::time(since)),
        );
    }
    let applied = s.in_force.as_ref().is_none_or(|f| f.applied_at_step.is_some());
    if !applied && since < s.config.apply_timeout_s.get() {
        return deferred(Keep::NotApplied, format!("version {} is not in force on every rank yet", s.version()));
    }
    if let Some(what) = contradicted(costs).filter(|_| costs.offered && current.score.is_some()) {
        return deferred(Keep::LinksContradicted, what);
    }
    if let Some(ago) = m.unsteady(&s.config, now) {
        let (ago, settle) = (words::time(ago.get()), words::time(s.config.links_settle_s.get()));
        return deferred(Keep::LinksMoving, format!("links moved {ago} ago and have to be steady for {settle} first"));
    }
    if rests_on_the_past(s, m, costs, now) && !wins_on_the_slowest(s, m, (best, margin), now) {
        return deferred(
            Keep::LinksMoving,
            "it sends more, and not every link has been measured since they fell".into(),
        );
    }
    Ok(Take { to: best.clone(), why: sentence(s, &head, best, current, "for the one in force,") })
}

/// What the links say against the newest steps.
pub(crate) fn contradicted(costs: &Costs) -> Option<String> {
    let (claimed, steps) = (costs.contradicted?, costs.measured.what.t_step);
    let (claimed, steps) = (words::time(claimed.get()), words::time(steps.get()));
    Some(format!("the links say {claimed} per step where the newest steps take {steps}"))
}

/// Whether bandwidth fell and not every link has been measured since.
pub(crate) fn fell_unmeasured(s: &Snapshot, m: &Memory, now: Timestamp) -> bool {
    let (Some(links), Some(moving)) = (&s.links, m.moving) else { return false };
    let (is, least) = (LinkSummary::of(&links.matrix), 1.0 + s.config.link_change);
    let fell = [moving.from, m.links].into_iter().flatten().any(|before| {
        before.bandwidth_mean_bps >= is.bandwidth_mean_bps * least
            || before.bandwidth_worst_bps >= is.bandwidth_worst_bps * least
    });
    fell && links.oldest >= now.since(moving.since)
}

/// Whether the best candidate would send more than the one in force on links some of which may still be known as they
/// were before they fell: it may look cheap only because of that. For so long at most as a link may go unmeasured:
/// links that go on falling and rising are never all measured since.
fn rests_on_the_past(s: &Snapshot, m: &Memory, costs: &Costs, now: Timestamp) -> bool {
    let waits = m.fallen_since.is_some_and(|since| now.since(since) < s.config.max_link_age_s);
    waits && costs.best.as_ref().is_some_and(|best| costs.sends_more(best))
}

/// Whether it would still win by the margin if all links had become as slow as the slowest that is known. Against what the
/// policy does not admit anything wins, which says nothing of the links.
fn wins_on_the_slowest(s: &Snapshot, m: &Memory, (best, margin): (&Priced, f64), now: Timestamp) -> bool {
    let Some(links) = &s.links else { return false };
    let slowest = LinkMatrix::uniform(links.matrix.ranks(), links.matrix.worst());
    let Some(costs) = slowest.ok().and_then(|links| solve::price(s, &links, m, None, now).ok()) else { return false };
    let there = costs.find(&best.strategy());
    costs.in_force.score.is_some() && there.is_some_and(|x| x.cost() < costs.in_force.cost() * (1.0 - margin))
}

/// What a new strategy must win, as a share.
fn margin(s: &Snapshot, memory: &Memory, found: &[Trigger], best: &Priced) -> f64 {
    if found.iter().any(Trigger::moved) {
        return hysteresis(s, best);
    }
    let lasting = memory.leads.saturating_add(1) >= s.config.persistence;
    let links = if lasting { 0.0 } else { s.config.noise_weight * memory.noise() };
    let still = small_margin(s, best) + links;
    memory.deferred.as_ref().map_or(still, |deferred| deferred.margin.min(still))
}

/// The least win that can be told from none: smaller when only the ratio changes.
fn hysteresis(s: &Snapshot, best: &Priced) -> f64 {
    let (current, new) = (s.strategy(), best.strategy());
    let only_ratio = current.family() == new.family() && current.collective() == new.collective();
    if only_ratio { s.config.hysteresis_ratio.min(s.config.hysteresis) } else { s.config.hysteresis }
}

/// The margin without the noise of the links.
fn small_margin(s: &Snapshot, best: &Priced) -> f64 {
    hysteresis(s, best) + s.config.noise_weight * s.measured_now().map_or(0.0, |m| m.gain_spread)
}

/// Whether the best candidate leads by what would be enough if it lasts.
pub(crate) fn leads(s: &Snapshot, costs: &Costs) -> bool {
    costs.best.as_ref().is_some_and(|best| best.cost() < costs.in_force.cost() * (1.0 - small_margin(s, best)))
}

fn worth_it(s: &Snapshot, best: &Priced, current: &Priced, margin: f64) -> Result<(), Hold> {
    let win = 1.0 - best.cost() / current.cost();
    let names = || {
        format!(
            "{} predicted {}, {} better than the one in force ({})",
            words::strategy(&best.strategy()),
            best.words(),
            words::percent(win),
            current.words()
        )
    };
    // A share that is no number (0/0) is no win.
    if win.is_nan() || win <= 0.0 || win < margin {
        let why = format!("{}: less than the {} that a change must bring", names(), words::percent(margin));
        return Err(Hold::new(Keep::Hysteresis, why));
    }
    let horizon =
        s.remaining.map_or(s.config.horizon_s, |r| if r < s.config.horizon_s { r } else { s.config.horizon_s });
    let (saved, cost) = (win * horizon.get(), s.config.switch_cost_s.get());
    if saved <= cost {
        let (saved, cost, horizon) = (words::time(saved), words::time(cost), words::time(horizon.get()));
        let why = format!("{}: it would save {saved} over the next {horizon}, a switch costs {cost}", names());
        return Err(Hold::new(Keep::SwitchCost, why));
    }
    Ok(())
}

fn nothing_open() -> Hold {
    Hold::new(Keep::AlreadyBest, "every candidate is blocked after a rollback; the one in force stays".into())
}

fn already_best(s: &Snapshot, costs: &Costs, found: &[Trigger]) -> String {
    let current = &costs.in_force;
    let second = costs.all.iter().find(|p| p.strategy() != current.strategy() && !p.blocked && p.score.is_some());
    let head = format!(
        "{}; {} stays the best by {} at {}",
        heading(found),
        words::strategy(&current.strategy()),
        s.config.policy.policy().name(),
        current.words()
    );
    match second {
        Some(p) => format!("{head}, before {} at {}", words::strategy(&p.strategy()), p.words()),
        None => head,
    }
}

/// What moved, as the beginning of a sentence. The cause of what was deferred counts only when nothing else does.
pub(crate) fn heading(found: &[Trigger]) -> String {
    let deferred = |t: &&Trigger| matches!(t, Trigger::Deferred { .. });
    let mut words: Vec<String> = found.iter().filter(|t| !deferred(t)).map(Trigger::words).collect();
    if words.is_empty() {
        words = found.iter().map(Trigger::words).collect();
    }
    if words.is_empty() { "nothing moved".into() } else { words.join(", ") }
}

fn sentence(s: &Snapshot, head: &str, best: &Priced, current: &Priced, against: &str) -> String {
    let win = 1.0 - best.cost() / current.cost();
    let better = if win.is_finite() && win > 0.0 {
        format!(" ({} better by {})", words::percent(win), s.config.policy.policy().name())
    } else {
        String::new()
    };
    format!(
        "{head}; {} predicted {} against {} {against} {}{better}",
        words::strategy(&best.strategy()),
        best.words(),
        current.words(),
        words::strategy(&current.strategy())
    )
}
