//! One decision from beginning to end; see the crate's walk-through. What it says of it is in `reasons`.

mod reasons;

use crate::beliefs::{Beliefs, Priced};
use crate::information::Scores;
use crate::loss::{self, LossWatch};
use crate::memory::LinkSummary;
use crate::{
    Alternative, JobPolicy, Keep, MeanLoss, Memory, Observed, Outcome, Pin, PolicyConfig, Report, Snapshot,
    TrialRequest, Verdict, plans, trial, words,
};
use flexcomm_domain::{Decision, Plan, Seconds, Strategy, Timestamp};
use flexcomm_estimation::{TEST_TELLS_S, TestKind, test_sd};
use flexcomm_optimizer::{Solver, pareto};
use rand::RngCore;
use std::collections::BTreeSet;

/// Steps that it takes to learn what a strategy costs; one with error feedback is known later, when its residual has filled.
const TRY_STEPS: f64 = 15.0;
const MOST_TRY_STEPS: f64 = 100.0;
/// What trying a strategy leaves uncertain of what it saves, as a share: noise of medians, and what its residual does later.
const RESOLUTION: f64 = 0.15;
/// Throughput tests of a batch: where one alone rarely changes a decision, several may (Frazier and Powell, Paradoxes in learning and the
/// marginal value of information, 2010).
const BATCHES: [f64; 3] = [1.0, 3.0, 10.0];
/// A score that shares are taken of is at least so much: by some policies dense scores 0.
const LEAST_SCORE: f64 = 1e-9;
/// A smaller share is worth neither trying nor, where scores are no times, a change: what is believed is not so exact.
const LEAST_SAVING: f64 = 0.015;
/// What was left before has to be worth so much more each time to be tried again.
const MORE_SAVING: f64 = 0.03;
/// What was left so often on one network is known: it is tried again where it is better in the mean by this share, and not for what trying
/// might show.
const TRIES: usize = 2;
const KNOWN_SAVING: f64 = 0.05;
/// A strategy stays for at least so many steps: the first are not like the rest.
const LEAST_DWELL_STEPS: f64 = 5.0;
/// Least horizon, seconds and steps: what is better now usually stays better after the next change, too.
const LEAST_HORIZON_S: f64 = 20.0;
const LEAST_HORIZON_STEPS: f64 = 20.0;
/// So long after a change tests are waited for.
const TESTS_FOLLOW_S: f64 = 20.0;
/// Steps of the strategy in force that must be slower than dense ones would be before it is left at once.
const WATCHDOG_STEPS: u64 = 10;
/// So large a share of the steps of a plan under which the loss did not fall, as a logarithm, is too much, too.
const NEARLY_AS_MANY: f64 = 0.7;
/// For so long dense stays where no loss is reported, seconds and steps: of a decision's first steps none is.
const LOSS_UNKNOWN_S: f64 = 300.0;
const LOSS_UNKNOWN_STEPS: f64 = 40.0;

/// Decides what a job should run from here on, and says why.
///
/// Pure: the same snapshot, time and state of `rng` give the same answer, byte for byte. The returned
/// memory assumes that the decision, if there is one, is published and that the trial, if one is asked for, is
/// ordered; a caller that does neither keeps the old memory.
pub fn decide(snapshot: &Snapshot, now: Timestamp, rng: &mut (impl RngCore + ?Sized)) -> Outcome {
    let mut call = Call::new(snapshot, now);
    let choice = call.choose(rng);
    match call.under_policy(choice) {
        Ok(choice) => call.change(choice),
        Err(Stay { keep, why }) => call.keep(keep, why),
    }
}

/// The step that the links of a snapshot claim for the strategy in force, where its newest steps show a network that is far faster; see
/// [`Report::contradicted_s`].
pub fn contradicted(snapshot: &Snapshot) -> Option<Seconds> {
    snapshot.check().ok().and_then(|()| Beliefs::contradicted(snapshot))
}

