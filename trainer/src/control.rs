//! The agreement over a control group: a process group apart from the one that carries gradients. Pure.
//!
//! Every so many ticks rank 0 broadcasts a [`ControlMessage`], without waiting for it: its step, what is in force, what is announced if
//! anything, and when the next message comes. All ranks take it in at the end of the tick in which it is due, and what it announces is
//! in force in the tick after. Which ticks these are follows from the messages alone, so it is the same on all ranks.
//!
//! Before a trial, and in each of its iterations, the ranks gather what each says of itself instead: whether it can run the trial,
//! whether the trial should end. Everything is launched when a tick begins and taken in when a tick ends, by which time all
//! ranks have launched it: no rank waits for one that waits for it in a collective of the script.

use crate::agreement::{Agreement, Change, Disagreement, Tick};
use crate::answer::{self, Answer, Verdict};
use crate::message::{
    AbortCause, Announced, ControlMessage, MESSAGE_BYTES, MOST_APART, MessageError, Schedule, TrialPlan,
};
use flexcomm_domain::{Rank, Strategy};
use std::time::Duration;

/// A broadcast takes some 0.1 ms of the host, 0.5 % of the steps between two of them from 2.5 ms a step on.
const APART: Duration = Duration::from_millis(20);

/// Steps after a trial in which the ranks send rank 0 samples of their gradients, where it had candidates of AR-Topk.
const SAMPLED_STEPS: u64 = 50;

/// After how many of them rank 0 reports what they show: early, since a decision waits for it, and at the end.
const SAMPLES_REPORTED: [u64; 2] = [20, SAMPLED_STEPS];

/// In each of so many first steps there is one: the first trial and the first decision come in them.
const FIRST_STEPS: u64 = 32;

/// From this step time on, a message that is broadcast together with a step's own collectives has arrived when the step ends. Shorter
/// steps leave it another one.
const LONG: Duration = Duration::from_millis(250);

impl Schedule {
    /// Of the first steps.
    const FIRST: Self = Self { every: 1, delay: 1 };

    /// A decision is in force within the longest of two steps and a second.
    fn of(step: Duration) -> Self {
        let every = APART.as_nanos().div_ceil(step.as_nanos().max(1)).min(u128::from(MOST_APART)) as u8;
        let delay = if step < LONG { 2 } else { 1 };
        Self { every: every.max(delay), delay }
    }
}

/// Why ranks cannot go on together.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ControlError {
    /// The ranks do not run the same step and plan, or fill the bucket with different parameters.
    #[error(
        "agree with {who} in step {step}, bucket {bucket}: it runs another step or strategy, or its bucket has other parameters, than {ours}"
    )]
    Desynchronised {
        /// Which rank.
        who: String,
        /// This rank's.
        step: u64,
        /// This rank's.
        bucket: u32,
        /// What this rank runs.
        ours: String,
    },
    /// Rank 0's message cannot be read.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Rank 0's message contradicts what this rank knows.
    #[error(transparent)]
    Announced(#[from] Disagreement),
}

/// One rank's part in the agreement over a control group.
#[derive(Debug, Clone)]
pub struct Control {
    agreement: Agreement,
    rank: Rank,
    /// Whether some rank has an agent: else nothing is ever announced.
    steered: bool,
    /// Steps so far; iterations of trials do not count.
    ticks: u64,
    schedule: Schedule,
    /// The tick of the next message.
    next: u64,
    /// The tick at whose end the message under way takes force.
    due: Option<u64>,
    /// A trial that was announced: it begins after the next tick, if all ranks say in it that they can.
    asked: Option<TrialPlan>,
    /// Of the step before; only rank 0's counts.
    step_time: Option<Duration>,
    /// Candidates of AR-Topk of the newest trial.
    art: Vec<Strategy>,
    /// The number of the sample that the next tick sends.
    sample: Option<u64>,
}

