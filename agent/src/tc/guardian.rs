//! The guardian: a small process of its own session that puts links back when the agent dies or stops renewing.
//!
//! What it is to put back, [`Orders`], is in its environment from the start, so that it needs nothing more from the
//! agent. The agent holds the only write end of the pipe that is the guardian's stdin, so the kernel tells the guardian
//! of any death of the agent, SIGKILL included, by the end of the file, also of one before the guardian's first read.
//! Over the pipe: `r` for each renewal and `q` when everything has been put back already. The guardian answers one
//! line, [`READY`], before the agent makes its first change.
//!
//! A [`Watch`] keeps two guardians: when one is killed, the other watches until it is replaced.

use super::error::ShapeError;
use super::{GuardianCommand, restore};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// What the guardian says when it watches.
const READY: &str = "flexcomm tc guardian: ready";
/// It starts within milliseconds; a machine under load gets this long.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// What may come before [`READY`] on its stdout.
const MOST_START_BYTES: usize = 16 * 1024;
/// The variable of the guardian's environment that holds its [`Orders`] as JSON.
pub const ORDERS: &str = "FLEXCOMM_TC_GUARDIAN";
/// One to put back, one more for the time in which a killed one is not replaced yet. Both put back what is left:
/// the second finds nothing to do.
const GUARDIANS: usize = 2;
/// Pauses between attempts to put back: from 20 ms, doubled up to 5 s, 130 times: about ten minutes.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const MOST_ATTEMPTS: u32 = 130;
const RENEW: u8 = b'r';
const QUIT: u8 = b'q';

/// Whose links the guardian puts back, and when.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) state_dir: PathBuf,
    pub(crate) owner: String,
    pub(crate) lease_ms: u64,
}

/// Why the watch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Quit,
    AgentGone,
    LeaseOut,
}

/// Runs the guardian on stdin and stdout; returns the process's exit status. Nothing but this belongs in the process.
pub fn main() -> i32 {
    let status = match guard() {
        Ok(()) => 0,
        Err(error) => {
            say(&format!("{error}"));
            1
        }
    };
    flexcomm_log::flush();
    status
}

fn guard() -> io::Result<()> {
    detach();
    let orders = std::env::var(ORDERS).map_err(|error| io::Error::other(format!("read {ORDERS}: {error}")))?;
    let orders: Orders = serde_json::from_str(&orders)?;
    let mut pipe = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    // An agent that is gone already reads no answer; its links are put back all the same.
    let _ = writeln!(io::stdout(), "{READY}").and_then(|()| io::stdout().flush());
    match watch(&mut pipe, Duration::from_millis(orders.lease_ms)) {
        End::Quit => return Ok(()),
        End::AgentGone => say("the agent is gone"),
        End::LeaseOut => say("the lease ran out"),
    }
    insist(&orders)
}

/// Nothing that ends the agent may end the guardian: a session of its own, no signal but SIGKILL, last in the
/// kernel's order of victims. Each is tried; none is needed to go on.
fn detach() {
    let _ = nix::unistd::setsid();
    let _ = std::env::set_current_dir("/");
    let mut signals = SigSet::empty();
    let all = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];
    all.into_iter().for_each(|signal| signals.add(signal));
    let _ = signals.thread_block();
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
}

/// stderr may be closed or full: nothing waits for it.
fn say(what: &str) {
    flexcomm_log::write_line(&format!("flexcomm tc guardian: {what}"));
}

/// Until the agent says quit, is gone, or has not renewed for a whole lease.
fn watch(pipe: &mut File, lease: Duration) -> End {
    let mut deadline = Instant::now() + lease;
    let mut bytes = [0; 256];
    loop {
        match readable(pipe.as_fd(), deadline.saturating_duration_since(Instant::now())) {
            Ok(false) => return End::LeaseOut,
            Err(_) => return End::AgentGone,
            Ok(true) => {}
        }
        match pipe.read(&mut bytes) {
            Ok(0) => return End::AgentGone,
            Ok(count) if bytes[..count].contains(&QUIT) => return End::Quit,
            Ok(_) => deadline = Instant::now() + lease,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return End::AgentGone,
        }
    }
}

