//! The edge: a netlink socket of this thread's network namespace. Nothing is decided here.

use super::codec::{self, Frame, Message};
use super::error::ShapeError;
use super::plan::Tree;
use rtnetlink::sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use std::collections::BTreeSet;
use std::io;

/// An answer that takes longer never comes; the kernel answers within the system call.
const ANSWER_TIMEOUT_S: i64 = 5;
/// Datagrams of one dump: 64 MB of qdiscs.
const MOST_DATAGRAMS: usize = 4096;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const SET_LINK: u16 = 19;
const GET_ROUTE: u16 = 26;
/// `IFLA_TXQLEN`.
const QUEUE_LENGTH: u16 = 13;
/// `NLM_F_ACK_TLVS`: the kernel's own words follow.
const FLAG_ACK_TLVS: u16 = 0x200;

/// A message the kernel refused.
#[derive(Debug)]
pub(crate) struct Refusal {
    /// Which of the batch.
    pub(crate) index: usize,
    pub(crate) source: io::Error,
    pub(crate) words: String,
}

impl Refusal {
    fn own(source: io::Error) -> Self {
        Self { index: 0, source, words: String::new() }
    }

    pub(crate) fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(0)
    }
}

/// An interface as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) ifindex: u32,
    pub(crate) queue_length: u32,
}

/// A netlink socket.
pub(crate) struct Kernel {
    socket: Socket,
    sequence: u32,
}

impl Kernel {
    pub(crate) fn open() -> Result<Self, ShapeError> {
        Self::connect().map_err(ShapeError::io("open a netlink socket"))
    }

    fn connect() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_ext_ack(true)?;
        socket.set_cap_ack(true)?;
        set_timeout(&socket)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends all messages in one system call, within which the kernel carries all of them out; says which one was
    /// refused first.
    pub(crate) fn execute(&mut self, messages: &[Message]) -> Result<(), Refusal> {
        let first = self.sequence + 1;
        let mut bytes = Vec::new();
        for message in messages {
            self.sequence += 1;
            message.encode(self.sequence, &mut bytes);
        }
        self.send(&bytes).map_err(Refusal::own)?;
        let mut refusal: Option<Refusal> = None;
        let mut open: BTreeSet<u32> = (first..=self.sequence).collect();
        while !open.is_empty() {
            let datagram = self.receive().map_err(Refusal::own)?;
            for frame in codec::frames(&datagram).filter(|f| f.message == ERROR) {
                if open.remove(&frame.sequence)
                    && let Err((source, words)) = verdict(&frame)
                    && refusal.is_none()
                {
                    refusal = Some(Refusal { index: (frame.sequence - first) as usize, source, words });
                }
            }
        }
        refusal.map_or(Ok(()), Err)
    }

    /// What stands under an interface.
    pub(crate) fn tree(&mut self, ifindex: u32) -> io::Result<Tree> {
        Ok(Tree::from_dump(&self.dump(codec::GET_QDISC, ifindex)?))
    }

    /// Qdiscs or classes of an interface.
    pub(crate) fn dump(&mut self, message: u16, ifindex: u32) -> io::Result<Vec<Message>> {
        let mut payload = [0; 20];
        payload[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        let mut found = Vec::new();
        self.ask(message, codec::FLAG_DUMP, &payload, |frame| {
            found.extend(Message::decode(frame.message, frame.flags, frame.payload).filter(|m| m.ifindex == ifindex));
        })?;
        Ok(found)
    }

    /// The interface with this number in this namespace; `None` when there is none.
    pub(crate) fn link(&mut self, ifindex: u32) -> io::Result<Option<Link>> {
        let mut link = None;
        let answer = self.ask(GET_LINK, 0, &link_header(ifindex), |frame| {
            if frame.message == NEW_LINK && codec::u32_at(frame.payload, 4) == Some(ifindex) {
                let length = codec::attributes(frame.payload.get(16..).unwrap_or(&[]))
                    .find(|(kind, _)| *kind == QUEUE_LENGTH)
                    .and_then(|(_, value)| codec::u32_at(value, 0));
                link = Some(Link { ifindex, queue_length: length.unwrap_or(0) });
            }
        });
        match answer {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            answer => answer.map(|()| link),
        }
    }

    /// Sets the length of the driver's queue in packets.
    pub(crate) fn set_queue_length(&mut self, link: Link) -> io::Result<()> {
        let mut payload = link_header(link.ifindex).to_vec();
        codec::attribute(&mut payload, QUEUE_LENGTH, &link.queue_length.to_ne_bytes());
        self.ask(SET_LINK, codec::FLAG_ACK, &payload, |_| {})
    }

    /// Interfaces that carry a default route in any table, IPv4 or IPv6.
    pub(crate) fn default_routes(&mut self) -> io::Result<BTreeSet<u32>> {
        let mut found = BTreeSet::new();
        for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
            let mut payload = [0; 12];
            payload[0] = family;
            self.ask(GET_ROUTE, codec::FLAG_DUMP, &payload, |frame| found.extend(default_route(frame.payload)))?;
        }
        Ok(found)
    }

