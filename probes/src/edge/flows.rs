//! The kernel's list of TCP connections with what it counts of each (`sock_diag`, as `ss -ti` shows it).

use crate::flows::Flow;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::inet::nlas::{Nla, TcpInfo};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};
use std::io;
use std::net::IpAddr;

/// Datagrams of one list: more connections than a machine has ports.
const MOST_DATAGRAMS: usize = 4096;
/// Length of a netlink message's own header; every message begins at a multiple of 4 bytes.
const HEADER: usize = 16;

/// Asks for connections. Of the network namespace of the thread that opened it.
pub struct FlowSocket {
    socket: Socket,
    families: Vec<u8>,
}

impl FlowSocket {
    /// Opens it; needs no privilege. The kernel says only in the answers whether it has `tcp_diag`.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // The kernel makes its answers within the system calls: one that is not there never comes.
        socket.set_non_blocking(true)?;
        Ok(Self { socket, families: vec![libc::AF_INET as u8, libc::AF_INET6 as u8] })
    }

    /// Every established connection that `wanted` takes by its ends: the port here, and address and port there.
    pub fn flows(&mut self, wanted: impl Fn(u16, IpAddr, u16) -> bool) -> io::Result<Vec<Flow>> {
        let mut found = Vec::new();
        for family in self.families.clone() {
            match self.list(family, &wanted, &mut found) {
                // A kernel without IPv6 has none of its connections either.
                Err(error) if family == libc::AF_INET6 as u8 && error.raw_os_error() == Some(libc::ENOENT) => {
                    self.families.retain(|other| *other != family);
                }
                answer => answer?,
            }
        }
        Ok(found)
    }

    fn list(&self, family: u8, wanted: &impl Fn(u16, IpAddr, u16) -> bool, found: &mut Vec<Flow>) -> io::Result<()> {
        let request = request(family);
        if self.socket.send(&request, 0)? != request.len() {
            return Err(io::Error::other("the kernel took a part of the request"));
        }
        for _ in 0..MOST_DATAGRAMS {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while let Some((message, after)) = split(rest) {
                rest = after;
                // What this version of the kernel says and we cannot read is no connection to watch.
                let Ok(message) = NetlinkMessage::<SockDiagMessage>::deserialize(message) else { continue };
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                        found.extend(flow(&response, wanted));
                    }
                    _ => {}
                }
            }
        }
        Err(io::Error::other(format!("the list of connections has no end after {MOST_DATAGRAMS} datagrams")))
    }
}

fn request(family: u8) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let socket_id = if family == libc::AF_INET as u8 { SocketId::new_v4() } else { SocketId::new_v6() };
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

fn flow(response: &InetResponse, wanted: &impl Fn(u16, IpAddr, u16) -> bool) -> Option<Flow> {
    let id = &response.header.socket_id;
    let peer = id.destination_address.to_canonical();
    if !wanted(id.source_port, peer, id.destination_port) {
        return None;
    }
    let info = response.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(info) => Some(info),
        _ => None,
    })?;
    Some(counted(u64::from_ne_bytes(id.cookie), peer, info))
}

fn counted(id: u64, peer: IpAddr, info: &TcpInfo) -> Flow {
    let seconds = |us: u32| f64::from(us) * 1e-6;
    Flow { id, peer, acked: info.bytes_acked, rtt_s: seconds(info.rtt), path_s: seconds(info.min_rtt) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