/// The state of one call.
struct Call<'a> {
    s: &'a Snapshot,
    now: Timestamp,
    memory: Memory,
    /// Best first.
    all: Vec<Priced>,
    /// Plans by bucket that are known without a search.
    listed: Vec<Plan>,
    /// What each is worth against the strategy in force.
    worth: Vec<Worth>,
    /// What each throughput test is expected to save, in batches of the size at which that is most; as a share.
    test_worth: f64,
    contradicted: Option<Seconds>,
    /// Latencies as measured, and bandwidths as they are believed.
    links: Option<LinkSummary>,
    /// Whether these are known since they changed last.
    knows_network: bool,
    trial: Option<TrialRequest>,
    /// What the job's policy has pinned, where the job can run it.
    pin: Option<&'a Pin>,
    /// What would be decided, where the job's policy only observes.
    proposed: Option<Plan>,
    /// Whether the plan in force still is one that the job offers and its policy allows. A job that offers no ring runs it until the
    /// first decision.
    is_offered: bool,
}

/// What a candidate is worth against the strategy in force, by common samples; shares of what that costs in the mean.
#[derive(Debug, Clone, Copy, Default)]
struct Worth {
    /// What it saves in the mean.
    saves: f64,
    /// In which share of samples it is better.
    sure: f64,
    /// What it loses where it is worse, in the mean over all samples.
    loses: f64,
    /// What is saved by a choice between the two that is made when it has been tried: of what is uncertain now, trying leaves
    /// [`RESOLUTION`] (Frazier, Powell and Dayanik, The knowledge-gradient policy for correlated normal beliefs, 2009).
    when_tried: f64,
}

impl Worth {
    fn of(candidate: &Priced, current: &Priced) -> Self {
        match (candidate.mean.is_finite(), current.mean.is_finite()) {
            (false, _) => return Self { saves: f64::MIN, ..Self::default() },
            // What the policy does not admit is left for anything that it does.
            (true, false) => return Self { saves: 1.0, sure: 1.0, ..Self::default() },
            (true, true) => {}
        }
        let (mut sum, mut squares, mut loses, mut better) = (0.0, 0.0, 0.0, 0.0);
        let unit = current.mean.max(LEAST_SCORE);
        let each = || candidate.scores.iter().zip(&current.scores).map(|(own, other)| (other - own) / unit);
        for saves in each() {
            sum += saves;
            squares += saves * saves;
            loses += (-saves).max(0.0);
            better += f64::from(u8::from(saves > 0.0));
        }
        let count = current.scores.len() as f64;
        let saves = sum / count;
        let sd = (squares / count - saves * saves).max(0.0).sqrt();
        let resolved = sd / sd.hypot(RESOLUTION);
        let when_tried = each().map(|x| (saves + resolved * (x - saves)).max(0.0)).sum::<f64>() / count;
        Self { saves, sure: better / count, loses: loses / count, when_tried }
    }
}

/// What is to be in force from here on.
struct Choice {
    to: Plan,
    why: String,
    /// Where it is dense for the loss's sake: why.
    loss: Option<LossCause>,
}

/// What the loss did under a compressed plan.
enum LossCause {
    /// It rose; before it was this.
    Rose(f64),
    /// It did not fall from this, under a plan that was expected to take so many steps, as a logarithm.
    Flat(MeanLoss, f64),
}

impl Choice {
    fn of(to: &Plan, why: String) -> Self {
        Self { to: to.clone(), why, loss: None }
    }
}

/// Why nothing changes.
struct Stay {
    keep: Keep,
    why: String,
}

/// Why what would be better is not decided yet.
fn waits(keep: Keep, why: &str) -> String {
    match keep {
        Keep::NotApplied => format!("waits until the last decision is in force on all ranks: {why}"),
        _ => format!("waits for the dwell time: {why}"),
    }
}

impl Stay {
    fn because(keep: Keep, why: impl Into<String>) -> Self {
        Self { keep, why: why.into() }
    }
}

impl<'a> Call<'a> {
    fn new(s: &'a Snapshot, now: Timestamp) -> Self {
        let mut memory = s.memory.clone().in_run(s.begun);
        if memory.dwell_from.is_none() {
            memory.dwell_from = s.in_force.as_ref().map(|f| f.decision.decided_at);
        }
        memory.clamp_times(now);
        let pin = s.policy.pin_at(now).filter(|pin| s.cannot_run(&pin.plan).is_none());
        Self {
            s,
            now,
            memory,
            all: Vec::new(),
            listed: Vec::new(),
            worth: Vec::new(),
            test_worth: 0.0,
            contradicted: None,
            links: None,
            knows_network: false,
            trial: None,
            pin,
            proposed: None,
            is_offered: true,
        }
    }

