//! The trainer's end of the agent's socket. A thread of its own connects, says hello, sends what is queued
//! and connects again when the agent was restarted; another one reads what the agent says as long as a connection lasts.
//! A training step only ever puts a message into the queue and looks whether there are new orders.

use crate::orders::OrdersSlot;
use flexcomm_wire::{AppliedReport, FromTrainer, Hello, MAX_LINE, PROTOCOL, ToTrainer, check_buckets};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most messages that wait while the agent is away or does not read; the oldest measurements go first. About ten
/// minutes of reports.
pub const MAX_QUEUED: usize = 2048;

/// How long one write to, or the welcome from, the agent may take before the connection is given up.
const IO_TIMEOUT: Duration = Duration::from_secs(2);

/// Between two attempts to connect.
const RECONNECT: Duration = Duration::from_millis(300);

/// Between two attempts after the agent refused the hello: someone has to change something first.
const RECONNECT_REFUSED: Duration = Duration::from_secs(5);

/// A connection that has lasted for this long after a refusal counts as accepted: the controller's answer comes back in far
/// less.
const ACCEPTED_AFTER: Duration = Duration::from_secs(10);

/// A message and its number.
#[derive(Debug, Clone)]
struct Queued {
    number: u64,
    message: FromTrainer,
}

impl Queued {
    /// Whether newer ones replace its worth. Of all others there is only one.
    fn is_measurement(&self) -> bool {
        matches!(self.message, FromTrainer::Steps(_))
    }
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Queued>,
    /// Messages queued so far.
    queued: u64,
    /// Told again after each hello: a restarted agent has forgotten it.
    applied: Option<AppliedReport>,
    /// What the next hello says, see [`Hello::buckets`].
    buckets: Vec<u64>,
    connected: bool,
    dropped: u64,
    ending: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    orders: OrdersSlot,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves plain data behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, timeout: Duration, until: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.wake.wait_timeout_while(self.lock(), timeout, |state| !until(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn disconnected(&self) {
        self.lock().connected = false;
        self.wake.notify_all();
    }
}

/// A connection that comes and goes; its methods never wait for the agent.
#[derive(Debug)]
pub struct Client {
    gradient_values: u64,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Client {
    /// Starts the thread. Fails only when the system cannot start one.
    pub fn start(socket: &Path, hello: Hello) -> std::io::Result<Self> {
        let orders = OrdersSlot::new(hello.job.clone(), hello.run);
        let state = Mutex::new(State { buckets: hello.buckets.clone(), ..State::default() });
        let shared = Arc::new(Shared { state, wake: Condvar::new(), orders });
        let gradient_values = hello.gradient_values;
        let link = Link {
            socket: socket.to_owned(),
            hello,
            takes_buckets: false,
            shared: Arc::clone(&shared),
            warned: false,
            refused: None,
        };
        let thread = std::thread::Builder::new().name("flexcomm-client".into()).spawn(move || link.run())?;
        Ok(Self { gradient_values, shared, thread: Some(thread) })
    }

    /// Queues a message. When the queue is full the oldest measurement is dropped and counted; when it holds none, the
    /// oldest message.
    pub fn send(&self, message: FromTrainer) {
        let mut state = self.shared.lock();
        if let FromTrainer::Applied(report) = &message {
            state.applied = Some(report.clone());
        }
        if state.queue.len() >= MAX_QUEUED {
            let oldest = state.queue.iter().position(Queued::is_measurement).unwrap_or(0);
            state.queue.remove(oldest);
            state.dropped += 1;
        }
        state.queued += 1;
        let number = state.queued;
        state.queue.push_back(Queued { number, message });
        drop(state);
        self.shared.wake.notify_one();
    }

    /// The gradient is sent in buckets of these values, in the order in which backward has them ready. The agent hears of it now, or by
    /// the next hello where it is away or too old. What it would refuse is kept from it: with that in the hello it would refuse this
    /// trainer.
    pub fn report_buckets(&self, values: Vec<u64>) {
        match check_buckets(&values, self.gradient_values) {
            Ok(()) => self.shared.lock().buckets = values,
            Err(why) => tracing::info!("the buckets are not reported to the agent: {why}"),
        }
        self.shared.wake.notify_one();
    }

    /// What the agent orders. It stays when the agent is gone; one that comes back sends its newest again.
    pub fn orders(&self) -> &OrdersSlot {
        &self.shared.orders
    }

    /// Whether the agent has welcomed this trainer and is still there, as far as is known.
    pub fn connected(&self) -> bool {
        self.shared.lock().connected
    }

    /// Messages dropped because the agent was away for too long, or because one was too long to send.
    pub fn dropped(&self) -> u64 {
        self.shared.lock().dropped
    }

    /// Says goodbye after what is queued and waits for at most `grace`.
    pub fn finish(mut self, grace: Duration) {
        self.send(FromTrainer::Bye);
        self.shared.lock().ending = true;
        self.shared.wake.notify_all();
        let done = self.shared.wait(grace, |state| state.queue.is_empty() || !state.connected);
        drop(done);
        // Dropping a handle detaches the thread; it ends by itself once it sees `ending`.
        self.thread = None;
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.lock().ending = true;
        self.shared.wake.notify_all();
    }
}

enum End {
    /// The agent went away or never was there.
    Lost(std::io::Error),
    /// It does not want this trainer.
    Refused(String),
    /// The client is done.
    Ending,
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Lost(error)
    }
}

/// How much was sent of what was queued.
enum Sent {
    /// All of it, and there will be no more.
    All,
    /// The connection is gone.
    Some,
}

struct Link {
    socket: PathBuf,
    /// Its buckets are those that the agent knows.
    hello: Hello,
    /// Whether this connection's agent takes others.
    takes_buckets: bool,
    shared: Arc<Shared>,
    /// Whether the loss of the agent was logged since the last welcome.
    warned: bool,
    /// The refusal that was logged last; each attempt that it ends is not worth another line.
    refused: Option<String>,
}

/// What the system says of a socket that waits is "temporarily unavailable".
fn why(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("it was silent for {} s", IO_TIMEOUT.as_secs()),
        _ => error.to_string(),
    }
}

impl Link {
    fn run(mut self) {
        loop {
            let end = self.session();
            self.shared.disconnected();
            let pause = match end {
                End::Ending => return,
                End::Lost(error) => {
                    self.warn_once(&format!(
                        "no connection to the agent at {}: {}",
                        self.socket.display(),
                        why(&error)
                    ));
                    RECONNECT
                }
                End::Refused(reason) => {
                    self.log_refusal(reason);
                    RECONNECT_REFUSED
                }
            };
            let ending = self.shared.wait(pause, |state| state.ending).ending;
            if ending {
                return;
            }
        }
    }

