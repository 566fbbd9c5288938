//! Who is connected, and how much of the socket one user takes.

use super::roster::Rank;
use flexcomm_domain::JobId;
use flexcomm_wire::Hello;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::UnixStream;

/// Most trainers connected at once: eight accelerators in each of a few jobs, with room.
pub(super) const MAX_TRAINERS: usize = 256;
/// Most of them of one user: others always find room.
pub(super) const MAX_TRAINERS_PER_USER: usize = MAX_TRAINERS / 2;

/// The process at the other end of a connection, as the kernel noted it when it connected (`SO_PEERCRED`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) uid: u32,
    /// None for a process of a PID namespace that this agent does not see.
    pub(super) pid: Option<i32>,
}

impl Peer {
    pub(super) fn of(stream: &UnixStream) -> std::io::Result<Self> {
        let credentials = stream.peer_cred()?;
        Ok(Self { uid: credentials.uid(), pid: credentials.pid().filter(|pid| *pid > 0) })
    }

    fn is_same_process(self, other: Self) -> bool {
        self.pid.is_some() && self.pid == other.pid
    }

    fn is_gone(self) -> bool {
        self.pid.is_some_and(|pid| kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH) || has_exited(pid))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} of user {}", self.uid),
            None => write!(f, "a process of user {} in another PID namespace", self.uid),
        }
    }
}

/// Whether a process has only its exit status left, for a parent that has not asked for it: it still takes signals.
fn has_exited(pid: i32) -> bool {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may hold anything.
    String::from_utf8_lossy(&stat).rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with(['Z', 'X']))
}

/// The connection of a rank.
#[derive(Debug)]
struct Connection {
    id: u64,
    seen: Hello,
    peer: Peer,
    /// A descriptor of the same socket, to see whether it is still open.
    socket: OwnedFd,
}

impl Connection {
    /// Whether the rank is still there. A process that is gone counts as gone though a child of it has the socket, too.
    fn is_open(&self) -> bool {
        !has_ended(self.socket.as_fd()) && !self.peer.is_gone()
    }
}

/// Whether the other end closed the connection. The kernel notes it at once (`POLLHUP`), also while what was sent before is
/// not read yet.
pub(super) fn has_ended(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Who is connected: one process per rank, by one connection or more. One that connects again may have left copies of
/// its last socket to children it forked, which keep that open.
#[derive(Debug, Default)]
pub(super) struct Registry {
    next: u64,
    live: BTreeMap<(JobId, u32), Vec<Connection>>,
}

impl Registry {
    /// Refuses a rank that is connected already, another run of a job that is here, and a world that contradicts the job's
    /// other ranks here.
    pub(super) fn check(&self, seen: &Hello, peer: Peer) -> Result<(), String> {
        let here = self.live.values().flatten().filter(|other| other.seen.job == seen.job);
        let is_own = |other: &Connection| {
            (other.seen.rank, other.seen.run) == (seen.rank, seen.run) && other.peer.is_same_process(peer)
        };
        let mut others = here.filter(|other| !is_own(other));
        others.try_for_each(|other| if other.is_open() { check_beside(seen, other) } else { Ok(()) })
    }

    /// Registers a rank that was checked. Returns the number of the connection.
    pub(super) fn join(&mut self, seen: &Hello, peer: Peer, socket: OwnedFd) -> u64 {
        self.next += 1;
        let connection = Connection { id: self.next, seen: seen.clone(), peer, socket };
        self.live.entry((seen.job.clone(), seen.rank)).or_default().push(connection);
        self.next
    }

    /// What a rank says of itself after its hello, by the connection of this number; whether it is news.
    pub(super) fn update(&mut self, seen: &Hello, id: u64) -> bool {
        let mut known = self.live.get_mut(&(seen.job.clone(), seen.rank)).into_iter().flatten();
        let own = known.find(|own| own.id == id && own.seen != *seen);
        own.map(|own| own.seen.clone_from(seen)).is_some()
    }

    /// Jobs with a connection.
    pub(super) fn jobs(&self) -> BTreeSet<JobId> {
        self.live.keys().map(|(job, _)| job.clone()).collect()
    }

    /// Ranks with a connection.
    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.seen().map(Rank::from)
    }

    /// Whether a rank has a connection, in whichever run.
    pub(super) fn is_here(&self, rank: &Rank) -> bool {
        self.live.contains_key(&(rank.job.clone(), rank.rank))
    }

    /// What the ranks said of themselves.
    pub(super) fn seen(&self) -> impl Iterator<Item = &Hello> {
        self.live.values().filter_map(|known| Some(&known.last()?.seen))
    }

    /// Whether the rank is gone with this connection; false while it has another.
    pub(super) fn leave(&mut self, seen: &Hello, id: u64) -> bool {
        let key = (seen.job.clone(), seen.rank);
        let Some(known) = self.live.get_mut(&key) else { return false };
        known.retain(|connection| connection.id != id);
        known.is_empty() && self.live.remove(&key).is_some()
    }
}

