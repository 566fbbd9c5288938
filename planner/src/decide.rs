//! One decision from beginning to end; see the crate's walk-through.

use crate::blocks::{Moved, OTHER_NETWORK};
use crate::choose::{self, Hold, Take};
use crate::guard::{self, Judgement, Rollback};
use crate::memory::{DeferredChange, GainReference, LinkSummary, Promise, Seen};
use crate::solve::{self, Costs, Priced};
use crate::{
    BucketReport, Keep, Links, Measured, Memory, Observed, Outcome, Report, Snapshot, TrialRequest, Trigger, Verdict,
    buckets, gains, trial, triggers, words,
};
use flexcomm_domain::{Decision, Seconds, Strategy, Timestamp};
use rand::RngCore;

/// Decides what a job should run from here on, and says why.
///
/// Pure: the same snapshot, time and state of `rng` give the same answer, byte for byte. The returned
/// memory assumes that the decision, if there is one, is published and that the trial, if one is asked for, is
/// ordered; a caller that does neither keeps the old memory.
pub fn decide(snapshot: &Snapshot, now: Timestamp, rng: &mut (impl RngCore + ?Sized)) -> Outcome {
    let mut call = Call::new(snapshot, now);
    if let Err(error) = snapshot.check() {
        return call.keep(Keep::InvalidSnapshot, format!("the snapshot cannot be used: {error}"));
    }
    trial::settle(snapshot, &mut call.memory, now);
    let ready = call.observe();
    let contradicted = call.costs.as_ref().is_some_and(|c| c.contradicted.is_some());
    call.ask_for_trial(ready.is_ok() && !contradicted, rng);
    match ready {
        Ok(links) => {
            call.solve_buckets(rng);
            call.judge_and_choose(links)
        }
        Err((Keep::UntrustedLinks, why)) => call.only_guard(why),
        Err((keep, why)) => call.keep(keep, why),
    }
}

/// The state of one call.
struct Call<'a> {
    s: &'a Snapshot,
    now: Timestamp,
    memory: Memory,
    costs: Option<Costs>,
    triggers: Vec<Trigger>,
    trial: Option<TrialRequest>,
    rollback: bool,
    buckets: Option<BucketReport>,
}

impl<'a> Call<'a> {
    fn new(s: &'a Snapshot, now: Timestamp) -> Self {
        let mut memory = s.memory.clone();
        if memory.dwell_from.is_none() {
            memory.dwell_from = s.in_force.as_ref().map(|f| f.decision.decided_at);
        }
        memory.heal(now, &s.config);
        Self { s, now, memory, costs: None, triggers: Vec::new(), trial: None, rollback: false, buckets: None }
    }

    /// Prices the candidates, takes note of what is measured, and finds what moved. An error says why
    /// nothing can be decided on this snapshot.
    fn observe(&mut self) -> Result<LinkSummary, (Keep, String)> {
        let s = self.s;
        let Some(links) = &s.links else {
            return Err((Keep::NoLinks, "no estimate covers all links between the job's ranks yet".into()));
        };
        gains::note(s, &mut self.memory, self.now);
        let summary = LinkSummary::of(&links.matrix);
        let trusted = trusted(s, links, self.now);
        if trusted.is_ok() && s.compute.is_some() {
            self.memory.note_links(&summary, &s.config, self.now);
        }
        self.price(links)?;
        if self.note_measurements(summary) {
            self.price(links)?;
        }
        trusted.map_err(|why| (Keep::UntrustedLinks, why))?;
        if s.compute.is_none() {
            return Err((Keep::NoCompute, "no steps are reported yet, so the time of a step is not known".into()));
        }
        let fallen = choose::fell_unmeasured(s, &self.memory, self.now);
        self.memory.fallen_since = fallen.then(|| self.memory.fallen_since.unwrap_or(self.now));
        let ended = self.review_blocks(links, &summary)?;
        if self.memory.assumed == Some(s.version()) && trial::unmeasured(s).is_empty() {
            self.memory.dwell_waived = self.memory.assumed.take();
        }
        let step_s = self.in_force_step();
        self.triggers = triggers::find(s, &self.memory, &summary, step_s, self.now);
        self.triggers.extend(ended);
        let costs = self.costs.as_ref().filter(|_| s.in_force.is_some());
        if costs.is_some_and(|c| !c.offered) {
            self.triggers.push(Trigger::Withdrawn);
        }
        if let Some(c) = costs.filter(|c| c.in_force.score.is_none()) {
            self.triggers.push(Trigger::NotAdmitted { gain: c.in_force.what.quality().effective_gain() });
        }
        Ok(summary)
    }

