//! The agreement of ranks that run at any speeds, whatever their agents and scripts say.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use flexcomm_domain::{Plan, Rank, Strategy, Version};
use flexcomm_trainer::{Agreement, Answer, Change, Control, Offer, Tick, TrialPlan, Verdict};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
use std::collections::VecDeque;
use std::time::Duration;

struct Node {
    control: Control,
    tick: Option<Tick>,
    began: usize,
    history: Vec<(Tick, Change)>,
    /// What rank 0 has broadcast to it, and what each rank has said to it.
    messages: VecDeque<Vec<u8>>,
    answers: Vec<VecDeque<Answer>>,
}

/// What a rank is told before a tick, what it says of a trial, and how long its ticks take: decisions that come late, twice and
/// backwards, trials, ranks that cannot run them, times from a millisecond to seconds.
struct World {
    offers: Vec<(u64, usize, bool)>,
    verdicts: Vec<u8>,
    times: Vec<u32>,
    stop: Option<usize>,
    asked: usize,
}

impl World {
    fn next<T: Clone>(asked: &mut usize, of: &[T]) -> T {
        *asked += 1;
        of[*asked % of.len()].clone()
    }

    fn offer(&mut self, rank: usize, agreement: &mut Agreement) {
        let (version, which, trial) = Self::next(&mut self.asked, &self.offers);
        if rank == 0 && self.stop.is_some_and(|when| self.asked > when) {
            agreement.request_stop();
        }
        // All ranks are told different things; only rank 0 may listen.
        let answer = match trial {
            true => agreement.offer_trial(TrialPlan::new(version + 1, vec![strategy(which); 2], 3, 0).unwrap()),
            false => agreement.offer_decision(Version(version + self.asked as u64 / 50), strategy(which)),
        };
        assert_eq!(answer == Offer::NotLeader, rank != 0);
    }

    fn answer(&mut self) -> Answer {
        match Self::next(&mut self.asked, &self.verdicts) {
            0 => Answer::cannot("no memory"),
            1 => Answer::of(Verdict::Diverged),
            2 => Answer::of(Verdict::Budget),
            _ => Answer::of(Verdict::GoOn),
        }
    }

    fn took(&mut self) -> Duration {
        Duration::from_millis(u64::from(Self::next(&mut self.asked, &self.times)))
    }
}

struct Job {
    nodes: Vec<Node>,
    ticks: usize,
}

impl Job {
    fn new(n: usize, ticks: usize) -> Self {
        let node = |rank: usize| {
            let rank = Rank(rank as u32);
            let mut control = Control::new(Agreement::new(rank, Strategy::DENSE_RING, 0), rank);
            control.steer(true);
            let (tick, began, history, messages) = Default::default();
            Node { control, tick, began, history, messages, answers: vec![VecDeque::new(); n] }
        };
        Self { nodes: (0..n).map(node).collect(), ticks }
    }

    fn done(&self, rank: usize) -> bool {
        let history = &self.nodes[rank].history;
        history.len() == self.ticks || history.last().is_some_and(|(_, change)| *change == Change::Stop)
    }

    fn begin(&mut self, rank: usize, world: &mut World) {
        let node = &mut self.nodes[rank];
        world.offer(rank, node.control.agreement());
        node.tick = Some(node.control.begin());
        node.began += 1;
        let message = (rank == 0 && node.control.announces()).then(|| node.control.message());
        let answer = node.control.gathers().then(|| world.answer());
        for other in &mut self.nodes {
            other.messages.extend(message.clone());
            other.answers[rank].extend(answer.clone());
        }
    }

    fn end(&mut self, rank: usize, world: &mut World) -> Result<(), String> {
        let node = &mut self.nodes[rank];
        if node.control.is_due() {
            let message = node.messages.pop_front().ok_or("it waits for a message that was not sent")?;
            node.control.accept(&message).map_err(|error| error.to_string())?;
        }
        let answers = match node.control.gathers() {
            true => node.answers.iter_mut().map(VecDeque::pop_front).collect::<Option<Vec<_>>>(),
            false => Some(Vec::new()),
        };
        let change = node.control.finish(world.took(), &answers.ok_or("it waits for an answer that was not sent")?);
        node.history.push((node.tick.take().unwrap(), change));
        Ok(())
    }

    /// Lets one rank do the next thing that it can. False when it has to wait: no gradient's exchange ends before all ranks
    /// have begun it.
    fn poke(&mut self, rank: usize, world: &mut World) -> Result<bool, String> {
        if self.done(rank) {
            return Ok(false);
        }
        if self.nodes[rank].tick.is_none() {
            self.begin(rank, world);
            return Ok(true);
        }
        let began = self.nodes[rank].began;
        let all = self.nodes.iter().all(|node| node.began >= began);
        if all {
            self.end(rank, world)?;
        }
        Ok(all)
    }

    fn run(&mut self, mut first: impl FnMut() -> usize, world: &mut World) -> Result<(), String> {
        let n = self.nodes.len();
        while !(0..n).all(|rank| self.done(rank)) {
            let (first, mut moved) = (first(), false);
            for i in 0..n {
                moved = moved || self.poke((first + i) % n, world)?;
            }
            if !moved {
                return Err("the job hangs".into());
            }
        }
        Ok(())
    }

    /// Ranks did the same, versions only grow, and each stands for one strategy.
    fn check(&self) -> Result<(), String> {
        let history = &self.nodes[0].history;
        if self.nodes.iter().any(|node| node.history != *history) {
            return Err("the ranks are desynchronised".into());
        }
        let mut last = (Version(0), Plan::DENSE_RING);
        for (tick, _) in history.iter().filter(|(tick, _)| tick.trial.is_none()) {
            let now = (tick.version, tick.plan.clone());
            if now.0 < last.0 || now.0 == last.0 && now.1 != last.1 {
                return Err(format!("{now:?} after {last:?}"));
            }
            last = now;
        }
        Ok(())
    }
}

fn strategy(i: usize) -> Strategy {
    const TEXTS: [&str; 4] = ["none@1/dense-tree", "fp16/dense-ring", "topk@0.1/allgather", "topk@0.01/art-ring:star"];
    TEXTS[i % TEXTS.len()].parse().unwrap()
}

proptest! {
    #[test]
    fn ranks_are_never_desynchronised(
        n in 1usize..10,
        order in prop::collection::vec(any::<u16>(), 1..200),
        offers in prop::collection::vec((0u64..12, 0usize..4, any::<bool>()), 1..40),
        verdicts in prop::collection::vec(0u8..20, 1..40),
        times in prop::collection::vec(1u32..3000, 1..20),
        stop in prop::option::of(5usize..900),
    ) {
        let (mut job, mut world) = (Job::new(n, 80), World { offers, verdicts, times, stop, asked: 0 });
        let mut at = 0;
        let first = || {
            at += 1;
            usize::from(order[at % order.len()])
        };
        let ran = job.run(first, &mut world).and_then(|()| job.check());
        prop_assert_eq!(ran, Ok(()));
        let stopped = job.nodes[0].history.last().is_some_and(|(_, change)| *change == Change::Stop);
        prop_assert!(stopped || job.nodes[0].history.len() == 80);
    }
}