    fn warn_once(&mut self, what: &str) {
        if !self.warned {
            tracing::warn!("{what}; training goes on with the strategy in force");
            self.warned = true;
        }
    }

    fn log_refusal(&mut self, reason: String) {
        if self.refused.as_ref() != Some(&reason) {
            tracing::warn!(
                "the agent refuses this trainer: {reason}; training goes on with the strategy in force, and the agent is \
                 asked again every {} s",
                RECONNECT_REFUSED.as_secs()
            );
            self.refused = Some(reason);
        }
    }

    fn session(&mut self) -> End {
        let (stream, mut lines) = match self.connect() {
            Ok(connected) => connected,
            Err(end) => return end,
        };
        if self.warned {
            tracing::info!("the agent at {} is back", self.socket.display());
            self.warned = false;
        }
        let shared = Arc::clone(&self.shared);
        std::thread::scope(|scope| {
            let reading = std::thread::Builder::new().name("flexcomm-orders".into()).spawn_scoped(scope, || {
                let end = take_in(&mut lines, &shared.orders);
                shared.disconnected();
                end
            });
            let reading = match reading {
                Ok(reading) => reading,
                Err(error) => return End::Lost(error),
            };
            let sent = self.pump(&stream);
            // Ends the reading, and copies of the socket, too, which children that were forked meanwhile have.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            let read =
                reading.join().unwrap_or_else(|_| End::Lost(Error::other("the thread that reads it has panicked")));
            match (sent, read) {
                // Also where a message was on its way to an agent that had closed already.
                (_, End::Refused(reason)) => End::Refused(reason),
                (Err(error), _) => End::Lost(error),
                (Ok(Sent::All), _) => End::Ending,
                (Ok(Sent::Some), end) => end,
            }
        })
    }