    fn price(&mut self, links: &Links) -> Result<(), (Keep, String)> {
        let steps = self.s.measured_now().filter(|m| m.steps >= self.s.config.least_steps);
        let costs = solve::price(self.s, &links.matrix, &self.memory, steps, self.now);
        let costs = costs.map_err(|e| (Keep::InvalidSnapshot, format!("the candidates cannot be compared: {e}")))?;
        self.costs = Some(costs);
        Ok(())
    }

    /// Ends blocks that rest on other links than these.
    fn review_blocks(&mut self, links: &Links, summary: &LinkSummary) -> Result<Option<Trigger>, (Keep, String)> {
        let Some(costs) = &self.costs else { return Ok(None) };
        let (s, moved) = (self.s, Moved { links: summary, config: &self.s.config, now: self.now });
        let known = self.memory.seen.len();
        let ended = self.memory.review_blocks(&moved, s.version(), |memory, blocked, evidence| {
            guard::clears(&guard::Look { s, memory, costs, links: summary, now: self.now }, blocked, evidence)
        });
        let what = ended.words();
        if what.is_some() || self.memory.seen.len() != known {
            self.price(links)?;
        }
        Ok(what.map(|what| Trigger::Unblocked { what }))
    }

    fn in_force_step(&self) -> f64 {
        self.costs.as_ref().map_or(0.0, |c| c.in_force.what.t_step.get())
    }

    /// Notes what the steps in force cost; answers whether that was new. Nothing is noted over links that they contradict.
    fn note_measurements(&mut self, links: LinkSummary) -> bool {
        let enough = |m: &&Measured| m.steps >= self.s.config.least_steps;
        let Some((m, costs)) = self.s.measured_now().filter(enough).zip(self.costs.as_ref()) else { return false };
        // Steps of the network before would be remembered as this one's. The longest of them show how fast they come now.
        let modelled_s = || m.t_step.get().max(costs.modelled.t_step.get());
        let window_s = m.steps as f64 * m.scatter.map_or_else(modelled_s, |x| x.step_high.get());
        let steady = self.memory.moving.is_none_or(|moving| self.now.since(moving.until).get() >= window_s);
        let noted = steady && costs.contradicted.is_none();
        if noted {
            let (strategy, terms) = (self.s.strategy(), Some(costs.modelled.terms));
            self.memory.remember(Seen { strategy, cost: *m, links, terms, at: self.now, doubted: false });
        }
        let settled = gains::settled(self.s, &self.memory, self.now).is_some();
        if settled && self.memory.gain.is_none_or(|g| g.version != m.version) {
            self.memory.gain = Some(GainReference { version: m.version, gain: m.gain });
        }
        noted
    }

    /// Asks for a trial when there is reason to. Runs for every snapshot of a job that reports steps.
    fn ask_for_trial(&mut self, trusted: bool, rng: &mut (impl RngCore + ?Sized)) {
        if self.s.compute.is_none() {
            return;
        }
        let look = trial::Look { s: self.s, memory: &self.memory, costs: self.costs.as_ref(), trusted, now: self.now };
        let Some(why) = look.wanted(&self.triggers, rng) else { return };
        let Some((request, cost_s)) = trial::request(self.s, self.costs.as_ref(), why) else { return };
        self.memory.trial.asked_at = Some(self.now);
        self.memory.trial.cost_s = cost_s;
        self.memory.trial.pending = true;
        if let Some(m) = gains::settled(self.s, &self.memory, self.now) {
            self.memory.gain = Some(GainReference { version: m.version, gain: m.gain });
        }
        self.trial = Some(request);
    }

    /// With several buckets: a ratio for each, whenever everything is solved again.
    fn solve_buckets(&mut self, rng: &mut (impl RngCore + ?Sized)) {
        let Some(costs) = self.costs.as_ref().filter(|_| self.triggers.iter().any(Trigger::solves)) else { return };
        self.buckets = buckets::solve(self.s, costs, rng);
    }

    /// On links that cannot be trusted nothing is chosen, but what is measured to be worse than what was measured before
    /// is left all the same.
    fn only_guard(mut self, why: String) -> Outcome {
        let judged = self.costs.as_ref().zip(self.s.links.as_ref()).map(|(costs, links)| {
            guard::judge(self.s, &mut self.memory, costs, &LinkSummary::of(&links.matrix), self.now)
        });
        match judged {
            Some(Judgement::Roll(rollback)) => {
                let take = self.roll_back(*rollback);
                self.change(take)
            }
            _ => self.keep(Keep::UntrustedLinks, why),
        }
    }

