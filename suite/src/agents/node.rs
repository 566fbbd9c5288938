//! One agent, that of a node with some ranks: the simulated network delivers its messages, the shipped agent's code handles them.

use super::test::{self, Frame, Outcome, Test};
use super::{Answer, Call, InFlight, NodeContext, Timer, address, json_bytes, node_at};
use anyhow::{Context, Result};
use flexcomm_agent::parts::{
    Account, Action, Event, Follower, Held, LOOK_EVERY, Links, MAX_GRANTS, PROBE_SHARE, Prepared, REPORT_INTERVAL,
    Session, echo_addr, grant, merge, pace,
};
use flexcomm_domain::{JobId, NodeName};
use flexcomm_probes::auth::Key;
use flexcomm_probes::echo::{LEN, Loss, Prober, ProberLimits, Received, Responder, next_turn, turn};
use flexcomm_probes::{ECHO_PORT, Nanos, THROUGHPUT_PORT};
use flexcomm_wire::{
    FromTrainer, Heartbeat, Hello, JobOrders, MAX_BATCH, Orders, PROTOCOL, ProbePlan, Register, Registered, Report,
    ReportAck, ReportBatch, ReportBody, ThroughputGrant,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// What probing and reporting took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// Payload of throughput tests.
    pub test_bytes: f64,
    /// Echoes and their answers, with heads.
    pub echo_bytes: f64,
    /// Registrations, heartbeats, reports, orders and their answers, with heads.
    pub report_bytes: f64,
}

/// From one agent's start to the next one's: no two do everything at the same moments.
const STAGGER_S: f64 = 0.0137;
/// A refused registration is tried again after this time (the agent's longest wait), seconds.
const AGAIN_S: f64 = 5.0;
/// 2026-01-01: time 0 by the agents' wall clocks, microseconds.
const EPOCH_US: u64 = 1_767_225_600_000_000;

/// A peer of the probe plan.
struct Target {
    prober: Prober,
    turn: f64,
    next: Nanos,
}

/// A test with what it is for.
struct Running {
    test: Test,
    grant: ThroughputGrant,
    held: Held,
    peer: usize,
}

/// A rank's trainer, by its connection to the agent.
#[derive(Default)]
struct Trainer {
    session: Session,
    /// Those that it has not read yet.
    new_orders: Option<JobOrders>,
}

/// An agent.
pub(super) struct Node {
    number: usize,
    name: NodeName,
    /// Time 0.
    base: Instant,
    /// By its monotonic clock, seconds.
    booted_s: f64,
    /// Of both kernels, in a round trip.
    stack_s: f64,
    follower: Follower,
    /// By rank.
    trainers: BTreeMap<usize, Trainer>,
    /// The orders of their job, once one of them came.
    job: Option<JobOrders>,
    last_trial: u64,
    pub(super) problems: Vec<String>,
    links: Links,
    key: Key,
    responder: Responder,
    targets: BTreeMap<SocketAddr, Target>,
    /// So many probers began: each has a number of its own.
    sessions: u64,
    echo_interval_s: f64,
    /// When the next echo's timer runs out.
    echo_at: f64,
    account: Account,
    grants: VecDeque<(f64, ThroughputGrant)>,
    running: Option<Running>,
    tests: u64,
    log: Log,
}

/// Reports that are not stored at the controller yet.
#[derive(Default)]
struct Log {
    last_seq: u64,
    waiting: VecDeque<Report>,
    is_registered: bool,
    /// So many were accepted: heartbeats of an earlier one end.
    registrations: u64,
    heartbeat_s: f64,
    /// So many of the oldest are on their way.
    sent: usize,
    /// A timer runs until the next batch is sent.
    is_gathering: bool,
    delivered: f64,
    beat: Option<f64>,
}