    /// The socket, and the lines that come by it.
    fn connect(&mut self) -> Result<(UnixStream, BufReader<UnixStream>), End> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_write_timeout(Some(IO_TIMEOUT))?;
        stream.set_read_timeout(Some(IO_TIMEOUT))?;
        self.hello.buckets.clone_from(&self.shared.lock().buckets);
        write_line(&stream, &FromTrainer::Hello { protocol: PROTOCOL, hello: self.hello.clone() })?;
        let mut lines = BufReader::new(stream.try_clone()?);
        match serde_json::from_slice(&read_line(&mut lines)?).map_err(Error::from)? {
            ToTrainer::Refused { reason } => return Err(End::Refused(reason)),
            ToTrainer::Welcome { takes_buckets, .. } => {
                self.takes_buckets = takes_buckets;
                self.welcomed(&stream)?;
            }
            ToTrainer::Orders(_) => return Err(Error::new(ErrorKind::InvalidData, "orders before its welcome").into()),
        }
        stream.set_read_timeout(None)?;
        Ok((stream, lines))
    }

    fn welcomed(&self, stream: &UnixStream) -> std::io::Result<()> {
        let applied = {
            let mut state = self.shared.lock();
            state.connected = true;
            state.applied.clone()
        };
        self.shared.wake.notify_all();
        match applied {
            Some(report) => write_line(stream, &FromTrainer::Applied(report)),
            None => Ok(()),
        }
    }

    /// Sends until told to end, or until the connection is gone. A message leaves the queue only once the system has taken
    /// all of it.
    fn pump(&mut self, stream: &UnixStream) -> std::io::Result<Sent> {
        let since = Instant::now();
        loop {
            let unreported = |state: &State| self.takes_buckets && state.buckets != self.hello.buckets;
            let wakes =
                |state: &State| !state.queue.is_empty() || unreported(state) || state.ending || !state.connected;
            let (next, buckets, ending, connected) = {
                let state = self.shared.wait(ACCEPTED_AFTER, wakes);
                let buckets = unreported(&state).then(|| state.buckets.clone());
                (state.queue.front().cloned(), buckets, state.ending, state.connected)
            };
            match next {
                // First: an agent that has read the goodbye closes the connection.
                None if ending => return Ok(Sent::All),
                _ if !connected => return Ok(Sent::Some),
                _ => {}
            }
            if self.refused.is_some() && since.elapsed() >= ACCEPTED_AFTER {
                self.refused = None;
                tracing::info!("the agent has not refused this trainer again for {} s", ACCEPTED_AFTER.as_secs());
            }
            if let Some(values) = buckets {
                self.hello.buckets.clone_from(&values);
                let (job, rank) = (self.hello.job.clone(), self.hello.rank);
                write_line(stream, &FromTrainer::Buckets { job, rank, values })?;
                continue;
            }
            let Some(Queued { number, message }) = next else { continue };
            let written = write_line(stream, &message);
            let too_long = matches!(&written, Err(e) if e.kind() == ErrorKind::InvalidInput);
            if !too_long {
                written?;
            }
            let mut state = self.shared.lock();
            state.dropped += u64::from(too_long);
            // When the queue overflowed meanwhile, this very message may have been dropped from its front.
            state.queue.pop_front_if(|front| front.number == number);
            drop(state);
            self.shared.wake.notify_all();
        }
    }
}

