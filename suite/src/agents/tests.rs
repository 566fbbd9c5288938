//! Agents and controller on small networks.

use super::*;
use crate::adaptive;
use crate::cells::Phase;
use crate::families;
use crate::ranks::{Carried, Exchanged};
use crate::steps::{Compute, StepOf, Stragglers, Timeline};
use flexcomm_compression::codec::Element;
use flexcomm_controller::RawConfig;
use flexcomm_domain::{CodecBytes, Plan};
use flexcomm_exchange::How;
use flexcomm_truth::coefficients::{CodecSeconds, Gather};
use flexcomm_wire::{AppliedReport, CodecInfo, LinkReport, ReportBody, StepRecord, StepsReport};
use flexcomm_wire::{ThroughputReport, TrialOutcome, TrialReport};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn phase(seconds: f64, latency_ms: f64, mbit: f64) -> Phase {
    Phase { seconds, latency_ms, up_mbit: mbit, down_mbit: mbit, nics: Vec::new() }
}

fn cell(world: usize, ranks_per_nic: usize, phases: Vec<Phase>) -> Cell {
    Cell { world, ranks_per_nic, phases, ..families::drawn()[0].clone() }
}

fn hello(rank: usize, world: usize) -> Hello {
    let bytes = CodecBytes { header_bytes: 16, ..CodecBytes::PAPER };
    let codec = |text: &&str| CodecInfo::new(text.parse().unwrap(), bytes);
    Hello {
        codecs: ["topk", "fp16"].iter().map(codec).collect(),
        collectives: ["dense-ring", "allgather", "art-ring"].map(Into::into).to_vec(),
        ..Hello::new("j".parse().unwrap(), (rank as u32, world as u32), 1_000_000, "gloo")
    }
}

/// A network with its agents, and a job that follows its orders and reports made-up measurements.
struct Bench {
    net: Net<Token>,
    agents: Agents,
    /// The orders of each rank.
    orders: Vec<(f64, usize, JobOrders)>,
    running: Vec<(u64, Plan)>,
}

impl Bench {
    fn new(cell: &Cell) -> Self {
        Self::warm(cell, WARM_S)
    }

    /// Agents and controller begin so long before the job.
    fn warm(cell: &Cell, warm_s: f64) -> Self {
        let truth = Coefficients::frozen();
        let mut agents = Agents::new(cell, &truth, RawConfig::default().validate().unwrap()).unwrap();
        agents.warm_s = warm_s;
        let hellos = (0..cell.world).map(|rank| hello(rank, cell.world)).collect();
        let net = adaptive::begin(cell, &truth, 1, hellos, &mut agents);
        Self { net, agents, orders: Vec::new(), running: vec![(0, Plan::DENSE_RING); cell.world] }
    }

