//! `flexcomm probe` as users start it: what it prints, and its exit status.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

#[path = "../../tests/skipped.rs"]
mod skipped;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use skipped::skipped;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, UdpSocket};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

const TOKEN: &str = "the token of the tests";

fn probe(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
    command.arg("probe").args(args).env("FLEXCOMM_TOKEN", TOKEN).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(args: &[&str]) -> Output {
    probe(args).output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A program of which the first line is read. Killed with its handle.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        let mut child = probe(args).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }

    /// Sends a signal; the exit status and the rest of both outputs.
    fn end(mut self, signal: Signal) -> (Option<i32>, String, String) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
        let (mut out, mut err) = (String::new(), String::new());
        self.lines.read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (self.child.wait().unwrap().code(), out, err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `flexcomm probe serve` on free ports: UDP, TCP.
fn serve() -> (Running, String, String) {
    let mut server = Running::start(&["serve", "--listen", "127.0.0.1", "--echo-port", "0", "--throughput-port", "0"]);
    let line = server.line();
    let port = |after: &str| {
        let rest = line.split(after).nth(1).unwrap_or_else(|| panic!("{line}"));
        let digits = rest.chars().take_while(char::is_ascii_digit);
        digits.collect::<String>()
    };
    let (udp, tcp) = (port("UDP 127.0.0.1:"), port("TCP 127.0.0.1:"));
    (server, udp, tcp)
}

#[test]
fn echo_and_throughput_find_a_server_which_says_goodbye() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let (server, udp, tcp) = serve();
        let echo = run(&["echo", "127.0.0.1", "--port", &udp, "-c", "5", "-i", "10ms", "--json"]);
        assert!(echo.status.success(), "{echo:?}");
        let found = json(&echo);
        assert_eq!((&found["sent"], &found["answered"], &found["loss"]), (&5.into(), &5.into(), &0.0.into()));
        assert!(found["median_s"].as_f64().unwrap() > 0.0 && found["jitter_out_s"].is_number(), "{found}");

        let tput = run(&["throughput", "127.0.0.1", "--port", &tcp, "-b", "4M", "--json"]);
        assert!(tput.status.success(), "{tput:?}");
        let found = json(&tput);
        assert!(found["out"]["bps"].as_f64().unwrap() > 1e6 && found["back"]["bps"].as_f64().unwrap() > 1e6, "{found}");
        assert!(found["bytes"].as_u64().unwrap() <= 4_000_000, "{found}");

        let (status, out, err) = server.end(signal);
        assert_eq!(status, Some(0), "{err}");
        assert!(out.contains("echoes answered"), "{out:?}");
    }
}

/// Also where echoes follow each other faster than the program looks.
#[test]
fn echo_sends_as_many_as_asked_for_and_counts_from_one() {
    let (_server, udp, _) = serve();
    for (count, interval) in [("1", "1ms"), ("3", "1ms"), ("3", "100ms"), ("50", "1ms")] {
        let echo = run(&["echo", "127.0.0.1", "--port", &udp, "-c", count, "-i", interval]);
        let text = String::from_utf8_lossy(&echo.stdout).into_owned();
        assert!(text.contains(&format!(": {count} sent, {count} answered, 0.0 % lost")), "{text}");
        let seen = text.lines().filter_map(|line| line.split("seq=").nth(1)?.split(' ').next()?.parse::<u64>().ok());
        assert_eq!(seen.collect::<Vec<u64>>(), (1..=count.parse().unwrap()).collect::<Vec<u64>>(), "{text}");
    }
}

#[test]
fn a_host_that_does_not_answer_is_an_error_and_nulls() {
    let mute = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = mute.local_addr().unwrap().port().to_string();
    let args = ["echo", "127.0.0.1", "--port", &port, "-c", "2", "-i", "10ms", "--timeout", "50ms"];
    let echo = run(&[&args[..], &["--json"]].concat());
    assert_eq!(echo.status.code(), Some(1));
    assert!(stderr(&echo).contains("did not answer"), "{echo:?}");
    let found = json(&echo);
    assert_eq!((&found["sent"], &found["answered"], &found["loss"]), (&2.into(), &0.into(), &1.0.into()));
    for key in ["median_s", "jitter_s", "jitter_out_s", "jitter_back_s", "loss_out"] {
        assert!(found.get(key).is_some_and(Value::is_null), "{key} in {found}");
    }
    let text = run(&args);
    assert_eq!(text.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&text.stdout).contains("0 answered, 100.0 % lost"), "{text:?}");
}

