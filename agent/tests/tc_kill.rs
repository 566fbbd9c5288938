//! SIGKILL at random moments of apply, renew and restore: the qdisc tree is as before within a second, every time.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

mod tc_common;

use nix::sys::signal::{Signal, kill};
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tc_common::{Net, can_make_namespaces};

const MOMENTS: u32 = 200;
const SEED: u64 = 0x5f1e_c033;
/// From the helper's first word to the kill, at most: several rounds of apply, renew and restore.
const LONGEST: Duration = Duration::from_millis(150);

/// Agents killed after one of their guardians, and the longest time between both: the helper looks every 200 ms.
const GUARDIANS_KILLED: u32 = 60;
const REPLACED: Duration = Duration::from_millis(250);

#[test]
fn sigkill_at_200_moments_leaves_the_tree_as_before() {
    if !can_make_namespaces() {
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
    if !can_make_namespaces() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut random = rand::rngs::StdRng::seed_from_u64(SEED + 1);
    let mut left_shaped = 0;
    for moment in 0..40 {
        let mut helper = net.helper("loop", &[]);
        helper.wait_for("apply");
        std::thread::sleep(random.random_range(Duration::ZERO..LONGEST));
        helper.kill_with_guardians();
        left_shaped += u32::from(net.tree() != before);
        net.within(|| flexcomm_agent::tc::recover(net.state.path()).unwrap());
        assert_eq!(net.tree(), before, "moment {moment}");
        assert_eq!(net.journals(), 0, "moment {moment}");
    }
    println!("40 kills of both: {left_shaped} left a shaped link, each put back by the next start");
    assert!(left_shaped > 0, "no kill fell while a shape was in force");
}

/// A guardian is killed and its agent at a random moment of the time in which it is replaced.
#[test]
fn sigkill_of_a_guardian_and_then_of_its_agent_leaves_the_tree_as_before() {
    if !can_make_namespaces() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut random = rand::rngs::StdRng::seed_from_u64(SEED + 2);
    let mut left = Vec::new();
    for moment in 0..GUARDIANS_KILLED {
        let mut helper = net.helper("hold", &[]);
        helper.wait_for("shaped");
        let guardians = helper.guardians();
        let victim = guardians[random.random_range(0..guardians.len())];
        let delay = random.random_range(Duration::ZERO..REPLACED);
        kill(victim, Signal::SIGKILL).unwrap();
        std::thread::sleep(delay);
        helper.kill();
        if net.back_within(&before).is_none() {
            left.push((moment, delay));
            net.within(|| flexcomm_agent::tc::recover(net.state.path()).unwrap());
        }
        wait_for_no_journal(&net);
    }
    assert!(left.is_empty(), "{} of {GUARDIANS_KILLED} kills left a shaped link (kill, delay): {left:?}", left.len());
}

/// Starts the loop, kills it with SIGKILL `delay` after its first word, and returns what it was doing.
fn kill_once(net: &Net, delay: Duration) -> String {
    let mut helper = net.helper("loop", &[]);
    helper.wait_for("apply");
    std::thread::sleep(delay);
    let status = helper.kill();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "the helper ended by itself");
    helper.last_word().unwrap_or_else(|| "apply".to_owned())
}

/// The guardian removes the journal after the qdisc.
fn wait_for_no_journal(net: &Net) {
    let start = Instant::now();
    while net.journals() > 0 {
        assert!(start.elapsed() < tc_common::TIMEOUT, "the journal is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}
