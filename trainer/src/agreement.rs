//! How all ranks change at the same step. Pure: no clock, no IO.
//!
//! Time is cut into ticks: one tick is one gradient exchange, a training step or an iteration of a trial. At
//! the start of a tick rank 0 may announce one plan; it takes force at the next tick. Within the tick every
//! frame carries the plan from the moment its sender knows it. The result of the exchange on every rank
//! depends on rank 0's contribution, so there is a chain of frames from rank 0 to every rank, each sent after
//! the one before it arrived: when a rank finishes the tick it knows the plan. `tests/schedules.rs` checks
//! that for every collective and number of ranks. Should the chain ever be missing, the next frame between
//! the two disagrees in version, digest or step, which is an error on the spot, or the two wait for frames that
//! the other does not send, which the transport's timeout ends. It is never a wrong sum.
//!
//! Ranks other than 0 switch by what they hear from their peers alone. Nothing that only one rank knows
//! makes it branch: a wish to stop or to abort a trial is an announced plan too.

use crate::word::{AbortCause, ControlWord, Plan, TrialPlan};
use flexcomm_domain::{Digest, Rank, Strategy, Version};

/// A frame that must not be used. Each text names both sides.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Disagreement {
    /// A frame of another step.
    #[error("agree with rank {from}: its frame is of step {theirs}, rank {own} is at step {ours}")]
    Step {
        /// The sender.
        from: Rank,
        /// This rank.
        own: Rank,
        /// The sender's.
        theirs: u64,
        /// This rank's.
        ours: u64,
    },
    /// A frame of another iteration of a trial, or of a trial against training.
    #[error("agree with rank {from} in step {step}: it is in {theirs}, rank {own} in {ours}")]
    Iteration {
        /// The sender.
        from: Rank,
        /// This rank.
        own: Rank,
        /// Of both.
        step: u64,
        /// The sender's, in words.
        theirs: String,
        /// This rank's, in words.
        ours: String,
    },
    /// Another decision is in force there.
    #[error("agree with rank {from} in step {step}: version {theirs} is in force there, {ours} on rank {own}")]
    Version {
        /// The sender.
        from: Rank,
        /// This rank.
        own: Rank,
        /// Of both.
        step: u64,
        /// The sender's.
        theirs: Version,
        /// This rank's.
        ours: Version,
    },
    /// The same version with another strategy.
    #[error(
        "agree with rank {from} in step {step}: under version {version} it runs strategy digest {theirs}, \
         rank {own} runs {ours}"
    )]
    Digest {
        /// The sender.
        from: Rank,
        /// This rank.
        own: Rank,
        /// Of both.
        step: u64,
        /// Of both.
        version: Version,
        /// The sender's.
        theirs: Digest,
        /// This rank's.
        ours: Digest,
    },
    /// A plan that contradicts what this rank knows.
    #[error("agree with rank {from} in step {step}: it passes on {theirs}, rank {own} {ours}")]
    Plan {
        /// The sender.
        from: Rank,
        /// This rank.
        own: Rank,
        /// Of both.
        step: u64,
        /// What arrived.
        theirs: String,
        /// What this rank knows instead.
        ours: String,
    },
}

/// What became of something offered to rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// It will be announced at the next tick where nothing more urgent is.
    Taken,
    /// Its version or id is not above what was seen before.
    Stale,
    /// The version is known with another strategy: two controllers, or one that lost its memory.
    Conflict,
    /// Only rank 0's copy of the orders counts.
    NotLeader,
}

/// The decision in force.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InForce {
    /// 0 before the first decision.
    pub version: Version,
    /// What to do.
    pub strategy: Strategy,
    /// The first step under it.
    pub since_step: u64,
}

/// Where a trial stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialTick {
    /// Index of the candidate that runs.
    pub candidate: usize,
    /// Counts over all candidates.
    pub iteration: u32,
    /// Counts within the candidate.
    pub within: u32,
}

/// One gradient exchange that is about to be done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tick {
    /// The training step; stands still during a trial.
    pub step: u64,
    /// What to run.
    pub strategy: Strategy,
    /// The decision in force.
    pub version: Version,
    /// Set during a trial.
    pub trial: Option<TrialTick>,
}

