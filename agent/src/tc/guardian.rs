//! The guardian: a small process of its own session that puts links back when the agent dies or stops renewing.
//!
//! The agent holds the only write end of the pipe that is the guardian's stdin, so the kernel tells the guardian of
//! any death of the agent, SIGKILL included, by the end of the file. Over the pipe: one line of JSON, [`Hello`],
//! then `r` for each renewal and `q` when everything has been put back already. The guardian answers one line,
//! [`READY`], before the agent makes its first change.

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
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// What the guardian says when it watches.
const READY: &str = "flexcomm tc guardian: ready";
/// It starts within milliseconds; a machine under load gets this long.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// What may come before [`READY`] on its stdout.
const MOST_START_BYTES: usize = 16 * 1024;
/// The first line.
const MOST_HELLO_BYTES: usize = 16 * 1024;
/// Pauses between attempts to put back: from 20 ms, doubled up to 5 s, 130 times: about ten minutes.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const MOST_ATTEMPTS: u32 = 130;
const RENEW: u8 = b'r';
const QUIT: u8 = b'q';

/// What the guardian is told first.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
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
    let mut pipe = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let hello: Hello = serde_json::from_str(&first_line(&mut pipe)?)?;
    writeln!(io::stdout(), "{READY}")?;
    io::stdout().flush()?;
    match watch(&mut pipe, Duration::from_millis(hello.lease_ms)) {
        End::Quit => return Ok(()),
        End::AgentGone => say("the agent is gone"),
        End::LeaseOut => say("the lease ran out"),
    }
    insist(&hello)
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
    flexcomm_log::say(&format!("flexcomm tc guardian: {what}"));
}

/// Byte by byte: what follows the line must stay in the pipe.
fn first_line(pipe: &mut File) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < MOST_HELLO_BYTES {
        pipe.read_exact(&mut byte)?;
        if byte[0] == b'\n' {
            return String::from_utf8(line).map_err(io::Error::other);
        }
        line.push(byte[0]);
    }
    Err(io::Error::other("the first line is too long"))
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
fn insist(hello: &Hello) -> io::Result<()> {
    let mut pause = FIRST_PAUSE;
    for _ in 0..MOST_ATTEMPTS {
        match attempt(hello) {
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

fn attempt(hello: &Hello) -> Result<Option<Vec<String>>, ShapeError> {
    if let Some(section) = restore::try_enter(&hello.state_dir)? {
        return restore::put_back_of(&hello.state_dir, &hello.owner, &section).map(Some);
    }
    restore::undo_of(&hello.state_dir, &hello.owner)?;
    Ok(None)
}

/// The agent's end.
#[derive(Debug)]
pub(crate) struct Handle {
    child: Child,
    pipe: ChildStdin,
}

impl Handle {
    /// Starts the guardian and waits until it watches.
    pub(crate) fn start(command: &GuardianCommand, hello: &Hello) -> Result<Self, ShapeError> {
        let program = command.program.display().to_string();
        Self::spawn(command, hello).map_err(|error| ShapeError::Guardian { program, why: error.to_string() })
    }

    fn spawn(command: &GuardianCommand, hello: &Hello) -> io::Result<Self> {
        let mut child = Command::new(&command.program)
            .arg0("flexcomm")
            .args(&command.args)
            .envs(command.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(mut pipe), Some(mut stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        let ready = (|| {
            nonblocking(pipe.as_fd())?;
            writeln!(pipe, "{}", serde_json::to_string(hello)?)?;
            wait_for_ready(&mut stdout)
        })();
        if let Err(error) = ready {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        Ok(Self { child, pipe })
    }

    /// Renews the lease; an error when the guardian is gone or takes nothing any more.
    pub(crate) fn renew(&mut self) -> io::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            return Err(io::Error::other(format!("it ended with {status}")));
        }
        self.pipe.write_all(&[RENEW])
    }

    /// Ends it without putting anything back.
    pub(crate) fn quit(mut self) {
        if self.pipe.write_all(&[QUIT]).is_err() {
            let _ = self.child.kill();
        }
        drop(self.pipe);
        let _ = self.child.wait();
    }

    /// Ends one that no longer works, by force.
    pub(crate) fn discard(mut self) {
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
    let mut said = Vec::new();
    let mut bytes = [0; 512];
    while said.len() < MOST_START_BYTES {
        if !readable(stdout.as_fd(), deadline.saturating_duration_since(Instant::now()))? {
            return Err(io::Error::other(format!("it was not ready after {} s", START_TIMEOUT.as_secs())));
        }
        match stdout.read(&mut bytes)? {
            0 => return Err(io::Error::other("it ended before it was ready")),
            count => said.extend_from_slice(&bytes[..count]),
        }
        if String::from_utf8_lossy(&said).contains(READY) {
            return Ok(());
        }
    }
    Err(io::Error::other("it said something else than that it is ready"))
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

    #[test]
    fn the_first_line_leaves_the_rest_in_the_pipe() {
        let (mut read, mut write) = pipe();
        write.write_all(b"{\"a\":1}\nrq").unwrap();
        assert_eq!(first_line(&mut read).unwrap(), "{\"a\":1}");
        assert_eq!(watch(&mut read, Duration::from_secs(3600)), End::Quit);
        drop(write);
        assert!(first_line(&mut read).is_err());
    }
}
