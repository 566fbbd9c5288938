//! Traceroute over a UDP socket and its error queue. Needs no capability.

use super::clock::Clocks;
use super::fd::{Interest, wait};
use super::udp::Stamped;
use super::{SystemError, monotonic, system};
use crate::trace::{Answer, Path, Step, TracePlan, TraceRun};
use flexcomm_domain::Invalid;
use nix::errno::Errno;
use nix::sys::socket::sockopt::{Ipv4RecvErr, Ipv6RecvErr};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt};
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a probe, as traceroute sends.
const PROBE: [u8; 32] = [0x40; 32];
/// Longest wait before the stop flag is looked at again, seconds.
const LOOK_S: f64 = 0.1;
/// Reads of the error queue in a row.
const BATCH: usize = 256;
/// The origin of an error that came over the network, by family.
const ORIGINS: [u8; 2] = [libc::SO_EE_ORIGIN_ICMP, libc::SO_EE_ORIGIN_ICMP6];

/// Why a trace failed. The text completes "failed to trace the route".
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The system refused.
    #[error(transparent)]
    System(#[from] SystemError),
    /// The plan is out of range.
    #[error(transparent)]
    Plan(#[from] Invalid),
    /// Every probe failed at once on this machine.
    #[error("send to {target}: {cause}")]
    Send {
        /// Whom.
        target: IpAddr,
        /// The system's reason.
        cause: io::Error,
    },
}

/// Finds the hops to a target, in the calling thread and its network namespace, until the plan is carried out or
/// `stop` is set.
pub fn trace_route(target: IpAddr, plan: &TracePlan, stop: &AtomicBool) -> Result<Path, TraceError> {
    let v6 = target.is_ipv6();
    let socket = Stamped::udp_client(v6).map_err(system("open a UDP socket"))?;
    let asked =
        if v6 { setsockopt(socket.raw(), Ipv6RecvErr, &true) } else { setsockopt(socket.raw(), Ipv4RecvErr, &true) };
    asked.map_err(|errno| system("ask for the errors of routers")(errno.into()))?;
    let mut run = TraceRun::new(monotonic(), target, *plan)?;
    while !stop.load(Ordering::Relaxed) {
        let until = match run.step(monotonic()) {
            Step::Send { ttl, port } => {
                send(&socket, &mut run, ttl, SocketAddr::new(target, port))?;
                monotonic()
            }
            Step::Wait(until) => until.min(monotonic().plus(LOOK_S)),
            Step::Finished => break,
        };
        wait(&[Interest { fd: socket.fd(), write: false }], until).map_err(system("wait for answers"))?;
        take(&socket, &mut run)?;
    }
    Ok(run.path())
}

/// An error that an earlier probe left behind is reported by the next send; it says nothing about that one.
fn send(socket: &Stamped, run: &mut TraceRun, ttl: u8, to: SocketAddr) -> Result<(), TraceError> {
    let set =
        if to.is_ipv6() { socket.raw().set_unicast_hops_v6(ttl.into()) } else { socket.raw().set_ttl_v4(ttl.into()) };
    set.map_err(system("set the distance of a probe"))?;
    let mut last = None;
    for _ in 0..3 {
        run.sent_at(to.port(), monotonic());
        match socket.send(&PROBE, to) {
            Ok(()) => return Ok(()),
            Err(error) => last = Some(error),
        }
        take(socket, run)?;
    }
    match last {
        Some(cause) => Err(TraceError::Send { target: to.ip(), cause }),
        None => Ok(()),
    }
}

/// Reads the error queue until it is empty.
fn take(socket: &Stamped, run: &mut TraceRun) -> Result<(), TraceError> {
    for _ in 0..BATCH {
        let mut quoted = [0; 512];
        let mut space =
            nix::cmsg_space!(nix::sys::time::TimeSpec, libc::sock_extended_err, libc::sockaddr_in6, [u8; 64]);
        let mut iov = [IoSliceMut::new(&mut quoted)];
        let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
        let message = match recvmsg::<SockaddrStorage>(socket.raw().as_raw_fd(), &mut iov, Some(&mut space), flags) {
            Ok(message) => message,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(()),
            Err(errno) => return Err(system("read the errors of routers")(errno.into()).into()),
        };
        let port = message.address.as_ref().and_then(port_of);
        let (mut stamp, mut error) = (None, None);
        for cmsg in message.cmsgs().into_iter().flatten() {
            match cmsg {
                ControlMessageOwned::Ipv4RecvErr(e, from) => {
                    error = from.map(|a| (e, IpAddr::from(u32::from_be(a.sin_addr.s_addr).to_be_bytes())));
                }
                ControlMessageOwned::Ipv6RecvErr(e, from) => {
                    error = from.map(|a| (e, IpAddr::from(Ipv6Addr::from(a.sin6_addr.s6_addr))));
                }
                other => stamp = stamp.or(super::udp::stamp_of(other)),
            }
        }
        if let (Some(port), Some((error, from))) = (port, error)
            && ORIGINS.contains(&error.ee_origin)
        {
            run.answer(Clocks::read().place(stamp), port, from, kind_of(&error));
        }
    }
    Ok(())
}

fn port_of(address: &SockaddrStorage) -> Option<u16> {
    address.as_sockaddr_in().map(|a| a.port()).or_else(|| address.as_sockaddr_in6().map(|a| a.port()))
}

fn kind_of(error: &libc::sock_extended_err) -> Answer {
    // ICMP 11 and ICMPv6 3: time exceeded. ICMP 3 code 3 and ICMPv6 1 code 4: nobody on that port.
    match (error.ee_origin, error.ee_type, error.ee_code) {
        (libc::SO_EE_ORIGIN_ICMP, 11, _) | (libc::SO_EE_ORIGIN_ICMP6, 3, _) => Answer::TimeExceeded,
        (libc::SO_EE_ORIGIN_ICMP, 3, 3) | (libc::SO_EE_ORIGIN_ICMP6, 1, 4) => Answer::Reached,
        _ => Answer::Unreachable,
    }
}