    /// What the job's policy makes of a choice: a pin takes its place, and a policy that observes makes a report of it.
    fn under_policy(&mut self, choice: Result<Choice, Stay>) -> Result<Choice, Stay> {
        if self.s.check().is_err() {
            return choice;
        }
        let choice = match (self.pin, self.s.policy.pin_at(self.now)) {
            (Some(pin), _) => self.pinned(pin),
            (None, Some(pin)) => self.unpinned(pin, choice),
            (None, None) => choice,
        };
        if !self.s.policy.observe {
            return choice;
        }
        let Choice { to, why, .. } = choice?;
        self.proposed = Some(to).filter(|to| to != self.s.plan());
        let would = if self.proposed.is_some() { "it would be decided" } else { "nothing would change" };
        Err(Stay::because(Keep::Observing, format!("the policy only observes; {would}: {why}")))
    }

    fn pinned(&self, pin: &Pin) -> Result<Choice, Stay> {
        let why = format!("{} is pinned {}", words::plan(&pin.plan), pin.ends());
        if self.s.in_force.is_some() && pin.plan == *self.s.plan() {
            return Err(Stay::because(Keep::Pinned, why));
        }
        self.is_applied().map_err(|keep| Stay::because(keep, waits(keep, &why)))?;
        Ok(Choice::of(&pin.plan, why))
    }

    /// A pin that the job cannot run is named and not followed.
    fn unpinned(&self, pin: &Pin, choice: Result<Choice, Stay>) -> Result<Choice, Stay> {
        let obstacle = self.s.cannot_run(&pin.plan).unwrap_or_default();
        let with =
            |why| format!("{why}; {} is pinned {} and cannot run: {obstacle}", words::plan(&pin.plan), pin.ends());
        choice
            .map(|choice| Choice { why: with(choice.why), ..choice })
            .map_err(|stay| Stay { why: with(stay.why), ..stay })
    }

    fn choose(&mut self, rng: &mut (impl RngCore + ?Sized)) -> Result<Choice, Stay> {
        let s = self.s;
        s.check().map_err(|e| Stay::because(Keep::InvalidSnapshot, format!("the snapshot cannot be used: {e}")))?;
        trial::settle(s, &mut self.memory, self.now);
        let stayed_s = self.stayed_s();
        self.memory.beliefs.observe(s, self.now, stayed_s);
        if let Some(losses) = s.losses_now() {
            self.memory.loss_watch = std::mem::take(&mut self.memory.loss_watch).after(losses, s.plan());
        }
        if s.links.is_none() {
            return Err(Stay::because(
                Keep::NoLinks,
                "not every link between the job's ranks has a latency and a throughput test yet",
            ));
        }
        self.contradicted = Beliefs::contradicted(s);
        self.knows_network = self.memory.beliefs.knows_network();
        self.links = self.memory.beliefs.links(s).map(|links| LinkSummary::of(&links));
        self.price(rng);
        let Some(current) = self.in_force() else {
            return Err(Stay::because(Keep::InvalidSnapshot, "the strategy in force cannot be compared with others"));
        };
        let for_the_loss = self.loss_rose(current).or_else(|| self.loss_flat(current));
        let better = self.better(current);
        // What is surely better does not wait for a trial.
        if !self.only_dense() && for_the_loss.is_none() && better.is_none() {
            self.ask_for_trial(current, rng);
        }
        if s.in_force.is_none() && better.is_none() && self.waits_for_trial() {
            let why = "the first decision waits for the trial that measures what compression keeps and costs";
            return Err(Stay::because(Keep::AwaitingTrial, why));
        }
        if let Some(choice) = self.watchdog(current) {
            return Ok(choice);
        }
        if let Some(choice) = for_the_loss {
            return Ok(choice);
        }
        let Some(to) = better.or_else(|| self.worth_trying(current)) else {
            if s.compute.is_none() {
                let why = "no steps are reported yet, and nothing is surely better whatever computing takes";
                return Err(Stay::because(Keep::NoCompute, why));
            }
            return self.stay(current);
        };
        let why = self.reason(to, current, better.is_none());
        self.may_change(current).map_err(|keep| Stay::because(keep, waits(keep, &why)))?;
        Ok(Choice::of(&self.all[to].plan, why))
    }

