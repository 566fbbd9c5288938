//! `flexcomm doctor` and the hidden guardian process, as users and agents start them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

fn doctor(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flexcomm"))
        .arg("doctor")
        .args(args)
        .env_remove("FLEXCOMM_CONTROLLER")
        .output()
        .unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn what_is_missing_is_named_with_a_remedy_and_a_status() {
    let folder = std::env::temp_dir();
    let folder = folder.to_str().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let args = ["--for", "agent", "--state-dir", folder, "--run-dir", folder];

    let well = doctor(&[&args[..], &["--json"]].concat());
    assert!(well.status.success(), "{well:?}");
    let checks = json(&well);
    assert_eq!(checks["ok"], true);
    assert!(checks["checks"].as_array().unwrap().iter().all(|check| check["group"] == "agent"));

    let ill = doctor(&[&args[..], &["--json", "--controller", &url]].concat());
    assert_eq!(ill.status.code(), Some(1));
    let checks = json(&ill);
    assert_eq!(checks["ok"], false);
    let missing: Vec<_> = checks["checks"].as_array().unwrap().iter().filter(|c| c["state"] == "missing").collect();
    assert_eq!(missing.len(), 1);
    assert_eq!(missing[0]["name"], "controller");
    assert!(missing[0]["mend"].as_str().unwrap().contains("flexcomm controller"));

    let text = doctor(&[&args[..], &["--controller", &url]].concat());
    assert!(String::from_utf8_lossy(&text.stdout).contains("MISSING  controller"));
    assert_eq!(String::from_utf8_lossy(&text.stderr), "flexcomm: missing here: controller\n");
}

/// The agent starts its own binary with `tc-guardian`, this in its environment, and speaks this over its pipes.
#[test]
fn the_guardian_is_ready_and_ends_when_told() {
    let state = std::env::temp_dir().join(format!("flexcomm-guardian-{}", std::process::id()));
    std::fs::create_dir_all(&state).unwrap();
    let orders = serde_json::json!({ "state_dir": state, "owner": "test", "lease_ms": 600_000 });
    let mut guardian = Command::new(env!("CARGO_BIN_EXE_flexcomm"))
        .arg("tc-guardian")
        .env("FLEXCOMM_TC_GUARDIAN", orders.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = guardian.stdin.take().unwrap();
    let mut line = String::new();
    BufReader::new(guardian.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "flexcomm tc guardian: ready\n");
    // What ends the agent (a terminal, a service manager) reaches the guardian too, and must not end it.
    let kill = format!("kill -TERM {0}; kill -INT {0}; kill -HUP {0}", guardian.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    pipe.write_all(b"rq").unwrap();
    assert!(guardian.wait().unwrap().success());
    std::fs::remove_dir_all(&state).unwrap();
}

#[test]
fn the_guardian_is_hidden_from_the_help() {
    let help = Command::new(env!("CARGO_BIN_EXE_flexcomm")).arg("--help").output().unwrap();
    assert!(!String::from_utf8_lossy(&help.stdout).contains("guardian"));
}