/// What the end of a tick brought.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Nothing.
    None,
    /// From the next step on this is in force.
    Switched(Box<InForce>),
    /// The next tick is a trial's first iteration: take the snapshot now.
    TrialStarts(TrialPlan),
    /// All of the trial's iterations have run, or it was aborted: restore now.
    TrialEnds(Option<AbortCause>),
    /// The job ends; when a trial was running, restore first.
    Stop,
}

/// One rank's part in the agreement.
#[derive(Debug, Clone)]
pub struct Agreement {
    rank: Rank,
    in_force: InForce,
    step: u64,
    trial: Option<Running>,
    /// Of the strategy that runs in this tick; kept because every frame is compared with it.
    digest: Digest,
    /// Announced in this tick, in force at the next.
    pending: Option<Plan>,
    stop_wished: bool,
    wanted_decision: Option<(Version, Strategy)>,
    wanted_trial: Option<TrialPlan>,
    wanted_abort: Option<AbortCause>,
    last_trial: u64,
}

#[derive(Debug, Clone)]
struct Running {
    plan: TrialPlan,
    iteration: u32,
}

impl Running {
    fn candidate(&self) -> usize {
        (self.iteration / self.plan.iterations) as usize
    }

    fn tick(&self) -> TrialTick {
        let within = self.iteration % self.plan.iterations;
        TrialTick { candidate: self.candidate(), iteration: self.iteration, within }
    }
}

impl Agreement {
    /// A job's start at `first_step`, which all ranks must be given alike, as they must `initial`.
    pub fn new(rank: Rank, initial: Strategy, first_step: u64) -> Self {
        Self {
            rank,
            in_force: InForce { version: Version(0), strategy: initial, since_step: first_step },
            step: first_step,
            trial: None,
            digest: initial.digest(),
            pending: None,
            stop_wished: false,
            wanted_decision: None,
            wanted_trial: None,
            wanted_abort: None,
            last_trial: 0,
        }
    }

    /// The decision in force.
    pub fn in_force(&self) -> InForce {
        self.in_force
    }

    /// The step under way, or the next one between ticks.
    pub fn step(&self) -> u64 {
        self.step
    }

    fn leads(&self) -> bool {
        self.rank == Rank(0)
    }

    /// A decision from the orders. Fences off what is not newer than all that was seen.
    pub fn offer_decision(&mut self, version: Version, strategy: Strategy) -> Offer {
        if !self.leads() {
            return Offer::NotLeader;
        }
        let pending = match &self.pending {
            Some(Plan::Decision { version, strategy }) => Some((*version, **strategy)),
            _ => None,
        };
        let (newest, known) =
            self.wanted_decision.or(pending).unwrap_or((self.in_force.version, self.in_force.strategy));
        if version == newest && version != Version(0) && strategy != known {
            return Offer::Conflict;
        }
        if version <= newest {
            return Offer::Stale;
        }
        self.wanted_decision = Some((version, strategy));
        Offer::Taken
    }

    /// A trial from the orders. Ids only grow.
    pub fn offer_trial(&mut self, plan: TrialPlan) -> Offer {
        if !self.leads() {
            return Offer::NotLeader;
        }
        if plan.id <= self.last_trial {
            return Offer::Stale;
        }
        self.last_trial = plan.id;
        self.wanted_trial = Some(plan);
        Offer::Taken
    }

    /// Iterations per candidate of the running trial.
    pub fn trial_iterations(&self) -> Option<u32> {
        self.trial.as_ref().map(|t| t.plan.iterations)
    }

    /// Ends the running trial early, on all ranks alike. Only rank 0's word counts, and only during a trial.
    pub fn abort_trial(&mut self, cause: AbortCause) -> Offer {
        if !self.leads() {
            return Offer::NotLeader;
        }
        if self.trial.is_none() {
            return Offer::Stale;
        }
        self.wanted_abort = Some(cause);
        Offer::Taken
    }