impl Node {
    pub(super) fn new(number: usize, name: NodeName, base: Instant, stack_s: f64) -> Result<Self> {
        let token = flexcomm_probes::Token::new("of a simulated cluster").context("make the agents' token")?;
        Ok(Self {
            number,
            follower: Follower::new(name.clone()),
            name,
            base,
            // Clocks of machines do not agree.
            booted_s: 1000.0 + 61.37 * number as f64,
            stack_s,
            trainers: BTreeMap::new(),
            job: None,
            last_trial: 0,
            problems: Vec::new(),
            links: Links::new(base),
            key: token.echo_key(),
            responder: Responder::new(token.echo_key(), [number as u8; 32]),
            targets: BTreeMap::new(),
            sessions: 0,
            echo_interval_s: 1.0,
            echo_at: f64::INFINITY,
            account: Account::restored(0.0, PROBE_SHARE, 0.0),
            grants: VecDeque::new(),
            running: None,
            tests: 0,
            log: Log { delivered: f64::NEG_INFINITY, ..Log::default() },
        })
    }

    /// The job of its trainers.
    pub(super) fn job(&self) -> Option<&JobId> {
        self.job.as_ref().map(|orders| &orders.job)
    }

    /// What a rank's trainer has not read yet.
    pub(super) fn take_orders(&mut self, rank: usize) -> Option<JobOrders> {
        self.trainers.get_mut(&rank)?.new_orders.take()
    }

    fn instant(&self, now: f64) -> Instant {
        self.base + Duration::from_secs_f64(now)
    }

    /// Its monotonic clock.
    fn clock(&self, now: f64) -> Nanos {
        Nanos(((self.booted_s + now) * 1e9).round() as u64)
    }

    /// The simulated time at a moment of its clock.
    fn time_of(&self, clock: Nanos) -> f64 {
        clock.0 as f64 * 1e-9 - self.booted_s
    }

    fn wall_us(&self, now: f64) -> u64 {
        EPOCH_US + (now * 1e6) as u64
    }

    /// Begins.
    pub(super) fn begin(&mut self, context: &mut NodeContext<'_>) {
        let start = context.now() + STAGGER_S * self.number as f64;
        for timer in [Timer::Register, Timer::Look] {
            context.timer(start, self.number, timer);
        }
    }

    /// A message of the trainer of one of its ranks.
    pub(super) fn report(&mut self, context: &mut NodeContext<'_>, rank: usize, message: FromTrainer) {
        let trainer = self.trainers.entry(rank).or_default();
        match trainer.session.message(message) {
            Ok(Event::Joined(seen)) => {
                let none = || JobOrders { job: seen.job.clone(), decision: None, trial: None };
                self.job.get_or_insert_with(none);
                self.push(context, ReportBody::JobSeen(seen));
            }
            Ok(Event::Report(body)) => self.push(context, body),
            Ok(Event::Left) => {
                let left = self.trainers.remove(&rank);
                if let Some(Hello { job, rank, run, .. }) = left.and_then(|left| left.session.seen().cloned()) {
                    self.push(context, ReportBody::JobLeft { job, rank, run, connection_lost: false });
                }
            }
            Ok(Event::Rejected(why)) | Err(why) => self.problems.push(why),
        }
    }

    /// Announces to the controller the ranks that are connected.
    fn announce(&mut self, context: &mut NodeContext<'_>) {
        let here = self.trainers.values().filter_map(|trainer| trainer.session.seen().cloned());
        here.collect::<Vec<_>>().into_iter().for_each(|seen| self.push(context, ReportBody::JobSeen(seen)));
    }

    pub(super) fn timer(&mut self, context: &mut NodeContext<'_>, timer: Timer) {
        match timer {
            Timer::Register => self.register(context),
            Timer::Heartbeat(registration) => self.heartbeat(context, registration),
            Timer::Echo => self.echoes(context),
            Timer::Look => self.report_links(context),
            Timer::Deliver => self.deliver(context),
            Timer::Test(number) => self.look_at_test(context, number),
        }
    }

    // To and from the controller.

    fn register(&mut self, context: &mut NodeContext<'_>) {
        let request = Register {
            protocol: PROTOCOL,
            node: self.name.clone(),
            instance: self.number as u64 + 1,
            previous: Vec::new(),
            addr: address(self.number),
            echo_port: ECHO_PORT,
            throughput_port: THROUGHPUT_PORT,
            may_shape: false,
            software: env!("CARGO_PKG_VERSION").to_owned(),
        };
        context.call(self.number, json_bytes(&request), Call::Register(request));
    }

