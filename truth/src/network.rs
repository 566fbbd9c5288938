//! Ports, connections between them, and what TCP makes of a message: bytes as a fluid, windows as TCP grows them.
//!
//! A message waits for those before it on its connection, then takes its share of every port on its path (max-min), but never
//! more than a window per round trip. Windows grow by doubling until a loss, halve while idle, and shrink when what is
//! in flight does not fit a port's buffer. Everything is an event in one queue; no formula knows how long a collective takes.
//!
//! Flows of others are not sent packet by packet: where there are any, a port is full, whatever we send. Its queue then holds
//! [`QUEUED_BY_OTHERS`] of the buffer, through which messages, their acknowledgements' round trips and echoes go alike, and of
//! capacity and buffer our windows have the share of our flows. Of the way back only the latency is known, not its queues. A queue
//! that our own windows fill delays echoes, and not the messages that are in it: these are held up by the port's rate already.

use crate::coefficients::Tcp;
use crate::trace::Trace;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

/// A direction of a NIC, or a bottleneck that several share.
#[derive(Debug, Clone)]
pub struct Port {
    /// Bytes per second.
    pub rate: Trace,
    /// Long-lived flows of others that take their share of it.
    pub competitors: Trace,
    /// Bytes that fit into its queue.
    pub buffer: f64,
    /// A credit of bytes that go faster than the rate.
    pub burst: Option<Burst>,
}

/// A token bucket.
#[derive(Debug, Clone, Copy)]
pub struct Burst {
    /// Bytes of credit when full.
    pub bytes: f64,
    /// Bytes per second while there is credit.
    pub peak: f64,
}

/// Number of a port.
pub type PortId = usize;
/// Number of a connection.
pub type ConnectionId = usize;

/// What the network reports as its clock advances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkEvent<T> {
    /// The last byte of a message arrived.
    Delivered(T),
    /// A timer ran out.
    Timer(T),
}

/// What the kernels of both ends know of a connection (`tcp_info`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TcpInfo {
    /// Bytes that have left.
    pub sent: f64,
    /// Bytes that wait to leave.
    pub waiting: f64,
    /// Seconds there and back on an idle network.
    pub path_s: f64,
    /// The same with the queues on the way as they are.
    pub round_trip_s: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// Nothing to send.
    Idle,
    /// Takes its share.
    Sending,
    /// Waits for acknowledgements or a retransmission timeout.
    Blocked,
}

#[derive(Debug)]
struct Message<T> {
    left: f64,
    token: T,
}

#[derive(Debug)]
struct Connection<T> {
    path: Arc<[PortId]>,
    /// One-way latency, seconds.
    latency: Trace,
    /// Of the way back.
    latency_back: Trace,
    queue: VecDeque<Message<T>>,
    state: State,
    /// Bytes per second since `settled`.
    rate: f64,
    settled: f64,
    /// Bytes, in all.
    sent: f64,
    window: f64,
    /// Above it a window no longer doubles.
    threshold: f64,
    /// What may still be sent before `round_ends`.
    window_left: f64,
    round_ends: f64,
    last_sent: f64,
    /// No message overtakes another.
    last_arrival: f64,
    /// It sends a largest window per round trip, evenly: as one that sends at the full rate and then waits for acknowledgements.
    paced: bool,
    /// Whether it waits for its share.
    open: bool,
    /// Events of earlier plans are out of date.
    plan: u64,
}

#[derive(Debug)]
struct PortState {
    port: Port,
    /// Connections that are sending through it, in order.
    sending: Vec<ConnectionId>,
    /// Whether the search for ports that are tied to others has found it.
    found: bool,
    tokens: f64,
    counted: f64,
    /// Bytes per second that go through it: of our connections, or all that it lets through where others fill it.
    load: f64,
    plan: u64,
}

