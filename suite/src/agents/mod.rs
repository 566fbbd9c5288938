//! The control plane of a job that adapts: an agent on each node, which is a NIC with its ranks, and the controller on the first
//! node, with messages of the simulated network for sockets.
//!
//! What an agent decides is the shipped agent's code (`flexcomm_agent::parts`, `flexcomm_probes`), at simulated times: echoes with
//! their packets and cookies, estimates, grants and their budget, when which report is due and delivered, which orders are followed. What the controller decides is the shipped controller's
//! ([`Embedded`]). Echoes, tests, reports, heartbeats and orders share ports with the job. Left out: traceroutes (the network has
//! no hops), shaping, what is kept on disk, HTTP's and TLS's handshakes, and the time that agents and controller compute: a pass of
//! the controller takes no simulated time.
//!
//! As in a cluster, the daemons run before the job does, for `WARM_S`, and have measured the links by then. Their clocks begin with
//! them (`NodeContext::now`); times in a run's results are by the job's clock (`Agents::by_job`).

mod controller_side;
mod node;
mod test;

pub use node::Spent;

use crate::adaptive::{ControlPlane, Prediction};
use crate::cells::{Cell, Net};
use anyhow::{Context, Result};
use controller_side::ControllerSide;

use flexcomm_controller::{Config, Embedded};
use flexcomm_domain::NodeName;
use flexcomm_probes::echo::LEN;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job;
use flexcomm_truth::network::{ConnectionId, Network, NetworkEvent};
use flexcomm_wire::{FromTrainer, Heartbeat, Hello, JobOrders, PROTOCOL, Register, Registered, Report, ReportAck};
use node::Node;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use test::Frame;

/// The network that agents share with the job.
type Shared = Network<job::Token<Token>>;

/// What timers and messages of agents and controller carry.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token(Carries);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Carries {
    Timer(usize, Timer),
    InFlight(u64),
    /// Of a throughput test: whose, which, what.
    Test(usize, u64, Frame),
    Pass,
}

/// What an agent waits for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Timer {
    Register,
    /// Of the registration with this number.
    Heartbeat(u64),
    Echo,
    Look,
    Deliver,
    Test(u64),
}

/// A message in flight that is too large for a token.
#[derive(Debug)]
enum InFlight {
    Echo { from: usize, to: usize, packet: [u8; LEN] },
    EchoAnswer { from: usize, to: usize, packet: [u8; LEN] },
    ToController(usize, Call),
    ToAgent(usize, Answer),
}

/// What an agent asks of the controller.
#[derive(Debug)]
enum Call {
    Register(Register),
    Follow,
    Heartbeat(Heartbeat),
    Reports(Vec<Report>),
}

/// What the controller sends to an agent.
#[derive(Debug)]
enum Answer {
    Registered(Result<Registered, String>),
    Alive(Result<(), String>),
    Stored(Result<ReportAck, String>),
    Orders(Arc<flexcomm_controller::Published>),
}

/// So long before the job's first step agents and controller begin, in seconds: each link was tested by then.
const WARM_S: f64 = 60.0;

/// Bytes of a request's or an answer's head (HTTP/1.1 as the agent's client writes it, with its token).
const HEAD_BYTES: f64 = 250.0;
/// Bytes of IP's and UDP's heads.
const PACKET_BYTES: f64 = 28.0;

/// The connections of agents.
#[derive(Debug)]
struct Connections {
    /// `tests[from][to]`, of nodes; their datagrams and those of echoes take the same way.
    tests: Vec<Vec<Option<ConnectionId>>>,
    /// To the controller.
    up: Vec<ConnectionId>,
    /// From the controller.
    down: Vec<ConnectionId>,
}

/// What an agent or the controller may use while it handles an event.
struct NodeContext<'a> {
    network: &'a mut Shared,
    /// When agents and controller began, by the network's clock.
    began: f64,
    connections: &'a Connections,
    in_flight: &'a mut MessagesInFlight,
    spent: &'a mut Spent,
}

/// Messages in flight, by number.
#[derive(Debug, Default)]
struct MessagesInFlight {
    next: u64,
    waiting: BTreeMap<u64, InFlight>,
}

impl MessagesInFlight {
    fn add(&mut self, message: InFlight) -> job::Token<Token> {
        self.next += 1;
        self.waiting.insert(self.next, message);
        job::Token::Other(Token(Carries::InFlight(self.next)))
    }
}