    /// An answer or orders of the controller.
    pub(super) fn answer(&mut self, context: &mut NodeContext<'_>, answer: Answer) {
        match answer {
            Answer::Registered(Ok(registered)) => self.registered(context, &registered),
            Answer::Registered(Err(why)) => self.lost(context, why),
            Answer::Alive(Err(why)) | Answer::Stored(Err(why)) if self.log.is_registered => self.lost(context, why),
            Answer::Alive(Err(_)) | Answer::Stored(Err(_)) => {}
            Answer::Alive(Ok(())) => {}
            Answer::Stored(Ok(ack)) => self.stored(context, ack),
            Answer::Orders(orders) => self.follow(context, orders.orders.clone()),
        }
    }

    /// The registration is no longer valid.
    fn lost(&mut self, context: &mut NodeContext<'_>, why: String) {
        self.problems.push(why);
        (self.log.is_registered, self.log.sent) = (false, 0);
        context.timer(context.now() + AGAIN_S, self.number, Timer::Register);
    }

    fn registered(&mut self, context: &mut NodeContext<'_>, registered: &Registered) {
        self.log.is_registered = true;
        self.log.registrations += 1;
        self.log.heartbeat_s = pace::heartbeat(registered).as_secs_f64();
        self.follower.registered();
        self.announce(context);
        context.call(self.number, 0, Call::Follow);
        self.heartbeat(context, self.log.registrations);
    }

    fn heartbeat(&mut self, context: &mut NodeContext<'_>, registration: u64) {
        if !self.log.is_registered || registration != self.log.registrations {
            return;
        }
        context.timer(context.now() + self.log.heartbeat_s, self.number, Timer::Heartbeat(registration));
        let since = |at: f64| Duration::from_secs_f64((context.now() - at).min(1e6));
        let every = Duration::from_secs_f64(self.log.heartbeat_s);
        if !pace::is_beat_due(self.log.beat.map(since), Some(since(self.log.delivered)), every) {
            return;
        }
        self.log.beat = Some(context.now());
        let heartbeat = Heartbeat {
            instance: self.number as u64 + 1,
            now_us: self.wall_us(context.now()),
            orders_epoch: self.follower.epoch(),
            spooled: self.log.waiting.len() as u64,
            hosts: Vec::new(),
        };
        context.call(self.number, json_bytes(&heartbeat), Call::Heartbeat(heartbeat));
    }

    fn push(&mut self, context: &mut NodeContext<'_>, body: ReportBody) {
        self.log.last_seq += 1;
        self.log.waiting.push_back(Report { seq: self.log.last_seq, at_us: self.wall_us(context.now()), body });
        self.gather(context);
    }

    /// A batch goes soon, with what comes until then.
    fn gather(&mut self, context: &mut NodeContext<'_>) {
        let Log { is_registered, is_gathering, sent, delivered, .. } = self.log;
        if is_registered && !is_gathering && sent == 0 {
            let since = (context.now() - delivered).min(1e6);
            self.log.is_gathering = true;
            let at = context.now() + pace::gather(Duration::from_secs_f64(since)).as_secs_f64();
            context.timer(at, self.number, Timer::Deliver);
        }
    }

    fn deliver(&mut self, context: &mut NodeContext<'_>) {
        self.log.is_gathering = false;
        if !self.log.is_registered || self.log.waiting.is_empty() {
            return;
        }
        let reports: Vec<Report> = self.log.waiting.iter().take(MAX_BATCH).cloned().collect();
        self.log.sent = reports.len();
        let batch = ReportBatch { instance: self.number as u64 + 1, reports };
        context.call(self.number, json_bytes(&batch), Call::Reports(batch.reports));
    }

    /// The next batch goes at once where reports waited for the answer to this one.
    fn stored(&mut self, context: &mut NodeContext<'_>, ack: ReportAck) {
        let refused = ack.refused.into_iter().map(|run| run.reason);
        self.problems.extend(ack.first_reason.into_iter().chain(refused));
        self.log.waiting.retain(|report| report.seq > ack.acked_seq);
        (self.log.sent, self.log.delivered) = (0, context.now());
        if !self.log.waiting.is_empty() {
            self.deliver(context);
        }
    }