    /// Sends one request and hands every answer to `each` until the kernel says it is done.
    fn ask(&mut self, message: u16, flags: u16, payload: &[u8], mut each: impl FnMut(&Frame<'_>)) -> io::Result<()> {
        self.sequence += 1;
        let sequence = self.sequence;
        let mut bytes = ((payload.len() + 16) as u32).to_ne_bytes().to_vec();
        bytes.extend_from_slice(&message.to_ne_bytes());
        bytes.extend_from_slice(&(flags | codec::FLAG_REQUEST).to_ne_bytes());
        bytes.extend_from_slice(&sequence.to_ne_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(payload);
        self.send(&bytes)?;
        for _ in 0..MOST_DATAGRAMS {
            let datagram = self.receive()?;
            for frame in codec::frames(&datagram).filter(|f| f.sequence == sequence) {
                match frame.message {
                    DONE => return Ok(()),
                    ERROR => return verdict(&frame).map_err(|(source, _)| source),
                    _ => each(&frame),
                }
                if flags == 0 {
                    return Ok(());
                }
            }
        }
        Err(io::Error::other("the dump does not end"))
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let sent = retry(|| self.socket.send(bytes, 0))?;
        if sent == bytes.len() { Ok(()) } else { Err(io::Error::other("the message was cut short")) }
    }

    fn receive(&self) -> io::Result<Vec<u8>> {
        retry(|| self.socket.recv_from_full()).map(|(bytes, _)| bytes)
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn set_timeout(socket: &Socket) -> io::Result<()> {
    use nix::sys::socket::{setsockopt, sockopt::ReceiveTimeout};
    use nix::sys::time::{TimeVal, TimeValLike};
    setsockopt(socket, ReceiveTimeout, &TimeVal::seconds(ANSWER_TIMEOUT_S)).map_err(io::Error::from)
}

/// What an error frame says: errno 0 is an acknowledgement.
fn verdict(frame: &Frame<'_>) -> Result<(), (io::Error, String)> {
    const WORDS: u16 = 1;
    let errno = codec::u32_at(frame.payload, 0).map_or(libc::EPROTO, |v| -(v as i32));
    if errno == 0 {
        return Ok(());
    }
    let tail = if frame.flags & FLAG_ACK_TLVS == 0 { &[] } else { frame.payload.get(20..).unwrap_or(&[]) };
    let words = codec::attributes(tail).find(|(kind, _)| *kind == WORDS).map(|(_, value)| codec::text(value));
    Err((io::Error::from_raw_os_error(errno), words.unwrap_or_default()))
}

fn link_header(ifindex: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    header
}

/// Outgoing interfaces of a route when it is a default route to somewhere.
fn default_route(payload: &[u8]) -> Vec<u32> {
    const UNICAST: u8 = 1;
    const OUT: u16 = 4;
    const MULTIPATH: u16 = 9;
    let (Some(&[_, destination_bits, ..]), Some(&kind)) = (payload.get(..8), payload.get(7)) else { return Vec::new() };
    if destination_bits != 0 || kind != UNICAST {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (kind, value) in codec::attributes(payload.get(12..).unwrap_or(&[])) {
        match kind {
            OUT => found.extend(codec::u32_at(value, 0)),
            MULTIPATH => found.extend(next_hops(value)),
            _ => {}
        }
    }
    found
}

/// `struct rtnexthop`: length, flags, hops, interface.
fn next_hops(mut bytes: &[u8]) -> Vec<u32> {
    let mut found = Vec::new();
    while let (Some(length), Some(ifindex)) = (codec::u16_at(bytes, 0), codec::u32_at(bytes, 4)) {
        found.push(ifindex);
        bytes = bytes.get(usize::from(length).max(8).next_multiple_of(4)..).unwrap_or(&[]);
    }
    found
}