impl NodeContext<'_> {
    /// Seconds since agents and controller began.
    fn now(&self) -> f64 {
        self.network.now() - self.began
    }

    /// A timer that runs out at such a moment; never before it, whatever rounding does.
    fn set(&mut self, at: f64, carries: Carries) {
        let moment = at + self.began;
        let moment = if moment - self.began < at { moment.next_up() } else { moment };
        self.network.timer(moment, job::Token::Other(Token(carries)));
    }

    fn timer(&mut self, at: f64, node: usize, timer: Timer) {
        self.set(at, Carries::Timer(node, timer));
    }

    /// A packet of an echo.
    fn packet(&mut self, from: usize, to: usize, message: InFlight) {
        if let Some(way) = self.connections.tests[from][to] {
            let bytes = LEN as f64 + PACKET_BYTES;
            self.spent.echo_bytes += bytes;
            let token = self.in_flight.add(message);
            self.network.datagram(way, bytes, token);
        }
    }

    /// A request with a body of so many bytes.
    fn call(&mut self, from: usize, bytes: usize, call: Call) {
        let bytes = bytes as f64 + HEAD_BYTES;
        self.spent.report_bytes += bytes;
        let token = self.in_flight.add(InFlight::ToController(from, call));
        self.network.send(self.connections.up[from], bytes, token);
    }

    /// An answer, or orders.
    fn answer(&mut self, to: usize, bytes: usize, answer: Answer) {
        let bytes = bytes as f64 + HEAD_BYTES;
        self.spent.report_bytes += bytes;
        let token = self.in_flight.add(InFlight::ToAgent(to, answer));
        self.network.send(self.connections.down[to], bytes, token);
    }
}

/// Bytes of a message's JSON.
fn json_bytes(message: &impl serde::Serialize) -> usize {
    // Plain data with string keys: there is nothing in it that JSON cannot hold.
    serde_json::to_vec(message).map_or(0, |json| json.len())
}

fn address(node: usize) -> IpAddr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 0, 0, 1)) + node as u32).into()
}

/// The node at an address.
fn node_at(addr: IpAddr) -> Option<usize> {
    let IpAddr::V4(addr) = addr else { return None };
    u32::from(addr).checked_sub(u32::from(Ipv4Addr::new(10, 0, 0, 1))).map(|node| node as usize)
}

fn node_name(node: usize) -> Result<NodeName> {
    NodeName::new(&format!("n{node}")).with_context(|| format!("name node {node}"))
}

/// Agents and controller of a cell.
pub struct Agents {
    cell: Cell,
    nodes: Vec<Node>,
    controller_side: ControllerSide,
    connections: Connections,
    in_flight: MessagesInFlight,
    spent: Spent,
    /// How long they run before the job.
    warm_s: f64,
    /// Of tests before it.
    warm_bytes: f64,
}

impl Agents {
    /// Of a cell's nodes, before any began; the controller by this configuration.
    pub fn new(cell: &Cell, truth: &Coefficients, config: Config) -> Result<Self> {
        let names = (0..cell.nics()).map(node_name).collect::<Result<Vec<_>>>()?;
        let controller = Embedded::open(config).context("start the controller")?;
        // Any moment does: only times since are used.
        let base = std::time::Instant::now();
        let node = |(number, name): (usize, &NodeName)| Node::new(number, name.clone(), base, truth.tcp.stack_s);
        Ok(Self {
            cell: cell.clone(),
            nodes: names.iter().enumerate().map(node).collect::<Result<Vec<_>>>()?,
            controller_side: ControllerSide::new(controller, names),
            connections: Connections { tests: Vec::new(), up: Vec::new(), down: Vec::new() },
            in_flight: MessagesInFlight::default(),
            spent: Spent::default(),
            warm_s: WARM_S,
            warm_bytes: 0.0,
        })
    }

    /// The controller, to ask what it decided and why.
    pub fn controller(&self) -> &Embedded {
        &self.controller_side.controller
    }

    /// What probing and reporting took so far.
    pub fn spent(&self) -> Spent {
        self.spent
    }

    /// What went wrong: refused requests, reports and parts of orders, with the reasons.
    pub fn problems(&self) -> Vec<String> {
        let of_agent = |node: &Node| node.problems.clone();
        self.nodes.iter().flat_map(of_agent).chain(self.controller_side.problems.iter().cloned()).collect()
    }

