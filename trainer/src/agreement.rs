//! What is in force on a rank, and what comes next. Pure: no clock, no IO.
//!
//! Time is cut into ticks: one tick is one gradient exchange, a training step or an iteration of a trial. What rank 0 announces
//! takes force at the end of the same tick on all ranks, see [`crate::Control`]. Nothing that only one rank knows makes it
//! branch.

use crate::message::{AbortCause, Announced, ControlMessage, Schedule, TrialPlan};
use flexcomm_domain::{Digest, Plan, Rank, Strategy, Version};

/// A message of rank 0 that does not fit what this rank knows. Each text names both sides.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Disagreement {
    /// Of another step.
    #[error("agree with rank 0: its message is of step {theirs}, rank {own} is at step {ours}")]
    Step {
        /// This rank.
        own: Rank,
        /// Rank 0's.
        theirs: u64,
        /// This rank's.
        ours: u64,
    },
    /// Another decision is in force there.
    #[error("agree with rank 0 in step {step}: version {theirs} is in force there, {ours} on rank {own}")]
    Version {
        /// This rank.
        own: Rank,
        /// Of both.
        step: u64,
        /// Rank 0's.
        theirs: Version,
        /// This rank's.
        ours: Version,
    },
    /// The same version with another plan.
    #[error(
        "agree with rank 0 in step {step}: under version {version} it runs plan digest {theirs}, rank {own} runs {ours}"
    )]
    Digest {
        /// This rank.
        own: Rank,
        /// Of both.
        step: u64,
        /// Of both.
        version: Version,
        /// Rank 0's.
        theirs: Digest,
        /// This rank's.
        ours: Digest,
    },
    /// An announcement that contradicts what this rank knows.
    #[error("agree with rank 0 in step {step}: it announces {theirs}, rank {own} {ours}")]
    Announced {
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
    /// The version is known with another plan: two controllers, or one that lost its memory.
    Conflict,
    /// Only rank 0's copy of the orders counts.
    NotLeader,
}

/// The decision in force.
#[derive(Debug, Clone, PartialEq)]
pub struct InForce {
    /// 0 before the first decision.
    pub version: Version,
    /// What to do.
    pub plan: Plan,
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
    /// Whether it is the candidate's last: everything is put back after it, so that the next one starts equal.
    pub last: bool,
}

/// One gradient exchange that is about to be done.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    /// The training step; stands still during a trial.
    pub step: u64,
    /// What to run: the decision's plan, in a trial a candidate's.
    pub plan: Plan,
    /// The decision in force.
    pub version: Version,
    /// Set during a trial.
    pub trial: Option<TrialTick>,
}

impl Tick {
    /// What to run in a bucket.
    pub fn strategy(&self, bucket: usize) -> &Strategy {
        self.plan.of(bucket)
    }

    /// A number that differs between steps; a trial's iterations go on from its step.
    pub fn index(&self) -> u64 {
        self.step + self.trial.map_or(0, |trial| u64::from(trial.within))
    }
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
    /// Some rank cannot run this trial, and why: none does.
    TrialRefused(TrialPlan, String),
    /// All of the trial's iterations have run, or it was aborted: restore now.
    TrialEnds(Option<AbortCause>),
    /// Every rank has left the trial's loop, and this tick trained: keep what it did.
    TrialLeft,
    /// The job ends; when a trial was running, restore first.
    Stop,
}

/// One rank's part in the agreement.
#[derive(Debug, Clone)]
pub struct Agreement {
    rank: Rank,
    in_force: InForce,
    /// Of its plan: every bucket's exchange asks for it.
    digest: Digest,
    step: u64,
    trial: Option<Running>,
    /// Announced, and not in force yet.
    pending: Option<Announced>,
    stop_wanted: bool,
    wanted_decision: Option<(Version, Plan)>,
    wanted_trial: Option<TrialPlan>,
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
        let last = within + 1 == self.plan.iterations;
        TrialTick { candidate: self.candidate(), iteration: self.iteration, within, last }
    }
}