    /// Guard first, then the choice.
    fn judge_and_choose(mut self, links: LinkSummary) -> Outcome {
        let Some(costs) = self.costs.take() else {
            return self.keep(Keep::InvalidSnapshot, "the candidates cannot be compared".into());
        };
        let judgement = guard::judge(self.s, &mut self.memory, &costs, &links, self.now);
        let result = match judgement {
            Judgement::Roll(rollback) => Ok(self.roll_back(*rollback)),
            Judgement::Stay(what) => self.report_regression(&costs, what),
            Judgement::Fine | Judgement::Suspect => self.choose(&costs),
        };
        // While links move nothing counts as solved: the reason names the network from which it all began.
        let moving = result.as_ref().is_err_and(|hold| hold.keep == Keep::LinksMoving);
        if !moving && self.triggers.iter().any(Trigger::solves) || self.memory.links.is_none() {
            self.solved(links, &costs, result.as_ref().ok().map(|take| &take.to));
        }
        self.costs = Some(costs);
        match result {
            Ok(take) => self.change(take),
            Err(hold) => {
                self.memory.deferred = hold.deferred;
                self.keep(hold.keep, hold.why)
            }
        }
    }

    fn roll_back(&mut self, r: Rollback) -> Take {
        self.triggers.push(Trigger::Guard { what: r.failed.why.clone() });
        self.rollback = true;
        self.memory.unblock(&r.to.strategy(), self.now);
        self.memory.block(r.failed, self.now, &self.s.config);
        let until = self.memory.blocked.last().map_or(0.0, |b| b.until.since(self.now).get());
        Take { to: r.to, why: format!("{}; not to be tried again for {}", r.why, words::time(until)) }
    }

    /// Something is wrong but nothing known is better: the usual choice may still find a way out.
    fn report_regression(&mut self, costs: &Costs, what: String) -> Result<Take, Hold> {
        if self.memory.judged == Some(self.s.version()) {
            return self.choose(costs);
        }
        self.memory.judged = Some(self.s.version());
        self.triggers.push(Trigger::Guard { what: what.clone() });
        self.choose(costs).map_err(|hold| Hold { keep: Keep::NothingBetter, why: what, ..hold })
    }

    fn choose(&mut self, costs: &Costs) -> Result<Take, Hold> {
        if !self.triggers.iter().any(Trigger::solves) {
            let (keep, why) = match choose::contradicted(costs) {
                Some(what) => (Keep::LinksContradicted, format!("nothing is compared: {what}")),
                None => (Keep::NothingMoved, self.nothing_moved(costs)),
            };
            return Err(Hold { keep, why, deferred: None });
        }
        if self.s.in_force.is_some() {
            return choose::next(self.s, &self.memory, costs, &self.triggers, self.now);
        }
        let awaited = self.memory.trial.pending && self.memory.trial.given_up == 0;
        if awaited && !trial::unmeasured(self.s).is_empty() && !self.on_another_network() {
            let why = "the first decision waits for the trial that measures what compression keeps and costs".into();
            return Err(Hold { keep: Keep::AwaitingTrial, why, deferred: None });
        }
        choose::first(self.s, costs, &self.first_heading())
    }

    /// Links seem to move a little as soon as a job and its trial fill them.
    fn on_another_network(&self) -> bool {
        let (Some(before), Some(links)) = (self.memory.links, &self.s.links) else { return false };
        let floor_s = self.s.config.latency_floor_s.get();
        before.moved(&LinkSummary::of(&links.matrix), OTHER_NETWORK, floor_s)
    }

    fn first_heading(&self) -> String {
        let links = self.s.links.as_ref().map(|l| LinkSummary::of(&l.matrix));
        let network = links.map_or_else(String::new, |l| {
            format!(", {} and {}", words::rate(l.bandwidth_mean_bps), words::time(l.alpha_mean_s))
        });
        let assumed = self.s.ranks > 1 && !trial::unmeasured(self.s).is_empty();
        let prior = if assumed { ", gains not measured yet but assumed" } else { "" };
        match self.s.ranks {
            1 => "first decision for a single rank".to_owned(),
            n => format!("first decision for {n} ranks{network}{prior}"),
        }
    }

    fn nothing_moved(&self, costs: &Costs) -> String {
        let stays = words::strategy(&costs.in_force.strategy());
        let trial = match self.triggers.first() {
            Some(gain) => format!("{}: a new trial is due before anything changes; ", gain.words()),
            None => String::new(),
        };
        let share = words::percent(self.s.config.link_change);
        format!(
            "{trial}links and predicted times moved by less than {share}; {stays} stays at {}",
            costs.in_force.words()
        )
    }

    /// Remembers for what was solved.
    fn solved(&mut self, links: LinkSummary, costs: &Costs, taken: Option<&Priced>) {
        if self.s.in_force.is_none() && taken.is_none() {
            // Still waiting: what moves from the first look on counts.
            self.memory.links.get_or_insert(links);
            return;
        }
        self.memory.links = Some(links);
        self.memory.solved_at = Some(self.now);
        let leads = taken.is_none() && choose::leads(self.s, costs);
        self.memory.leads = if leads { self.memory.leads.saturating_add(1) } else { 0 };
        self.memory.profile_at = self.s.profiles.measured_at;
        self.memory.predicted_step_s = Some(taken.unwrap_or(&costs.in_force).what.t_step.get());
    }