fn check_beside(seen: &Hello, other: &Connection) -> Result<(), String> {
    let (job, rank, there) = (&seen.job, seen.rank, &other.seen);
    if there.run != seen.run {
        return Err(format!(
            "another run trains under the name {job} on this node already (rank {}: {}): give each training a name of its \
             own, by FLEXCOMM_JOB or attach(job=...)",
            there.rank, other.peer
        ));
    }
    if there.rank == rank {
        return Err(format!(
            "rank {rank} of job {job} is connected already: {}; end it, or give this run another job name (FLEXCOMM_JOB)",
            other.peer
        ));
    }
    if (there.world, there.gradient_values) == (seen.world, seen.gradient_values) {
        return Ok(());
    }
    Err(format!(
        "rank {rank} of job {job} says {} ranks and {} values, rank {} says {} and {}",
        seen.world, seen.gradient_values, there.rank, there.world, there.gradient_values
    ))
}

/// Connections by user, those without a hello included.
#[derive(Debug, Default, Clone)]
pub(super) struct Slots(Arc<Mutex<BTreeMap<u32, usize>>>);

/// One connection's slot, free again when dropped.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Slots,
    uid: u32,
}

impl Slots {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot, or the reason why there is none.
    pub(super) fn take(&self, uid: u32) -> Result<Slot, String> {
        let mut by_user = self.lock();
        if by_user.values().sum::<usize>() >= MAX_TRAINERS {
            return Err(format!("{MAX_TRAINERS} trainers are connected already"));
        }
        let mine = by_user.entry(uid).or_default();
        if *mine >= MAX_TRAINERS_PER_USER {
            return Err(format!("{MAX_TRAINERS_PER_USER} trainers of user {uid} are connected already"));
        }
        *mine += 1;
        drop(by_user);
        Ok(Slot { slots: self.clone(), uid })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut by_user = self.slots.lock();
        let Some(left) = by_user.get_mut(&self.uid) else { return };
        *left -= 1;
        if *left == 0 {
            by_user.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    use std::os::unix::net::UnixStream;

    const ME: Peer = Peer { uid: 1000, pid: None };

    /// Our end of a connection and the trainer's.
    fn connection() -> (OwnedFd, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours.into(), theirs)
    }

    fn join(registry: &mut Registry, seen: &Hello, peer: Peer, socket: OwnedFd) -> Result<u64, String> {
        registry.check(seen, peer).map(|()| registry.join(seen, peer, socket))
    }

    #[test]
    fn a_rank_that_is_connected_is_refused_a_second_connection() {
        let mut registry = Registry::default();
        let (ours, theirs) = connection();
        let first = join(&mut registry, &seen(0, 4), Peer { pid: Some(1), ..ME }, ours).unwrap();
        let (second, _other) = connection();
        let why = join(&mut registry, &seen(0, 4), ME, second).unwrap_err();
        assert!(why.contains("rank 0 of job j is connected already: process 1 of user 1000"), "{why}");
        assert_eq!(registry.ranks().count(), 1);
        assert!(registry.leave(&seen(0, 4), first), "the first one owns the rank");
        drop(theirs);
    }

    #[test]
    fn a_connection_that_has_ended_makes_way_before_its_end_is_read() {
        let mut registry = Registry::default();
        let (ours, mut theirs) = connection();
        let old = join(&mut registry, &seen(0, 4), ME, ours).unwrap();
        std::io::Write::write_all(&mut theirs, b"not read yet\n").unwrap();
        drop(theirs);
        let (ours, _theirs) = connection();
        let new = join(&mut registry, &seen(0, 4), ME, ours).unwrap();
        assert!(!registry.leave(&seen(0, 4), old), "the rank is still there");
        assert!(registry.leave(&seen(0, 4), new));
        assert!(!registry.leave(&seen(0, 4), new));
    }

    #[test]
    fn a_process_that_connects_again_is_registered_and_the_rank_leaves_with_its_last_connection() {
        let mut registry = Registry::default();
        let me = Peer { pid: Some(std::process::id() as i32), ..ME };
        let (ours, _copy) = connection();
        let old = join(&mut registry, &seen(0, 4), me, ours).unwrap();
        let (ours, _theirs) = connection();
        let new = join(&mut registry, &seen(0, 4), me, ours).unwrap();
        assert_eq!((registry.ranks().count(), registry.seen().count()), (1, 1));
        assert!(!registry.leave(&seen(0, 4), new), "the first one is still open");
        let next = Hello { run: Some(flexcomm_domain::RunId(2)), ..seen(0, 4) };
        assert!(join(&mut registry, &next, me, connection().0).unwrap_err().contains("another run"));
        assert!(registry.leave(&seen(0, 4), old));
        assert_eq!(registry.ranks().count(), 0);
    }

    /// A child of the trainer, such as a data loader, has a copy of the socket and outlives it for a moment.
    #[test]
    fn a_dead_process_does_not_lock_out_the_next_though_its_socket_is_open() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Some(child.id() as i32);
        let mut registry = Registry::default();
        let (ours, _copy) = connection();
        join(&mut registry, &seen(0, 4), Peer { pid, ..ME }, ours).unwrap();
        let exited = Id::Pid(Pid::from_raw(child.id() as i32));
        waitid(exited, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
        registry.check(&seen(0, 4), ME).expect("its parent has not asked for its exit status");
        child.wait().unwrap();
        join(&mut registry, &seen(0, 4), ME, connection().0).unwrap();
    }

    #[test]
    fn ranks_that_contradict_each_other_are_refused() {
        let mut registry = Registry::default();
        let (ours, theirs) = connection();
        join(&mut registry, &seen(0, 4), ME, ours).unwrap();
        let (ours, _rank_1) = connection();
        assert!(join(&mut registry, &seen(1, 8), ME, ours).unwrap_err().contains("says 8 ranks"));
        drop(theirs);
        let (ours, _rank_0) = connection();
        join(&mut registry, &seen(0, 8), ME, ours).unwrap();
        let (ours, _rank_1) = connection();
        join(&mut registry, &seen(1, 8), ME, ours).unwrap();
    }

    #[test]
    fn another_run_of_a_job_waits_until_the_first_has_left() {
        let of = |run, rank| Hello { run: Some(flexcomm_domain::RunId(run)), ..seen(rank, 4) };
        let mut registry = Registry::default();
        let ((rank_0, theirs_0), (rank_1, theirs_1)) = (connection(), connection());
        let first = join(&mut registry, &of(1, 0), ME, rank_0).unwrap();
        join(&mut registry, &of(1, 1), ME, rank_1).unwrap();
        for rank in [0, 2] {
            let refused = join(&mut registry, &of(2, rank), ME, connection().0).unwrap_err();
            assert!(refused.contains("another run trains under the name j on this node already"), "{refused}");
            assert!(refused.contains("FLEXCOMM_JOB"), "{refused}");
        }
        drop(theirs_0);
        registry.leave(&of(1, 0), first);
        assert!(join(&mut registry, &of(2, 0), ME, connection().0).is_err(), "rank 1 of the first is there");
        drop(theirs_1);
        join(&mut registry, &of(2, 0), ME, connection().0).unwrap();
    }

    #[test]
    fn one_user_leaves_room_for_others() {
        let slots = Slots::default();
        let mut taken: Vec<_> = (0..MAX_TRAINERS_PER_USER).map(|_| slots.take(1000).unwrap()).collect();
        assert!(slots.take(1000).unwrap_err().contains("of user 1000"));
        let others: Vec<_> = (0..MAX_TRAINERS_PER_USER).map(|_| slots.take(1001).unwrap()).collect();
        assert!(slots.take(1002).unwrap_err().contains("256 trainers"));
        taken.pop();
        drop(slots.take(1000).unwrap());
        drop((taken, others));
        assert!(slots.lock().is_empty());
    }
}
