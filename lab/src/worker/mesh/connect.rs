//! How ranks meet: each listens on its own address, calls every lower rank and is called by every higher one.

use super::{MAX_WORLD, Mesh, MeshConfig, MeshError, Peer};
use flexcomm_domain::{Rank, RunId};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, Socket, Type};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Socket buffers in bytes: two round trips of 100 ms at 100 Mbit/s, and a whole chunk in one write.
const SOCKET_BUFFER: usize = 4 << 20;

/// Between two attempts to reach a rank that does not listen yet.
const RETRY: Duration = Duration::from_millis(30);

/// How long a caller may take to say who it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(3);

const MAGIC: [u8; 4] = *b"FLXM";
const LAYOUT: u32 = 4;

/// Where the release stands in a greeting, and where it ends. Magic, layout, rank and release are there in every layout from 4 on;
/// layout 3 was as long as this, without a release.
const RELEASE: std::ops::Range<usize> = 12..40;
const GREETING: usize = 68;

struct Greeting {
    rank: u32,
    /// As people know it; what follows is read of the own one only.
    release: String,
    world: u32,
    settings: u64,
    /// Which clock it reads: the same number means the same kernel since the same boot.
    clock: u64,
    /// Random; rank 0's is the id of the run.
    run: u64,
}

impl Greeting {
    fn of(config: &MeshConfig) -> Self {
        let world = config.peers.len() as u32;
        Self {
            rank: config.rank.0,
            release: format!("{} (protocol {})", env!("CARGO_PKG_VERSION"), flexcomm_wire::PROTOCOL),
            world,
            settings: config.settings,
            clock: super::clock::identity(),
            run: rand::random(),
        }
    }

    fn bytes(&self) -> [u8; GREETING] {
        let mut bytes = [0; GREETING];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&LAYOUT.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.rank.to_le_bytes());
        bytes[RELEASE].iter_mut().zip(self.release.bytes()).for_each(|(to, byte)| *to = byte);
        bytes[40..44].copy_from_slice(&self.world.to_le_bytes());
        bytes[44..52].copy_from_slice(&self.settings.to_le_bytes());
        bytes[52..60].copy_from_slice(&self.clock.to_le_bytes());
        bytes[60..].copy_from_slice(&self.run.to_le_bytes());
        bytes
    }

    /// None for anything that is not a worker.
    fn read(stream: &mut TcpStream) -> std::io::Result<Option<Self>> {
        let mut bytes = [0; GREETING];
        stream.read_exact(&mut bytes[..RELEASE.end])?;
        let layout = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if bytes[..4] != MAGIC {
            return Ok(None);
        }
        if layout == LAYOUT {
            stream.read_exact(&mut bytes[RELEASE.end..])?;
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let release = match layout {
            ..LAYOUT => format!("an earlier one (greeting {layout})"),
            _ => String::from_utf8_lossy(&bytes[RELEASE]).trim_end_matches('\0').to_owned(),
        };
        Ok(Some(Self { rank: word(8), release, world: word(40), settings: long(44), clock: long(52), run: long(60) }))
    }

    /// What does not fit between two workers of one job.
    fn clash(&self, own: &Self) -> Option<String> {
        if self.release != own.release {
            let (theirs, ours, rank) = (&self.release, &own.release, own.rank);
            return Some(format!("its release is {theirs}, that of rank {rank} is {ours}; run the same on all ranks"));
        }
        if self.world != own.world {
            return Some(format!("it was started with {} peers, rank {} with {}", self.world, own.rank, own.world));
        }
        (self.settings != own.settings).then(|| {
            "it was started with another job, network, batch, learning rate, seed, strategy or number of steps".into()
        })
    }
}

impl Mesh {
    /// Opens this rank's address.
    pub fn listen(config: &MeshConfig) -> Result<TcpListener, MeshError> {
        let addr = config.peers[config.rank.index()];
        open_listener(addr).map_err(|source| MeshError::Listen { addr, source })
    }

    /// Meets all other ranks. `listener` is open on this rank's address already; `stop` ends waiting.
    pub fn connect(listener: TcpListener, config: &MeshConfig, stop: Arc<AtomicBool>) -> Result<Self, MeshError> {
        debug_assert!(config.peers.len() <= MAX_WORLD);
        let deadline = Instant::now() + config.timeout;
        let mut peers: Vec<Option<Peer>> = config.peers.iter().map(|_| None).collect();
        let meeting = Meeting { config, own: Greeting::of(config), deadline, stop: &stop };
        for (rank, slot) in peers.iter_mut().enumerate().take(config.rank.index()) {
            *slot = Some(meeting.call(Rank(rank as u32))?);
        }
        meeting.answer(&listener, &mut peers)?;
        let timeout = config.timeout;
        let run = RunId(peers.first().and_then(|first| first.as_ref()).map_or(meeting.own.run, |first| first.run));
        Ok(Self {
            rank: config.rank,
            run,
            peers,
            timeout,
            stop,
            peer_told_to_stop: false,
            posted: Vec::new(),
            bytes_sent: 0,
            own_entry_us: 0,
            last_entry_us: 0,
        })
    }
}