impl Agreement {
    /// A job's start at `first_step`, which all ranks must be given alike, as they must `initial`.
    pub fn new(rank: Rank, initial: impl Into<Plan>, first_step: u64) -> Self {
        let plan = initial.into();
        Self {
            rank,
            digest: plan.digest(),
            in_force: InForce { version: Version(0), plan, since_step: first_step },
            step: first_step,
            trial: None,
            pending: None,
            stop_wanted: false,
            wanted_decision: None,
            wanted_trial: None,
            last_trial: 0,
        }
    }

    /// The decision in force.
    pub fn in_force(&self) -> &InForce {
        &self.in_force
    }

    /// The step under way, or the next one between ticks.
    pub fn step(&self) -> u64 {
        self.step
    }

    pub(crate) fn leads(&self) -> bool {
        self.rank == Rank(0)
    }

    /// A decision from the orders. Fences off what is not newer than all that was seen.
    pub fn offer_decision(&mut self, version: Version, plan: impl Into<Plan>) -> Offer {
        if !self.leads() {
            return Offer::NotLeader;
        }
        let plan = plan.into();
        let (newest, known) = match (&self.wanted_decision, &self.pending) {
            (Some((version, plan)), _) | (None, Some(Announced::Decision { version, plan })) => (*version, plan),
            _ => (self.in_force.version, &self.in_force.plan),
        };
        if version == newest && version != Version(0) && plan != *known {
            return Offer::Conflict;
        }
        if version <= newest {
            return Offer::Stale;
        }
        self.wanted_decision = Some((version, plan));
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

    /// Asks rank 0 for an orderly end of the job.
    pub fn request_stop(&mut self) {
        self.stop_wanted = true;
    }

    /// Starts a tick. With `announces` rank 0 decides now what it announces, if anything.
    pub(crate) fn begin(&mut self, announces: bool) -> Tick {
        if announces && self.leads() && self.pending.is_none() {
            self.pending = self.choose();
        }
        self.tick()
    }

    /// The tick under way.
    pub fn tick(&self) -> Tick {
        Tick {
            step: self.step,
            plan: self.candidate().map_or_else(|| self.in_force.plan.clone(), Plan::from),
            version: self.in_force.version,
            trial: self.trial.as_ref().map(Running::tick),
        }
    }

    /// Whether a trial runs.
    pub fn tries(&self) -> bool {
        self.trial.is_some()
    }

    /// A number that differs between all ticks of a step.
    pub(crate) fn iteration(&self) -> u64 {
        self.trial.as_ref().map_or(0, |trial| u64::from(trial.iteration) + 1)
    }

    /// Digest of what the tick under way runs.
    pub(crate) fn digest(&self) -> Digest {
        self.candidate().map_or(self.digest, |strategy| strategy.digest())
    }

    fn candidate(&self) -> Option<Strategy> {
        self.trial.as_ref().and_then(|trial| trial.plan.candidates.get(trial.candidate())).copied()
    }

    /// The most urgent of what is wanted.
    fn choose(&mut self) -> Option<Announced> {
        if self.stop_wanted {
            return Some(Announced::Stop);
        }
        if let Some((version, plan)) = self.wanted_decision.take() {
            return Some(Announced::Decision { version, plan });
        }
        self.wanted_trial.take().map(Announced::Trial)
    }

    /// Rank 0's message: in force after so many more ticks of training, of which the one under way is the first.
    pub(crate) fn message(&self, ticks: u8, schedule: Schedule) -> ControlMessage {
        ControlMessage {
            schedule,
            step: self.step + u64::from(ticks) - 1,
            version: self.in_force.version,
            digest: self.digest,
            announced: self.pending.clone(),
        }
    }

    /// Takes in rank 0's message, in the tick at whose end it takes force.
    pub(crate) fn accept(&mut self, message: &ControlMessage) -> Result<(), Disagreement> {
        let (own, step) = (self.rank, self.step);
        if message.step != step {
            return Err(Disagreement::Step { own, theirs: message.step, ours: step });
        }
        let (theirs, ours) = (message.version, self.in_force.version);
        if theirs != ours {
            return Err(Disagreement::Version { own, step, theirs, ours });
        }
        let (theirs, ours) = (message.digest, self.digest);
        if theirs != ours {
            return Err(Disagreement::Digest { own, step, version: self.in_force.version, theirs, ours });
        }
        if let (Some(announced), false) = (&message.announced, self.leads())
            && let Some(ours) = self.misplaced(announced)
        {
            return Err(Disagreement::Announced { own, step, theirs: describe(announced), ours });
        }
        self.pending.clone_from(&message.announced);
        Ok(())
    }

    /// Why this cannot be announced in the state that all ranks are in; the last line against a rank 0 that
    /// goes backwards.
    fn misplaced(&self, announced: &Announced) -> Option<String> {
        match announced {
            Announced::Decision { version, .. } if *version <= self.in_force.version => {
                Some(format!("has version {} in force already", self.in_force.version))
            }
            Announced::Trial(trial) if trial.id <= self.last_trial => {
                Some(format!("has seen trial {} already", self.last_trial))
            }
            _ => None,
        }
    }

    /// Ends an iteration of a trial.
    pub(crate) fn finish_iteration(&mut self) -> Change {
        let Some(trial) = &mut self.trial else { return Change::None };
        trial.iteration += 1;
        if trial.iteration < trial.plan.ticks() {
            return Change::None;
        }
        self.trial = None;
        Change::TrialEnds(None)
    }

    /// Ends the trial between two ticks, where all ranks have seen alike that it cannot go on. With `trained` the tick before
    /// trained after all, and counts as a step.
    pub(crate) fn leave_trial(&mut self, trained: bool) {
        self.trial = None;
        self.step += u64::from(trained);
    }

    /// What was announced, once it is due.
    pub(crate) fn take_announced(&mut self) -> Option<Announced> {
        self.pending.take()
    }

    /// Ends a step of training; this takes force.
    pub(crate) fn finish_step(&mut self, announced: Option<Announced>) -> Change {
        self.step += 1;
        match announced {
            Some(Announced::Decision { version, plan }) => {
                self.digest = plan.digest();
                self.in_force = InForce { version, plan, since_step: self.step };
                Change::Switched(Box::new(self.in_force.clone()))
            }
            Some(Announced::Trial(plan)) => {
                // A newer one may have been offered to rank 0 since.
                self.last_trial = self.last_trial.max(plan.id);
                self.trial = Some(Running { plan: plan.clone(), iteration: 0 });
                Change::TrialStarts(plan)
            }
            Some(Announced::Stop) => Change::Stop,
            None => Change::None,
        }
    }
}

fn describe(announced: &Announced) -> String {
    match announced {
        Announced::Decision { version, plan } => format!("decision {version} ({plan})"),
        Announced::Trial(trial) => format!("trial {} of {} candidates", trial.id, trial.candidates.len()),
        Announced::Stop => "the end of the job".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEDULE: Schedule = Schedule { every: 1, delay: 1 };

    fn strategy(text: &str) -> Strategy {
        text.parse().unwrap()
    }

    fn pair() -> (Agreement, Agreement) {
        let new = |rank| Agreement::new(Rank(rank), Strategy::DENSE_RING, 0);
        (new(0), new(1))
    }

    #[test]
    fn old_versions_are_fenced_off() {
        let (mut a, mut b) = pair();
        let (x, y) = (strategy("topk@0.1/allgather"), strategy("topk@0.01/allgather"));
        assert_eq!(b.offer_decision(Version(9), x), Offer::NotLeader);
        assert_eq!(a.offer_decision(Version(0), x), Offer::Stale);
        assert_eq!(a.offer_decision(Version(5), x), Offer::Taken);
        assert_eq!(a.offer_decision(Version(5), x), Offer::Stale);
        assert_eq!(a.offer_decision(Version(5), y), Offer::Conflict);
        assert_eq!(a.offer_decision(Version(4), y), Offer::Stale);
        a.begin(true);
        assert_eq!(a.offer_decision(Version(5), x), Offer::Stale, "announced");
        assert_eq!(a.finish_step(None), Change::None, "not due yet");
        assert_eq!(a.offer_decision(Version(5), x), Offer::Stale, "still announced");
        a.begin(false);
        let in_force = InForce { version: Version(5), plan: x.into(), since_step: 2 };
        let announced = a.take_announced();
        assert_eq!(a.finish_step(announced), Change::Switched(Box::new(in_force)));
        a.begin(true);
        assert_eq!(a.offer_decision(Version(5), x), Offer::Stale, "in force");
        assert_eq!(a.offer_decision(Version(5), y), Offer::Conflict, "in force");
        assert_eq!(a.take_announced(), None);
        assert_eq!(a.finish_step(None), Change::None);
    }

    #[test]
    fn steps_versions_digests_and_plans_are_compared() {
        let (mut a, mut b) = pair();
        let x = strategy("topk@0.1/allgather");
        a.offer_decision(Version(1), x);
        a.begin(true);
        b.begin(true);
        let good = a.message(1, SCHEDULE);
        let refuse = |b: &mut Agreement, message: &ControlMessage, text: &str| {
            let error = b.accept(message).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        refuse(&mut b, &ControlMessage { step: 7, ..good.clone() }, "is of step 7, rank 1 is at step 0");
        refuse(&mut b, &ControlMessage { digest: Digest(1), ..good.clone() }, "digest 00000000000001");
        for rank in [&mut a, &mut b] {
            rank.accept(&good).unwrap();
            let announced = rank.take_announced();
            assert!(matches!(rank.finish_step(announced), Change::Switched(_)));
        }
        let late = ControlMessage { step: 1, ..good.clone() };
        refuse(&mut b, &late, "version 0 is in force there, 1 on rank 1");
        let again = ControlMessage { version: Version(1), digest: x.digest(), ..late };
        refuse(&mut b, &again, "announces decision 1");
        refuse(&mut b, &again, "rank 1 has version 1 in force already");
        let trial = Announced::Trial(TrialPlan::new(1, vec![x], 1, 0).unwrap());
        b.last_trial = 3;
        refuse(&mut b, &ControlMessage { announced: Some(trial), ..again }, "has seen trial 3 already");
    }

    #[test]
    fn a_trial_stands_still_in_steps() {
        let (mut a, _) = pair();
        let candidates = vec![strategy("topk@0.1/allgather"), strategy("topk@0.01/art-ring:star")];
        let plan = TrialPlan::new(4, candidates.clone(), 2, 1000).unwrap();
        assert_eq!(a.offer_trial(plan.clone()), Offer::Taken);
        assert_eq!(a.offer_trial(plan.clone()), Offer::Stale);
        a.begin(true);
        assert_eq!(a.take_announced(), Some(Announced::Trial(plan.clone())));
        assert_eq!(a.finish_step(None), Change::None);
        assert_eq!(a.finish_step(Some(Announced::Trial(plan.clone()))), Change::TrialStarts(plan.clone()));
        for i in 0..4 {
            let tick = a.begin(false);
            assert_eq!((tick.step, tick.plan), (2, candidates[i / 2].into()));
            assert_eq!(tick.trial.map(|trial| trial.last), Some(i % 2 == 1), "then everything is put back");
            assert_eq!(a.finish_iteration(), if i == 3 { Change::TrialEnds(None) } else { Change::None });
        }
        a.finish_step(Some(Announced::Trial(plan)));
        a.begin(false);
        a.leave_trial(true);
        assert_eq!((a.begin(false).trial, a.step()), (None, 4), "the iteration counts as a step");
    }
}
