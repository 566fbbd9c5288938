//! The agreement over a control group: a process group beside the one that carries gradients. Pure.
//!
//! One tick is one synchronised backward pass. Every so many ticks rank 0 broadcasts a message of [`MESSAGE_BYTES`], without
//! waiting for it: its tick, what is in force, a plan or none, and when the next message comes. All ranks take it in at the end of
//! the tick in which it is due, and what it announces is in force in the tick after. Which ticks these are follows from the
//! messages alone, so it is the same on all ranks.
//!
//! Before a trial, and in each of its iterations, the ranks gather what each says of itself instead: whether it can run the trial,
//! whether the trial should end. Everything is launched when a tick begins and taken in when a tick ends, by which time all
//! ranks have launched it: no rank waits for one that waits for it in a collective of the script.

use crate::agreement::{Agreement, Change, Disagreement, Tick};
use crate::word::{ControlWord, TrialPlan, WORD_MAX, WordError};
use flexcomm_domain::Rank;
use std::time::Duration;

/// Bytes of a control message: two of the schedule, two of the word's length, and the longest word.
pub const MESSAGE_BYTES: usize = 4 + WORD_MAX;

/// A broadcast takes some 0.1 ms of the host, and messages come so seldom that this is under 1 % of the steps between them.
const APART: Duration = Duration::from_millis(20);

/// ... but at most so many steps apart, however short steps are: when the network collapses they become long.
const MOST_APART: u8 = 8;

/// From this step time on, a message that is broadcast beside a step's own collectives has arrived when the step ends. Shorter
/// steps leave it another one.
const LONG: Duration = Duration::from_millis(250);

/// When messages come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Schedule {
    /// Ticks from one message to the next.
    every: u8,
    /// Ticks that a message has to arrive, its own included; at most `every`.
    delay: u8,
}