impl Control {
    /// Around an agreement.
    pub fn new(agreement: Agreement, rank: Rank) -> Self {
        let (schedule, due, asked, step_time) = (Schedule::FIRST, None, None, None);
        let (art, sample) = (Vec::new(), None);
        Self { agreement, rank, steered: false, ticks: 0, schedule, next: 0, due, asked, step_time, art, sample }
    }

    /// Whether messages are broadcast at all: the same on all ranks, before the first tick.
    pub fn steer(&mut self, steered: bool) {
        self.steered = steered;
    }

    /// The agreement, to offer things to.
    pub fn agreement(&mut self) -> &mut Agreement {
        &mut self.agreement
    }

    /// The agreement, to look at.
    pub fn look(&self) -> &Agreement {
        &self.agreement
    }

    /// The trial for which all ranks say in this tick whether they can run it.
    pub fn asked(&self) -> Option<&TrialPlan> {
        self.asked.as_ref()
    }

    /// Whether the ranks gather in this tick what each says of itself.
    pub fn gathers(&self) -> bool {
        self.asked.is_some() || self.agreement.tries()
    }

    /// Starts a tick.
    pub fn begin(&mut self) -> Tick {
        let free = self.due.is_none() && !self.gathers();
        let announces = self.steered && free && self.ticks >= self.next;
        if announces {
            self.next = self.ticks;
            self.due = Some(self.ticks + u64::from(self.schedule.delay) - 1);
        }
        self.agreement.begin(announces)
    }

    /// Whether a message is broadcast in this tick, between [`Self::begin`] and its end.
    pub fn announces(&self) -> bool {
        self.due.is_some() && self.ticks == self.next
    }

    /// Rank 0's message for the broadcast of this tick, [`MESSAGE_BYTES`]; zeros on other ranks, which receive it.
    pub fn message(&self) -> Vec<u8> {
        if self.rank != Rank(0) {
            return vec![0; MESSAGE_BYTES];
        }
        let settled = self.step_time.filter(|_| self.ticks >= FIRST_STEPS);
        let following = settled.map_or(Schedule::FIRST, Schedule::of);
        self.agreement.message(self.schedule.delay, following).encode()
    }

    /// Whether this tick ends with a message, see [`Self::accept`].
    pub fn is_due(&self) -> bool {
        self.due == Some(self.ticks)
    }

    /// Takes in the message that is due, before [`Self::finish`].
    pub fn accept(&mut self, bytes: &[u8]) -> Result<(), ControlError> {
        let message = ControlMessage::decode(bytes)?;
        self.agreement.accept(&message)?;
        self.schedule = message.schedule;
        Ok(())
    }

    /// The number of the sample that every rank sends rank 0 in this tick, for shadow trials of AR-Topk: 0 is of the residuals, every
    /// other one of the gradient of the tick before.
    pub fn sample(&self) -> Option<u64> {
        self.sample
    }

    /// Whether the next sample is of this tick's gradient.
    pub fn is_sampled(&self) -> bool {
        self.sample.is_some_and(|number| number < SAMPLED_STEPS)
    }

    /// Whether rank 0 reports what the samples show, with this tick's.
    pub fn reports_samples(&self) -> bool {
        self.sample.is_some_and(|number| SAMPLES_REPORTED.contains(&number))
    }

    /// Whether samples begin with the next tick.
    pub fn begins_sampling(&self) -> bool {
        self.sample == Some(0)
    }

    /// Ends a tick that took so long, after its last bucket. `answers` are all ranks', where they were gathered.
    pub fn finish(&mut self, took: Duration, answers: &[Answer]) -> Change {
        let art = |plan: &TrialPlan| plan.candidates.iter().copied().filter(|s| s.collective().is_art()).collect();
        let following = self.sample.filter(|_| self.is_sampled()).map(|number| number + 1);
        let change = self.finish_tick(took, answers);
        let before = match &change {
            Change::TrialStarts(plan) | Change::TrialRefused(plan, _) => std::mem::replace(&mut self.art, art(plan)),
            _ => Vec::new(),
        };
        self.sample = match &change {
            Change::None | Change::Switched(_) => following,
            // Whose refused trials come again before the samples of the last are all there would never get an answer.
            Change::TrialRefused(..) if following.is_some() && self.art == before => following,
            Change::TrialRefused(..) | Change::TrialEnds(_) => (!self.art.is_empty()).then_some(0),
            Change::TrialStarts(_) | Change::TrialLeft | Change::Stop => None,
        };
        change
    }