    /// Prices the candidates, what a search by bucket finds, and the plan in force.
    fn price(&mut self, rng: &mut (impl RngCore + ?Sized)) {
        let mut strategies = self.s.space().strategies();
        self.is_offered = self.s.plan().is_dense() && self.s.in_force.is_none()
            || match self.s.plan().alike() {
                Some(strategy) => strategies.contains(strategy),
                None => plans::offers(self.s, self.s.plan()),
            };
        strategies.retain(|x| self.s.ranks > 1 || x.is_dense());
        let mut plans: Vec<Plan> = strategies.into_iter().map(Plan::from).collect();
        let refused = self.memory.loss_watch.refused().map(|(plan, _)| plan);
        let refused = refused.filter(|plan| self.s.cannot_run(plan).is_none());
        for plan in self.pin.map(|pin| &pin.plan).into_iter().chain([self.s.plan()]).chain(refused) {
            if !plans.contains(plan) {
                plans.push(plan.clone());
            }
        }
        let prices = self.memory.beliefs.price(self.s, plans, rng);
        (self.all, self.listed) = (prices.plans, prices.listed);
        if !self.is_offered {
            // It has to be left, whatever it costs.
            self.all.iter_mut().filter(|x| x.plan == *self.s.plan()).for_each(|x| x.mean = f64::INFINITY);
        }
        self.refuse();
        self.all.sort_by(|a, b| a.mean.total_cmp(&b.mean));
        if let Some(current) = self.in_force() {
            self.worth = self.all.iter().map(|x| Worth::of(x, &self.all[current])).collect();
            self.test_worth = self.worth_of_tests(current, &prices.bandwidth);
        }
    }

    /// A plan under which the loss did not fall, what shares a strategy with it, and what takes nearly as many steps for the progress of a
    /// dense one, is not admitted.
    fn refuse(&mut self) {
        let Some((plan, known)) = self.memory.loss_watch.refused() else { return };
        let priced = self.all.iter().find(|x| x.plan == *plan);
        let most = NEARLY_AS_MANY * priced.map_or(known, |x| x.log_steps);
        let in_both = |x: &Strategy| !x.is_dense() && plan.strategies().contains(x);
        let is_refused = |x: &&mut Priced| {
            let shares = x.plan.strategies().iter().any(in_both);
            // What is in force stays where it is only now expected to take as many.
            shares || x.log_steps > most.max(0.0) && x.plan != *self.s.plan()
        };
        for x in self.all.iter_mut().filter(is_refused) {
            x.mean = f64::INFINITY;
            x.scores.clear();
        }
    }

    fn in_force(&self) -> Option<usize> {
        self.all.iter().position(|x| x.plan == *self.s.plan())
    }

    /// The best in the mean of what has to be better by enough samples and saves more than the switch costs.
    fn better(&self, current: usize) -> Option<usize> {
        let least = match self.saves_time() {
            true => self.switch_s(current) / self.horizon_s(),
            false => LEAST_SAVING,
        };
        (0..self.all.len()).find(|i| {
            let worth = self.worth[*i];
            let pays = !self.all[current].mean.is_finite() || worth.saves > least;
            *i != current && self.may_follow(*i) && worth.sure >= self.s.config.confidence && pays
        })
    }

    /// Whether shares of a score are shares of time, so that what is saved can be compared with what it takes to know or to switch.
    fn saves_time(&self) -> bool {
        matches!(self.s.config.policy, PolicyConfig::TimeToQuality(_))
    }

    /// How often it was left on the network of now, and not so long ago that another one is almost sure to be there by now.
    fn times_left(&self, candidate: usize) -> usize {
        let unchanged_s = self.memory.beliefs.unchanged_s(self.now).min(2.0 * self.memory.beliefs.lasts_s());
        self.memory.times_left(&self.all[candidate].plan, self.now, unchanged_s)
    }