/// Whether there is something to read (the end included) before the time is out.
fn readable(fd: BorrowedFd<'_>, within: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis() + 1;
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Puts back, again and again until it worked. While the agent hangs inside the section only the qdiscs are put
/// back; journals and a second look wait until it has left or died.
fn insist(orders: &Orders) -> io::Result<()> {
    let mut pause = FIRST_PAUSE;
    for _ in 0..MOST_ATTEMPTS {
        match attempt(orders) {
            Ok(Some(done)) => {
                say(&format!("put back {}", if done.is_empty() { "nothing".to_owned() } else { done.join(", ") }));
                return Ok(());
            }
            Ok(None) => {}
            Err(error) => say(&format!("failed to {error}; trying again")),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Err(io::Error::other("gave up; the next start of the agent puts back what is left"))
}

fn attempt(orders: &Orders) -> Result<Option<Vec<String>>, ShapeError> {
    if let Some(section) = restore::try_enter(&orders.state_dir)? {
        return restore::put_back_of(&orders.state_dir, &orders.owner, &section).map(Some);
    }
    restore::undo_of(&orders.state_dir, &orders.owner)?;
    Ok(None)
}

/// The agent's end: the guardians that watch it.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    guardians: Vec<Guardian>,
}

impl Watch {
    /// Renews the lease; whether all guardians took it. Those that are gone or take nothing any more are removed.
    pub(crate) fn renew(&mut self) -> bool {
        for mut guardian in std::mem::take(&mut self.guardians) {
            match guardian.renew() {
                Ok(()) => self.guardians.push(guardian),
                Err(error) => {
                    tracing::warn!(%error, "a tc guardian is gone");
                    guardian.discard();
                }
            }
        }
        self.guardians.len() == GUARDIANS
    }

    /// Starts what is missing. Waits until the first watches; those started beside it are the same program, and their
    /// orders and their pipe are in place when they are spawned. One that watches is enough to go on.
    pub(crate) fn fill(&mut self, command: &GuardianCommand, orders: &Orders) -> Result<(), ShapeError> {
        while self.guardians.len() < GUARDIANS {
            let started = Guardian::spawn(command, orders).and_then(|guardian| match self.guardians.is_empty() {
                true => guardian.ready(),
                false => Ok(guardian),
            });
            match started {
                Ok(guardian) => self.guardians.push(guardian),
                Err(error) if self.guardians.is_empty() => {
                    let program = command.program.display().to_string();
                    return Err(ShapeError::Guardian { program, why: error.to_string() });
                }
                Err(error) => {
                    tracing::warn!(%error, "one tc guardian watches, a second one could not be started");
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Ends them without putting anything back.
    pub(crate) fn quit(&mut self) {
        self.guardians.drain(..).for_each(Guardian::quit);
    }
}

/// One guardian.
#[derive(Debug)]
struct Guardian {
    child: Child,
    pipe: ChildStdin,
    stdout: ChildStdout,
}

impl Guardian {
    fn spawn(command: &GuardianCommand, orders: &Orders) -> io::Result<Self> {
        let mut child = Command::new(&command.program)
            .arg0("flexcomm")
            .args(&command.args)
            .envs(command.env.iter().map(|(name, value)| (name, value)))
            .env(ORDERS, serde_json::to_string(orders)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(pipe), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        nonblocking(pipe.as_fd())?;
        Ok(Self { child, pipe, stdout })
    }

    /// Waits until it watches; one that does not is ended.
    fn ready(mut self) -> io::Result<Self> {
        match wait_for_ready(&mut self.stdout) {
            Ok(()) => Ok(self),
            Err(error) => {
                self.discard();
                Err(error)
            }
        }
    }

    /// Renews the lease; an error when the guardian is gone or takes nothing any more.
    fn renew(&mut self) -> io::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            return Err(io::Error::other(format!("it ended with {status}")));
        }
        self.pipe.write_all(&[RENEW])
    }

    /// Ends it without putting anything back.
    fn quit(mut self) {
        if self.pipe.write_all(&[QUIT]).is_err() {
            let _ = self.child.kill();
        }
        drop(self.pipe);
        let _ = self.child.wait();
    }

    /// Ends one that no longer works, by force.
    fn discard(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_truncate(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

fn wait_for_ready(stdout: &mut (impl Read + AsFd)) -> io::Result<()> {
    let deadline = Instant::now() + START_TIMEOUT;
    let mut output = Vec::new();
    let mut bytes = [0; 512];
    while output.len() < MOST_START_BYTES {
        if !readable(stdout.as_fd(), deadline.saturating_duration_since(Instant::now()))? {
            return Err(io::Error::other(format!("it was not ready after {} s", START_TIMEOUT.as_secs())));
        }
        match stdout.read(&mut bytes)? {
            0 => return Err(io::Error::other("it ended before it was ready")),
            count => output.extend_from_slice(&bytes[..count]),
        }
        if String::from_utf8_lossy(&output).contains(READY) {
            return Ok(());
        }
    }
    Err(io::Error::other("it wrote something else than that it is ready"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe() -> (File, File) {
        let (read, write) = nix::unistd::pipe().unwrap();
        (File::from(read), File::from(write))
    }

    #[test]
    fn watch_ends_for_each_reason() {
        let (mut read, mut write) = pipe();
        write.write_all(b"rrq").unwrap();
        assert_eq!(watch(&mut read, Duration::from_secs(3600)), End::Quit);
        assert_eq!(watch(&mut read, Duration::ZERO), End::LeaseOut);
        write.write_all(b"r").unwrap();
        drop(write);
        assert_eq!(watch(&mut read, Duration::from_secs(3600)), End::AgentGone);
    }
}
