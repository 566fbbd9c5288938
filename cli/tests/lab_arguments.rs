//! What `flexcomm lab up` refuses: before it prints an address, and without leaving a folder.
#![allow(clippy::unwrap_used, missing_docs)]

use std::process::{Command, Output};

/// With its temporary folder, which must stay empty.
fn refused(args: &[&str]) -> (Output, String) {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
    let output = command.args(["lab", "up"]).args(args).env("TMPDIR", temporary.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}: {output:?}");
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0, "{args:?} left something behind");
    (output, said)
}

#[test]
fn wrong_arguments_are_named_and_leave_nothing() {
    for (flag, value, words) in [
        ("--nodes", "1", "--nodes 1: allowed is 2 to 32"),
        ("--scenario", "/none.toml", "--scenario /none.toml"),
        ("--strategy", "x", "--strategy"),
        ("--hidden", "128,0", "--hidden [128, 0]: layers must not be empty"),
        ("--batch", "100000000", "--batch 100000000: allowed are 1 to 16384"),
        ("--lr", "1e300", "--lr 1e300: allowed is above 0"),
        ("--lr", "NaN", "--lr NaN"),
        ("--momentum", "1", "--momentum 1: allowed is 0 to below 1"),
        ("--steps-per-epoch", "0", "--steps-per-epoch 0"),
        ("--least-compute", "1h", "--least-compute"),
        ("--rate-divisor", "0", "--rate-divisor"),
        ("--epochs", "1", "--epochs: number of epochs is 1, allowed is 4"),
        ("--listen", "localhost:7070", "expected IP:PORT, for example 127.0.0.1:7070"),
    ] {
        let (output, said) = refused(&[flag, value]);
        assert!(said.contains(words), "{flag} {value}: {said}");
        assert_eq!(output.status.code(), Some(2), "{flag} {value}");
    }
}

#[test]
fn an_address_that_cannot_be_had_leaves_nothing() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    // Who is not root hears of that first.
    let root = nix::unistd::geteuid().is_root();
    for (listen, words) in [(addr.as_str(), "choose another with --listen"), ("0.0.0.0:7070", "loopback")] {
        let (_, said) = refused(&["--listen", listen]);
        assert!(said.contains(if root { words } else { "root" }), "{listen}: {said}");
    }
}

#[test]
fn a_folder_that_a_lab_writes_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let held = std::fs::File::open(folder.path()).unwrap();
    held.lock().unwrap();
    let (_, said) = refused(&["--listen", "127.0.0.1:0", "--out", folder.path().to_str().unwrap()]);
    let root = nix::unistd::geteuid().is_root();
    assert!(said.contains(if root { "a lab that is running writes there" } else { "root" }), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