    /// Seconds since the job began, of a time since the controller did.
    fn by_job(&self, since_start: Duration) -> f64 {
        since_start.as_secs_f64() + self.begins_at()
    }

    fn deliver(&mut self, network: &mut Shared, carries: Carries) {
        let began = self.begins_at();
        let Self { nodes, controller_side, connections, in_flight, spent, .. } = self;
        let message = match carries {
            Carries::InFlight(id) => in_flight.waiting.remove(&id),
            _ => None,
        };
        let context = &mut NodeContext { network, began, connections, in_flight, spent };
        match carries {
            Carries::Timer(node, timer) => nodes[node].timer(context, timer),
            Carries::Test(node, number, frame) => nodes[node].test_frame(context, number, frame),
            Carries::Pass => controller_side.pass(context),
            Carries::InFlight(_) => match message {
                Some(InFlight::Echo { from, to, packet }) => nodes[to].echo(context, from, &packet),
                Some(InFlight::EchoAnswer { from, to, packet }) => nodes[to].echo_answer(context, from, &packet),
                Some(InFlight::ToController(from, call)) => controller_side.call(context, from, call),
                Some(InFlight::ToAgent(to, answer)) => nodes[to].answer(context, answer),
                None => {}
            },
        }
    }
}

impl ControlPlane for Agents {
    type Token = Token;

    fn begins_at(&self) -> f64 {
        -self.warm_s
    }

    fn begin(&mut self, net: &mut Net<Token>) {
        let (cell, nodes) = (&self.cell, self.cell.nics());
        let mut connect = |from: usize, to: usize| net.connect(cell, from, to);
        let tests = (0..nodes).map(|from| (0..nodes).map(|to| (from != to).then(|| connect(from, to))).collect());
        let tests = tests.collect();
        let up = (0..nodes).map(|node| connect(node, 0)).collect();
        let down = (0..nodes).map(|node| connect(0, node)).collect();
        self.connections = Connections { tests, up, down };
        let began = self.begins_at();
        let Self { nodes, controller_side, connections, in_flight, spent, .. } = self;
        let context = &mut NodeContext { network: &mut net.network, began, connections, in_flight, spent };
        controller_side.arm(context);
        nodes.iter_mut().for_each(|node| node.begin(context));
    }

    fn join(&mut self, network: &mut Shared, hellos: Vec<Hello>) {
        self.warm_bytes = self.spent.test_bytes;
        for (rank, hello) in hellos.into_iter().enumerate() {
            self.report(network, rank, FromTrainer::Hello { protocol: PROTOCOL, hello });
        }
    }

    fn handle(&mut self, network: &mut Shared, what: NetworkEvent<Token>) {
        let (NetworkEvent::Delivered(Token(carries)) | NetworkEvent::Timer(Token(carries))) = what;
        self.deliver(network, carries);
    }

    fn report(&mut self, network: &mut Shared, rank: usize, message: FromTrainer) {
        let began = self.begins_at();
        let Self { cell, nodes, connections, in_flight, spent, .. } = self;
        nodes[cell.nic(rank)].report(&mut NodeContext { network, began, connections, in_flight, spent }, rank, message);
    }

    fn orders(&mut self, rank: usize) -> Option<JobOrders> {
        self.nodes[self.cell.nic(rank)].take_orders(rank)
    }

    fn bytes(&self) -> f64 {
        self.spent.test_bytes - self.warm_bytes
    }

    fn predictions(&self) -> Vec<Prediction> {
        let job = self.nodes.first().and_then(Node::job);
        let made = job.map_or(Ok(Vec::new()), |job| self.controller_side.controller.decisions(job)).unwrap_or_default();
        let prediction = |made: flexcomm_controller::MadeDecision| {
            let (sync_s, version) = (made.predicted?.t_sync_s, Some(made.version.0));
            Some(Prediction { version, at_s: self.by_job(made.at), plan: made.plan, sync_s })
        };
        let looks = job.map_or(&[][..], |job| self.controller_side.controller.looks(job));
        let predicted = |look: &flexcomm_controller::Look| {
            let (plan, sync_s) = look.in_force.clone()?;
            Some(Prediction { version: None, at_s: self.by_job(look.at), plan, sync_s })
        };
        made.into_iter().filter_map(prediction).chain(looks.iter().filter_map(predicted)).collect()
    }
}

#[cfg(test)]
mod tests;
