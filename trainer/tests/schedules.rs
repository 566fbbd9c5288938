//! The agreement over the real schedules' frames, in any order in which a network may deliver them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use flexcomm_collectives::{Round, Schedule, allgather, binomial_broadcast, ring_allreduce, tree_allreduce};
use flexcomm_domain::{Collective, Rank, Strategy, Version};
use flexcomm_trainer::{AbortCause, Agreement, Change, ControlWord, Offer, Tick, TrialPlan};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
use std::collections::{BTreeMap, VecDeque};

/// What the ranks run in a tick, as the worker does.
fn exchanges(tick: &Tick, n: u32) -> Vec<Schedule> {
    let turn = tick.step + tick.trial.map_or(0, |t| u64::from(t.within));
    let root = Rank((turn % u64::from(n)) as u32);
    match tick.strategy.collective() {
        Collective::DenseRing => vec![ring_allreduce(n).unwrap()],
        Collective::DenseTree => vec![tree_allreduce(n).unwrap()],
        Collective::Allgather => vec![allgather(n).unwrap()],
        Collective::ArtRing => vec![binomial_broadcast(n, root).unwrap(), ring_allreduce(n).unwrap()],
        Collective::ArtTree => vec![binomial_broadcast(n, root).unwrap(), tree_allreduce(n).unwrap()],
    }
}

/// One rank of the simulated job.
struct Node {
    agreement: Agreement,
    /// The tick under way and its rounds.
    tick: Option<(Tick, Vec<Round>)>,
    at: usize,
    /// Whether the sends of the round have been posted.
    posted: bool,
    history: Vec<(Tick, Change)>,
}

impl Node {
    fn stopped(&self) -> bool {
        self.history.last().is_some_and(|(_, change)| *change == Change::Stop)
    }
}

/// What is done to a rank before each of its ticks.
type Meddler<'a> = &'a mut dyn FnMut(usize, &mut Agreement);

struct Job {
    nodes: Vec<Node>,
    links: BTreeMap<(Rank, Rank), VecDeque<ControlWord>>,
    ticks: usize,
}

impl Job {
    fn new(n: u32, initial: Strategy, ticks: usize) -> Self {
        let node = |rank| Node {
            agreement: Agreement::new(Rank(rank), initial, 0),
            tick: None,
            at: 0,
            posted: false,
            history: Vec::new(),
        };
        Self { nodes: (0..n).map(node).collect(), links: BTreeMap::new(), ticks }
    }

    fn done(&self, rank: usize) -> bool {
        self.nodes[rank].stopped() || self.nodes[rank].history.len() == self.ticks
    }

    /// Lets one rank do the next thing it can: begin, send, receive or finish. False when it has to wait.
    fn poke(&mut self, rank: usize, offer: Meddler) -> Result<bool, String> {
        if self.done(rank) {
            return Ok(false);
        }
        let (n, own) = (self.nodes.len() as u32, Rank(rank as u32));
        let node = &mut self.nodes[rank];
        let Some((tick, rounds)) = &node.tick else {
            offer(rank, &mut node.agreement);
            let tick = node.agreement.begin();
            let rounds = exchanges(&tick, n).iter().flat_map(|s| s.for_rank(own)).collect();
            (node.tick, node.at, node.posted) = (Some((tick, rounds)), 0, false);
            return Ok(true);
        };
        let Some(round) = rounds.get(node.at) else {
            node.history.push((*tick, node.agreement.finish()));
            node.tick = None;
            return Ok(true);
        };
        if !node.posted {
            for send in &round.sends {
                let mut bytes = Vec::new();
                node.agreement.word().encode(&mut bytes);
                let word = ControlWord::decode(&bytes).map_err(|e| e.to_string())?;
                self.links.entry((own, send.peer)).or_default().push_back(word);
            }
            node.posted = true;
            return Ok(true);
        }
        if round.recvs.iter().any(|r| self.links.get(&(r.peer, own)).is_none_or(VecDeque::is_empty)) {
            return Ok(false);
        }
        for recv in &round.recvs {
            let word = self.links.get_mut(&(recv.peer, own)).and_then(VecDeque::pop_front).ok_or("no frame")?;
            node.agreement.accept(recv.peer, &word).map_err(|e| e.to_string())?;
        }
        (node.at, node.posted) = (node.at + 1, false);
        Ok(true)
    }