#[derive(Debug)]
enum Scheduled<T> {
    Connection { id: ConnectionId, plan: u64 },
    Change { port: PortId },
    Empty { port: PortId, plan: u64 },
    Event(NetworkEvent<T>),
}

#[derive(Debug)]
struct Queued<T> {
    at: f64,
    order: u64,
    event: Scheduled<T>,
}

impl<T> PartialEq for Queued<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl<T> Eq for Queued<T> {}
impl<T> PartialOrd for Queued<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Queued<T> {
    /// The earliest is the greatest; among those at one moment, the one that was queued first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at).then(other.order.cmp(&self.order))
    }
}

/// The network under a virtual clock.
#[derive(Debug)]
pub struct Network<T> {
    tcp: Tcp,
    rng: ChaCha8Rng,
    now: f64,
    order: u64,
    events: BinaryHeap<Queued<T>>,
    ports: Vec<PortState>,
    connections: Vec<Connection<T>>,
    tied: Tied,
}

/// Ports and connections that share with each other, in order; and what is left of these ports, and the connections that go no faster
/// than their pace. Kept between two uses for its memory.
#[derive(Debug, Default)]
struct Tied {
    ports: Vec<PortId>,
    connections: Vec<ConnectionId>,
    left: Vec<Remaining>,
    paces: Vec<(ConnectionId, f64)>,
    fixed: Vec<ConnectionId>,
}

/// What of a port is not given to a connection yet.
#[derive(Debug)]
struct Remaining {
    port: PortId,
    /// Bytes per second.
    rate: f64,
    /// Among so many, competitors counted.
    flows: f64,
}

impl Remaining {
    fn each(&self) -> f64 {
        if self.flows > 0.0 { self.rate / self.flows } else { f64::INFINITY }
    }
}

/// Bytes per second of a connection without ports: what a kernel copies.
pub const WITHIN_MACHINE: f64 = 4e9;

/// Of a port's buffer, what long-lived flows of others keep in its queue. Flows that halve their windows at a loss leave a queue
/// between empty and full, those that shrink them by 0.7 (CUBIC), and several that do so at different times, between half full and
/// full; this is the middle of that.
pub const QUEUED_BY_OTHERS: f64 = 0.75;

/// A byte less than this is none: what rounding leaves of a message.
const LEAST_BYTES: f64 = 1e-3;

/// Until a connection's next moment, at least: much less would be lost in the rounding of a clock that stands at days, and the moment
/// would come again and again.
const LEAST_SECONDS: f64 = 1e-9;

impl<T: Copy> Network<T> {
    /// Without connections, at time 0.
    pub fn new(tcp: Tcp, ports: Vec<Port>, rng: ChaCha8Rng) -> Self {
        Self::beginning_at(0.0, tcp, ports, rng)
    }

    /// The same with another moment at which its clock begins, in seconds: before 0 everything is as it is at 0.
    pub fn beginning_at(begins: f64, tcp: Tcp, ports: Vec<Port>, rng: ChaCha8Rng) -> Self {
        let state = |port: Port| PortState {
            tokens: port.burst.map_or(0.0, |burst| burst.bytes),
            port,
            sending: Vec::new(),
            found: false,
            counted: begins,
            load: 0.0,
            plan: 0,
        };
        let mut network = Self {
            tcp,
            rng,
            now: begins,
            order: 0,
            events: BinaryHeap::new(),
            ports: ports.into_iter().map(state).collect(),
            connections: Vec::new(),
            tied: Tied::default(),
        };
        for port in 0..network.ports.len() {
            network.queue_change(port);
            // Others may use up its credit from the start.
            network.share(&[port]);
        }
        network
    }

