//! The world beside a job that adapts: an agent on the node of each rank and the controller beside the first NIC, with messages of
//! the simulated network for sockets.
//!
//! What an agent decides is the shipped agent's code (`flexcomm_agent::parts`, `flexcomm_probes`), at simulated times: echoes with
//! their packets and cookies, estimates, looks at TCP flows by the connections' counters, grants and their budget, when which
//! report is due and delivered, which orders are followed. What the controller decides is the shipped controller's
//! ([`Embedded`]). Echoes, tests, reports, heartbeats and orders share ports with the job. Left out: traceroutes (the network has
//! no hops), shaping, what is kept on disk, HTTP's and TLS's handshakes, and the time that agents and controller compute: a pass of
//! the controller takes no simulated time.

mod desk;
mod node;
mod test;

pub use node::Spent;

use crate::adaptive::{ControlPlane, Prediction};
use crate::cells::{Cell, Net};
use anyhow::{Context, Result};
use desk::Desk;

use flexcomm_controller::{Config, Embedded};
use flexcomm_domain::NodeName;
use flexcomm_probes::echo::LEN;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job;
use flexcomm_truth::network::{ConnectionId, Happened, Network};
use flexcomm_wire::{FromTrainer, Heartbeat, Hello, JobOrders, Register, Registered, Report, ReportAck};
use node::Node;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use test::Word;

/// The network that agents share with the job.
type Shared = Network<job::Token<Token>>;

/// What timers and messages of agents and controller carry.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token(Carries);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Carries {
    Timer(usize, Timer),
    Letter(u64),
    /// Of a throughput test: whose, which, what.
    Test(usize, u64, Word),
    Pass,
}

/// What an agent waits for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Timer {
    Register,
    Beat,
    Echo,
    Look,
    Flows,
    Deliver,
    Test(u64),
}

/// What is on its way and too large for a token.
#[derive(Debug)]
enum Letter {
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
    Beat(Heartbeat),
    Reports(Vec<Report>),
}

/// What it hears.
#[derive(Debug)]
enum Answer {
    Registered(Result<Registered, String>),
    Alive(Result<(), String>),
    Stored(Result<ReportAck, String>),
    Orders(Arc<flexcomm_controller::Published>),
}

/// Bytes of a request's or an answer's head (HTTP/1.1 as the agent's client writes it, with its token).
const HEAD_BYTES: f64 = 250.0;
/// Bytes of IP's and UDP's heads.
const PACKET_BYTES: f64 = 28.0;

/// The connections of agents, and those of the job that they look at.
#[derive(Debug)]
struct Wires {
    /// `job[from][to]`.
    job: Vec<Vec<Option<ConnectionId>>>,
    /// The same for tests, whose datagrams and those of echoes take the same way.
    tests: Vec<Vec<Option<ConnectionId>>>,
    /// To the controller.
    up: Vec<ConnectionId>,
    /// From the controller.
    down: Vec<ConnectionId>,
}

/// What an agent or the controller has in its hands while something happens.
struct World<'a> {
    network: &'a mut Shared,
    wires: &'a Wires,
    letters: &'a mut Letters,
    spent: &'a mut Spent,
}

/// Those on their way.
#[derive(Debug, Default)]
struct Letters {
    next: u64,
    waiting: BTreeMap<u64, Letter>,
}

impl Letters {
    fn post(&mut self, letter: Letter) -> job::Token<Token> {
        self.next += 1;
        self.waiting.insert(self.next, letter);
        job::Token::Other(Token(Carries::Letter(self.next)))
    }
}

impl World<'_> {
    fn now(&self) -> f64 {
        self.network.now()
    }

    fn timer(&mut self, at: f64, rank: usize, timer: Timer) {
        self.network.timer(at, job::Token::Other(Token(Carries::Timer(rank, timer))));
    }

    /// A packet of an echo.
    fn packet(&mut self, from: usize, to: usize, letter: Letter) {
        if let Some(way) = self.wires.tests[from][to] {
            let bytes = LEN as f64 + PACKET_BYTES;
            self.spent.echo_bytes += bytes;
            let token = self.letters.post(letter);
            self.network.datagram(way, bytes, token);
        }
    }

    /// A request with a body of so many bytes.
    fn call(&mut self, from: usize, bytes: usize, call: Call) {
        let bytes = bytes as f64 + HEAD_BYTES;
        self.spent.report_bytes += bytes;
        let token = self.letters.post(Letter::ToController(from, call));
        self.network.send(self.wires.up[from], bytes, token);
    }

    /// An answer, or orders.
    fn answer(&mut self, to: usize, bytes: usize, answer: Answer) {
        let bytes = bytes as f64 + HEAD_BYTES;
        self.spent.report_bytes += bytes;
        let token = self.letters.post(Letter::ToAgent(to, answer));
        self.network.send(self.wires.down[to], bytes, token);
    }
}

/// Bytes of a message's JSON.
fn json_bytes(message: &impl serde::Serialize) -> usize {
    // Plain data with string keys: there is nothing in it that JSON cannot hold.
    serde_json::to_vec(message).map_or(0, |json| json.len())
}

fn address(rank: usize) -> IpAddr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 0, 0, 1)) + rank as u32).into()
}

/// The rank at an address.
fn rank_at(addr: IpAddr) -> Option<usize> {
    let IpAddr::V4(addr) = addr else { return None };
    u32::from(addr).checked_sub(u32::from(Ipv4Addr::new(10, 0, 0, 1))).map(|rank| rank as usize)
}