    /// Runs to the end; `first` says who goes next if it can, the ranks after it follow.
    fn run(&mut self, mut first: impl FnMut() -> usize, offer: Meddler) -> Result<(), String> {
        let n = self.nodes.len();
        while !(0..n).all(|rank| self.done(rank)) {
            let first = first();
            let mut moved = false;
            for i in 0..n {
                moved = self.poke((first + i) % n, offer)?;
                if moved {
                    break;
                }
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
            return Err("ranks ran apart".into());
        }
        let mut strategies: BTreeMap<Version, Strategy> = BTreeMap::new();
        let mut last = Version(0);
        for (tick, _) in history {
            if tick.version < last {
                return Err(format!("version {} after {last}", tick.version));
            }
            last = tick.version;
            let known = *strategies.entry(tick.version).or_insert(tick.strategy);
            if tick.trial.is_none() && known != tick.strategy {
                return Err(format!("two strategies under version {last}"));
            }
        }
        Ok(())
    }
}

fn strategy(i: usize) -> Strategy {
    const TEXTS: [&str; 5] = [
        "none@1/dense-ring",
        "none@1/dense-tree",
        "topk@0.1/allgather",
        "topk@0.01/art-ring:star",
        "topk@0.01/art-tree:var",
    ];
    TEXTS[i % TEXTS.len()].parse().unwrap()
}

/// For every collective, every number of ranks up to 33 and several turns of the root, also when one rank
/// moves only when nobody else can.
#[test]
fn what_rank_0_announces_is_in_force_everywhere_at_the_next_tick() {
    for n in 1..=33u32 {
        for under in 0..5 {
            for announced in 0..n.min(5) as u64 {
                let mut job = Job::new(n, strategy(under), announced as usize + 2);
                let mut offer = |rank: usize, agreement: &mut Agreement| {
                    if rank == 0 && agreement.step() == announced {
                        assert_eq!(agreement.offer_decision(Version(1), strategy(under + 1)), Offer::Taken);
                    }
                };
                let slowest = announced as usize * 7 % n as usize;
                job.run(|| slowest + 1, &mut offer).unwrap_or_else(|e| panic!("{n} ranks: {e}"));
                job.check().unwrap_or_else(|e| panic!("{n} ranks: {e}"));
                for node in &job.nodes {
                    let versions: Vec<_> = node.history.iter().map(|(tick, _)| tick.version.0).collect();
                    let (last, before) = versions.split_last().unwrap();
                    assert!(*last == 1 && before.iter().all(|v| *v == 0), "{n} ranks: {versions:?}");
                }
            }
        }
    }
}

/// When a rank does not hear the announcement, the next frame between it and the others is refused, or each side
/// waits for frames that the other does not send (which a timeout ends). Nobody finishes that tick.
#[test]
fn a_lost_announcement_never_ends_in_a_wrong_sum() {
    let mut refusals = 0;
    for n in 2..=9u32 {
        for under in 0..5 {
            let mut job = Job::new(n, strategy(under), 9);
            let deaf = n - 1;
            let mut offer = |rank: usize, agreement: &mut Agreement| {
                if rank == 0 && agreement.step() == 1 {
                    agreement.offer_decision(Version(1), strategy(under + 1));
                }
            };
            let (mut turn, mut refused, mut moved) = (0, None, true);
            while moved && refused.is_none() {
                (turn, moved) = (turn + 1, false);
                for i in 0..n as usize {
                    for (_, words) in job.links.iter_mut().filter(|((_, to), _)| to.0 == deaf) {
                        words.iter_mut().for_each(|word| word.plan = None);
                    }
                    match job.poke((i + turn) % n as usize, &mut offer) {
                        Ok(poked) => moved |= poked,
                        Err(error) => refused = refused.or(Some(error)),
                    }
                }
            }
            let finished = job.nodes.iter().map(|node| node.history.len()).max();
            assert_eq!(finished, Some(2), "{n} ranks under {}: a tick was finished", strategy(under));
            if let Some(error) = refused {
                refusals += 1;
                let names = error.contains("version") && error.contains(&format!("rank {deaf}"));
                assert!(names, "{n} ranks: {error}");
            }
        }
    }
    assert!(refusals > 20, "only {refusals} were refused, the rest waited");
}

proptest! {
    /// Decisions that come late, twice, backwards, from an agent that was restarted; trials and their end; a
    /// wish to stop from anywhere; any order of delivery: ranks never run apart and never hang.
    #[test]
    fn ranks_never_run_apart(
        n in 1u32..10,
        order in prop::collection::vec(any::<u16>(), 1..200),
        offers in prop::collection::vec((0u64..12, 0usize..5, any::<bool>(), any::<bool>()), 1..40),
        stop in prop::option::of((0usize..10, 5usize..60)),
    ) {
        let mut job = Job::new(n, Strategy::DENSE_RING, 60);
        let mut asked = 0;
        let mut offer = |rank: usize, agreement: &mut Agreement| {
            asked += 1;
            if stop.is_some_and(|(who, when)| who % n as usize == rank && asked > when * n as usize) {
                agreement.request_stop();
            }
            // All ranks are told different things; only rank 0 may listen.
            let (version, which, trial, abort) = offers[asked % offers.len()];
            let answer = if trial {
                let candidates = vec![strategy(which), strategy(which + 1)];
                agreement.offer_trial(TrialPlan::new(version + 1, candidates, 3, 0).unwrap())
            } else {
                agreement.offer_decision(Version(version + asked as u64 / 50), strategy(which))
            };
            assert_eq!(answer == Offer::NotLeader, rank != 0);
            if abort {
                agreement.abort_trial(AbortCause::Budget);
            }
        };
        let mut at = 0;
        let first = || {
            at += 1;
            usize::from(order[at % order.len()])
        };
        let ran = job.run(first, &mut offer).and_then(|()| job.check());
        prop_assert_eq!(ran, Ok(()));
        prop_assert!(job.nodes[0].stopped() || job.nodes[0].history.len() == 60);
    }
}