    /// A connection over these ports, with the one-way latencies there and back.
    pub fn connect(&mut self, path: Vec<PortId>, latency: Trace, latency_back: Trace) -> ConnectionId {
        let window = self.tcp.initial_window();
        self.connections.push(Connection {
            path: path.into(),
            latency,
            latency_back,
            queue: VecDeque::new(),
            state: State::Idle,
            rate: 0.0,
            settled: self.now,
            sent: 0.0,
            window,
            threshold: f64::INFINITY,
            window_left: window,
            round_ends: f64::NEG_INFINITY,
            last_sent: f64::NEG_INFINITY,
            last_arrival: f64::NEG_INFINITY,
            paced: false,
            open: false,
            plan: 0,
        });
        self.connections.len() - 1
    }

    /// Seconds since the start of traces; less than 0 before it.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// A [`NetworkEvent::Timer`] at a moment, now where that is past.
    pub fn timer(&mut self, at: f64, token: T) {
        self.push(at.max(self.now), Scheduled::Event(NetworkEvent::Timer(token)));
    }

    /// Hands a message to a connection; [`NetworkEvent::Delivered`] when its last byte arrives.
    pub fn send(&mut self, id: ConnectionId, bytes: f64, token: T) {
        let now = self.now;
        self.connections[id].queue.push_back(Message { left: bytes.max(1.0), token });
        if self.connections[id].state == State::Idle {
            let round_trip = self.round_trip(id);
            let (timeout, least) = (self.tcp.timeout_s.max(round_trip), self.tcp.initial_window());
            let connection = &mut self.connections[id];
            // Linux halves a window for every timeout of idleness (`tcp_cwnd_restart`).
            let halvings = ((now - connection.last_sent) / timeout).floor().clamp(0.0, 64.0);
            connection.window = (connection.window * 0.5f64.powf(halvings)).max(connection.window.min(least));
            if now >= connection.round_ends {
                (connection.window_left, connection.round_ends) = (connection.window, now + round_trip);
            }
            connection.settled = now;
            self.begin(id);
        }
    }

    /// A single packet, which waits behind what is queued in the ports: echoes and small messages without a connection.
    pub fn datagram(&mut self, id: ConnectionId, bytes: f64, token: T) {
        let delay = self.connections[id].latency.at(self.now) + self.queueing(id, bytes);
        self.push(self.now + delay, Scheduled::Event(NetworkEvent::Delivered(token)));
    }

    /// Closes a connection on which nothing waits, and opens it again: what it knows of the way is forgotten.
    pub fn reopen(&mut self, id: ConnectionId) {
        let connection = &mut self.connections[id];
        if connection.state == State::Idle {
            connection.window = self.tcp.initial_window();
            (connection.threshold, connection.round_ends) = (f64::INFINITY, f64::NEG_INFINITY);
        }
    }

    /// What a look at a connection shows.
    pub fn tcp_info(&self, id: ConnectionId) -> TcpInfo {
        let Connection { queue, rate, settled, sent, window, .. } = &self.connections[id];
        let (path_s, since) = (self.path_s(id), rate * (self.now - settled));
        // Windows of a kernel go on growing while the link holds the stream up, until packets queue; here they stop at what fits.
        // Where others fill a port, the queue is there, and it is theirs.
        let alone = self.queued_by_others(id) == 0.0;
        let held_up = alone && *rate > 0.0 && rate * path_s < 0.99 * window;
        let buffer_s = |&port: &PortId| self.ports[port].port.buffer / self.capacity(port);
        let most = self.connections[id].path.iter().map(buffer_s).fold(0.0, f64::max);
        let queueing_s = self.queueing(id, 0.0).max(if held_up { path_s.min(most) } else { 0.0 });
        let waiting: f64 = queue.iter().map(|message| message.left).sum();
        TcpInfo { sent: sent + since, waiting: (waiting - since).max(0.0), path_s, round_trip_s: path_s + queueing_s }
    }

    /// The next thing that happens, and the clock is there. None when nothing is left.
    pub fn advance(&mut self) -> Option<NetworkEvent<T>> {
        self.next(f64::INFINITY)
    }

