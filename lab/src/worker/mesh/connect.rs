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
const LAYOUT: u32 = 3;
const GREETING: usize = 40;

struct Greeting {
    rank: u32,
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
        bytes[12..16].copy_from_slice(&self.world.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.settings.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.clock.to_le_bytes());
        bytes[32..].copy_from_slice(&self.run.to_le_bytes());
        bytes
    }

    /// None for anything that is not a worker of this release.
    fn read(stream: &mut TcpStream) -> std::io::Result<Option<Self>> {
        let mut bytes = [0; GREETING];
        stream.read_exact(&mut bytes)?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[..4] != MAGIC || word(4) != LAYOUT {
            return Ok(None);
        }
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Ok(Some(Self { rank: word(8), world: word(12), settings: long(16), clock: long(24), run: long(32) }))
    }

    /// What does not fit between two workers of one job.
    fn clash(&self, own: &Self) -> Option<String> {
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
            stop_heard: false,
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
                    let what = "what listens there is no worker of this release".to_owned();
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
