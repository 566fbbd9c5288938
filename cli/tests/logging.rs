//! Controller and agent whose stderr is closed, or a pipe that its reader does not empty: all they do goes on, and what
//! is not logged is counted.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_domain::Strategy;
use flexcomm_wire::{FromTrainer, Hello, PROTOCOL, StepsReport, ToTrainer};
use std::io::{BufRead, BufReader, PipeReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for an answer, and for a process to start or to end.
const WITHIN: Duration = Duration::from_secs(30);

/// Requests, each with a line or more in the log.
const REQUESTS: usize = 60;
/// Messages of a trainer, each with a warning.
const MESSAGES: u64 = 3000;
/// Trainers that connect between two looks at the agent's metrics, each with two lines in the log.
const CONNECTIONS: usize = 100;

/// A daemon, and the other end of its stderr where there is one. Killed when dropped.
struct Daemon {
    process: Child,
    _stderr: Option<PipeReader>,
}

impl Daemon {
    fn start(command: &mut Command, stderr_is_open: bool) -> Self {
        let (reader, writer) = std::io::pipe().unwrap();
        // A few lines, and it is full.
        nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
        let process = command.stderr(writer).stdout(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
        Self { process, _stderr: stderr_is_open.then_some(reader) }
    }

    /// Asks it to end, as a supervisor does; true when it ended well.
    fn ends(mut self) -> bool {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.process.id() as i32), nix::sys::signal::SIGTERM)
            .unwrap();
        until("the end", || self.process.try_wait().unwrap()).success()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(since.elapsed() < WITHIN, "not within {WITHIN:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn flexcomm() -> Command {
    Command::new(env!("CARGO_BIN_EXE_flexcomm"))
}

/// The answer to a request; `None` when the connection breaks or stays silent.
fn ask(server: SocketAddr, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&server, WITHIN).ok()?;
    stream.set_read_timeout(Some(WITHIN)).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer).filter(|text| !text.is_empty())
}

fn get(server: SocketAddr, path: &str) -> Option<String> {
    ask(server, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
}

/// A metric's value.
fn value(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in\n{metrics}")).parse().unwrap()
}

fn a_controller_answers_all(stderr_is_open: bool) {
    let dir = tempfile::tempdir().unwrap();
    let addr = free_address();
    let mut command = flexcomm();
    command.args(["controller", "--listen", &addr.to_string()]).current_dir(dir.path()).env("RUST_LOG", "debug");
    let daemon = Daemon::start(&mut command, stderr_is_open);
    until("the controller is ready", || get(addr, "/readyz").filter(|answer| answer.starts_with("HTTP/1.1 200")));
    let token = std::fs::read_to_string(dir.path().join("flexcomm.token")).unwrap();
    let body = r#"{"protocol":1,"node":"a","instance":1,"addr":"10.0.0.1","echo_port":1,"throughput_port":2,
        "may_shape":false,"software":"x"}"#
        .replace("\"protocol\":1", &format!("\"protocol\":{PROTOCOL}"));
    let register = format!(
        "POST /api/v1/agents/register HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        token.trim(),
        body.len()
    );
    let answers = (0..REQUESTS).filter_map(|_| ask(addr, &register));
    let well = answers.filter(|answer| answer.starts_with("HTTP/1.1 200")).count();
    assert_eq!(well, REQUESTS, "requests answered");
    // First the lines fill what may wait.
    until("lines are dropped and counted", || {
        ask(addr, &register)?;
        let metrics = get(addr, "/metrics")?;
        (value(&metrics, "flexcomm_log_lines_dropped_total") > 0.0).then_some(())
    });
    assert!(daemon.ends());
}

#[test]
fn a_controller_whose_stderr_is_closed_answers_all() {
    a_controller_answers_all(false);
}

#[test]
fn a_controller_whose_stderr_is_full_answers_all() {
    a_controller_answers_all(true);
}

/// A trainer's side of a connection to the agent.
struct Trainer(BufReader<UnixStream>);

impl Trainer {
    fn connect(socket: &Path) -> Self {
        let stream = until("the agent's socket", || UnixStream::connect(socket).ok());
        stream.set_read_timeout(Some(WITHIN)).unwrap();
        stream.set_write_timeout(Some(WITHIN)).unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, message: &FromTrainer) -> std::io::Result<()> {
        self.0.get_mut().write_all(format!("{}\n", serde_json::to_string(message).unwrap()).as_bytes())
    }

