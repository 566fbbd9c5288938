//! The kernel's list of TCP connections with what it counts of each (`sock_diag`, as `ss -ti` shows it).

use crate::flows::Flow;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::inet::nlas::{Nla, TcpInfo};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};
use std::io;
use std::net::{IpAddr, Ipv4Addr};

/// Room for one datagram: with less the kernel sends a list in more of them.
const DATAGRAM: usize = 32 << 10;
/// Datagrams of one list: more than a million connections.
const MOST_DATAGRAMS: usize = 1 << 14;
/// Length of a netlink message's own header; every message begins at a multiple of 4 bytes.
const HEADER: usize = 16;

/// The ends of a connection by which it is known what it is: the port here, and address and port there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// Port here.
    pub port: u16,
    /// Address there, IPv4 as such also on an IPv6 socket.
    pub peer: IpAddr,
    /// Port there.
    pub there: u16,
}

/// One connection of a list, which can be looked at again.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its ends.
    pub ends: Ends,
    /// What the kernel counts.
    pub flow: Flow,
    family: u8,
    id: SocketId,
}

/// Asks for connections. Of the network namespace of the thread that opened it.
pub struct FlowSocket {
    socket: Socket,
    buffer: Vec<u8>,
}

impl FlowSocket {
    /// Opens it; needs no privilege. The kernel says only in its answers whether it has `tcp_diag`.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // The kernel makes its answers within the system calls: one that is not there never comes.
        socket.set_non_blocking(true)?;
        Ok(Self { socket, buffer: Vec::with_capacity(DATAGRAM) })
    }

    /// Every established connection; whether it is the job's says `is_job`. Costs the kernel a walk through all of its
    /// table: 1 to 2 ms on a large machine with few connections.
    pub fn list(&mut self, is_job: impl Fn(Ends) -> bool) -> io::Result<Vec<Listed>> {
        let mut found = Vec::new();
        self.list_family(libc::AF_INET as u8, &is_job, &mut found)?;
        match self.list_family(libc::AF_INET6 as u8, &is_job, &mut found) {
            // A kernel without IPv6 has none of its connections either.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            answer => answer?,
        }
        Ok(found)
    }

    /// These connections as they are now; those that are gone are left out. Costs some microseconds each.
    pub fn look(&mut self, listed: &[Listed]) -> io::Result<Vec<Flow>> {
        let mut flows = Vec::with_capacity(listed.len());
        for connection in listed {
            self.send(&request(connection.family, connection.id.clone(), NLM_F_REQUEST))?;
            match self.answers(|response| flows.extend(counted(response, connection.flow.job)), false) {
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                answer => answer?,
            }
        }
        Ok(flows)
    }

    fn list_family(&mut self, family: u8, is_job: &impl Fn(Ends) -> bool, found: &mut Vec<Listed>) -> io::Result<()> {
        let all = if family == libc::AF_INET as u8 { SocketId::new_v4() } else { SocketId::new_v6() };
        self.send(&request(family, all, NLM_F_REQUEST | NLM_F_DUMP))?;
        self.answers(
            |response| {
                let id = &response.header.socket_id;
                let ends = Ends { port: id.source_port, peer: peer(id), there: id.destination_port };
                let listed = |flow| Listed { ends, flow, family, id: id.clone() };
                found.extend(counted(response, is_job(ends)).map(listed));
            },
            true,
        )
    }

    fn send(&self, request: &[u8]) -> io::Result<()> {
        if self.socket.send(request, 0)? != request.len() {
            return Err(io::Error::other("the kernel took a part of the request"));
        }
        Ok(())
    }

    /// Hands every answer to `each`: one, or all of a list until the kernel says that it is done.
    fn answers(&mut self, mut each: impl FnMut(&InetResponse), whole_list: bool) -> io::Result<()> {
        for _ in 0..MOST_DATAGRAMS {
            self.buffer.clear();
            self.socket.recv(&mut self.buffer, 0)?;
            let mut rest = self.buffer.as_slice();
            while let Some((message, after)) = split(rest) {
                rest = after;
                // A connection whose counters this kernel has not all of (before 5.4) cannot be watched.
                let message = NetlinkMessage::<SockDiagMessage>::deserialize(message)
                    .map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error.to_string()))?;
                match message.payload {
                    // A list that cannot be had is "done" with an error: ENOENT without tcp_diag.
                    NetlinkPayload::Done(done) if done.code < 0 => {
                        return Err(io::Error::from_raw_os_error(-done.code));
                    }
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => each(&response),
                    _ => {}
                }
            }
            if !whole_list {
                return Ok(());
            }
        }
        Err(io::Error::other(format!("the list of connections has no end after {MOST_DATAGRAMS} datagrams")))
    }
}

fn request(family: u8, socket_id: SocketId, flags: u16) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let request = InetRequest {
        family,
        protocol: libc::IPPROTO_TCP as u8,
        extensions: ExtensionFlags::INFO,
        states: StateFlags::ESTABLISHED,
        socket_id,
    };
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// The first message, and what follows it; none when what is left is no whole message.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.first_chunk::<4>().copied()?) as usize;
    if length < HEADER || length > bytes.len() {
        return None;
    }
    Some((&bytes[..length], bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// The other end. Where that is this machine's own address too, as of ranks of one node, the loopback's: its way is the same.
fn peer(id: &SocketId) -> IpAddr {
    let peer = id.destination_address.to_canonical();
    if peer == id.source_address.to_canonical() { Ipv4Addr::LOCALHOST.into() } else { peer }
}

fn counted(response: &InetResponse, job: bool) -> Option<Flow> {
    let info: &TcpInfo = response.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(info) => Some(info),
        _ => None,
    })?;
    let id = &response.header.socket_id;
    let seconds = |us: u32| f64::from(us) * 1e-6;
    Some(Flow {
        id: u64::from_ne_bytes(id.cookie),
        peer: peer(id),
        job,
        acked: info.bytes_acked,
        rtt_s: seconds(info.rtt),
        path_s: seconds(info.min_rtt),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_a_machine_goes_to_the_loopback() {
        let ends = |from: &str, to: &str| {
            let mut id = SocketId::new_v6();
            (id.source_address, id.destination_address) = (from.parse().unwrap(), to.parse().unwrap());
            peer(&id)
        };
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(ends("10.0.0.1", "10.0.0.2"), address("10.0.0.2"));
        assert_eq!(ends("::ffff:10.0.0.1", "10.0.0.2"), address("10.0.0.2"));
        assert!(ends("::ffff:10.0.0.1", "10.0.0.1").is_loopback() && ends("fe80::1", "fe80::1").is_loopback());
    }

    #[test]
    fn messages_are_split_as_the_kernel_pads_them() {
        let mut bytes = vec![0_u8; 44];
        bytes[..4].copy_from_slice(&17_u32.to_ne_bytes());
        bytes[20..24].copy_from_slice(&24_u32.to_ne_bytes());
        let (first, rest) = split(&bytes).unwrap();
        assert_eq!((first.len(), rest.len()), (17, 24));
        let (second, rest) = split(rest).unwrap();
        assert_eq!((second.len(), rest.len()), (24, 0));
        assert_eq!(split(rest), None);
        for broken in [0_u32, 15, 25, u32::MAX] {
            let mut bytes = vec![0_u8; 24];
            bytes[..4].copy_from_slice(&broken.to_ne_bytes());
            assert_eq!(split(&bytes), None, "{broken}");
        }
    }
}
