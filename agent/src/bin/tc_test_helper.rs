//! The process that the tests of tc shape links with and kill, and its guardian. A program of its own: a test binary
//! that is run again writes its harness's lines between those of the process, in an order that depends on the number of
//! cores. What is being done goes to stdout, one word a line.
#![allow(clippy::unwrap_used)]

#[path = "../../tests/tc_common/helper.rs"]
mod helper;

use flexcomm_agent::tc::{Shaper, TcConfig, guardian};
use helper::{IFACE, NETEM, ROLE, SHAPE, STATE, shape};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn main() {
    let role = std::env::var(ROLE).unwrap_or_default();
    let state = PathBuf::from(std::env::var_os(STATE).unwrap_or_default());
    let iface = std::env::var(IFACE).unwrap_or_default();
    match role.as_str() {
        "guardian" => std::process::exit(guardian::main()),
        "loop" => churn(&state, &iface),
        "hold" => hold(&state, &iface),
        other => panic!("{ROLE} is {other:?}: only the tests of tc start this program"),
    }
}

fn config(state: &Path, iface: &str) -> TcConfig {
    helper::config(&std::env::current_exe().unwrap(), state, iface)
}

/// The test that reads this may have ended.
fn say(what: &str) {
    let _ = writeln!(std::io::stdout(), "{what}");
}

/// Applies, changes, renews and restores until it is killed.
fn churn(state: &Path, iface: &str) {
    let netem = std::env::var_os(NETEM).is_some();
    let one = if netem { shape(5.0, 1.0, 0.01, 100.0) } else { shape(0.0, 0.0, 0.0, 100.0) };
    let other = if netem { shape(50.0, 0.0, 0.0, 10.0) } else { shape(0.0, 0.0, 0.0, 10.0) };
    let mut shaper = Shaper::new(config(state, iface)).unwrap();
    loop {
        for shape in [one, other] {
            say("apply");
            shaper.apply(iface, &shape).unwrap();
            for _ in 0..2000 {
                say("renew");
                shaper.renew().unwrap();
            }
        }
        say("restore");
        shaper.restore().unwrap();
        say("idle");
    }
}

/// Applies the shape named in the environment (`delay_ms jitter_ms loss mbit`) and renews until it is killed.
fn hold(state: &Path, iface: &str) {
    let text = std::env::var(SHAPE).unwrap_or_else(|_| "0 0 0 50".into());
    let numbers: Vec<f64> = text.split(' ').map(|n| n.parse().unwrap()).collect();
    let mut shaper = Shaper::new(config(state, iface)).unwrap();
    shaper.apply(iface, &shape(numbers[0], numbers[1], numbers[2], numbers[3])).unwrap();
    say("shaped");
    loop {
        std::thread::sleep(Duration::from_millis(200));
        if shaper.renew().is_err() {
            say("lost");
        }
    }
}