struct Meeting<'a> {
    config: &'a MeshConfig,
    own: Greeting,
    deadline: Instant,
    stop: &'a AtomicBool,
}

impl Meeting<'_> {
    fn over(&self) -> bool {
        Instant::now() >= self.deadline || self.stop.load(Ordering::Relaxed)
    }

    fn missing(&self, ranks: impl Iterator<Item = usize>) -> MeshError {
        let name = |rank: usize| format!("rank {rank} ({})", self.config.peers[rank]);
        let missing = ranks.map(name).collect::<Vec<_>>().join(", ");
        MeshError::Missing { seconds: self.config.timeout.as_secs_f64(), missing }
    }

    /// Calls a lower rank until it answers.
    fn call(&self, rank: Rank) -> Result<Peer, MeshError> {
        let addr = self.config.peers[rank.index()];
        loop {
            match self.try_call(addr) {
                Ok((stream, Some(greeting))) => return self.checked(stream, addr, &greeting, rank),
                Ok((_, None)) => {
                    let what = "what listens there is no worker".to_owned();
                    return Err(MeshError::Stranger { peer: rank, addr, what });
                }
                Err(error) => tracing::debug!(%rank, %addr, %error, "not there yet"),
            }
            if self.over() {
                return Err(self.missing(std::iter::once(rank.index())));
            }
            std::thread::sleep(RETRY);
        }
    }

    fn try_call(&self, addr: SocketAddr) -> std::io::Result<(TcpStream, Option<Greeting>)> {
        let left = self.deadline.saturating_duration_since(Instant::now()).max(RETRY);
        let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
        large_buffers(&socket);
        socket.connect_timeout(&addr.into(), left)?;
        let mut stream = TcpStream::from(socket);
        stream.write_all(&self.own.bytes())?;
        // The other side answers once it has met the ranks below it, which may take as long as they take.
        stream.set_read_timeout(Some(left))?;
        let greeting = Greeting::read(&mut stream)?;
        Ok((stream, greeting))
    }

    fn checked(
        &self,
        stream: TcpStream,
        addr: SocketAddr,
        greeting: &Greeting,
        expected: Rank,
    ) -> Result<Peer, MeshError> {
        let stranger = |what| MeshError::Stranger { peer: expected, addr, what };
        if greeting.rank != expected.0 {
            return Err(stranger(format!("it says it is rank {}", greeting.rank)));
        }
        if let Some(what) = greeting.clash(&self.own) {
            return Err(stranger(what));
        }
        let same_clock = greeting.clock == self.own.clock && greeting.clock != 0;
        let peer = ready(stream, expected, addr).map_err(|e| stranger(e.to_string()))?;
        Ok(Peer { same_clock, run: greeting.run, ..peer })
    }

    /// Waits for the calls of all higher ranks. Whoever does not speak our greeting is sent away.
    fn answer(&self, listener: &TcpListener, peers: &mut [Option<Peer>]) -> Result<(), MeshError> {
        let own = self.config.rank.index();
        let addr = self.config.peers[own];
        listener.set_nonblocking(true).map_err(|source| MeshError::Listen { addr, source })?;
        while peers[own + 1..].iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, from)) => {
                    if let Some(peer) = self.accept(stream, from)? {
                        let slot = peer.rank.index();
                        peers[slot] = Some(peer);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.over() {
                        return Err(self.missing((own + 1..peers.len()).filter(|r| peers[*r].is_none())));
                    }
                    std::thread::sleep(RETRY);
                }
                Err(source) => return Err(MeshError::Listen { addr, source }),
            }
        }
        Ok(())
    }

    fn accept(&self, mut stream: TcpStream, from: SocketAddr) -> Result<Option<Peer>, MeshError> {
        let greeted = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_read_timeout(Some(GREETING_TIMEOUT)))
            .and_then(|()| Greeting::read(&mut stream));
        let Ok(Some(greeting)) = greeted else {
            tracing::warn!(%from, "a connection that is not from a worker was closed");
            return Ok(None);
        };
        let rank = greeting.rank as usize;
        if let Err(error) = stream.write_all(&self.own.bytes()) {
            tracing::debug!(%from, %error, "a worker left again");
            return Ok(None);
        }
        if rank <= self.config.rank.index() || rank >= self.config.peers.len() {
            let what = greeting.clash(&self.own).unwrap_or_else(|| "that rank calls nobody here".into());
            return Err(MeshError::Stranger { peer: Rank(greeting.rank), addr: from, what });
        }
        let addr = self.config.peers[rank];
        self.checked(stream, addr, &greeting, Rank(greeting.rank)).map(Some)
    }
}