fn node_name(rank: usize) -> Result<NodeName> {
    NodeName::new(&format!("n{rank}")).with_context(|| format!("name the node of rank {rank}"))
}

/// Agents and controller of a cell.
pub struct Agents {
    cell: Cell,
    nodes: Vec<Node>,
    desk: Desk,
    wires: Wires,
    letters: Letters,
    spent: Spent,
}

impl Agents {
    /// Of a cell's ranks, before any began; the controller by this configuration.
    pub fn new(cell: &Cell, truth: &Coefficients, config: Config) -> Result<Self> {
        let names = (0..cell.world).map(node_name).collect::<Result<Vec<_>>>()?;
        let controller = Embedded::open(config).context("start the controller")?;
        // Any moment does: only times since are used.
        let base = std::time::Instant::now();
        let nodes = names.iter().enumerate().map(|(rank, name)| Node::new(rank, name.clone(), base, truth.tcp.stack_s));
        Ok(Self {
            cell: cell.clone(),
            nodes: nodes.collect::<Result<Vec<_>>>()?,
            desk: Desk::new(controller, names),
            wires: Wires { job: Vec::new(), tests: Vec::new(), up: Vec::new(), down: Vec::new() },
            letters: Letters::default(),
            spent: Spent::default(),
        })
    }

    /// The controller, to ask what it decided and why.
    pub fn controller(&self) -> &Embedded {
        &self.desk.controller
    }

    /// What probing and reporting took so far.
    pub fn spent(&self) -> Spent {
        self.spent
    }

    /// What went wrong: refused requests, reports and parts of orders, with the reasons.
    pub fn problems(&self) -> Vec<String> {
        let of_agent = |node: &Node| node.problems.clone();
        self.nodes.iter().flat_map(of_agent).chain(self.desk.problems.iter().cloned()).collect()
    }

    fn handle(&mut self, network: &mut Shared, carries: Carries) {
        let Self { nodes, desk, wires, letters, spent, .. } = self;
        let letter = match carries {
            Carries::Letter(id) => letters.waiting.remove(&id),
            _ => None,
        };
        let world = &mut World { network, wires, letters, spent };
        match carries {
            Carries::Timer(rank, timer) => nodes[rank].timer(world, timer),
            Carries::Test(rank, number, word) => nodes[rank].test_word(world, number, word),
            Carries::Pass => desk.pass(world),
            Carries::Letter(_) => match letter {
                Some(Letter::Echo { from, to, packet }) => nodes[to].echo(world, from, &packet),
                Some(Letter::EchoAnswer { from, to, packet }) => nodes[to].echo_answer(world, from, &packet),
                Some(Letter::ToController(from, call)) => desk.call(world, from, call),
                Some(Letter::ToAgent(to, answer)) => nodes[to].answer(world, answer),
                None => {}
            },
        }
    }
}

impl ControlPlane for Agents {
    type Token = Token;

    fn begin(&mut self, net: &mut Net<Token>, hellos: Vec<Hello>) {
        let (cell, world) = (&self.cell, self.cell.world);
        let mut connect = |from: usize, to: usize| net.connect(cell, cell.nic(from), cell.nic(to));
        let tests = (0..world).map(|from| (0..world).map(|to| (from != to).then(|| connect(from, to))).collect());
        let tests = tests.collect();
        let up = (0..world).map(|rank| connect(rank, 0)).collect();
        let down = (0..world).map(|rank| connect(0, rank)).collect();
        self.wires = Wires { job: net.mesh.to.clone(), tests, up, down };
        let Self { nodes, desk, wires, letters, spent, .. } = self;
        let world = &mut World { network: &mut net.network, wires, letters, spent };
        desk.arm(world);
        nodes.iter_mut().zip(hellos).for_each(|(node, hello)| node.begin(world, hello));
    }

    fn happened(&mut self, network: &mut Shared, what: Happened<Token>) {
        let (Happened::Delivered(Token(carries)) | Happened::Timer(Token(carries))) = what;
        self.handle(network, carries);
    }

    fn says(&mut self, network: &mut Shared, rank: usize, message: FromTrainer) {
        let Self { nodes, wires, letters, spent, .. } = self;
        nodes[rank].says(&mut World { network, wires, letters, spent }, message);
    }

    fn orders(&mut self, rank: usize) -> Option<JobOrders> {
        self.nodes[rank].new_orders.take()
    }

    fn bytes(&self) -> f64 {
        self.spent.test_bytes
    }

    fn predictions(&self) -> Vec<Prediction> {
        let job = self.nodes.first().and_then(Node::job);
        let made = job.map_or(Ok(Vec::new()), |job| self.desk.controller.decisions(job)).unwrap_or_default();
        let prediction = |made: flexcomm_controller::MadeDecision| {
            let (sync_s, version) = (made.predicted?.t_sync_s, Some(made.version.0));
            Some(Prediction { version, at_s: made.at.as_secs_f64(), strategy: made.strategy, sync_s })
        };
        let looks = job.map_or(&[][..], |job| self.desk.controller.looks(job));
        let predicted = |look: &flexcomm_controller::Look| {
            let (strategy, sync_s) = look.in_force?;
            Some(Prediction { version: None, at_s: look.at.as_secs_f64(), strategy, sync_s })
        };
        made.into_iter().filter_map(prediction).chain(looks.iter().filter_map(predicted)).collect()
    }
}

#[cfg(test)]
mod tests;