    fn on_node(&mut self, number: usize, does: impl FnOnce(&mut Node, &mut NodeContext<'_>)) {
        let began = self.agents.begins_at();
        let Agents { nodes, connections, in_flight, spent, .. } = &mut self.agents;
        does(
            &mut nodes[number],
            &mut NodeContext { network: &mut self.net.network, began, connections, in_flight, spent },
        );
    }

    /// Without a step of the job.
    fn idle(mut self, until: f64) -> Self {
        adaptive::idle(&mut self.net.network, &mut self.agents, until);
        self
    }

    /// The job steps by dense rings of a million values.
    fn train(self, until: f64) -> Self {
        self.exchange(How::Sum(Element::F32), until)
    }

    /// The job steps by one exchange of 4 MB parts.
    fn exchange(mut self, how: How, until: f64) -> Self {
        let world = self.running.len();
        let compute = Compute { seconds: 0.05, values_factor: 1.0 };
        let none = Stragglers { spread: 0.0, pause_share: 0.0, pause: 0.0 };
        let mut timeline = Timeline::new(world, vec![1_000_000], compute, none, Gather::default());
        let rounds = vec![Carried { how, bytes: 4_000_000, fixed: 0 }];
        let exchanged = [Exchanged { rounds, energies: Vec::new() }];
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (mut starts, mut number) = (vec![self.net.network.now(); world], 0);
        while starts[0] < until {
            let (codecs, plan) = (&[CodecSeconds::default()], &Plan::DENSE_RING);
            let of = StepOf { plan, exchanged: &exchanged, codecs, besides: &[], control: &[] };
            let step = timeline.step(&of, &mut rng).unwrap();
            let Self { net, agents, .. } = &mut self;
            let software = Coefficients::frozen().software;
            let others = &mut |network: &mut Shared, what| agents.handle(network, what);
            let times = job::run(&mut net.network, &net.mesh, software, &step.step, &starts, others).unwrap();
            for (rank, times) in times.ranks.iter().enumerate() {
                self.stepped(rank, number, (times.ended - times.began) * 1e6);
            }
            starts = times.ranks.iter().map(|times| times.ended).collect();
            number += 1;
        }
        self
    }

    fn stepped(&mut self, rank: usize, step: u64, took_us: f64) {
        let (job, at) = ("j".parse::<flexcomm_domain::JobId>().unwrap(), self.net.network.now());
        let mut messages = Vec::new();
        if let Some(orders) = self.agents.orders(rank) {
            self.orders.push((at, rank, orders.clone()));
            if let Some(new) = orders.decision.filter(|new| new.version > self.running[rank].0) {
                self.running[rank] = (new.version, Plan::try_from(&new.strategy).unwrap());
                let (version, digest) = (new.version, new.digest);
                messages.push(FromTrainer::Applied(AppliedReport {
                    job: job.clone(),
                    rank: rank as u32,
                    version,
                    digest,
                    step,
                }));
            }
            if let Some(trial) = orders.trial {
                let outcome = |strategy: &flexcomm_wire::StrategyWire| TrialOutcome {
                    strategy: strategy.clone(),
                    gain: 0.9,
                    energy: Some(1.0),
                    shadow_gain: None,
                    shadow_energy: None,
                    comp_us: 500.0,
                    sync_us: 1e5,
                    iterations: 10,
                };
                let outcomes = trial.candidates.iter().map(outcome).collect();
                let (rank, cost_us) = (rank as u32, 1e6);
                let job = job.clone();
                let (bytes, cpu_us, shadow_us) = Default::default();
                let report =
                    TrialReport { job, rank, id: trial.id, outcomes, aborted: None, cost_us, bytes, cpu_us, shadow_us };
                messages.push(FromTrainer::Trial(report));
            }
        }
        let (version, plan) = self.running[rank].clone();
        let record = StepRecord {
            step,
            compute_us: 5e4,
            sync_us: took_us - 5e4,
            wait_us: Some(0.0),
            step_us: took_us,
            bytes_sent: 6_000_000,
            gain: 1.0,
            energy: Some(1.0),
            loss: Some(1.0),
            ..StepRecord::default()
        };
        let (rank, steps) = (rank as u32, vec![record]);
        messages.push(FromTrainer::Steps(StepsReport { job, rank, version, strategy: (&plan).into(), steps }));
        messages.into_iter().for_each(|message| self.agents.report(&mut self.net.network, rank as usize, message));
    }

    /// The newest report of each link that had arrived at a time.
    fn links(&self, until: f64) -> BTreeMap<(usize, NodeName), LinkReport> {
        let taken = self.agents.controller_side.taken.iter().filter(|(at, ..)| *at <= until);
        let link = |(_, rank, report): &(f64, usize, Report)| match &report.body {
            ReportBody::Link(link) => Some(((*rank, link.peer.clone()), link.clone())),
            _ => None,
        };
        taken.filter_map(link).collect()
    }

    /// What each node's newest tests found towards its peers.
    fn tested(&self, until: f64) -> BTreeMap<(usize, NodeName), f64> {
        let reports = self.agents.controller_side.taken.iter().filter(|(at, ..)| *at <= until);
        let found = |(_, rank, report): &(f64, usize, Report)| match &report.body {
            ReportBody::Throughput(test) => Some(((*rank, test.peer.clone()), test.out_bps?)),
            _ => None,
        };
        reports.filter_map(found).collect()
    }

    /// The tests whose reports arrived between two times.
    fn tests(&self, from: f64, until: f64) -> Vec<ThroughputReport> {
        let taken = self.agents.controller_side.taken.iter().filter(|(at, ..)| (from..until).contains(at));
        let test = |(.., report): &(f64, usize, Report)| match &report.body {
            ReportBody::Throughput(report) => Some(report.clone()),
            _ => None,
        };
        taken.filter_map(test).collect()
    }

    /// All that was reported, ordered and spent.
    fn transcript(&self) -> String {
        format!("{:?}\n{:?}\n{:?}", self.agents.controller_side.taken, self.orders, self.agents.spent())
    }
}

fn near(value: f64, truth: f64) -> bool {
    (value / truth - 1.0).abs() < 0.1
}

#[test]
fn links_are_known_after_seconds_and_their_changes_too() {
    let cell = cell(4, 1, vec![phase(30.0, 5.0, 100.0), phase(1000.0, 40.0, 10.0)]);
    let bench = Bench::warm(&cell, 0.0).idle(40.0);
    assert_eq!(bench.agents.problems(), Vec::<String>::new());
    let known = bench.links(30.0);
    assert_eq!(known.len(), 12);
    for (link, report) in &known {
        assert!(near(report.latency_us, 5000.0) && report.latency_confidence > 0.5, "{link:?}: {report:?}");
        assert!(report.loss_out == 0.0 && report.loss_back == 0.0, "{link:?}: {report:?}");
    }
    let measured = bench.tested(30.0);
    assert!(!measured.is_empty() && measured.values().all(|bps| near(*bps, 100e6)), "{measured:?}");
    let soon = bench.links(38.0);
    assert!(soon.values().all(|report| near(report.latency_us, 40_000.0)), "{soon:?}");
    let tested: Vec<f64> = bench.tests(30.0, 40.0).iter().map(|report| report.out_bps.unwrap()).collect();
    assert!(!tested.is_empty() && tested.iter().all(|bps| near(*bps, 10e6)), "{tested:?}");
    let Spent { test_bytes, echo_bytes, report_bytes } = bench.agents.spent();
    assert!(test_bytes > 1e5 && echo_bytes > 40.0 * 12.0 * 5.0 * 200.0 && report_bytes > 1e5);
}

/// As daemons do: the job finds the links measured.
#[test]
fn links_are_known_when_the_job_begins() {
    let cell = cell(4, 1, vec![phase(40.0, 5.0, 100.0)]);
    let began = Bench::new(&cell).idle(1.0);
    assert_eq!(began.agents.problems(), Vec::<String>::new());
    let known = began.links(0.0);
    assert_eq!(known.len(), 12);
    for (link, report) in &known {
        assert!(near(report.latency_us, 5000.0) && report.latency_confidence >= 0.5, "{link:?}: {report:?}");
    }
    let tested = began.tested(0.0);
    assert!(tested.len() >= 6 && tested.values().all(|bps| near(*bps, 100e6)), "{tested:?}");
    // The first look finds every link; a bandwidth may be old, and unsure for that.
    let looks = began.agents.controller().looks(&"j".parse().unwrap());
    assert!(!looks.is_empty() && looks.iter().all(|look| look.verdict != "no-links"), "{looks:?}");
    assert!(began.agents.bytes() < began.agents.spent().test_bytes);
    assert!(Bench::warm(&cell, 0.0).links(0.0).is_empty());
}

#[test]
fn a_job_gets_a_decision_and_the_same_run_gives_the_same_bytes() {
    let cell = cell(4, 1, vec![phase(40.0, 5.0, 100.0), phase(1000.0, 5.0, 20.0)]);
    let run = || Bench::new(&cell).train(60.0);
    let bench = run();
    assert_eq!(bench.agents.problems(), Vec::<String>::new());
    for rank in 0..4 {
        let decided = bench.orders.iter().find(|(_, of, orders)| *of == rank && orders.decision.is_some());
        assert!(decided.is_some(), "{:?}", bench.agents.controller().looks(&"j".parse().unwrap()));
    }
    let predicted = bench.agents.predictions();
    assert!([true, false].iter().all(|made| predicted.iter().any(|prediction| prediction.version.is_some() == *made)));
    assert_eq!(bench.transcript(), run().transcript());
}

#[test]
fn ranks_of_one_node_have_one_agent() {
    let cell = cell(4, 2, vec![phase(1000.0, 5.0, 100.0)]);
    let bench = Bench::new(&cell).exchange(How::Gather, 40.0);
    assert_eq!(bench.agents.problems(), Vec::<String>::new());
    assert_eq!(bench.agents.nodes.len(), 2);
    let known = bench.links(40.0);
    assert_eq!(known.keys().cloned().collect::<Vec<_>>(), [(0, node_name(1).unwrap()), (1, node_name(0).unwrap())]);
    // Later its queues are in it.
    let before = bench.links(0.0);
    assert!(before.len() == 2 && before.values().all(|report| near(report.latency_us, 5000.0)), "{before:?}");
}

/// A grant that comes too late, and one for a peer that is not there, are reported and cost nothing.
#[test]
fn a_grant_that_cannot_be_used_is_reported() {
    let mut bench = Bench::new(&cell(2, 1, vec![phase(1000.0, 5.0, 100.0)])).idle(5.0);
    let grant = |id, peer: &str, valid_ms| {
        let peer = peer.parse().unwrap();
        flexcomm_wire::ThroughputGrant { id, peer, budget_bytes: 1 << 20, valid_ms }
    };
    bench.on_node(0, |node, context| {
        node.granted(context, grant(7001, "n1", 100));
        node.granted(context, grant(7002, "absent", 10_000));
    });
    let bench = bench.idle(6.0);
    let reports = bench.tests(5.0, 6.0);
    let report = |id| reports.iter().find(|report| report.grant == id).unwrap();
    let of = |id| report(id).error.clone().unwrap();
    assert_eq!((of(7001).as_str(), of(7002).as_str()), ("the grant has expired", "the peer is not in the probe plan"));
    assert_eq!([7001, 7002].map(|id| report(id).bytes), [0, 0]);
}

/// One that registers again while the timer of a heartbeat runs goes on with one chain of them.
#[test]
fn heartbeats_are_as_many_after_another_registration() {
    let mut bench = Bench::new(&cell(2, 1, vec![phase(1000.0, 5.0, 100.0)])).idle(30.0);
    bench.on_node(0, |node, context| {
        // The controller answers that it does not know the agent; 0.1 s later that it does.
        node.answer(context, Answer::Alive(Err("no such agent".to_owned())));
        context.timer(context.now() + 0.1, 0, Timer::Register);
    });
    let bench = bench.idle(61.0);
    let heartbeats = |node, from: f64| {
        let within = |(at, of): &&(f64, usize)| *of == node && (from..from + 20.0).contains(at);
        bench.agents.controller_side.heartbeats.iter().filter(within).count()
    };
    assert_eq!(bench.agents.problems(), ["no such agent"]);
    for node in 0..2 {
        let (before, after) = (heartbeats(node, 5.0), heartbeats(node, 40.0));
        assert!(before > 1 && after.abs_diff(before) <= 1, "node {node}: {before} heartbeats in 20 s, then {after}");
    }
}
