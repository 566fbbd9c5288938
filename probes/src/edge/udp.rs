//! UDP and ICMP sockets whose receive times are the kernel's.

use super::clock::Clocks;
use crate::Nanos;
use nix::errno::Errno;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrLike, SockaddrStorage, recvmsg, setsockopt, sockopt::ReceiveTimestampns,
};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Room for answers that arrive together: a burst from a thousand peers.
const RECEIVE_BUFFER: usize = 1 << 20;

/// Datagrams taken from a socket before anything else gets its turn.
const BATCH: usize = 256;

/// Bytes that are read of a datagram: more than any probe has.
const LONGEST: usize = 2048;

/// A datagram socket with kernel receive stamps. Never blocks.
pub(super) struct Stamped {
    socket: Socket,
}

/// A received datagram.
pub(super) struct Datagram {
    len: usize,
    pub(super) from: SocketAddr,
    pub(super) at: Nanos,
}

impl Stamped {
    pub(super) fn new(domain: Domain, kind: Type, protocol: Protocol) -> io::Result<Self> {
        let socket = Socket::new(domain, kind, Some(protocol))?;
        socket.set_nonblocking(true)?;
        // Best effort: the kernel caps it silently, and a smaller buffer loses only bursts.
        let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
        setsockopt(&socket, ReceiveTimestampns, &true)?;
        Ok(Self { socket })
    }

    /// A UDP socket of the address's family, bound to it.
    pub(super) fn udp(bind: SocketAddr) -> io::Result<Self> {
        let stamped = Self::new(Domain::for_address(bind), Type::DGRAM, Protocol::UDP)?;
        if bind.is_ipv6() {
            // "::" serves both families where the system allows it.
            stamped.socket.set_only_v6(!bind.ip().is_unspecified())?;
        }
        stamped.socket.bind(&bind.into())?;
        Ok(stamped)
    }

    /// A UDP socket on a free port that talks to that family.
    pub(super) fn udp_client(v6: bool) -> io::Result<Self> {
        let any: IpAddr = if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let stamped = Self::new(Domain::for_address((any, 0).into()), Type::DGRAM, Protocol::UDP)?;
        if v6 {
            stamped.socket.set_only_v6(true)?;
        }
        stamped.socket.bind(&SocketAddr::new(any, 0).into())?;
        Ok(stamped)
    }

    /// Marks what is sent from here so that shapers can tell it from the job's bulk data.
    pub(super) fn mark(&self, v6: bool, tos: u8, priority: u32) -> io::Result<()> {
        if v6 {
            self.socket.set_tclass_v6(u32::from(tos))?;
            // A dual-stack socket sends IPv4 as well; a pure one refuses the option.
            let _ = self.socket.set_tos_v4(u32::from(tos));
        } else {
            self.socket.set_tos_v4(u32::from(tos))?;
        }
        // Setting the TOS has set a priority of its own: this one comes after.
        self.socket.set_priority(priority)
    }

    pub(super) fn local(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()?.as_socket().ok_or_else(|| io::Error::other("the socket has no IP address"))
    }

    pub(super) fn raw(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends; a full buffer and a port that refused an earlier packet are errors like any other.
    pub(super) fn send(&self, bytes: &[u8], to: SocketAddr) -> io::Result<()> {
        let sent = self.socket.send_to(bytes, &SockAddr::from(to))?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Hands over what waits, at most [`BATCH`] datagrams: others have their turn, too. What the socket reports of an
    /// earlier packet (an ICMP error: that peer is gone, others are not) is logged.
    pub(super) fn receive_all(&self, name: &str, mut each: impl FnMut(&Datagram, &[u8])) {
        let (mut buffer, mut clocks) = ([0; LONGEST], None);
        for _ in 0..BATCH {
            match self.receive(&mut buffer, &mut clocks) {
                Ok(Some(packet)) => each(&packet, &buffer[..packet.len.min(buffer.len())]),
                Ok(None) => return,
                Err(error) => tracing::debug!(%error, "{name} reported"),
            }
        }
    }

    /// The next datagram; `None` when there is none now. A datagram longer than `buffer` arrives cut and with
    /// a length beyond it, so a parser that checks lengths refuses it. The clocks are read for the first of a batch.
    fn receive(&self, buffer: &mut [u8], clocks: &mut Option<Clocks>) -> io::Result<Option<Datagram>> {
        let mut space = nix::cmsg_space!(nix::sys::time::TimeSpec);
        let mut iov = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
        let message = match recvmsg::<SockaddrStorage>(self.socket.as_raw_fd(), &mut iov, Some(&mut space), flags) {
            Ok(message) => message,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let stamp = message.cmsgs().ok().and_then(|mut all| all.find_map(stamp_of));
        let from = message.address.as_ref().and_then(socket_addr);
        let from = from.ok_or_else(|| io::Error::other("a datagram came without a sender"))?;
        Ok(Some(Datagram { len: message.bytes, from, at: clocks.get_or_insert_with(Clocks::read).place(stamp) }))
    }
}

pub(super) fn stamp_of(message: ControlMessageOwned) -> Option<u64> {
    match message {
        ControlMessageOwned::ScmTimestampns(t) => {
            Some((t.tv_sec() as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec() as u64))
        }
        _ => None,
    }
}

/// The address as std has it; IPv4 in IPv6 clothes becomes IPv4.
fn socket_addr(storage: &SockaddrStorage) -> Option<SocketAddr> {
    match storage.family()? {
        nix::sys::socket::AddressFamily::Inet => storage.as_sockaddr_in().map(|a| SocketAddrV4::from(*a).into()),
        nix::sys::socket::AddressFamily::Inet6 => storage.as_sockaddr_in6().map(|a| SocketAddrV6::from(*a).into()),
        _ => None,
    }
}