    /// Leaves the trial between two ticks without a plan, where all ranks have seen alike that it cannot go on. With `trained`
    /// the tick before trained after all, and counts as a step.
    pub fn leave_trial(&mut self, trained: bool) {
        self.trial = None;
        self.wanted_abort = None;
        self.step += u64::from(trained);
    }

    /// Asks for an orderly end; any rank may. Rank 0 hears of it within this tick and announces it at the next.
    pub fn request_stop(&mut self) {
        self.stop_wished = true;
    }

    /// Starts a tick. On rank 0 this decides what the tick announces; call it before the tick's first frame.
    pub fn begin(&mut self) -> Tick {
        self.begin_with(true)
    }

    /// As [`Self::begin`], where this tick may announce nothing; what is wanted then waits.
    pub fn begin_with(&mut self, announces: bool) -> Tick {
        if announces && self.leads() && self.pending.is_none() {
            self.pending = self.choose();
        }
        self.digest = self.strategy().digest();
        let trial = self.trial.as_ref();
        Tick {
            step: self.step,
            strategy: self.strategy(),
            version: self.in_force.version,
            trial: trial.map(Running::tick),
        }
    }

    /// What runs in the tick under way.
    pub fn strategy(&self) -> Strategy {
        let candidate = self.trial.as_ref().and_then(|t| t.plan.candidates.get(t.candidate()));
        candidate.copied().unwrap_or(self.in_force.strategy)
    }

    /// The most urgent of what is wanted. Decisions and new trials wait while a trial runs.
    fn choose(&mut self) -> Option<Plan> {
        if self.stop_wished {
            return Some(Plan::Stop);
        }
        if self.trial.is_some() {
            return self.wanted_abort.take().map(Plan::Abort);
        }
        if let Some((version, strategy)) = self.wanted_decision.take() {
            return Some(Plan::Decision { version, strategy: Box::new(strategy) });
        }
        self.wanted_trial.take().map(Plan::Trial)
    }

    /// The word for a frame that is sent now.
    pub fn word(&self) -> ControlWord {
        ControlWord {
            step: self.step,
            version: self.in_force.version,
            digest: self.digest,
            iteration: self.trial.as_ref().map(|t| t.iteration),
            stop_wished: self.stop_wished,
            plan: self.pending.clone().map(|plan| (self.next_step(), plan)),
        }
    }

    /// As [`Self::word`], of the tick so many steps from now, up to which nothing changes.
    pub fn word_in(&self, steps: u64) -> ControlWord {
        let word = self.word();
        let plan = word.plan.map(|(first_step, plan)| (first_step + steps, plan));
        ControlWord { step: word.step + steps, plan, ..word }
    }

    /// The step of the next tick, as far as it is known while this one runs.
    fn next_step(&self) -> u64 {
        if self.trial.is_some() { self.step } else { self.step + 1 }
    }

    /// Takes in the word of a frame that belongs to this tick. After an error the frame must not be used.
    pub fn accept(&mut self, from: Rank, word: &ControlWord) -> Result<(), Disagreement> {
        self.compare(from, word)?;
        self.stop_wished |= word.stop_wished;
        if let Some((first_step, plan)) = &word.plan {
            self.hear(from, *first_step, plan)?;
        }
        Ok(())
    }

    fn compare(&self, from: Rank, word: &ControlWord) -> Result<(), Disagreement> {
        let (own, step) = (self.rank, self.step);
        if word.step != step {
            return Err(Disagreement::Step { from, own, theirs: word.step, ours: step });
        }
        let ours = self.trial.as_ref().map(|t| t.iteration);
        if word.iteration != ours {
            let words = |i: Option<u32>| i.map_or("training".into(), |i| format!("iteration {i} of a trial"));
            return Err(Disagreement::Iteration { from, own, step, theirs: words(word.iteration), ours: words(ours) });
        }
        let (theirs, ours) = (word.version, self.in_force.version);
        if theirs != ours {
            return Err(Disagreement::Version { from, own, step, theirs, ours });
        }
        let (theirs, ours) = (word.digest, self.digest);
        if theirs != ours {
            return Err(Disagreement::Digest { from, own, step, version: self.in_force.version, theirs, ours });
        }
        Ok(())
    }