impl Schedule {
    /// Before any step time is known.
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
    /// The ranks do not run the same step, strategy or bucket.
    #[error("agree with {who} in step {step}, bucket {bucket}: it runs another step, strategy or bucket than {ours}")]
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
    /// A message of another size, or with a schedule that no rank 0 makes.
    #[error("read a control message: {what} is {value}")]
    Message {
        /// Which field.
        what: &'static str,
        /// As found.
        value: usize,
    },
    /// Rank 0's message cannot be read.
    #[error(transparent)]
    Word(#[from] WordError),
    /// Rank 0's message contradicts what this rank knows.
    #[error(transparent)]
    Plan(#[from] Disagreement),
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
}

impl Control {
    /// Around an agreement.
    pub fn new(agreement: Agreement, rank: Rank) -> Self {
        let (schedule, due, asked, step_time) = (Schedule::FIRST, None, None, None);
        Self { agreement, rank, steered: false, ticks: 0, schedule, next: 0, due, asked, step_time }
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

    fn in_trial(&self) -> bool {
        self.agreement.trial_iterations().is_some()
    }

    /// Whether the ranks gather in this tick what each says of itself.
    pub fn gathers(&self) -> bool {
        self.asked.is_some() || self.in_trial()
    }

    /// Starts a tick.
    pub fn begin(&mut self) -> Tick {
        let free = self.due.is_none() && !self.gathers();
        let announces = self.steered && free && self.ticks >= self.next;
        if announces {
            self.next = self.ticks;
            self.due = Some(self.ticks + u64::from(self.schedule.delay) - 1);
        }
        self.agreement.begin_with(announces)
    }

    /// Whether a message is broadcast in this tick, between [`Self::begin`] and its end.
    pub fn announces(&self) -> bool {
        self.due.is_some() && self.ticks == self.next
    }

    /// Rank 0's message for the broadcast of this tick, [`MESSAGE_BYTES`]; zeros on other ranks, which receive it.
    pub fn message(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MESSAGE_BYTES);
        if self.rank == Rank(0) {
            let following = self.step_time.map_or(Schedule::FIRST, Schedule::of);
            bytes.extend_from_slice(&[following.every, following.delay, 0, 0]);
            self.agreement.word_in(u64::from(self.schedule.delay) - 1).encode(&mut bytes);
            // At most WORD_MAX, far below 2^16.
            let length = (bytes.len() - 4) as u16;
            bytes[2..4].copy_from_slice(&length.to_le_bytes());
        }
        bytes.resize(MESSAGE_BYTES, 0);
        bytes
    }

    /// Whether this tick ends with a message, see [`Self::accept`].
    pub fn is_due(&self) -> bool {
        self.due == Some(self.ticks)
    }

    /// Takes in the message that is due, before [`Self::finish`].
    pub fn accept(&mut self, bytes: &[u8]) -> Result<(), ControlError> {
        let wrong = |what, value| ControlError::Message { what, value };
        let Some(([every, delay, a, b], rest)) = bytes.split_first_chunk() else {
            return Err(wrong("its length", bytes.len()));
        };
        let (every, delay, length) = (*every, *delay, usize::from(u16::from_le_bytes([*a, *b])));
        if !(1..=MOST_APART).contains(&every) || !(1..=every).contains(&delay) {
            return Err(wrong("its schedule", usize::from(every)));
        }
        let word = rest.get(..length).ok_or(wrong("the length of its word", length))?;
        self.agreement.accept(Rank(0), &ControlWord::decode(word)?)?;
        self.schedule = Schedule { every, delay };
        Ok(())
    }

    /// Ends a tick that took so long, after its last bucket. `can`: all ranks have said that they can run the trial that was
    /// asked for.
    pub fn finish(&mut self, took: Duration, can: bool) -> Change {
        if self.in_trial() {
            return self.agreement.finish();
        }
        self.step_time = Some(took);
        let due = self.is_due();
        let asked = self.asked.take().filter(|_| can);
        if due {
            // By what the message says, and never before the tick after it.
            self.next = (self.next + u64::from(self.schedule.every)).max(self.ticks + 1);
            self.due = None;
        }
        self.ticks += 1;
        match asked {
            Some(plan) => self.agreement.start_trial(plan),
            None => {
                self.asked = if due { self.agreement.take_trial() } else { None };
                self.agreement.finish_with(due)
            }
        }
    }

    /// 32 bits over everything that must be alike on all ranks in a bucket's exchange. splitmix64's finaliser over the parts.
    pub fn check(&self, bucket: u32, length: usize) -> u32 {
        let word = self.agreement.word();
        let iteration = word.iteration.map_or(0, |i| u64::from(i) + 1);
        let parts = [word.step, word.version.0, word.digest.0, iteration, u64::from(bucket), length as u64];
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
        let word = self.agreement.word();
        let trial = word.iteration.map_or(String::new(), |i| format!(", iteration {i} of a trial"));
        let strategy = self.agreement.strategy();
        let ours = format!("rank {}: version {}, {strategy}{trial}", self.rank, word.version);
        ControlError::Desynchronised { who: format!("rank {rank}"), step: word.step, bucket, ours }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::Offer;
    use crate::word::TrialPlan;
    use flexcomm_domain::{Strategy, Version};
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
        (took, can): (Duration, bool),
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
        let ends = (1..).zip(job.iter_mut()).map(|(rank, control)| control.finish(took * rank, can));
        let changes: Vec<Change> = ends.collect();
        assert!(changes.iter().all(|change| *change == changes[0]), "{changes:?}");
        Ok((ticks[0], changes[0].clone()))
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
                let (_, change) = tick(&mut job, &mut sent, (took, true)).unwrap();
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

        #[test]
        fn any_message_is_an_error_or_taken(mut bytes in prop::collection::vec(any::<u8>(), 0..400), ours: bool) {
            let mut job = job(1);
            job[0].begin();
            if ours && bytes.len() > 40 {
                let length = (bytes.len() - 4) as u16;
                bytes[..2].copy_from_slice(&[2, 1]);
                bytes[2..4].copy_from_slice(&length.to_le_bytes());
                bytes[4..9].copy_from_slice(b"FLXW\x02");
            }
            let _ = job[0].accept(&bytes);
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
        for step in 0..30 {
            let mut next = job[0].clone();
            next.begin();
            broadcasts.extend(next.announces().then_some(step));
            tick(&mut job, &mut sent, (Duration::from_millis(5), true)).unwrap();
        }
        assert_eq!(broadcasts, [0, 1, 5, 9, 13, 17, 21, 25, 29], "one at once, then every fourth step");
    }

    #[test]
    fn a_trial_begins_where_all_can_and_decisions_come_after_it() {
        let (mut job, mut sent) = (job(2), Vec::new());
        let plan = |id| TrialPlan::new(id, vec![strategy("topk@0.1/allgather")], 3, 0).unwrap();
        let mut next = |job: &mut Vec<Control>, can| {
            sent.clear();
            let (tick, change) = tick(job, &mut sent, (Duration::from_millis(300), can)).unwrap();
            (tick.trial.is_some(), sent.is_empty(), change)
        };
        for (id, can) in [(1, false), (2, true)] {
            job[0].agreement().offer_trial(plan(id));
            assert_eq!(next(&mut job, true), (false, false, Change::None));
            assert!(job.iter().all(|rank| rank.asked() == Some(&plan(id)) && rank.gathers()));
            job[0].agreement().offer_decision(Version(id), strategy("fp16/dense-ring"));
            let begins = if can { Change::TrialStarts(plan(id)) } else { Change::None };
            assert_eq!(next(&mut job, can), (false, true, begins), "no message beside what is gathered");
            for left in (0..if can { 3 } else { 0 }).rev() {
                assert!(job.iter().all(Control::gathers));
                let ends = if left == 0 { Change::TrialEnds(None) } else { Change::None };
                assert_eq!(next(&mut job, true), (true, true, ends));
            }
            assert!(matches!(next(&mut job, true), (false, false, Change::Switched(_))));
        }
    }

    #[test]
    fn a_rank_in_another_step_is_told_of() {
        let (mut job, mut sent) = (job(2), Vec::new());
        tick(&mut job, &mut sent, (Duration::from_millis(300), true)).unwrap();
        job[0].begin();
        let message = job[0].message();
        let mut behind = self::job(2).remove(1);
        behind.begin();
        let error = behind.accept(&message).unwrap_err().to_string();
        assert_eq!(error, "agree with rank 0: its frame is of step 1, rank 1 is at step 0");
        assert!(behind.accept(&message[..3]).unwrap_err().to_string().contains("its length is 3"));
        assert!(behind.accept(&[9; 80]).unwrap_err().to_string().contains("its schedule is 9"));
        job[1].begin();
        assert_eq!(job[0].check(3, 5), job[1].check(3, 5));
        assert!(job[0].check(3, 5) != behind.check(3, 5) && job[0].check(3, 5) != job[0].check(4, 5));
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
            assert_eq!(control.finish(Duration::from_millis(1), true), Change::None);
        }
    }
}
