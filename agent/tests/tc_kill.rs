//! SIGKILL at random moments of apply, renew and restore: the qdisc tree is as before within a second, every time.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

mod tc_common;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};
use tc_common::{Net, can_make_namespaces};

const MOMENTS: u32 = 200;
const SEED: u64 = 0x5f1e_c033;
/// From the helper's first word to the kill, at most: several rounds of apply, renew and restore.
const LONGEST: Duration = Duration::from_millis(150);

#[test]
fn helper_entry() {
    tc_common::helper_main();
}

#[test]
fn sigkill_at_200_moments_leaves_the_tree_as_before() {
    if std::env::var_os(tc_common::ROLE).is_some() || !can_make_namespaces() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut random = rand::rngs::StdRng::seed_from_u64(SEED);
    let (mut phases, mut slowest) = (BTreeMap::<String, u32>::new(), Duration::ZERO);
    for moment in 0..MOMENTS {
        let delay = random.random_range(Duration::ZERO..LONGEST);
        let phase = kill_once(&net, delay);
        match net.back_within(&before) {
            Some(took) => slowest = slowest.max(took),
            None => panic!("moment {moment}, {delay:?} in, during {phase}: the tree is\n{}\nnot\n{before}", net.tree()),
        }
        wait_for_no_journal(&net);
        *phases.entry(phase).or_default() += 1;
    }
    println!("{MOMENTS} kills, by what was going on: {phases:?}; slowest return {slowest:?}");
    assert!(["apply", "renew", "restore"].iter().all(|p| phases.contains_key(*p)), "not all phases were hit");
}

/// Agent and guardian both killed, at random moments: the next start puts back whatever they were at.
#[test]
fn sigkill_of_both_at_40_moments_is_mended_by_the_next_start() {
    if std::env::var_os(tc_common::ROLE).is_some() || !can_make_namespaces() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut random = rand::rngs::StdRng::seed_from_u64(SEED + 1);
    let mut left_shaped = 0;
    for moment in 0..40 {
        let mut child = net.helper("loop", &[]);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line == "apply")));
        std::thread::sleep(random.random_range(Duration::ZERO..LONGEST));
        // Stopped first, so that it starts no other guardian in between.
        let agent = Pid::from_raw(child.id() as i32);
        kill(agent, Signal::SIGSTOP).unwrap();
        for guardian in tc_common::children(child.id()) {
            let _ = kill(guardian, Signal::SIGKILL);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        left_shaped += u32::from(net.tree() != before);
        net.within(|| flexcomm_agent::tc::recover(net.state.path()).unwrap());
        assert_eq!(net.tree(), before, "moment {moment}");
        assert_eq!(net.journals(), 0, "moment {moment}");
    }
    println!("40 kills of both: {left_shaped} left a shaped link, each put back by the next start");
    assert!(left_shaped > 0, "no kill fell while a shape was in force");
}

/// Starts the loop, kills it with SIGKILL `delay` after its first word, and says what it was doing.
fn kill_once(net: &Net, delay: Duration) -> String {
    let mut child = net.helper("loop", &[]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut phase = String::new();
    let words = ["apply", "renew", "restore", "idle"];
    for line in lines.by_ref() {
        phase = line.unwrap();
        if words.contains(&phase.as_str()) {
            break;
        }
    }
    let killer = std::thread::spawn(move || {
        std::thread::sleep(delay);
        child.kill().unwrap();
        child.wait().unwrap()
    });
    for line in lines {
        let line = line.unwrap();
        if words.contains(&line.as_str()) {
            phase = line;
        }
    }
    let status = killer.join().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "the helper ended by itself");
    phase
}

/// The guardian removes the journal after the qdisc.
fn wait_for_no_journal(net: &Net) {
    let start = Instant::now();
    while net.journals() > 0 {
        assert!(start.elapsed() < tc_common::PATIENCE, "the journal is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}