    fn hear(&mut self, from: Rank, first_step: u64, plan: &Plan) -> Result<(), Disagreement> {
        if self.pending.as_ref() == Some(plan) && first_step == self.next_step() {
            return Ok(());
        }
        let refused = if first_step != self.next_step() {
            Some(format!("expects plans for step {}", self.next_step()))
        } else if let Some(known) = &self.pending {
            Some(format!("knows {}", describe(known)))
        } else if self.leads() {
            Some("announced nothing".to_owned())
        } else {
            self.misplaced(plan)
        };
        if let Some(ours) = refused {
            let theirs = format!("{} for step {first_step}", describe(plan));
            return Err(Disagreement::Plan { from, own: self.rank, step: self.step, theirs, ours });
        }
        self.pending = Some(plan.clone());
        Ok(())
    }

    /// Why a plan cannot be announced in the state that all ranks are in; the last line against a rank 0 that
    /// goes backwards.
    fn misplaced(&self, plan: &Plan) -> Option<String> {
        match (plan, &self.trial) {
            (Plan::Decision { .. } | Plan::Trial(_), Some(_)) => Some("is in a trial".into()),
            (Plan::Abort(_), None) => Some("is in no trial".into()),
            (Plan::Decision { version, .. }, None) if *version <= self.in_force.version => {
                Some(format!("has version {} in force already", self.in_force.version))
            }
            (Plan::Trial(trial), None) if trial.id <= self.last_trial => {
                Some(format!("has seen trial {} already", self.last_trial))
            }
            _ => None,
        }
    }

    /// Ends a tick after its last frame; what was announced takes force.
    pub fn finish(&mut self) -> Change {
        self.finish_with(true)
    }

    /// As [`Self::finish`], where what was announced may not be due yet.
    pub fn finish_with(&mut self, due: bool) -> Change {
        let plan = if due { self.pending.take() } else { None };
        if let Some(trial) = &mut self.trial {
            trial.iteration += 1;
            let ended = trial.iteration >= trial.plan.ticks();
            return match plan {
                Some(Plan::Stop) => self.end_trial(Change::Stop),
                Some(Plan::Abort(cause)) if !ended => self.end_trial(Change::TrialEnds(Some(cause))),
                _ if ended => self.end_trial(Change::TrialEnds(None)),
                _ => Change::None,
            };
        }
        self.step += 1;
        match plan {
            Some(Plan::Decision { version, strategy }) => {
                self.in_force = InForce { version, strategy: *strategy, since_step: self.step };
                Change::Switched(Box::new(self.in_force))
            }
            Some(Plan::Trial(plan)) => self.enter_trial(plan),
            Some(Plan::Stop) => Change::Stop,
            Some(Plan::Abort(_)) | None => Change::None,
        }
    }

    fn enter_trial(&mut self, plan: TrialPlan) -> Change {
        self.last_trial = plan.id;
        self.trial = Some(Running { plan: plan.clone(), iteration: 0 });
        Change::TrialStarts(plan)
    }

    /// Takes out an announced trial, before [`Self::finish_with`]: it begins with [`Self::start_trial`], if at all.
    pub fn take_trial(&mut self) -> Option<TrialPlan> {
        let pending = self.pending.take_if(|plan| matches!(plan, Plan::Trial(_)));
        pending.and_then(|plan| if let Plan::Trial(plan) = plan { Some(plan) } else { None })
    }

    /// Ends a tick of training; the next is the first of this trial, which was taken out.
    pub fn start_trial(&mut self, plan: TrialPlan) -> Change {
        self.step += 1;
        self.enter_trial(plan)
    }

    fn end_trial(&mut self, change: Change) -> Change {
        self.trial = None;
        self.wanted_abort = None;
        change
    }
}