    /// The same, as far as it happens before a moment. None when nothing does, and the clock is at the moment.
    pub fn advance_before(&mut self, moment: f64) -> Option<NetworkEvent<T>> {
        let event = self.next(moment);
        if event.is_none() {
            self.now = self.now.max(moment);
        }
        event
    }

    fn next(&mut self, before: f64) -> Option<NetworkEvent<T>> {
        while self.events.peek().is_some_and(|next| next.at < before)
            && let Some(Queued { at, event, .. }) = self.events.pop()
        {
            self.now = at;
            match event {
                Scheduled::Event(event) => return Some(event),
                Scheduled::Connection { id, plan } if self.connections[id].plan == plan => self.look(id),
                Scheduled::Change { port } => {
                    self.queue_change(port);
                    self.share(&[port]);
                }
                Scheduled::Empty { port, plan } if self.ports[port].plan == plan => self.share(&[port]),
                Scheduled::Connection { .. } | Scheduled::Empty { .. } => {}
            }
        }
        None
    }

    fn push(&mut self, at: f64, event: Scheduled<T>) {
        self.order += 1;
        self.events.push(Queued { at, order: self.order, event });
    }

    fn queue_change(&mut self, port: PortId) {
        let Port { rate, competitors, .. } = &self.ports[port].port;
        let next = [rate, competitors].into_iter().filter_map(|trace| trace.next_change(self.now)).reduce(f64::min);
        if let Some(at) = next {
            self.push(at, Scheduled::Change { port });
        }
    }

    /// Seconds there and back on an idle network.
    fn path_s(&self, id: ConnectionId) -> f64 {
        let connection = &self.connections[id];
        connection.latency.at(self.now) + connection.latency_back.at(self.now) + self.tcp.stack_s
    }

    /// Seconds until a byte that is sent now is acknowledged.
    fn round_trip(&self, id: ConnectionId) -> f64 {
        self.path_s(id) + self.queued_by_others(id)
    }

    /// Seconds that the queues of others on a path take.
    fn queued_by_others(&self, id: ConnectionId) -> f64 {
        self.connections[id].path.iter().map(|&port| self.bytes_of_others(port) / self.capacity(port)).sum()
    }

    /// Bytes of others in a port's queue.
    fn bytes_of_others(&self, port: PortId) -> f64 {
        if self.others(port) > 0.0 { QUEUED_BY_OTHERS * self.ports[port].port.buffer } else { 0.0 }
    }

    /// Flows of others through a port.
    fn others(&self, port: PortId) -> f64 {
        self.ports[port].port.competitors.at(self.now).max(0.0)
    }

    /// Bytes of payload per second that a port lets through now.
    fn capacity(&self, port: PortId) -> f64 {
        let PortState { port, tokens, .. } = &self.ports[port];
        let rate = port.rate.at(self.now);
        self.tcp.payload_share()
            * port.burst.filter(|_| *tokens > LEAST_BYTES).map_or(rate, |burst| burst.peak.max(rate))
    }

    /// Seconds that a packet waits behind what is queued on a path, itself included: what echoes and looks at connections show.
    fn queueing(&self, id: ConnectionId, bytes: f64) -> f64 {
        let wait = |&port: &PortId| {
            let capacity = self.capacity(port);
            let PortState { port: Port { buffer, .. }, sending, load, .. } = &self.ports[port];
            let others = self.bytes_of_others(port);
            let own = if others == 0.0 && *load >= 0.99 * capacity {
                let windows: f64 = sending.iter().map(|&id| self.in_flight(id)).sum();
                (windows - capacity * self.round_trip(id)).clamp(0.0, *buffer)
            } else {
                0.0
            };
            (others + own + bytes) / capacity
        };
        self.connections[id].path.iter().map(wait).sum()
    }

    fn queued(&self, id: ConnectionId) -> f64 {
        self.connections[id].queue.iter().map(|message| message.left).sum()
    }

    fn in_flight(&self, id: ConnectionId) -> f64 {
        self.connections[id].window.min(self.queued(id))
    }