    /// Whether knowing more of it may pay: each time that it was left it has to be worth [`MORE_SAVING`] more, and where that was often
    /// enough, it is known.
    fn is_open(&self, candidate: usize) -> bool {
        let (left, worth) = (self.times_left(candidate), self.worth[candidate]);
        worth.when_tried > LEAST_SAVING + MORE_SAVING * left as f64 && (left < TRIES || worth.saves > KNOWN_SAVING)
    }

    fn may_follow(&self, candidate: usize) -> bool {
        !self.only_dense() || self.all[candidate].plan.is_dense()
    }

    /// While a loss that rose is not back, and while dense steps are tested.
    fn only_dense(&self) -> bool {
        self.memory.loss_limit.is_some() || self.memory.loss_watch.tests_dense()
    }

    /// What is worth trying in earnest: where it turns out to be worse, it is left as soon as that is known.
    fn worth_trying(&mut self, current: usize) -> Option<usize> {
        // What trying takes is not known before the first step.
        self.s.compute.filter(|_| self.saves_time())?;
        let (horizon_s, switch_s) = (self.horizon_s(), self.switch_s(current));
        // A network that is not known will be measured soon, which costs nothing; where no test comes, trying tells of it.
        if !self.memory.beliefs.knows_network() && self.memory.beliefs.unchanged_s(self.now) < TESTS_FOLLOW_S {
            return None;
        }
        // What is being tried is not left for another try before it is known.
        if self.s.in_force.is_some() && self.stayed_s() < self.try_s(current) {
            return None;
        }
        let gain_s = |i: usize| {
            let (worth, tried_s) = (self.worth[i], self.try_s(i));
            worth.when_tried * (horizon_s - tried_s) - worth.loses * tried_s - 2.0 * switch_s
        };
        let tried = (0..self.all.len())
            // What a plan by bucket costs is known by what its strategies cost.
            .filter(|i| *i != current && self.may_follow(*i) && self.all[*i].plan.alike().is_some())
            .filter(|i| self.is_open(*i))
            .map(|i| (i, gain_s(i)));
        let best = tried.filter(|(_, gain_s)| *gain_s > 0.0).max_by(|a, b| a.1.total_cmp(&b.1));
        best.map(|(i, _)| i)
    }

    /// Seconds until it is known what a candidate costs.
    fn try_s(&self, of: usize) -> f64 {
        let what = &self.all[of].what;
        let fills = |of: &Strategy| of.spec().ratio().map_or(0.0, |c| 0.5 / c.get());
        let fills = self.all[of].plan.strategies().iter().map(fills).fold(0.0, f64::max).min(MOST_TRY_STEPS);
        (TRY_STEPS.max(fills) * what.t_step.get()).max(self.s.config.dwell_s.get())
    }

    /// For how long the strategy in force has been, seconds; while the clock is before its decision, since that was noticed.
    fn stayed_s(&self) -> f64 {
        let decided = self.s.in_force.as_ref().map(|f| f.decision.decided_at).filter(|at| *at <= self.now);
        let named = self.s.begun_with.as_ref().filter(|_| self.s.in_force.is_none()).map(|_| self.s.begun);
        decided.or(self.memory.dwell_from).or(named).map_or(f64::INFINITY, |from| self.now.since(from).get())
    }

    /// Steps that take longer than dense ones would are not borne for the dwell time.
    fn watchdog(&self, current: usize) -> Option<Choice> {
        let m = self.s.measured_now().filter(|m| m.steps >= WATCHDOG_STEPS)?;
        let dense = self.all.iter().position(|x| x.plan.is_dense())?;
        let (is, other, sure) = (&self.all[current].plan, &self.all[dense].what, self.worth[dense].sure);
        // What the policy no longer admits is left for what is best, not for what it takes.
        let slower = self.all[current].mean.is_finite()
            && m.t_step > other.t_step
            && sure >= self.s.config.confidence
            && self.worth[dense].saves > 0.0;
        (slower && !is.is_dense()).then(|| {
            let why = format!(
                "steps of {} take {}; dense ones are expected to take {}, and are better with probability {}",
                words::plan(is),
                words::time(m.t_step.get()),
                words::time(other.t_step.get()),
                words::percent(sure)
            );
            Choice::of(&self.all[dense].plan, why)
        })
    }

