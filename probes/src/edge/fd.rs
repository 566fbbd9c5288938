//! Waiting for sockets.

use crate::Nanos;
use crate::edge::monotonic;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use std::io;
use std::os::fd::BorrowedFd;

/// What to wait for on one descriptor.
#[derive(Clone, Copy)]
pub(super) struct Interest<'a> {
    pub(super) fd: BorrowedFd<'a>,
    pub(super) write: bool,
}

/// No limit to how long it is waited.
pub(super) const FOREVER: Nanos = Nanos(u64::MAX);

/// Waits until a descriptor is ready or `until` has come; returns which are ready (errors count as ready: the
/// next call on the socket tells). An interrupting signal counts as a timeout.
pub(super) fn wait(interests: &[Interest<'_>], until: Nanos) -> io::Result<Vec<bool>> {
    let flags = |i: &Interest<'_>| if i.write { PollFlags::POLLOUT } else { PollFlags::POLLIN };
    let mut fds: Vec<PollFd<'_>> = interests.iter().map(|i| PollFd::new(i.fd, flags(i))).collect();
    let timeout = (until != FOREVER).then(|| {
        let left = until.0.saturating_sub(monotonic().0);
        TimeSpec::new((left / 1_000_000_000).min(3600) as i64, (left % 1_000_000_000) as i64)
    });
    match ppoll(&mut fds, timeout, None) {
        Ok(_) => Ok(fds.iter().map(|fd| fd.revents().is_some_and(|events| !events.is_empty())).collect()),
        Err(Errno::EINTR) => Ok(vec![false; interests.len()]),
        Err(error) => Err(error.into()),
    }
}