    fn answer(&mut self) -> ToTrainer {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?} is no answer: {error}"))
    }
}

fn an_agent_takes_all(stderr_is_open: bool) {
    let dir = tempfile::tempdir().unwrap();
    let metrics_at = free_address();
    let (echo, throughput) = (free_address().port().to_string(), free_address().port().to_string());
    let mut command = flexcomm();
    command.args(["agent", "--node", "a", "--token", "a-test-token", "--controller", "http://127.0.0.1:9"]);
    command.args(["--listen", "127.0.0.1", "--echo-port", &echo, "--throughput-port", &throughput, "--log", "debug"]);
    command.args(["--metrics-listen", &metrics_at.to_string()]);
    command.arg("--run-dir").arg(dir.path().join("run")).arg("--state-dir").arg(dir.path().join("state"));
    let daemon = Daemon::start(&mut command, stderr_is_open);
    let socket = dir.path().join("run/agent.sock");
    let mut trainer = Trainer::connect(&socket);
    let job: flexcomm_domain::JobId = "j".parse().unwrap();
    let collectives = vec!["dense-ring".into()];
    let hello = Hello { collectives, ..Hello::new(job.clone(), (0, 2), 1, "x") };
    trainer.send(&FromTrainer::Hello { protocol: PROTOCOL, hello: hello.clone() }).unwrap();
    let welcome = trainer.answer();
    assert!(matches!(welcome, ToTrainer::Welcome { .. }), "{welcome:?}");
    let orders = trainer.answer();
    assert!(matches!(orders, ToTrainer::Orders(_)), "{orders:?}");
    // A report without steps is rejected with a warning; the connection goes on.
    let strategy = Strategy::DENSE_RING.into();
    let empty = FromTrainer::Steps(StepsReport { job, rank: 0, version: 0, strategy, steps: vec![] });
    let sent = (0..MESSAGES).take_while(|_| trainer.send(&empty).is_ok()).count();
    assert_eq!(sent as u64, MESSAGES, "messages sent");
    until("all messages are taken", || {
        let metrics = get(metrics_at, "/metrics")?;
        (value(&metrics, "flexcomm_agent_trainer_reports_rejected_total") == MESSAGES as f64).then_some(())
    });
    // Other trainers come and go. A cause is written once a minute, so that lines which wait for a full pipe stay few: none is
    // dropped. Into a closed one every line is.
    for _ in 0..CONNECTIONS {
        let mut other = Trainer::connect(&socket);
        let hello = Hello { rank: 1, ..hello.clone() };
        other.send(&FromTrainer::Hello { protocol: PROTOCOL, hello }).unwrap();
        other.answer();
    }
    until("lines are dropped and counted, or wait", || {
        let dropped = value(&get(metrics_at, "/metrics")?, "flexcomm_agent_log_lines_dropped_total");
        ((dropped > 0.0) != stderr_is_open).then_some(())
    });
    trainer.0.get_mut().write_all(b"this is no message\n").unwrap();
    let refused = trainer.answer();
    assert!(matches!(refused, ToTrainer::Refused { .. }), "{refused:?}");
    assert!(daemon.ends());
}

#[test]
fn an_agent_whose_stderr_is_closed_takes_all() {
    an_agent_takes_all(false);
}

#[test]
fn an_agent_whose_stderr_is_full_takes_all() {
    an_agent_takes_all(true);
}

/// Why a daemon does not start is the last line that is written before it ends.
#[test]
fn the_reason_of_an_end_is_written_where_it_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = flexcomm();
    let ended = command.args(["controller", "--listen", "127.0.0.1:0", "--db"]).arg(dir.path()).output().unwrap();
    let text = String::from_utf8(ended.stderr).unwrap();
    assert!(text.contains("it is a folder; name the file in it"), "{text}");
    assert_eq!(ended.status.code(), Some(1));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = flexcomm();
    command.args(["controller", "--listen", "127.0.0.1:0", "--db"]).arg(dir.path()).stderr(writer);
    assert_eq!(command.status().unwrap().code(), Some(1), "not a panic's status");
}
