//! The controller without sockets: as over HTTP, at times that the test sets.

use flexcomm_controller::{Embedded, RawConfig};
use flexcomm_domain::{Plan, Strategy};
use flexcomm_wire::{Heartbeat, ReportAck, ReportBody};
use std::time::{Duration, Instant};

use super::common::{Agent, Network, job, node};

const FAST: Network = Network { latency_us: 100.0, bandwidth_bps: 1e11 };
const SLOW: Network = Network { latency_us: 20_000.0, bandwidth_bps: 2e7 };

/// Steps in each of an agent's batches.
const STEPS: u64 = 5;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// An agent with the trainer of one rank, which follows orders as soon as it sees them.
struct Simulated {
    agent: Agent,
    epoch: u64,
    running: (u64, Strategy),
    trial: u64,
    step: u64,
}

impl Simulated {
    fn new(rank: u32) -> Self {
        let (agent, running) = (Agent::new(&format!("n{rank}"), rank), (0, Strategy::DENSE_RING));
        Self { agent, epoch: 0, running, trial: 0, step: 0 }
    }
}

/// A controller and the agents of a job.
struct Cluster {
    embedded: Embedded,
    all: Vec<Simulated>,
    /// Every order, as its agent got it.
    orders: Vec<String>,
    passes: Vec<Duration>,
    /// Real time in passes.
    passing: Duration,
    /// Real time in what agents send.
    ingesting: Duration,
}

impl Cluster {
    /// Each agent registers and its trainer says hello, at time 0.
    fn start(world: u32) -> Self {
        let embedded = Embedded::open(RawConfig::default().validate().unwrap()).unwrap();
        let all = (0..world).map(Simulated::new).collect();
        let (orders, passes, passing, ingesting) = Default::default();
        let mut cluster = Self { embedded, all, orders, passes, passing, ingesting };
        for i in 0..cluster.all.len() {
            let agent = &mut cluster.all[i].agent;
            agent.seq = cluster.embedded.register(&agent.registration()).unwrap().acked_seq;
        }
        for i in 0..cluster.all.len() {
            let mut hello = cluster.all[i].agent.hello_with(&["topk", "lwtopk", "fp16", "powersgd", "qsgd"]);
            if let ReportBody::JobSeen(seen) = &mut hello {
                seen.world = world;
            }
            assert_eq!(cluster.report(i, vec![hello]).rejected, 0);
        }
        cluster
    }

    fn report(&mut self, i: usize, bodies: Vec<ReportBody>) -> ReportAck {
        let agent = &mut self.all[i].agent;
        let batch = agent.batch(bodies);
        self.embedded.reports(&agent.name, batch.instance, batch.reports).unwrap()
    }

    /// Passes that are due before a time, then the time.
    fn go_to(&mut self, at: Duration) {
        while self.embedded.next_pass() < at {
            let next = self.embedded.next_pass();
            self.embedded.set_time(next);
            let begun = Instant::now();
            self.embedded.pass().unwrap();
            self.passing += begun.elapsed();
            self.passes.push(next);
        }
        self.embedded.set_time(at);
    }

    /// What an agent does in a second: a heartbeat, then its orders, its links and its steps.
    fn act(&mut self, i: usize, network: Network) {
        let mut bodies = self.follow(i, network);
        let peers: Vec<String> = self.all.iter().map(|other| other.agent.name.to_string()).collect();
        let this = &mut self.all[i];
        let others = peers.iter().filter(|peer| **peer != this.agent.name.to_string());
        bodies.extend(others.map(|peer| this.agent.link(peer, network)));
        let sent = if this.running.1.is_dense() { 1.0 } else { 0.1 };
        let sync_us = 1e3 * network.latency_us.sqrt() + sent * 6.4e13 / network.bandwidth_bps;
        bodies.push(this.agent.steps(this.running, (this.step, STEPS), sync_us));
        this.step += STEPS;
        let (name, instance) = (this.agent.name.clone(), this.agent.instance);
        let beat = Heartbeat { instance, now_us: 1, orders_epoch: this.epoch, spooled: 0, hosts: Vec::new() };
        let begun = Instant::now();
        self.embedded.heartbeat(&name, &beat).unwrap();
        let ack = self.report(i, bodies);
        self.ingesting += begun.elapsed();
        assert_eq!(ack.first_reason, None);
    }