    fn finish_tick(&mut self, took: Duration, answers: &[Answer]) -> Change {
        if self.agreement.tries() {
            return self.finish_iteration(answers);
        }
        self.step_time = Some(took);
        self.ticks += 1;
        if let Some(plan) = self.asked.take() {
            let Some(why) = answer::refusal(answers) else {
                return self.agreement.finish_step(Some(Announced::Trial(plan)));
            };
            self.agreement.finish_step(None);
            return Change::TrialRefused(plan, why);
        }
        if self.due.take_if(|due| *due + 1 == self.ticks).is_none() {
            return self.agreement.finish_step(None);
        }
        // By what the message says, and never before the tick after it.
        self.next = (self.next + u64::from(self.schedule.every)).max(self.ticks);
        match self.agreement.take_announced() {
            Some(Announced::Trial(plan)) => {
                self.asked = Some(plan);
                self.agreement.finish_step(None)
            }
            announced => self.agreement.finish_step(announced),
        }
    }

    fn finish_iteration(&mut self, answers: &[Answer]) -> Change {
        let Some(cause) = answer::end(answers) else { return self.agreement.finish_iteration() };
        let trained = cause == AbortCause::Left && answers.iter().all(|answer| answer.verdict == Verdict::Cannot);
        self.agreement.leave_trial(trained);
        if trained { Change::TrialLeft } else { Change::TrialEnds(Some(cause)) }
    }