fn open_listener(addr: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    // Accepted connections inherit them.
    large_buffers(&socket);
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    // Fits an i32: MAX_WORLD.
    socket.listen(MAX_WORLD as i32)?;
    Ok(socket.into())
}

/// Must come before the connection: its window can never be larger than the buffer was then.
///
/// Only the forced variants: the ordinary ones would be capped at the system's small default and would switch
/// its own growing of buffers off. Without the capability that growing remains.
fn large_buffers(socket: &Socket) {
    let forced = setsockopt(socket, sockopt::SndBufForce, &SOCKET_BUFFER)
        .and_then(|()| setsockopt(socket, sockopt::RcvBufForce, &SOCKET_BUFFER));
    if let Err(errno) = forced {
        tracing::debug!(%errno, "socket buffers are left to the system");
    }
}

fn ready(stream: TcpStream, rank: Rank, addr: SocketAddr) -> std::io::Result<Peer> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(Peer { rank, addr, stream, mid_frame: false, same_clock: false, run: 0, control: VecDeque::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listener, and what a worker of this rank needs to meet another one.
    fn worker(rank: u32) -> (TcpListener, MeshConfig) {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let peers = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        let [first, second] = listeners;
        let config = MeshConfig { rank: Rank(rank), peers, settings: 7, timeout: Duration::from_secs(20) };
        (if rank == 0 { first } else { second }, config)
    }

    /// What the worker says that meets one with this greeting.
    fn refusal((listener, config): (TcpListener, MeshConfig), other: impl FnOnce() + Send) -> String {
        std::thread::scope(|scope| {
            scope.spawn(other);
            Mesh::connect(listener, &config, Arc::default()).unwrap_err().to_string()
        })
    }

    fn own() -> String {
        Greeting::of(&worker(0).1).release
    }

    fn of_layout(layout: u32, rank: u32, release: &str) -> Vec<u8> {
        let greeting = Greeting { release: release.into(), ..Greeting::of(&worker(rank).1) };
        let mut bytes = greeting.bytes().to_vec();
        bytes[4..8].copy_from_slice(&layout.to_le_bytes());
        bytes
    }

    #[test]
    fn a_worker_of_another_release_is_refused_by_its_rank_and_both_releases() {
        let mut before = of_layout(3, 1, "");
        // Its number of ranks, and its settings.
        before.truncate(40);
        before[12] = 2;
        before[16] = 7;
        let later = "0.2.0 (protocol 4)";
        let callers = [
            (before, "an earlier one (greeting 3)"),
            (of_layout(LAYOUT, 1, later), later),
            (of_layout(LAYOUT + 1, 1, later), later),
        ];
        for (greeting, release) in callers {
            let (listener, config) = worker(0);
            let addr = config.peers[0];
            let text = refusal((listener, config), move || {
                let mut caller = TcpStream::connect(addr).unwrap();
                caller.write_all(&greeting).unwrap();
                let mut answer = [0; GREETING];
                caller.read_exact(&mut answer).unwrap();
                let read = String::from_utf8_lossy(&answer[RELEASE]).into_owned();
                assert!(read.starts_with(&own()), "the caller hears of it, too: {read:?}");
            });
            assert!(text.starts_with("meet rank 1 ("), "{text}");
            assert!(text.contains(&format!("its release is {release}, that of rank 0 is {}", own())), "{text}");
        }
    }

    #[test]
    fn a_worker_that_calls_one_of_another_release_names_it() {
        let (own_listener, mut config) = worker(1);
        let called = TcpListener::bind("127.0.0.1:0").unwrap();
        config.peers[0] = called.local_addr().unwrap();
        let text = refusal((own_listener, config), move || {
            let mut answering = called.accept().unwrap().0;
            answering.write_all(&of_layout(LAYOUT + 1, 0, "0.2.0 (protocol 4)")).unwrap();
            // It stays until the other has gone.
            let _ = answering.read_to_end(&mut Vec::new());
        });
        assert!(text.starts_with("meet rank 0 ("), "{text}");
        let expected = format!("its release is 0.2.0 (protocol 4), that of rank 1 is {}", own());
        assert!(text.contains(&expected), "{text}");
    }
}