    /// Reports of what new orders ask for.
    fn follow(&mut self, i: usize, network: Network) -> Vec<ReportBody> {
        let this = &mut self.all[i];
        let Some(published) = self.embedded.orders(&this.agent.name).filter(|p| p.orders.epoch > this.epoch) else {
            return vec![];
        };
        self.orders.push(published.json.clone());
        this.epoch = published.orders.epoch;
        let mut bodies = Vec::new();
        for orders in &published.orders.jobs {
            if let Some(new) = orders.decision.as_ref().filter(|d| d.version > this.running.0) {
                this.running = (new.version, Strategy::try_from(&new.strategy).unwrap());
                bodies.push(this.agent.applied(new.version, new.digest, this.step));
            }
            if let Some(trial) = orders.trial.as_ref().filter(|t| t.id > this.trial) {
                this.trial = trial.id;
                bodies.push(this.agent.trial(trial));
            }
        }
        bodies.extend(this.agent.tests(&published.orders, Some(network)));
        bodies
    }

    /// Until a time: every agent acts once a second, one after the other.
    fn run(&mut self, until_s: u64, network: impl Fn(u64) -> Network) {
        let from = self.passes.last().map_or(0, |at| at.as_secs() + 1);
        let apart = 1000 / self.all.len() as u64;
        for second in from..until_s {
            for i in 0..self.all.len() {
                self.go_to(ms(second * 1000 + 37 + apart * i as u64));
                self.act(i, network(second));
            }
        }
    }
}

fn fast_then_slow(second: u64) -> Network {
    if second < 30 { FAST } else { SLOW }
}

#[test]
fn a_job_is_decided_its_orders_say_so_and_what_was_predicted_is_known() {
    let mut cluster = Cluster::start(2);
    cluster.run(90, fast_then_slow);
    let made = cluster.embedded.decisions(&job()).unwrap();
    let last = made.last().expect("a decision");
    assert!(!last.plan.is_dense() && made.len() >= 2, "{made:#?}");
    assert!(last.at > ms(30_000) && last.at < ms(90_000) && last.applied_at_step.is_some(), "{last:#?}");
    assert!(made.is_sorted_by(|a, b| a.version < b.version && a.at < b.at));
    let predicted = last.predicted.expect("it was a candidate");
    assert!(predicted.t_sync_s > 0.0 && predicted.t_step_s > predicted.t_sync_s + predicted.t_comp_s);
    assert!(predicted.gain > 0.0 && predicted.gain <= 1.0 && last.report.contains(&last.reason), "{last:#?}");
    for this in &cluster.all {
        let published = cluster.embedded.orders(&this.agent.name).unwrap();
        let order = published.orders.jobs[0].decision.as_ref().unwrap();
        assert_eq!((order.version, &order.reason), (last.version.0, &last.reason));
        assert_eq!(this.running, (last.version.0, *last.plan.last()));
    }
    let trials = cluster.embedded.trials(&job()).unwrap();
    assert!(trials[0].ended.is_some_and(|ended| ended > trials[0].at) && trials[0].aborted.is_none(), "{trials:#?}");
    assert!(trials.iter().all(|trial| !trial.candidates.is_empty() && !trial.why.is_empty()));
    let looks = cluster.embedded.looks(&job());
    assert_eq!((looks[0].at, looks[0].verdict.as_str()), (ms(400), "no-links"), "{looks:#?}");
    assert!(!looks[0].waiting.is_empty() && looks.iter().any(|look| look.verdict == "change"));
    assert!(looks.is_sorted_by(|a, b| a.at < b.at));
    assert_eq!(looks[0].in_force, None);
    let predicted = |plan: &Plan| {
        let plan = plan.clone();
        looks.iter().filter_map(|look| look.in_force.as_ref()).filter(move |(of, _)| *of == plan)
    };
    assert!(predicted(&last.plan).all(|(_, sync_s)| *sync_s > 0.0));
    let newest = looks.iter().rev().find_map(|look| look.in_force.as_ref());
    let dense = predicted(&Plan::DENSE_RING).count();
    assert!(dense > 0 && newest.is_some_and(|(plan, _)| *plan == last.plan), "{looks:#?}");
}