    /// Bytes per second that a window which grows no more lets through, while more than one window is to be sent.
    fn pace(&self, id: ConnectionId) -> Option<f64> {
        let window = self.connections[id].window;
        (window >= self.tcp.window_bytes && self.queued(id) > window + LEAST_BYTES)
            .then(|| window / self.round_trip(id))
    }

    /// A connection starts to send its first message, or the rest of it.
    fn begin(&mut self, id: ConnectionId) {
        if let Some(stall) = self.loss(id) {
            self.block(id, self.now + stall);
            return;
        }
        self.connections[id].state = State::Sending;
        let path = self.connections[id].path.clone();
        if path.is_empty() {
            self.connections[id].rate = WITHIN_MACHINE;
            self.plan(id);
            return;
        }
        for &port in &*path {
            let sending = &mut self.ports[port].sending;
            if let Err(at) = sending.binary_search(&id) {
                sending.insert(at, id);
            }
        }
        self.share(&path);
    }

    /// What overflows a queue on the path as this connection adds its window to those that are there: seconds until it goes on.
    fn loss(&mut self, id: ConnectionId) -> Option<f64> {
        let round_trip = self.round_trip(id);
        let own = self.in_flight(id);
        let lost = |&port: &PortId| {
            let PortState { port: Port { buffer, .. }, sending, .. } = &self.ports[port];
            let sending = sending.iter().filter(|other| **other != id);
            let flows = 1.0 + sending.clone().count() as f64;
            let all = own + sending.map(|&other| self.in_flight(other)).sum::<f64>();
            let free = buffer - self.bytes_of_others(port);
            // What others queue here is part of the round trip.
            let fits = (self.capacity(port) * round_trip + free) * flows / (flows + self.others(port));
            ((all - fits) / all).max(0.0)
        };
        let share = self.connections[id].path.iter().map(lost).fold(0.0, f64::max);
        if share <= 0.0 {
            return None;
        }
        let segments = (own / self.tcp.segment_bytes).max(1.0);
        if self.rng.random::<f64>() > (share * segments).min(1.0) {
            return None;
        }
        let tail = self.rng.random::<f64>() < self.tcp.tail_loss_share || segments < 4.0;
        let (timeout, least) = (self.tcp.timeout_s, self.tcp.segment_bytes);
        let connection = &mut self.connections[id];
        let shrunk = (connection.window * 0.7).max(2.0 * least);
        connection.threshold = shrunk;
        connection.window = if tail { least } else { shrunk };
        Some(if tail { timeout.max(2.0 * round_trip) } else { round_trip })
    }

    fn block(&mut self, id: ConnectionId, until: f64) {
        let connection = &mut self.connections[id];
        connection.state = State::Blocked;
        connection.rate = 0.0;
        connection.plan += 1;
        let plan = connection.plan;
        self.push(until, Scheduled::Connection { id, plan });
    }

    fn leave_ports(&mut self, id: ConnectionId) {
        let path = self.connections[id].path.clone();
        for &port in &*path {
            let sending = &mut self.ports[port].sending;
            if let Ok(at) = sending.binary_search(&id) {
                sending.remove(at);
            }
        }
        self.share(&path);
    }

    /// Counts what a connection sent since it was looked at.
    fn settle(&mut self, id: ConnectionId) {
        let now = self.now;
        let connection = &mut self.connections[id];
        let sent = connection.rate * (now - connection.settled);
        connection.settled = now;
        if sent > 0.0 {
            connection.last_sent = now;
            connection.sent += sent;
            connection.window_left -= sent;
            if let Some(message) = connection.queue.front_mut() {
                message.left -= sent;
            }
        }
    }