    fn follow(&mut self, context: &mut NodeContext<'_>, orders: Orders) {
        let actions = match self.follower.accept(orders) {
            Ok(actions) => actions,
            Err(refusal) => return self.problems.push(format!("failed to {refusal}")),
        };
        for action in actions {
            match action {
                Action::Probe(plan) => self.probe(context, &plan),
                Action::Grant(grant) => self.granted(context, grant),
                Action::Job(orders) => self.job_orders(&orders),
                Action::JobGone(_) | Action::Shape(_) => {}
            }
        }
    }

    fn job_orders(&mut self, new: &JobOrders) {
        let Some(sent) = self.job.as_mut().filter(|sent| sent.job == new.job) else { return };
        let (merged, rejected) = merge(sent, self.last_trial, new);
        self.problems.extend(rejected.iter().map(|part| format!("{part:?}")));
        if merged != *sent {
            self.last_trial = merged.trial.as_ref().map_or(self.last_trial, |trial| trial.id);
            self.trainers.values_mut().for_each(|trainer| trainer.new_orders = Some(merged.clone()));
            *sent = merged;
        }
    }

    // Echoes.

    /// Follows another probe plan.
    fn probe(&mut self, context: &mut NodeContext<'_>, plan: &ProbePlan) {
        let now = self.instant(context.now());
        self.links.set_peers((&plan.peers, Duration::from_millis(plan.echo_interval_ms)), now);
        self.echo_interval_s = plan.echo_interval_ms as f64 * 1e-3;
        let wanted: Vec<SocketAddr> = plan.peers.iter().map(echo_addr).collect();
        self.targets.retain(|peer, _| wanted.contains(peer));
        let now = self.clock(context.now());
        for (number, peer) in wanted.iter().enumerate() {
            let turn = turn(number, wanted.len());
            let (key, sessions) = (&self.key, &mut self.sessions);
            let next = now.plus(self.echo_interval_s * turn);
            let target = self.targets.entry(*peer).or_insert_with(|| {
                *sessions += 1;
                Target { prober: Prober::new(key.clone(), *sessions, ProberLimits::default()), turn, next }
            });
            target.turn = turn;
        }
        self.arm_echoes(context);
    }

    fn arm_echoes(&mut self, context: &mut NodeContext<'_>) {
        let Some(next) = self.targets.values().map(|target| target.next).min() else { return };
        let at = self.time_of(next);
        if at < self.echo_at {
            self.echo_at = at;
            context.timer(at, self.number, Timer::Echo);
        }
    }

    /// Asks the peers whose turn it is.
    fn echoes(&mut self, context: &mut NodeContext<'_>) {
        if context.now() < self.echo_at {
            // A timer from before an earlier one was set.
            return;
        }
        self.echo_at = f64::INFINITY;
        let now = self.clock(context.now());
        for (peer, target) in &mut self.targets {
            // Rounding to nanoseconds must not make it late.
            if target.next <= Nanos(now.0 + 1000) {
                target.prober.expire(now);
                let packet = target.prober.send(now);
                target.next = next_turn(now.max(target.next), target.turn, self.echo_interval_s);
                if let Some(to) = node_at(peer.ip()) {
                    context.packet(self.number, to, InFlight::Echo { from: self.number, to, packet });
                }
            }
        }
        self.arm_echoes(context);
    }

    /// A peer's echo request.
    pub(super) fn echo(&mut self, context: &mut NodeContext<'_>, from: usize, packet: &[u8; LEN]) {
        let now = self.clock(context.now());
        if let Ok(answer) = self.responder.handle(now, address(from), packet) {
            let packet = answer.seal(now, self.responder.key());
            context.packet(self.number, from, InFlight::EchoAnswer { from: self.number, to: from, packet });
        }
    }

    /// A peer's echo reply.
    pub(super) fn echo_answer(&mut self, context: &mut NodeContext<'_>, from: usize, packet: &[u8; LEN]) {
        let peer = SocketAddr::new(address(from), ECHO_PORT);
        let (arrived, now) = (self.clock(context.now() + self.stack_s), self.instant(context.now()));
        let Some(target) = self.targets.get_mut(&peer) else { return };
        match target.prober.receive(arrived, packet) {
            Ok(Received::Reply(sample)) => self.links.echo(peer, sample.rtt_s, now),
            Ok(Received::Hello) => {
                target.next = arrived;
                self.arm_echoes(context);
            }
            // Late.
            Err(_) => {}
        }
    }