#[test]
fn the_same_requests_at_the_same_times_give_the_same_bytes() {
    let run = || {
        let mut cluster = Cluster::start(4);
        cluster.run(60, fast_then_slow);
        let Cluster { embedded, orders, passes, .. } = cluster;
        let found = (embedded.decisions(&job()).unwrap(), embedded.trials(&job()).unwrap(), orders, passes);
        format!("{found:#?}\n{:#?}", embedded.looks(&job()))
    };
    let (once, again) = (run(), run());
    assert!(once.contains("MadeDecision") && once.contains("AskedTrial"));
    let differs = once.lines().zip(again.lines()).find(|(a, b)| a != b);
    assert!(once == again, "{differs:?}");
}

#[test]
fn it_passes_at_ticks_and_soon_after_news_as_the_loop_does() {
    let mut cluster = Cluster::start(2);
    // Registered and told of a job right after the first pass: looked at after the debounce, and again for what came in it.
    cluster.go_to(ms(3500));
    assert_eq!(cluster.passes, [400, 800, 2300].map(ms));
    cluster.act(0, FAST);
    assert_eq!(cluster.embedded.next_pass(), ms(3520));
    cluster.go_to(ms(3530));
    cluster.act(1, FAST);
    assert_eq!(cluster.embedded.next_pass(), ms(3920), "no sooner than the debounce");
    cluster.go_to(ms(3990));
    cluster.act(0, FAST);
    cluster.go_to(ms(4321));
    assert_eq!(cluster.passes[3..], [3520, 3920, 4320].map(ms));
    assert_eq!(cluster.embedded.next_pass(), ms(5820), "the tick after the last pass");
}

#[test]
fn time_never_goes_back_and_what_is_wrong_is_refused_as_over_http() {
    let mut cluster = Cluster::start(2);
    cluster.go_to(ms(5000));
    cluster.embedded.set_time(ms(1000));
    cluster.embedded.pass().unwrap();
    assert_eq!(cluster.embedded.next_pass(), ms(6500));
    let mut wrong = cluster.all[0].agent.link("n1", FAST);
    if let ReportBody::Link(link) = &mut wrong {
        link.latency_us = -1.0;
    }
    let ack = cluster.report(0, vec![wrong]);
    assert!(ack.rejected == 1 && ack.first_reason.unwrap().contains("latency_us is -1"));
    let hello = cluster.all[0].agent.hello();
    let mut batch = cluster.all[0].agent.batch(vec![hello]);
    batch.reports.extend(batch.reports.clone());
    let refused = cluster.embedded.reports(&node("n0"), batch.instance, batch.reports).unwrap_err();
    assert!(refused.contains("seq of report 1 is 3") && refused.contains("above the one before it (3)"), "{refused}");
    let refused = cluster.embedded.reports(&node("x"), 1, vec![]).unwrap_err();
    assert!(refused.contains("node x is not registered"), "{refused}");
    let beat = Heartbeat { instance: 99, now_us: 1, orders_epoch: 0, spooled: 0, hosts: Vec::new() };
    assert!(cluster.embedded.heartbeat(&node("n0"), &beat).unwrap_err().contains("register again"));
    let mut register = cluster.all[0].agent.registration();
    register.protocol += 1;
    assert!(cluster.embedded.register(&register).unwrap_err().contains("the agent speaks protocol"));
    assert!(cluster.embedded.orders(&node("x")).is_none());
    assert!(cluster.embedded.decisions(&"x".parse().unwrap()).unwrap().is_empty());
}