    /// A loss that rises under a compressed plan is taken for the compression's fault: dense runs until it is as low again, or what was
    /// before is no longer known. What falls more slowly is no reason, since every loss does so as training goes on.
    fn loss_rose(&mut self, current: usize) -> Option<Choice> {
        let (losses, is) = (self.s.losses_now().copied(), &self.all[current].plan);
        let (rise, before) = (losses.map_or(0.0, |losses| losses.rise()), losses.and_then(|losses| losses.before));
        let is_back = |newest: MeanLoss, limit: f64| newest.mean <= limit + loss::BACK * newest.sd;
        let unknown_s = LOSS_UNKNOWN_S.max(LOSS_UNKNOWN_STEPS * self.all[current].what.t_step.get());
        let is_over = match (losses, self.memory.loss_limit) {
            (Some(losses), Some(limit)) if is.is_dense() => losses.before.is_none() || is_back(losses.newest, limit),
            (None, _) => self.stayed_s() > unknown_s,
            (Some(_), Some(_)) => rise <= loss::ROSE,
            (_, None) => false,
        };
        if is_over {
            self.memory.loss_limit = None;
        }
        if is_over && losses.is_none() && self.memory.loss_watch.tests_dense() {
            self.memory.loss_watch = LossWatch::Over;
        }
        let (losses, before) = losses.zip(before).filter(|_| rise > loss::ROSE && !is.is_dense())?;
        let why = format!(
            "the loss rose from {:.3} to {:.3} under {}, by {rise:.0} times its noise: dense until it is back",
            before.mean,
            losses.newest.mean,
            words::plan(is),
        );
        self.dense_for(LossCause::Rose(before.mean), why)
    }

    /// A loss that does not fall under a compressed plan at the beginning of a run: dense steps tell whose fault it is.
    fn loss_flat(&self, current: usize) -> Option<Choice> {
        let (losses, is) = (self.s.losses_now()?, &self.all[current].plan);
        let first = self.memory.loss_watch.not_lower_than(losses).filter(|_| !is.is_dense())?;
        let why = format!(
            "the loss has not fallen in {} steps under {}, from {:.3} to {:.3}: dense to see whether it falls then",
            losses.newest.last_step - first.first_step,
            words::plan(is),
            first.mean,
            losses.newest.mean,
        );
        self.dense_for(LossCause::Flat(losses.newest, self.all[current].log_steps), why)
    }

    fn dense_for(&self, cause: LossCause, why: String) -> Option<Choice> {
        let dense = self.all.iter().find(|x| x.plan.is_dense())?;
        Some(Choice { loss: Some(cause), ..Choice::of(&dense.plan, why) })
    }

    /// Why a change that is worth it has to wait.
    fn may_change(&self, current: usize) -> Result<(), Keep> {
        if self.s.in_force.is_none() {
            return Ok(());
        }
        self.is_applied()?;
        let stayed_s = self.stayed_s();
        let steps_s = LEAST_DWELL_STEPS * self.all[current].what.t_step.get();
        if stayed_s < self.s.config.dwell_s.get().max(steps_s.min(self.s.config.apply_timeout_s.get())) {
            return Err(Keep::Dwell);
        }
        Ok(())
    }

    /// A decision that is on its way to the ranks is not overtaken.
    fn is_applied(&self) -> Result<(), Keep> {
        let on_its_way = self.s.in_force.as_ref().is_some_and(|f| f.applied_at_step.is_none());
        if on_its_way && self.stayed_s() < self.s.config.apply_timeout_s.get() { Err(Keep::NotApplied) } else { Ok(()) }
    }

    /// Seconds for which what is decided now is expected to stay right.
    fn horizon_s(&self) -> f64 {
        let step_s = self.in_force().map_or(0.0, |current| self.all[current].what.t_step.get());
        let left_s = self.s.steps_left().map_or(f64::INFINITY, |left| left * step_s);
        self.memory.beliefs.lasts_s().max(LEAST_HORIZON_S).max(LEAST_HORIZON_STEPS * step_s).min(left_s)
    }

    /// What a switch costs, seconds: the setting, and a step at the old pace.
    fn switch_s(&self, current: usize) -> f64 {
        self.s.config.switch_cost_s.get() + self.all[current].what.t_step.get()
    }