/// Takes in what the agent says after its welcome, until the connection ends.
fn take_in(lines: &mut BufReader<UnixStream>, orders: &OrdersSlot) -> End {
    loop {
        let line = match read_line(lines) {
            Ok(line) => line,
            Err(error) => return End::Lost(error),
        };
        match serde_json::from_slice(&line) {
            Ok(ToTrainer::Orders(new)) => orders.put(&new),
            Ok(ToTrainer::Refused { reason }) => return End::Refused(reason),
            Ok(ToTrainer::Welcome { .. }) => {}
            Err(error) => orders.reject(&error),
        }
    }
}

fn write_line(mut stream: &UnixStream, message: &FromTrainer) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    if line.len() > MAX_LINE {
        let text = format!("a message of {} bytes, at most {MAX_LINE} fit on a line", line.len());
        tracing::warn!("{text}; it is dropped");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    stream.write_all(&line)
}

/// The agent's next line, without its end.
fn read_line(lines: &mut BufReader<UnixStream>) -> std::io::Result<Vec<u8>> {
    let mut line = Vec::new();
    lines.take(MAX_LINE as u64 + 1).read_until(b'\n', &mut line)?;
    if line.pop_if(|last| *last == b'\n').is_some() {
        return Ok(line);
    }
    Err(if line.len() > MAX_LINE {
        Error::new(ErrorKind::InvalidData, format!("it sent a line of more than {MAX_LINE} bytes"))
    } else {
        Error::new(ErrorKind::UnexpectedEof, "it closed the connection")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::orders::tests::{orders, version};
    use flexcomm_domain::{JobId, NodeName};
    use flexcomm_wire::{PROTOCOL, StepRecord, StepsReport};
    use std::os::unix::net::UnixListener;

    const SOON: Duration = Duration::from_secs(20);

    fn hello() -> Hello {
        Hello::new(JobId::new("j").unwrap(), (0, 1), 1, "lab-tcp")
    }

    fn applied(version: u64) -> FromTrainer {
        FromTrainer::Applied(AppliedReport { job: JobId::new("j").unwrap(), rank: 0, version, digest: 0, step: 1 })
    }

    /// A report of so many steps.
    fn steps(count: usize) -> FromTrainer {
        let record = StepRecord {
            step: 1,
            compute_us: 1.0,
            sync_us: 1.0,
            step_us: 2.0,
            bytes_sent: 1,
            gain: 1.0,
            ..StepRecord::default()
        };
        let (job, strategy) = (JobId::new("j").unwrap(), flexcomm_domain::Strategy::DENSE_RING.into());
        FromTrainer::Steps(StepsReport { job, rank: 0, version: 0, strategy, steps: vec![record; count] })
    }

    struct Agent {
        lines: BufReader<UnixStream>,
        greeted: Hello,
    }

    impl Agent {
        fn accept(listener: &UnixListener) -> Self {
            let (stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            let mut agent = Self { lines: BufReader::new(stream), greeted: hello() };
            let Some(FromTrainer::Hello { hello, .. }) = agent.next() else { panic!("no hello") };
            agent.greeted = hello;
            agent
        }

        fn answer(&mut self, answer: &ToTrainer) {
            let mut line = serde_json::to_vec(answer).unwrap();
            line.push(b'\n');
            self.lines.get_mut().write_all(&line).unwrap();
        }

        fn welcome(&mut self) {
            let node = NodeName::new("n1").unwrap();
            self.answer(&ToTrainer::Welcome { protocol: PROTOCOL, node, takes_buckets: true });
        }

        fn next(&mut self) -> Option<FromTrainer> {
            let mut line = String::new();
            self.lines.read_line(&mut line).unwrap();
            (!line.is_empty()).then(|| serde_json::from_str(&line).unwrap())
        }
    }

    #[test]
    fn an_agent_that_says_nothing_is_told_of_in_words() {
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let silence = ours.read(&mut [0]).unwrap_err();
        assert_eq!(why(&silence), "it was silent for 2 s");
        assert!(why(&UnixStream::connect("/nowhere").unwrap_err()).contains("No such file"));
    }

    #[test]
    fn reports_survive_a_restart_of_the_agent_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let client = Client::start(&path, hello()).unwrap();
        client.send(FromTrainer::Bye);
        let listener = UnixListener::bind(&path).unwrap();
        let mut agent = Agent::accept(&listener);
        agent.welcome();
        assert_eq!(agent.next(), Some(FromTrainer::Bye), "queued before the agent was there");
        client.send(applied(4));
        assert_eq!(agent.next(), Some(applied(4)));
        assert!(client.connected());

        drop((agent, listener));
        drop(client.shared.wait(SOON, |state| !state.connected));
        client.send(applied(5));
        std::fs::remove_file(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        let mut agent = Agent::accept(&listener);
        agent.welcome();
        assert_eq!(agent.next(), Some(applied(5)), "what is in force is told to a new agent first");
        assert_eq!(agent.next(), Some(applied(5)));
        client.finish(SOON);
        assert_eq!(agent.next(), Some(FromTrainer::Bye));
        assert_eq!(agent.next(), None);
    }

    #[test]
    fn buckets_are_said_once_and_again_with_each_hello() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = Client::start(&path, Hello { gradient_values: 8, ..hello() }).unwrap();
        let mut agent = Agent::accept(&listener);
        assert!(agent.greeted.buckets.is_empty());
        // Between the hello and the welcome.
        client.report_buckets(vec![3, 5]);
        agent.welcome();
        let reported = |values| Some(FromTrainer::Buckets { job: JobId::new("j").unwrap(), rank: 0, values });
        assert_eq!(agent.next(), reported(vec![3, 5]));
        [vec![3, 5], vec![3, 6], vec![8, 0]].into_iter().for_each(|values| client.report_buckets(values));
        client.send(applied(1));
        assert_eq!(agent.next(), Some(applied(1)), "neither again nor what the agent would refuse");
        client.report_buckets(vec![5, 3]);
        assert_eq!(agent.next(), reported(vec![5, 3]));

        drop(agent);
        // One that does not take them has them by its hello.
        let mut agent = Agent::accept(&listener);
        assert_eq!(agent.greeted.buckets, [5, 3]);
        let node = NodeName::new("n1").unwrap();
        agent.answer(&ToTrainer::Welcome { protocol: PROTOCOL, node, takes_buckets: false });
        assert_eq!(agent.next(), Some(applied(1)));
        client.report_buckets(vec![2, 6]);
        client.send(applied(2));
        assert_eq!(agent.next(), Some(applied(2)));
        drop(agent);
        assert_eq!(Agent::accept(&listener).greeted.buckets, [2, 6]);
    }

    #[test]
    fn without_an_agent_the_queue_is_bounded_and_nothing_waits() {
        let folder = tempfile::tempdir().unwrap();
        let client = Client::start(&folder.path().join("nobody.sock"), hello()).unwrap();
        for version in 0..MAX_QUEUED as u64 + 10 {
            client.send(applied(version));
        }
        assert_eq!(client.dropped(), 10);
        assert!(!client.connected());
        assert_eq!(client.shared.lock().queue.front().map(|queued| queued.message.clone()), Some(applied(10)));
        client.finish(Duration::from_millis(1));
    }

    #[test]
    fn measurements_make_way_for_results() {
        let folder = tempfile::tempdir().unwrap();
        let client = Client::start(&folder.path().join("nobody.sock"), hello()).unwrap();
        client.send(applied(1));
        let measured = || steps(0);
        (0..2 * MAX_QUEUED).for_each(|_| client.send(measured()));
        client.send(applied(2));
        let state = client.shared.lock();
        let results: Vec<_> = state.queue.iter().filter(|q| !q.is_measurement()).map(|q| q.message.clone()).collect();
        assert_eq!(results, [applied(1), applied(2)]);
        assert_eq!((state.queue.len(), state.dropped), (MAX_QUEUED, MAX_QUEUED as u64 + 2));
    }

    #[test]
    fn a_refusal_is_not_a_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = Client::start(&path, hello()).unwrap();
        let mut agent = Agent::accept(&listener);
        agent.answer(&ToTrainer::Refused { reason: "protocol 1, this agent speaks 2".into() });
        assert_eq!(agent.next(), None);
        assert!(!client.connected());
    }

    /// What the agent orders next.
    fn ordered(client: &Client) -> Option<u64> {
        let end = Instant::now() + SOON;
        loop {
            if let Some(news) = client.orders().poll() {
                return version(Some(news));
            }
            assert!(Instant::now() < end, "no orders");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn orders_arrive_at_once_and_anew_from_an_agent_that_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = Client::start(&path, hello()).unwrap();
        let mut agent = Agent::accept(&listener);
        // In one piece: what comes behind the welcome is not lost with it.
        let node = NodeName::new("n1").unwrap();
        let both =
            [ToTrainer::Welcome { protocol: PROTOCOL, node, takes_buckets: false }, ToTrainer::Orders(orders(1))];
        let both: String = both.iter().map(|m| serde_json::to_string(m).unwrap() + "\n").collect();
        agent.lines.get_mut().write_all(both.as_bytes()).unwrap();
        assert_eq!(ordered(&client), Some(1));
        for bad in ["{\"kind\":\"orders\",\"job\":\n", "\u{1}\n", "{\"kind\":\"of a later release\"}\n"] {
            agent.lines.get_mut().write_all(bad.as_bytes()).unwrap();
        }
        agent.answer(&ToTrainer::Orders(orders(2)));
        assert_eq!((ordered(&client), client.orders().rejected()), (Some(2), 3));

        drop(agent);
        drop(client.shared.wait(SOON, |state| !state.connected));
        assert_eq!(client.orders().poll(), None, "training goes on with what it has");
        let mut agent = Agent::accept(&listener);
        agent.welcome();
        agent.answer(&ToTrainer::Orders(orders(2)));
        assert_eq!(ordered(&client), Some(2));
    }

    #[test]
    fn a_refusal_after_the_welcome_ends_the_connection_and_says_why() {
        let slot = OrdersSlot::new(JobId::new("j").unwrap(), None);
        let reason = format!("another run trains under the name j already{}", "!".repeat(500));
        let line = serde_json::to_string(&ToTrainer::Refused { reason: reason.clone() }).unwrap() + "\n";
        let end = |sent: &str| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let writing = std::thread::spawn({
                let sent = sent.to_owned();
                move || theirs.write_all(sent.as_bytes())
            });
            let end = take_in(&mut BufReader::new(ours), &slot);
            let _ = writing.join().unwrap();
            end
        };
        assert!(matches!(end(&line), End::Refused(found) if found == reason));
        assert!(matches!(end(""), End::Lost(error) if error.to_string().contains("closed")));
        assert!(matches!(end("half a line"), End::Lost(error) if error.to_string().contains("closed")));
        assert!(matches!(end(&"x".repeat(MAX_LINE + 2)), End::Lost(error) if error.to_string().contains("more than")));
        assert_eq!(slot.rejected(), 0);
    }

    #[test]
    fn a_message_too_long_for_a_line_is_dropped_and_the_rest_arrives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = Client::start(&path, hello()).unwrap();
        client.send(steps(MAX_LINE / 8));
        client.send(applied(1));
        let mut agent = Agent::accept(&listener);
        agent.welcome();
        // Once before the queue, once from it.
        assert_eq!(agent.next(), Some(applied(1)));
        assert_eq!(agent.next(), Some(applied(1)));
        assert_eq!(client.dropped(), 1);
    }
}
