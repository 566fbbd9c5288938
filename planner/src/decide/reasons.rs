//! What is said of a decision: one sentence that names what changed, what is chosen and what it saves.

use super::{Call, Choice, LEAST_SAVING, Stay};
use crate::beliefs::Priced;
use crate::{Keep, PolicyConfig, plans, words};
use flexcomm_domain::CompressorKind;

impl Call<'_> {
    /// Nothing is better: the first decision says what is in force, and later ones that it stays.
    pub(super) fn stay(&self, current: usize) -> Result<Choice, Stay> {
        let is = &self.all[current];
        let stays = |x: &Priced| format!("{} stays, {}", words::plan(&x.plan), self.cost(x));
        if self.s.in_force.is_none() {
            // A job that does not offer the ring runs it until the first decision.
            let offered = |x: &&Priced| plans::offers(self.s, &x.plan);
            let dense = self.all.iter().filter(|x| x.plan.is_dense()).find(offered);
            let to = if offered(&is) { is } else { dense.unwrap_or(is) };
            let why = format!("{}; {}", self.heading().unwrap_or_default(), stays(to));
            return Ok(Choice::of(&to.plan, why));
        }
        let (best, stays) = (self.worth[0], stays(is));
        if let Some(limit) = self.memory.loss_limit {
            let why = format!("{stays}, until the loss is back at {limit:.3}, where it was before it rose");
            return Err(Stay::because(Keep::LossRose, why));
        }
        if self.memory.loss_watch.tests_dense() {
            let why = format!("{stays}, to see whether the loss falls as it did not under compression");
            return Err(Stay::because(Keep::LossFlat, why));
        }
        if best.saves <= 0.0 || current == 0 {
            let limits = self.s.policy.least_gain.is_some() || self.s.policy.most_overhead.is_some();
            let within = if limits { " within the limits of its policy" } else { "" };
            let refused = self.memory.loss_watch.refused().map_or_else(String::new, |(plan, _)| {
                format!(
                    "; {}, under which the loss did not fall, and what takes nearly as many steps are left out",
                    words::plan(plan)
                )
            });
            return Err(Stay::because(
                Keep::AlreadyBest,
                format!("{stays}: nothing is expected to be better{within}{refused}"),
            ));
        }
        let (confidence, to) = (self.s.config.confidence, &self.all[0]);
        let not_enough = match (best.sure < confidence, self.saves_time()) {
            (true, _) => format!("less than the {} asked for", words::percent(confidence)),
            (false, true) => format!("less than a switch costs within {}", words::time(self.horizon_s())),
            (false, false) => format!("less than the {} that a change needs", words::percent(LEAST_SAVING)),
        };
        let saves = match self.saves_time() {
            true => format!("would save {}", words::percent(best.saves)),
            false => format!("is {} better by {}", words::percent(best.saves), self.s.config.policy.policy().name()),
        };
        Err(Stay::because(
            Keep::NotSure,
            format!(
                "{stays}: {}, {}, {saves} with probability {}, {not_enough}",
                words::plan(&to.plan),
                self.cost(to),
                words::percent(best.sure)
            ),
        ))
    }

    /// One sentence: what changed, what is chosen instead of what, what it saves, and how surely.
    pub(super) fn reason(&self, to: usize, from: usize, trying: bool) -> String {
        let (new, old, worth) = (&self.all[to], &self.all[from], self.worth[to]);
        let heading = self.heading().map_or_else(String::new, |heading| format!("{heading}; "));
        let found = |x: &Priced| if self.is_searched(&x.plan) { ", found by NSGA-II" } else { "" };
        let named = |x: &Priced| format!("{}, {}{}", words::plan(&x.plan), self.cost(x), found(x));
        if !self.all[from].mean.is_finite() {
            let (best, over) = match self.s.cannot_run(&old.plan).is_some() {
                true => ("the job still offers", "is no longer offered"),
                false => ("policy and settings admit", "is no longer admitted"),
            };
            return format!("{heading}{} is the best that {best}; {} {over}", named(new), words::plan(&old.plan));
        }
        let sure = words::percent(worth.sure);
        let benefit = match (&self.s.config.policy, trying) {
            (PolicyConfig::TimeToQuality(_), true) => format!(
                "worth trying, since it is better with probability {sure}: keeping the better of the two is expected to take {} less time \
                 to the same progress",
                words::percent(worth.when_tried)
            ),
            // A share of the time would be one of a computing time that is assumed.
            (PolicyConfig::TimeToQuality(_), false) if self.s.compute.is_none() => {
                format!("less time to the same progress whatever computing takes, with probability {sure}")
            }
            (PolicyConfig::TimeToQuality(_), false) => {
                format!("{} less time to the same progress, with probability {sure}", words::percent(worth.saves))
            }
            (other, _) => {
                format!("{} better by {}, with probability {sure}", words::percent(worth.saves), other.policy().name())
            }
        };
        let dense = self.all.iter().find(|x| x.plan.is_dense());
        // Of a network that is not known yet it is not known what dense steps take.
        let dense = dense.filter(|_| !new.plan.is_dense() && !old.plan.is_dense() && self.knows_network);
        let dense = dense.map_or_else(String::new, |x| self.beside_dense(new, x));
        format!("{heading}{} instead of {}: {benefit}{dense}", named(new), named(old))
    }

    /// What is saved against dense, the end of a sentence.
    fn beside_dense(&self, new: &Priced, dense: &Priced) -> String {
        let saves = (dense.mean - new.mean) / dense.mean;
        // A share of the time would be one of a computing time that is assumed.
        if !self.saves_time() || self.s.compute.is_none() || saves.is_nan() || saves.abs() < 5e-4 {
            return format!("; dense takes {}", self.takes(dense));
        }
        let by = if saves > 0.0 { "less" } else { "more" };
        let step = words::time(dense.what.t_step.get());
        format!("; {} {by} time than dense, whose steps take {step}", words::percent(saves.abs()))
    }

    /// What a step takes. Before the first one only what compressing and communicating take is known.
    fn takes(&self, of: &Priced) -> String {
        let what = &of.what;
        match self.s.compute {
            Some(_) => format!("{} per step", words::time(what.t_step.get())),
            None => {
                let seconds = what.t_comp.get() + what.t_sync.get();
                format!("{} for compressing and communicating", words::time(seconds))
            }
        }
    }

    /// What a step takes and keeps, and how many times as many of them as dense ones the same progress needs, where that counts.
    fn cost(&self, of: &Priced) -> String {
        let times = words::number(of.log_steps.exp().max(1.0));
        let steps = match self.saves_time() && !of.plan.is_dense() && times != "1" && times != "NaN" {
            true => format!(", needs {times} times the steps of dense"),
            false => String::new(),
        };
        format!("{}{}{steps}", self.takes(of), words::kept(&of.what))
    }

    /// The beginning of a sentence: what changed since the last decision.
    fn heading(&self) -> Option<String> {
        if self.s.in_force.is_some() {
            let parts = [self.policy_changed(), self.network_changed()];
            let parts: Vec<String> = parts.into_iter().flatten().collect();
            return (!parts.is_empty()).then(|| parts.join(", and "));
        }
        let network = self.links.map_or_else(String::new, |l| {
            format!(", {} and {}", words::rate(l.bandwidth_mean_bps), words::time(l.alpha_mean_s))
        });
        let steps = if self.s.compute.is_none() { ", before the first step" } else { "" };
        Some(match self.s.ranks {
            1 => "first decision for a single rank".to_owned(),
            n => format!("first decision for {n} ranks{network}{steps}"),
        })
    }

    /// What the job's policy is now, where it is not that of the last decision.
    fn policy_changed(&self) -> Option<String> {
        let (before, objective) = self.memory.policy.as_ref()?;
        let (now, by) = (&self.s.policy, &self.s.config.policy);
        let pinned = before.pin.as_ref().filter(|_| now.pin_at(self.now).is_none());
        let name = by.policy().name();
        let parts = [
            (by != objective).then(|| match name == objective.policy().name() {
                true => format!("the policy {name} has other parameters"),
                false => format!("the policy is {name} now"),
            }),
            pinned.map(|pin| format!("the pin of {} has ended", words::plan(&pin.plan))),
            (now.kinds != before.kinds).then(|| match &now.kinds {
                Some(kinds) => {
                    let names: Vec<&str> = kinds.iter().map(CompressorKind::name).collect();
                    format!("the policy allows only {}", names.join(", "))
                }
                None => "the policy allows all compressors".to_owned(),
            }),
            (now.least_gain != before.least_gain).then(|| match now.least_gain {
                Some(least) => format!("the policy's least gain is {least}"),
                None => "the policy has no least gain".to_owned(),
            }),
            (now.most_overhead != before.most_overhead).then(|| match now.most_overhead {
                Some(most) => format!("by the policy compressing may take {} of a step", words::percent(most)),
                None => "by the policy compressing may take any time".to_owned(),
            }),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// What the network is believed to be now, where it was seen to change since it was known at a decision.
    pub(super) fn network_changed(&self) -> Option<String> {
        let beliefs = &self.memory.beliefs;
        let (before, since) = self.memory.links.zip(self.memory.links_at)?;
        beliefs.changed_at().filter(|at| *at >= since)?;
        if !self.knows_network && beliefs.network_suspected() {
            return Some("steps show that the network has changed".to_owned());
        }
        let moved = words::links_moved(&before, &self.links?);
        (!moved.is_empty()).then_some(moved)
    }
}