    fn waits_for_trial(&self) -> bool {
        self.memory.trial.pending && self.memory.trial.given_up == 0 && !trial::unmeasured(self.s).is_empty()
    }

    /// Asks for a live trial where what it tells is worth more than it takes.
    fn ask_for_trial(&mut self, current: usize, rng: &mut (impl RngCore + ?Sized)) {
        let s = self.s;
        if s.policy.observe || self.pin.is_some() || s.compute.is_none() {
            return;
        }
        // What steps have shown of the network a trial does not explain.
        if self.memory.beliefs.network_suspected() || !trial::may_ask(s, &self.memory, self.now, rng) {
            return;
        }
        // What knowing saves is no time by other policies: what no trial has measured is measured once.
        let worth_s = match self.saves_time() {
            true => self.knowing(current, |scores| scores.of_perfect_information()) * self.horizon_s(),
            false if trial::unmeasured(s).is_empty() => 0.0,
            false => f64::INFINITY,
        };
        let slowdown = self.memory.trial.slowdown.unwrap_or(1.0);
        if worth_s < trial::WORTH * slowdown * trial::SNAPSHOTS_S {
            return;
        }
        let why = |cost_s| match self.saves_time() {
            true => format!(
                "it takes about {}, and knowing the best candidate is expected to save {}",
                words::time(cost_s),
                words::time(worth_s)
            ),
            false => format!("it takes about {}, and what compressors keep is assumed so far", words::time(cost_s)),
        };
        let Some((request, cost_s)) = trial::request(s, &self.all, slowdown, why) else { return };
        if worth_s < trial::WORTH * cost_s || cost_s <= 0.0 {
            return;
        }
        self.memory.trial.expected_s = Some(cost_s / slowdown);
        self.memory.trial.asked_at = Some(self.now);
        self.memory.trial.pending = true;
        self.trial = Some(request);
    }

    /// What each throughput test saves, in the batch in which that is most; `bandwidth` in the samples of the scores.
    fn worth_of_tests(&self, current: usize, bandwidth: &[f64]) -> f64 {
        let Some(links) = &self.s.links else { return 0.0 };
        let all_bounds = links.tests.iter().all(|test| test.is_lower_bound);
        let kind = if all_bounds { TestKind::LowerBound } else { TestKind::Whole };
        let nodes: BTreeSet<usize> = (0..links.matrix.ranks()).map(|rank| links.matrix.node(rank)).collect();
        let pairs = (nodes.len() as f64 / 2.0).max(1.0);
        let each =
            |scores: &Scores, tests: f64| scores.of_sample_information(bandwidth, test_sd(kind, tests, pairs)) / tests;
        self.knowing(current, |scores| BATCHES.map(|tests| each(scores, tests)).into_iter().fold(0.0, f64::max))
    }

    /// What knowing more saves, as a share of what the strategy in force takes.
    fn knowing(&self, current: usize, saves: impl Fn(&Scores) -> f64) -> f64 {
        let Some(scores) = Scores::new(&self.all) else { return 0.0 };
        let unit = if self.all[current].mean.is_finite() { self.all[current].mean } else { scores.least() };
        saves(&scores) / unit.max(LEAST_SCORE)
    }

    fn change(mut self, Choice { to, why, loss }: Choice) -> Outcome {
        let decision = Decision {
            job: self.s.job.clone(),
            version: self.s.newest_version().next(),
            parent: self.s.newest_version(),
            plan: to.clone(),
            decided_at: self.now,
            reason: why.clone(),
        };
        if to != *self.s.plan() && self.s.measured_now().is_some() {
            self.memory.leave(self.s.plan(), self.now);
        }
        let report = self.report("change", why, to);
        self.memory.dwell_from = Some(self.now);
        match loss {
            Some(LossCause::Rose(limit)) => self.memory.loss_limit = Some(limit),
            Some(LossCause::Flat(flat, log_steps)) => {
                self.memory.loss_watch = LossWatch::DenseTest { plan: self.s.plan().clone(), log_steps, flat };
            }
            None => {}
        }
        if self.knows_network || self.memory.links.is_none() {
            (self.memory.links, self.memory.links_at) = (self.links, Some(self.now));
        }
        let followed = JobPolicy { pin: self.pin.cloned(), ..self.s.policy.clone() };
        self.memory.policy = Some((followed, self.s.config.policy.clone()));
        Outcome { verdict: Verdict::Change(decision), report, memory: self.memory, trial: self.trial }
    }

