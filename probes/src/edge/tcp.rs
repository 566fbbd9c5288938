//! Two socket options that the safe crates lack.
#![allow(unsafe_code)]

use crate::throughput::TcpSummary;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};

/// What TCP knows about a connection.
pub(super) fn summary(socket: &impl AsFd) -> io::Result<TcpSummary> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as it is borrowed; the kernel writes at most `length` bytes into
    // `info`, which has that size and is zeroed, so that fields an older kernel leaves out are valid numbers.
    let info = unsafe {
        let fd = socket.as_fd().as_raw_fd();
        let outcome =
            libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length);
        if outcome != 0 {
            return Err(io::Error::last_os_error());
        }
        info.assume_init()
    };
    Ok(TcpSummary {
        rtt_us: info.tcpi_rtt,
        min_rtt_us: info.tcpi_min_rtt,
        retransmits: info.tcpi_total_retrans,
        cwnd: info.tcpi_snd_cwnd,
        mss: info.tcpi_snd_mss,
        delivery_bps: info.tcpi_delivery_rate as f64 * 8.0,
    })
}

/// Lets the kernel pace a connection at `bytes_per_s`.
pub(super) fn pace(socket: &impl AsFd, bytes_per_s: u64) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as it is borrowed; the kernel reads 8 bytes from a local.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const bytes_per_s).cast(),
            size_of::<u64>() as libc::socklen_t,
        )
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