    fn change(mut self, take: Take) -> Outcome {
        let decision = Decision {
            job: self.s.job.clone(),
            version: self.s.newest_version().next(),
            parent: self.s.newest_version(),
            strategy: take.to.strategy(),
            decided_at: self.now,
            reason: take.why.clone(),
        };
        let unmeasured = trial::unmeasured(self.s);
        let assumed =
            unmeasured.contains(&decision.strategy.selector()) || self.s.in_force.is_none() && !unmeasured.is_empty();
        self.memory.assumed = assumed.then_some(decision.version);
        self.memory.previous = Some(self.s.strategy());
        self.memory.promise = Some(Promise { version: decision.version, gain: take.to.what.gain });
        self.memory.dwell_from = Some(self.now);
        let cause = || format!("{} was rolled back", words::strategy(&self.s.strategy()));
        let margin = self.s.config.hysteresis;
        self.memory.deferred = self.rollback.then(|| DeferredChange { margin, cause: cause() });
        let chosen = decision.strategy;
        self.finish(Verdict::Change(decision), "change", take.why, chosen)
    }

    fn keep(self, keep: Keep, why: String) -> Outcome {
        let chosen = self.s.strategy();
        self.finish(Verdict::Keep(keep), keep.as_str(), why, chosen)
    }

    fn finish(self, verdict: Verdict, name: &str, why: String, chosen: Strategy) -> Outcome {
        let costs = self.costs.as_ref();
        let report = Report {
            job: self.s.job.clone(),
            at: self.now,
            verdict: name.to_owned(),
            why,
            seen: self.observed(),
            in_force: costs.map(|c| (&c.measured).into()),
            contradicted_s: costs.and_then(|c| c.contradicted).map(Seconds::get),
            best: costs.and_then(|c| c.best.as_ref()).map(Into::into),
            chosen,
            policy: self.s.config.policy.policy().name().to_owned(),
            alternatives: costs.map_or_else(Vec::new, |c| c.all.iter().map(Into::into).collect()),
            left_out: self.s.all_left_out(),
            front: costs.map_or_else(Vec::new, Costs::front),
            blocked: self.memory.blocked.iter().filter(|b| self.now < b.until).cloned().collect(),
            rollback: self.rollback,
            trial: self.trial_words(),
            buckets: self.buckets,
            triggers: self.triggers,
        };
        Outcome { verdict, report, memory: self.memory, trial: self.trial }
    }

    fn trial_words(&self) -> Option<String> {
        match &self.trial {
            Some(t) => Some(format!("asked for {} candidates: {}", t.candidates.len(), t.why)),
            None => self.memory.trial.pending.then(|| "under way".to_owned()),
        }
    }

    fn observed(&self) -> Observed {
        let s = self.s;
        Observed {
            ranks: s.ranks,
            gradient_values: s.gradient_values,
            backend: s.backend.clone(),
            version: s.version(),
            links: s.links.as_ref().map(|l| LinkSummary::of(&l.matrix)),
            links_before: s.memory.links,
            links_age_s: s.links.as_ref().map(|l| l.age.get()),
            links_oldest_s: s.links.as_ref().map(|l| l.oldest.get()),
            links_confidence: s.links.as_ref().map(|l| l.confidence),
            compute_s: s.compute.map(|c| c.get()),
            measured: s.measured_now().copied(),
            gain_correction: self.costs.as_ref().and_then(|c| c.gain_power),
            profile_measured: s.profiles.measured_at.is_some(),
        }
    }
}

/// Whether the links are known well enough to act on. A first decision may also rest on a fresh trial: its measured times
/// are what the predictions were fitted to, whatever the estimates of the links are worth.
pub(crate) fn trusted(s: &Snapshot, links: &Links, now: Timestamp) -> Result<(), String> {
    if links.age > s.config.max_link_age_s {
        let (age, most) = (words::time(links.age.get()), words::time(s.config.max_link_age_s.get()));
        return Err(format!("the newest sample of a link is {age} old, older than {most}"));
    }
    let tried = s.profiles.tried_at.filter(|at| s.in_force.is_none() && now.since(*at) <= s.config.max_link_age_s);
    if links.confidence < s.config.least_confidence && tried.is_none() {
        let (is, least) = (words::number(links.confidence), words::number(s.config.least_confidence));
        return Err(format!("the estimate of a link has confidence {is}, less than the {least} needed to act on it"));
    }
    Ok(())
}