    fn keep(self, keep: Keep, why: String) -> Outcome {
        let report = self.report(keep.as_str(), why, self.s.plan().clone());
        Outcome { verdict: Verdict::Keep(keep), report, memory: self.memory, trial: self.trial }
    }

    fn report(&self, verdict: &str, why: String, chosen: Plan) -> Report {
        let objectives: Vec<[f64; 3]> = self.all.iter().map(|x| x.objectives).collect();
        let front = pareto::front_of(&objectives);
        let is_admitted = |i: usize| self.all[i].mean.is_finite();
        let is_compared = |i: &usize| is_admitted(*i) && self.in_force().is_some_and(is_admitted);
        let worth = |i: usize| Some(i).filter(is_compared).and_then(|i| self.worth.get(i));
        let alternative = |(i, x): (usize, &Priced)| Alternative {
            plan: x.plan.clone(),
            t_comp_s: x.what.t_comp.get(),
            t_sync_s: x.what.t_sync.get(),
            t_step_s: x.what.t_step.get(),
            gain: x.what.gain,
            inverse_gain: Some(x.objectives[2]),
            variance: x.what.variance,
            score: x.mean.is_finite().then_some(x.mean),
            on_front: front.contains(&i),
            saves: worth(i).map(|w| w.saves),
            sure: worth(i).map(|w| w.sure),
            terms: x.what.terms,
        };
        let mut alternatives: Vec<Alternative> = self.all.iter().enumerate().map(alternative).collect();
        let in_force = alternatives.iter().find(|a| a.plan == *self.s.plan()).cloned();
        if !self.is_offered {
            alternatives.retain(|a| a.plan != *self.s.plan());
        }
        Report {
            job: self.s.job.clone(),
            at: self.now,
            verdict: verdict.to_owned(),
            why,
            seen: self.observed(),
            changed: self.network_changed(),
            in_force,
            contradicted_s: self.contradicted.map(Seconds::get),
            best: alternatives.first().filter(|a| a.score.is_some()).cloned(),
            solver: if self.is_searched(&chosen) { Solver::NsgaII } else { Solver::Enumeration },
            chosen,
            proposed: self.proposed.clone(),
            policy: self.s.config.policy.policy().name().to_owned(),
            front: alternatives.iter().filter(|a| a.on_front).map(|a| a.plan.clone()).collect(),
            alternatives,
            left_out: self.s.all_left_out(),
            trial: self.asked(),
            horizon_s: self.horizon_s(),
            // Where the choice does not depend on what is known, knowing more saves nothing.
            test_worth_s: match self.pin.is_some() || self.s.policy.observe || self.only_dense() || !self.saves_time() {
                true => 0.0,
                false => self.test_worth * self.horizon_s().min(TEST_TELLS_S),
            },
        }
    }

    /// Whether it is no plan that is known without a search.
    fn is_searched(&self, plan: &Plan) -> bool {
        plan.alike().is_none() && !self.listed.contains(plan)
    }

    fn asked(&self) -> Option<String> {
        match &self.trial {
            Some(trial) => Some(format!("asked for {} candidates: {}", trial.candidates.len(), trial.why)),
            None => self.memory.trial.pending.then(|| "its answer is awaited".to_owned()),
        }
    }

    fn observed(&self) -> Observed {
        let s = self.s;
        Observed {
            ranks: s.ranks,
            gradient_values: s.gradient_values,
            backend: s.backend.clone(),
            version: s.version(),
            links: self.links,
            links_before: self.memory.links,
            links_age_s: s.links.as_ref().map(|l| l.age.get()),
            links_oldest_s: s.links.as_ref().map(|l| l.oldest.get()),
            links_confidence: s.links.as_ref().map(|l| l.confidence),
            compute_s: s.compute.map(|c| c.get()),
            measured: s.measured_now().copied(),
            losses: s.losses_now().copied(),
            loss_limit: self.memory.loss_limit,
            loss_watch: self.memory.loss_watch.clone(),
            profile_measured: s.profiles.measured_at.is_some(),
        }
    }
}