    /// A connection's next moment: the end of a message, of its window, or of a wait.
    fn look(&mut self, id: ConnectionId) {
        self.settle(id);
        match self.connections[id].state {
            State::Idle => {}
            State::Blocked => {
                let round_trip = self.round_trip(id);
                let most = self.tcp.window_bytes;
                let connection = &mut self.connections[id];
                // The window was used up before its acknowledgements came.
                if connection.window_left <= LEAST_BYTES {
                    let grown = if connection.window < connection.threshold { 2.0 } else { 1.05 };
                    connection.window = (connection.window * grown).min(most);
                }
                (connection.window_left, connection.round_ends) = (connection.window, self.now + round_trip);
                connection.settled = self.now;
                self.begin(id);
            }
            State::Sending => self.sent(id),
        }
    }

    fn sent(&mut self, id: ConnectionId) {
        let (now, queued) = (self.now, self.queued_by_others(id));
        while self.connections[id].queue.front().is_some_and(|message| message.left <= LEAST_BYTES) {
            let connection = &mut self.connections[id];
            let Some(message) = connection.queue.pop_front() else { break };
            let way = connection.latency.at(now) + self.tcp.stack_s / 2.0 + queued;
            let arrival = (now + way).max(connection.last_arrival);
            connection.last_arrival = arrival;
            self.push(arrival, Scheduled::Event(NetworkEvent::Delivered(message.token)));
        }
        let connection = &mut self.connections[id];
        if connection.queue.is_empty() {
            (connection.state, connection.rate) = (State::Idle, 0.0);
            connection.plan += 1;
            self.leave_ports(id);
            return;
        }
        let last_window = connection.paced && self.pace(id).is_none();
        if last_window || now >= self.connections[id].round_ends {
            let round_trip = self.round_trip(id);
            let connection = &mut self.connections[id];
            (connection.window_left, connection.round_ends) = (connection.window, now + round_trip);
        }
        if last_window {
            let path = self.connections[id].path.clone();
            return self.share(&path);
        }
        if self.connections[id].window_left <= LEAST_BYTES {
            let until = self.connections[id].round_ends;
            self.block(id, until);
            self.leave_ports(id);
        } else {
            self.plan(id);
        }
    }

    /// When a sending connection is looked at next, at its rate.
    fn plan(&mut self, id: ConnectionId) {
        let (round_trip, queued) = (self.round_trip(id), self.queued(id));
        let now = self.now;
        let connection = &mut self.connections[id];
        connection.plan += 1;
        let (rate, plan) = (connection.rate, connection.plan);
        let Some(left) = connection.queue.front().map(|message| message.left) else { return };
        if rate <= 0.0 {
            return;
        }
        // Acknowledgements come as fast as bytes leave: the window slides and is never used up.
        let paced = connection.paced;
        let slides = paced || rate * round_trip <= connection.window;
        if slides {
            (connection.window_left, connection.round_ends) = (connection.window, now + round_trip);
        }
        let bytes = match (paced, slides) {
            // The last window goes as fast as the ports let it.
            (true, _) => left.min(queued - connection.window),
            (false, true) => left,
            (false, false) => left.min(connection.window_left),
        };
        self.push(now + (bytes / rate).max(LEAST_SECONDS), Scheduled::Connection { id, plan });
    }

    /// Shares out the ports that are tied to these by connections, max-min, and plans anew.
    fn share(&mut self, changed: &[PortId]) {
        let mut tied = std::mem::take(&mut self.tied);
        self.find_tied(changed, &mut tied);
        for &id in &tied.connections {
            self.settle(id);
        }
        for &port in &tied.ports {
            self.count_tokens(port);
        }
        self.fill(&mut tied);
        for &id in &tied.connections {
            self.plan(id);
        }
        for &port in &tied.ports {
            self.plan_tokens(port);
        }
        self.tied = tied;
    }