fn describe(plan: &Plan) -> String {
    match plan {
        Plan::Decision { version, strategy } => format!("decision {version} ({strategy})"),
        Plan::Trial(trial) => format!("trial {} of {} candidates", trial.id, trial.candidates.len()),
        Plan::Abort(_) => "the end of the trial".into(),
        Plan::Stop => "the end of the job".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strategy(text: &str) -> Strategy {
        text.parse().unwrap()
    }

    fn pair() -> (Agreement, Agreement) {
        let new = |rank| Agreement::new(Rank(rank), Strategy::DENSE_RING, 0);
        (new(0), new(1))
    }

    fn tick(a: &mut Agreement, b: &mut Agreement) -> (Tick, Change) {
        let (ta, tb) = (a.begin(), b.begin());
        assert_eq!(ta, tb);
        b.accept(Rank(0), &a.word()).unwrap();
        a.accept(Rank(1), &b.word()).unwrap();
        let (ca, cb) = (a.finish(), b.finish());
        assert_eq!(ca, cb);
        (ta, ca)
    }

    #[test]
    fn a_decision_takes_force_at_the_next_step_on_both() {
        let (mut a, mut b) = pair();
        let topk = strategy("topk@0.1/allgather");
        assert_eq!(a.offer_decision(Version(3), topk), Offer::Taken);
        assert_eq!(b.offer_decision(Version(9), topk), Offer::NotLeader);
        assert_eq!(a.begin().strategy, Strategy::DENSE_RING);
        b.begin();
        b.accept(Rank(0), &a.word()).unwrap();
        a.accept(Rank(1), &b.word()).unwrap();
        let switched = Change::Switched(Box::new(InForce { version: Version(3), strategy: topk, since_step: 1 }));
        assert_eq!(a.finish(), switched);
        assert_eq!(b.finish(), switched);
        assert_eq!((a.begin().strategy, b.begin().strategy), (topk, topk));
    }

    #[test]
    fn a_trial_is_left_without_a_plan() {
        let (mut a, mut b) = pair();
        let plan = TrialPlan::new(1, vec![strategy("topk@0.1/allgather")], 4, 0).unwrap();
        a.offer_trial(plan.clone());
        assert_eq!(tick(&mut a, &mut b).1, Change::TrialStarts(plan));
        a.leave_trial(false);
        b.leave_trial(false);
        assert_eq!((a.begin().trial, a.step(), b.step()), (None, 1, 1), "no iteration has run");
        let plan = TrialPlan::new(2, vec![strategy("topk@0.1/allgather")], 4, 0).unwrap();
        a.offer_trial(plan.clone());
        assert_eq!(tick(&mut a, &mut b).1, Change::TrialStarts(plan));
        assert_eq!(tick(&mut a, &mut b).1, Change::None);
        a.leave_trial(true);
        b.leave_trial(true);
        let (last, change) = tick(&mut a, &mut b);
        assert_eq!((last.trial, last.step, change), (None, 3, Change::None), "the iteration counts as a step");
    }

    #[test]
    fn old_versions_are_fenced_off() {
        let (mut a, _) = pair();
        let (x, y) = (strategy("topk@0.1/allgather"), strategy("topk@0.01/allgather"));
        assert_eq!(a.offer_decision(Version(0), x), Offer::Stale);
        assert_eq!(a.offer_decision(Version(5), x), Offer::Taken);
        assert_eq!(a.offer_decision(Version(5), x), Offer::Stale);
        assert_eq!(a.offer_decision(Version(5), y), Offer::Conflict);
        assert_eq!(a.offer_decision(Version(4), y), Offer::Stale);
        a.begin();
        assert_eq!(a.offer_decision(Version(5), x), Offer::Stale, "announced");
        a.finish();
        a.begin();
        assert_eq!(a.offer_decision(Version(5), x), Offer::Stale, "in force");
        assert_eq!(a.offer_decision(Version(5), y), Offer::Conflict, "in force");
        assert_eq!(a.finish(), Change::None);
    }

    #[test]
    fn a_rank_that_missed_a_switch_is_caught_at_the_first_frame() {
        let (mut a, mut b) = pair();
        a.offer_decision(Version(1), strategy("topk@0.1/allgather"));
        a.begin();
        b.begin();
        a.finish();
        b.finish();
        a.begin();
        b.begin();
        let error = b.accept(Rank(0), &a.word()).unwrap_err().to_string();
        assert_eq!(error, "agree with rank 0 in step 1: version 1 is in force there, 0 on rank 1");
        let error = a.accept(Rank(1), &b.word()).unwrap_err().to_string();
        assert_eq!(error, "agree with rank 1 in step 1: version 0 is in force there, 1 on rank 0");
    }

    #[test]
    fn steps_digests_and_plans_are_compared() {
        let (mut a, mut b) = pair();
        a.begin();
        b.begin();
        let good = a.word();
        let refuse = |b: &mut Agreement, word: &ControlWord, text: &str| {
            let error = b.accept(Rank(0), word).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        refuse(&mut b, &ControlWord { step: 7, ..good.clone() }, "step 7, rank 1 is at step 0");
        refuse(&mut b, &ControlWord { digest: Digest(1), ..good.clone() }, "digest 00000000000001");
        refuse(&mut b, &ControlWord { iteration: Some(2), ..good.clone() }, "iteration 2 of a trial");
        refuse(&mut b, &ControlWord { plan: Some((2, Plan::Stop)), ..good.clone() }, "expects plans for step 1");
        let abort = Plan::Abort(AbortCause::Budget);
        refuse(&mut b, &ControlWord { plan: Some((1, abort)), ..good.clone() }, "is in no trial");
        b.accept(Rank(0), &ControlWord { plan: Some((1, Plan::Stop)), ..good.clone() }).unwrap();
        let other = Plan::Decision { version: Version(1), strategy: Strategy::DENSE_RING.into() };
        refuse(&mut b, &ControlWord { plan: Some((1, other)), ..good.clone() }, "knows the end of the job");
        let error = a.accept(Rank(1), &b.word()).unwrap_err().to_string();
        assert!(error.contains("rank 0 announced nothing"), "{error}");
    }

    #[test]
    fn a_trial_stands_still_in_steps_and_decisions_wait() {
        let (mut a, mut b) = pair();
        let candidates = vec![strategy("topk@0.1/allgather"), strategy("topk@0.01/art-ring:star")];
        let plan = TrialPlan::new(4, candidates.clone(), 2, 1000).unwrap();
        assert_eq!(a.offer_trial(plan.clone()), Offer::Taken);
        assert_eq!(a.offer_trial(plan.clone()), Offer::Stale);
        assert_eq!(tick(&mut a, &mut b).1, Change::TrialStarts(plan));
        assert_eq!(a.offer_decision(Version(1), candidates[1]), Offer::Taken);
        for i in 0..4 {
            let (t, change) = tick(&mut a, &mut b);
            assert_eq!((t.step, t.strategy), (1, candidates[i / 2]));
            assert_eq!(change, if i == 3 { Change::TrialEnds(None) } else { Change::None });
        }
        assert!(matches!(tick(&mut a, &mut b).1, Change::Switched(f) if f.since_step == 2));
    }

    #[test]
    fn trials_are_aborted_and_jobs_stopped_on_all_ranks_alike() {
        let (mut a, mut b) = pair();
        let plan = TrialPlan::new(1, vec![Strategy::DENSE_RING], 100, 10).unwrap();
        let tick = |a: &mut Agreement, b: &mut Agreement| {
            a.begin();
            b.begin();
            b.accept(Rank(0), &a.word()).unwrap();
            a.accept(Rank(1), &b.word()).unwrap();
            let (ca, cb) = (a.finish(), b.finish());
            assert_eq!(ca, cb);
            ca
        };
        assert_eq!(a.abort_trial(AbortCause::Budget), Offer::Stale);
        a.offer_trial(plan);
        tick(&mut a, &mut b);
        assert_eq!(tick(&mut a, &mut b), Change::None);
        assert_eq!(a.abort_trial(AbortCause::Budget), Offer::Taken);
        assert_eq!(tick(&mut a, &mut b), Change::TrialEnds(Some(AbortCause::Budget)));
        b.request_stop();
        assert_eq!(tick(&mut a, &mut b), Change::None, "rank 0 hears of it in this tick");
        assert_eq!(tick(&mut a, &mut b), Change::Stop);
    }
}