    /// Reports the links that are due.
    fn report_links(&mut self, context: &mut NodeContext<'_>) {
        context.timer(context.now() + LOOK_EVERY.as_secs_f64(), self.number, Timer::Look);
        let (clock, now) = (self.clock(context.now()), self.instant(context.now()));
        let losses: BTreeMap<SocketAddr, Loss> =
            self.targets.iter_mut().map(|(peer, target)| (*peer, target.prober.loss(clock))).collect();
        for report in self.links.reports(&losses, now, REPORT_INTERVAL) {
            self.push(context, ReportBody::Link(report));
        }
    }

    // Throughput tests.

    /// Takes a grant that was received just now.
    pub(super) fn granted(&mut self, context: &mut NodeContext<'_>, grant: ThroughputGrant) {
        if self.grants.len() < MAX_GRANTS {
            self.grants.push_back((context.now(), grant));
        }
        self.next_test(context);
    }

    /// Begins the next granted test, if none runs.
    fn next_test(&mut self, context: &mut NodeContext<'_>) {
        while self.running.is_none()
            && let Some((received, grant)) = self.grants.pop_front()
        {
            let now = context.now();
            let waited = Duration::from_secs_f64(now - received);
            match grant::prepare(&grant, waited, &self.links, &mut self.account, now) {
                Ok(prepared) => self.begin_test(context, grant, prepared),
                Err(failed) => self.push(context, ReportBody::Throughput(grant::report(&grant, &Err(failed), None))),
            }
        }
    }

    fn begin_test(&mut self, context: &mut NodeContext<'_>, grant: ThroughputGrant, prepared: Prepared) {
        let Prepared { peer, plan, held } = prepared;
        let Some(server) = node_at(peer.addr) else { return };
        let Some(mut connections) = connections(self.number, server, context) else { return };
        self.tests += 1;
        let test = Test::begin(self.tests, plan, &mut connections);
        self.running = Some(Running { test, grant, held, peer: server });
        context.timer(context.now() + test::LOOK_S, self.number, Timer::Test(self.tests));
    }

    /// A frame of one of this agent's tests arrived, here or at its peer.
    pub(super) fn test_frame(&mut self, context: &mut NodeContext<'_>, number: u64, frame: Frame) {
        self.of_test(context, number, |test, connections| test.arrived(connections, frame));
    }

    fn look_at_test(&mut self, context: &mut NodeContext<'_>, number: u64) {
        if self.of_test(context, number, Test::look) {
            context.timer(context.now() + test::LOOK_S, self.number, Timer::Test(number));
        }
    }

    /// Whether the test of this number goes on.
    fn of_test(
        &mut self,
        context: &mut NodeContext<'_>,
        number: u64,
        does: impl FnOnce(&mut Test, &mut test::TestConnections<'_>) -> Option<Outcome>,
    ) -> bool {
        let Some(running) = self.running.as_mut().filter(|running| running.test.number == number) else { return false };
        let Some(mut connections) = connections(self.number, running.peer, context) else { return false };
        match does(&mut running.test, &mut connections) {
            None => true,
            Some(outcome) => {
                self.end_test(context, &outcome);
                false
            }
        }
    }

    fn end_test(&mut self, context: &mut NodeContext<'_>, outcome: &Outcome) {
        let Some(Running { grant, held, .. }) = self.running.take() else { return };
        let report = grant::report(&grant, outcome, None);
        grant::settle(&report, held, &mut self.links, &mut self.account);
        context.spent.test_bytes += report.bytes as f64;
        self.push(context, ReportBody::Throughput(report));
        self.next_test(context);
    }
}

fn connections<'a>(
    client: usize,
    server: usize,
    context: &'a mut NodeContext<'_>,
) -> Option<test::TestConnections<'a>> {
    let (out, back) = (context.connections.tests[client][server]?, context.connections.tests[server][client]?);
    let now = context.now();
    Some(test::TestConnections { network: context.network, now, client, out, back })
}