    /// 32 bits over everything that must be alike on all ranks in a bucket's exchange; `layout` is the bucket's. splitmix64's
    /// finaliser over the parts.
    pub fn check(&self, bucket: u32, layout: u64) -> u32 {
        let (agreement, version) = (&self.agreement, self.agreement.in_force().version);
        let parts =
            [agreement.step(), version.0, agreement.digest().0, agreement.iteration(), u64::from(bucket), layout];
        let mut hash = 0x9e37_79b9_7f4a_7c15u64;
        for part in parts {
            hash = (hash ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
            hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            hash ^= hash >> 31;
        }
        (hash >> 32) as u32
    }

    /// As an error: this rank's check of a bucket is another one than that rank's.
    pub fn desynchronised(&self, rank: usize, bucket: u32) -> ControlError {
        let tick = self.agreement.tick();
        let trial = tick.trial.map_or(String::new(), |trial| format!(", iteration {} of a trial", trial.iteration));
        let ours = format!("rank {}: version {}, {}{trial}", self.rank, tick.version, tick.plan);
        ControlError::Desynchronised { who: format!("rank {rank}"), step: tick.step, bucket, ours }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::{InForce, Offer};
    use flexcomm_domain::{Plan, Strategy, Version};
    use proptest::prelude::*;

    fn job(n: u32) -> Vec<Control> {
        let rank = |r| {
            let mut control = Control::new(Agreement::new(Rank(r), Strategy::DENSE_RING, 0), Rank(r));
            control.steer(true);
            control
        };
        (0..n).map(rank).collect()
    }

    /// One tick on all ranks; the message that was broadcast last is in `sent`.
    fn tick(
        job: &mut [Control],
        sent: &mut Vec<u8>,
        took: Duration,
        answers: &[Answer],
    ) -> Result<(Tick, Change), ControlError> {
        let ticks: Vec<Tick> = job.iter_mut().map(Control::begin).collect();
        assert!(ticks.iter().all(|tick| *tick == ticks[0]), "{ticks:?}");
        assert!(job.iter().all(|rank| rank.announces() == job[0].announces() && rank.is_due() == job[0].is_due()));
        if job[0].announces() {
            *sent = job[0].message();
            assert!(job[1..].iter().all(|rank| rank.message().iter().all(|byte| *byte == 0)));
        }
        if job[0].is_due() {
            job.iter_mut().try_for_each(|rank| rank.accept(sent))?;
        }
        // Other ranks' times are their own.
        let ends = (1..).zip(job.iter_mut()).map(|(rank, control)| control.finish(took * rank, answers));
        let changes: Vec<Change> = ends.collect();
        assert!(changes.iter().all(|change| *change == changes[0]), "{changes:?}");
        Ok((ticks[0].clone(), changes[0].clone()))
    }

    fn strategy(text: &str) -> Strategy {
        text.parse().unwrap()
    }

    proptest! {
        /// Decisions that arrive at any time, at any step times: all ranks change at the same tick, within the bound.
        #[test]
        fn a_decision_is_in_force_within_two_steps_or_a_second(
            offers in prop::collection::vec(0u64..4, 1..300), times in prop::collection::vec(1u64..2_000_000, 1..8)
        ) {
            let (mut job, mut sent, mut version, mut waits) = (job(4), Vec::new(), 0, None::<(Duration, usize)>);
            for (step, offer) in offers.iter().enumerate() {
                // Step times change rarely, as they do.
                let took = Duration::from_micros(times[step / 40 % times.len()]);
                if *offer == 0 && waits.is_none() {
                    version += 1;
                    prop_assert_eq!(job[0].agreement().offer_decision(Version(version), strategy("fp16/dense-ring")), Offer::Taken);
                    waits = Some((Duration::ZERO, 0));
                }
                let settled = step % 40 > usize::from(2 * MOST_APART);
                let (_, change) = tick(&mut job, &mut sent, took, &[]).unwrap();
                if let Some((waited, steps)) = &mut waits {
                    *waited += took;
                    *steps += 1;
                    let late = *steps > 2 && *waited > Duration::from_secs(1);
                    prop_assert!(!(settled && late && *steps < step % 40), "{:?} in {} steps", waited, steps);
                }
                if let Change::Switched(in_force) = change {
                    prop_assert_eq!(in_force.version, Version(version));
                    waits = None;
                }
            }
        }
    }

    #[test]
    fn messages_are_as_far_apart_as_step_times_say() {
        let of = |ms| Schedule::of(Duration::from_millis(ms));
        assert_eq!(of(0), Schedule { every: 8, delay: 2 });
        assert_eq!(of(5), Schedule { every: 4, delay: 2 });
        assert_eq!(of(100), Schedule { every: 2, delay: 2 });
        assert_eq!(of(300), Schedule { every: 1, delay: 1 });
        let (mut job, mut sent, mut broadcasts) = (job(2), Vec::new(), Vec::new());
        for step in 0..50 {
            let mut next = job[0].clone();
            next.begin();
            broadcasts.extend(next.announces().then_some(step));
            tick(&mut job, &mut sent, Duration::from_millis(5), &[]).unwrap();
        }
        let first: Vec<u64> = (0..=FIRST_STEPS).collect();
        assert_eq!(broadcasts, [&first[..], &[36, 40, 44, 48]].concat(), "every step, then every fourth");
    }

    #[test]
    fn a_trial_begins_where_all_can_and_decisions_come_after_it() {
        let (mut job, mut sent) = (job(2), Vec::new());
        let plan = |id| TrialPlan::new(id, vec![strategy("topk@0.1/allgather")], 3, 0).unwrap();
        let go = [Answer::of(Verdict::GoOn), Answer::of(Verdict::GoOn)];
        let one = [Answer::of(Verdict::GoOn), Answer::cannot("no memory")];
        let all = [Answer::cannot("left"), Answer::cannot("left")];
        let mut next = |job: &mut Vec<Control>, answers: &[Answer]| {
            sent.clear();
            let (tick, change) = tick(job, &mut sent, Duration::from_millis(300), answers).unwrap();
            (tick.step, sent.is_empty(), change)
        };
        let left = Change::TrialEnds(Some(AbortCause::Left));
        let ends = [
            (&go, vec![Change::TrialStarts(plan(1)), Change::None, Change::None, Change::TrialEnds(None)]),
            (&one, vec![Change::TrialRefused(plan(2), "rank 1: no memory".into())]),
            (&go, vec![Change::TrialStarts(plan(3)), left]),
            (&go, vec![Change::TrialStarts(plan(4)), Change::TrialLeft]),
        ];
        for (id, (first, changes)) in (1..).zip(ends) {
            job[0].agreement().offer_trial(plan(id));
            let (asked, _, _) = next(&mut job, &[]);
            job[0].agreement().offer_decision(Version(id), strategy("fp16/dense-ring"));
            for (at, change) in changes.iter().enumerate() {
                assert!(job.iter().all(Control::gathers));
                let answers = match change {
                    _ if at == 0 => first,
                    Change::TrialLeft => &all,
                    Change::TrialEnds(Some(_)) => &one,
                    _ => &go,
                };
                let step = asked + 1 + u64::from(at > 0);
                assert_eq!(next(&mut job, answers), (step, true, change.clone()), "no message beside what is gathered");
            }
            assert!(matches!(next(&mut job, &[]), (_, false, Change::Switched(_))));
            let trained = u64::from(changes.last() == Some(&Change::TrialLeft));
            assert_eq!(job[1].look().step(), asked + 3 + trained);
        }
    }

    #[test]
    fn samples_follow_a_trial_with_candidates_of_ar_topk() {
        let (mut job, mut sent) = (job(2), Vec::new());
        let go = [Answer::of(Verdict::GoOn), Answer::of(Verdict::GoOn)];
        let one = [Answer::of(Verdict::GoOn), Answer::cannot("no memory")];
        // Whether ranks sample after it, what they answer, and in how many ticks it is over after it was announced.
        let trials: [(&str, bool, &[Answer], u64); 3] = [
            ("topk@0.1/allgather", false, &go, 3),
            ("topk@0.1/art-ring:star", true, &go, 3),
            ("topk@0.1/art-tree:var", true, &one, 1),
        ];
        for (id, (candidate, sampled, answers, ticks)) in (1..).zip(trials) {
            job[0].agreement().offer_trial(TrialPlan::new(id, vec![strategy(candidate)], 2, 0).unwrap());
            let mut next = |job: &mut Vec<Control>| {
                let answers = if job[0].gathers() { answers } else { &[] };
                tick(job, &mut sent, Duration::from_millis(300), answers).unwrap();
                assert!(job[1].sample() == job[0].sample());
                job[0].sample()
            };
            for _ in 0..=ticks {
                assert!(job[0].sample().is_none() && !job[0].is_sampled());
                next(&mut job);
            }
            if sampled {
                assert!(job[0].begins_sampling());
                for number in 0..=SAMPLED_STEPS {
                    assert_eq!((job[0].sample(), job[0].is_sampled()), (Some(number), number < SAMPLED_STEPS));
                    next(&mut job);
                }
            }
            assert_eq!(job[0].sample(), None);
        }
    }

    /// Of the same candidates they go on, of others they begin anew; a trial that runs ends them.
    #[test]
    fn trials_while_samples_are_sent() {
        let (mut job, mut sent) = (job(2), Vec::new());
        let go = [Answer::of(Verdict::GoOn), Answer::of(Verdict::GoOn)];
        let one = [Answer::of(Verdict::GoOn), Answer::cannot("no memory")];
        let mut ends = |job: &mut Vec<Control>, (id, candidate): (u64, &str), answers: &[Answer]| {
            job[0].agreement().offer_trial(TrialPlan::new(id, vec![strategy(candidate)], 2, 0).unwrap());
            loop {
                let answers = if job[0].gathers() { answers } else { &[] };
                match tick(job, &mut sent, Duration::from_millis(300), answers).unwrap().1 {
                    Change::None => {}
                    _ => return job[1].sample(),
                }
            }
        };
        let [star, var] = ["topk@0.1/art-ring:star", "topk@0.1/art-ring:var"];
        assert_eq!(ends(&mut job, (1, star), &one), Some(0));
        assert_eq!(ends(&mut job, (2, star), &one), Some(2), "the step of the announcement, and that of the answers");
        assert_eq!(ends(&mut job, (3, var), &one), Some(0));
        assert_eq!(ends(&mut job, (4, "topk@0.1/allgather"), &one), None);
        assert_eq!(ends(&mut job, (5, star), &one), Some(0));
        assert_eq!(ends(&mut job, (6, var), &go), None, "it runs");
    }

    /// Ranks agree on all of it, and a bucket's check covers the strategies of all others.
    #[test]
    fn a_plan_of_several_buckets_is_in_force_on_all_ranks_at_the_same_step() {
        let (mut job, mut sent) = (job(3), Vec::new());
        let plan: Plan = "2x none/dense-ring | topk(k=0.01)+ef(vanilla)/allgather".parse().unwrap();
        assert_eq!(job[0].agreement().offer_decision(Version(1), plan.clone()), Offer::Taken);
        let (_, change) = tick(&mut job, &mut sent, Duration::from_millis(300), &[]).unwrap();
        let in_force = InForce { version: Version(1), plan: plan.clone(), since_step: 1 };
        assert_eq!(change, Change::Switched(Box::new(in_force)));
        let (now, _) = tick(&mut job, &mut sent, Duration::from_millis(300), &[]).unwrap();
        let (dense, sparse) = (Strategy::DENSE_RING, strategy("topk(k=0.01)+ef(vanilla)/allgather"));
        assert_eq!([0, 1, 2, 7].map(|bucket| *now.strategy(bucket)), [dense, dense, sparse, sparse]);
        let mut other = self::job(2).remove(1);
        other.agreement = job[0].agreement.clone();
        assert_eq!(job[0].check(0, 5), other.check(0, 5));
        other.agreement.finish_step(Some(Announced::Decision { version: Version(1), plan: Plan::DENSE_RING }));
        job[0].agreement.finish_step(None);
        assert_ne!(job[0].check(0, 5), other.check(0, 5), "bucket 0 is dense in both");
    }

    #[test]
    fn a_rank_in_another_step_is_told_of() {
        let (mut job, mut sent) = (job(2), Vec::new());
        tick(&mut job, &mut sent, Duration::from_millis(300), &[]).unwrap();
        job[0].begin();
        let message = job[0].message();
        let mut behind = self::job(2).remove(1);
        behind.begin();
        let error = behind.accept(&message).unwrap_err().to_string();
        assert_eq!(error, "agree with rank 0: its message is of step 1, rank 1 is at step 0");
        assert!(behind.accept(&message[..3]).unwrap_err().to_string().contains("3 bytes"));
        job[1].begin();
        assert_eq!(job[0].check(3, 5), job[1].check(3, 5));
        assert!(job[0].check(3, 5) != behind.check(3, 5) && job[0].check(3, 5) != job[0].check(4, 5));
        assert_ne!(job[0].check(3, 5), job[0].check(3, 6));
        let text = job[1].desynchronised(0, 3).to_string();
        assert!(
            text.contains("rank 0 in step 1, bucket 3") && text.contains("rank 1: version 0, none/dense-ring"),
            "{text}"
        );
    }

    #[test]
    fn nothing_is_announced_where_nobody_steers() {
        let mut control = Control::new(Agreement::new(Rank(0), Strategy::DENSE_RING, 0), Rank(0));
        for _ in 0..20 {
            control.begin();
            assert!(!control.announces() && !control.is_due());
            assert_eq!(control.finish(Duration::from_millis(1), &[]), Change::None);
        }
    }
}