#[test]
fn a_foreign_token_is_named() {
    let (_server, udp, tcp) = serve();
    let foreign = |args: &[&str]| probe(args).env("FLEXCOMM_TOKEN", "quite another token").output().unwrap();
    let tput = foreign(&["throughput", "127.0.0.1", "--port", &tcp]);
    assert_eq!(tput.status.code(), Some(1));
    assert!(stderr(&tput).contains("token"), "{tput:?}");
    let echo = foreign(&["echo", "127.0.0.1", "--port", &udp, "-c", "2", "-i", "10ms", "--timeout", "50ms"]);
    assert_eq!(echo.status.code(), Some(1));
    assert!(stderr(&echo).contains("with the same token"), "{echo:?}");
}

#[test]
fn ping_says_who_answered() {
    let good = run(&["ping", "127.0.0.1", "127.0.0.2", "-c", "3", "-i", "20ms", "--json"]);
    if stderr(&good).contains("open an ICMP socket") {
        return skipped("no ICMP socket is allowed here");
    }
    assert!(good.status.success(), "{good:?}");
    let found = json(&good);
    assert_eq!(found["targets"].as_array().unwrap().len(), 2);
    assert!(found["targets"][1]["median_s"].as_f64().unwrap() > 0.0, "{found}");

    // A name that nobody has keeps the others from nothing.
    let args = ["ping", "127.0.0.1", "nosuchhost.invalid", "-c", "2", "-i", "20ms", "--json"];
    let half = run(&args);
    assert_eq!((half.status.code(), &json(&half)["targets"][0]["answered"]), (Some(1), &2.into()), "{half:?}");
    assert!(
        stderr(&half).contains("look up \"nosuchhost.invalid\"") && !stderr(&half).contains("127.0.0.1"),
        "{half:?}"
    );

    // Reserved for ever: nobody has it.
    let args = ["ping", "127.0.0.1", "240.0.0.1", "-c", "2", "-i", "20ms", "--timeout", "100ms"];
    for json_too in [false, true] {
        let bad = run(&[&args[..], if json_too { &["--json"] } else { &[] }].concat());
        assert_eq!(bad.status.code(), Some(1), "{bad:?}");
        assert!(stderr(&bad).contains("no answer, 100 % lost, from 240.0.0.1"), "{bad:?}");
        if json_too {
            assert!(json(&bad)["targets"][1]["jitter_s"].is_null());
        }
    }
}

#[test]
fn trace_says_whether_it_arrived() {
    let good = run(&["trace", "127.0.0.1", "--json"]);
    assert!(good.status.success(), "{good:?}");
    let path = json(&good);
    assert_eq!((&path["reached"], &path["hops"][0]["addr"]), (&true.into(), &"127.0.0.1".into()));
    let bad = run(&["trace", "240.0.0.1", "-m", "2", "-q", "1", "--timeout", "100ms"]);
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    assert!(stderr(&bad).contains("240.0.0.1"), "{bad:?}");
}

#[test]
fn nobody_at_the_port_is_an_error_with_a_remedy() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let tput = run(&["throughput", "127.0.0.1", "--port", &port]);
    assert_eq!(tput.status.code(), Some(1));
    assert!(stderr(&tput).contains("is an agent or `flexcomm probe serve` running there"), "{tput:?}");
}

/// A server that takes the connection and says nothing, and an address that does not even take it.
#[test]
fn ctrl_c_ends_a_measurement_that_has_not_begun() {
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = mute.local_addr().unwrap().port().to_string();
    let tput = Running::start(&["throughput", "127.0.0.1", "--port", &port]);
    let _socket = mute.accept().unwrap();
    let (status, out, err) = tput.end(Signal::SIGINT);
    assert_eq!((status, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.contains("ended before the first byte"), "{err}");
}

#[test]
fn ctrl_c_ends_a_run_with_what_was_found() {
    let (_server, udp, _) = serve();
    let mut echo = Running::start(&["echo", "127.0.0.1", "--port", &udp, "-c", "1000000", "-i", "10ms"]);
    assert!(echo.line().contains("seq="));
    let (status, out, err) = echo.end(Signal::SIGINT);
    assert_eq!(status, Some(0), "{err}");
    assert!(out.contains("--- echo 127.0.0.1:"), "{out}");
}

#[test]
fn wrong_arguments_and_a_missing_token_are_said() {
    assert_eq!(run(&["echo"]).status.code(), Some(2));
    assert_eq!(run(&["throughput", "127.0.0.1", "-b", "many"]).status.code(), Some(2));
    let echo = probe(&["echo", "127.0.0.1"]).env_remove("FLEXCOMM_TOKEN").output().unwrap();
    assert_eq!(echo.status.code(), Some(1));
    assert!(stderr(&echo).contains("--token-file"), "{echo:?}");
    for kind in ["echo", "ping", "trace", "throughput"] {
        let help = run(&[kind, "--help"]);
        let text = String::from_utf8_lossy(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("Exit status: 0 when every host answered; 1 when one did not"), "{text}");
    }
}