    fn find_tied(&mut self, changed: &[PortId], Tied { ports, connections, .. }: &mut Tied) {
        ports.clear();
        connections.clear();
        let find = |found: &mut bool, port: PortId, ports: &mut Vec<PortId>| {
            if !std::mem::replace(found, true) {
                ports.push(port);
            }
        };
        for &port in changed {
            find(&mut self.ports[port].found, port, ports);
        }
        let mut at = 0;
        while let Some(&port) = ports.get(at) {
            for number in 0..self.ports[port].sending.len() {
                let id = self.ports[port].sending[number];
                let connection = &mut self.connections[id];
                if !std::mem::replace(&mut connection.open, true) {
                    connections.push(id);
                    for &port in &*connection.path {
                        find(&mut self.ports[port].found, port, ports);
                    }
                }
            }
            at += 1;
        }
        for &port in &*ports {
            self.ports[port].found = false;
        }
        ports.sort_unstable();
        connections.sort_unstable();
    }

    /// Progressive filling: the port with the least left for each of its flows is full first, unless a connection's pace is less.
    /// All connections are open before, none after.
    fn fill(&mut self, Tied { ports, connections, left, paces, fixed }: &mut Tied) {
        let whole = |&port: &PortId| {
            let flows = self.others(port) + self.ports[port].sending.len() as f64;
            Remaining { port, rate: self.capacity(port), flows }
        };
        left.clear();
        left.extend(ports.iter().map(whole));
        paces.clear();
        paces.extend(connections.iter().filter_map(|&id| Some((id, self.pace(id)?))));
        connections.iter().for_each(|&id| self.connections[id].paced = false);
        let mut open = connections.len();
        while open > 0 {
            let is_open = |id: &ConnectionId| self.connections[*id].open;
            let carries = |port: PortId| self.ports[port].sending.iter().any(is_open);
            let first = left.iter().filter(|left| carries(left.port)).min_by(|a, b| a.each().total_cmp(&b.each()));
            let Some((full, share)) = first.map(|left| (left.port, left.each().max(0.0))) else { break };
            let slow = paces.iter().filter(|(id, pace)| *pace < share && is_open(id));
            fixed.clear();
            let rate = match slow.min_by(|a, b| a.1.total_cmp(&b.1)) {
                Some(&(id, pace)) => {
                    fixed.push(id);
                    pace
                }
                None => {
                    fixed.extend(self.ports[full].sending.iter().copied().filter(is_open));
                    share
                }
            };
            open -= fixed.len();
            for &id in &*fixed {
                let connection = &mut self.connections[id];
                (connection.open, connection.rate, connection.paced) = (false, rate, rate < share);
                for left in left.iter_mut().filter(|left| connection.path.contains(&left.port)) {
                    (left.rate, left.flows) = ((left.rate - rate).max(0.0), left.flows - 1.0);
                }
            }
        }
        connections.iter().for_each(|&id| self.connections[id].open = false);
        for &port in &*ports {
            let own = self.ports[port].sending.iter().map(|&id| self.connections[id].rate).sum();
            self.ports[port].load = if self.others(port) > 0.0 { self.capacity(port) } else { own };
        }
    }

    fn count_tokens(&mut self, port: PortId) {
        let now = self.now;
        let state = &mut self.ports[port];
        // Every change of the rate is counted up to, so it was the same all the time.
        let rate = self.tcp.payload_share() * state.port.rate.at(state.counted);
        if let Some(burst) = state.port.burst {
            let gained = (rate - state.load) * (now - state.counted);
            state.tokens = (state.tokens + gained).clamp(0.0, burst.bytes);
        }
        state.counted = now;
    }

    fn plan_tokens(&mut self, port: PortId) {
        let rate = self.tcp.payload_share() * self.ports[port].port.rate.at(self.now);
        let state = &mut self.ports[port];
        state.plan += 1;
        let (plan, drain) = (state.plan, state.load - rate);
        if state.port.burst.is_some() && drain > 0.0 && state.tokens > LEAST_BYTES {
            let at = self.now + state.tokens / drain;
            self.push(at, Scheduled::Empty { port, plan });
        }
    }
}
