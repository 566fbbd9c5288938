//! What the guard blames, where it goes, and for how long it blocks what failed.

use crate::common::{Job, seconds};
use flexcomm_domain::Collective;
use flexcomm_planner::{Keep, Verdict};

/// All that compresses goes by allgather; what these tests tell is of a dense ring and a dense tree.
fn with_allgather_alone() -> Job {
    let mut job = Job::new();
    job.s.offer.collectives = vec![Collective::DenseRing, Collective::DenseTree, Collective::Allgather];
    job
}

#[test]
fn the_guard_leaves_for_the_best_of_the_rest_and_does_not_return_for_a_while() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.call();
    let failed = job.strategy();
    job.wait(3.0);
    let outcome = job.suffers(4.0, 0.004, 3.97, 0.6);
    assert!(outcome.report.rollback, "{}", outcome.report.why);
    let decision = outcome.decision().unwrap();
    let mut rest = outcome.report.alternatives.iter().filter(|a| a.strategy.collective() != failed.collective());
    assert_eq!(decision.strategy, rest.next().unwrap().strategy, "best first: {}", decision.reason);
    assert!(!decision.strategy.is_dense() && decision.reason.contains("; on to topk"));
    assert!(decision.reason.contains("measured at 4 s per step"), "{}", decision.reason);
    assert!(decision.reason.contains("not to be tried again for 300 s"), "{}", decision.reason);
    for _ in 0..28 {
        job.wait(10.0);
        job.call();
        assert_ne!(job.strategy().collective(), failed.collective());
    }
}

#[test]
fn the_guard_rolls_back_to_dense_where_nothing_else_is_left() {
    let mut job = with_allgather_alone();
    job.network(0.001, 1e9);
    job.call();
    let failed = job.strategy();
    assert!(!failed.is_dense());
    job.wait(3.0);
    let outcome = job.suffers_in_doubt(4.0, 0.004, 3.97, 0.6);
    assert!(outcome.report.rollback, "{}", outcome.report.why);
    let decision = outcome.decision().unwrap();
    assert!(decision.strategy.is_dense(), "{}", decision.reason);
    assert!(decision.reason.contains("measured at 4 s per step"), "{}", decision.reason);
    assert!(decision.reason.contains("not to be tried again for 300 s"), "{}", decision.reason);
    // What is better than dense and has not failed comes as soon as the dwell time is over.
    job.s.offer.collectives = Collective::ALL.to_vec();
    job.wait(11.0);
    let next = job.call();
    assert!(!next.decision().expect("art-ring is better than dense").strategy.is_dense());
    assert!(next.report.why.contains("was rolled back; "), "{}", next.report.why);
    for _ in 0..25 {
        job.wait(10.0);
        job.call();
        assert_ne!(job.strategy().collective(), failed.collective());
    }
}

#[test]
fn the_guard_stays_when_nothing_known_is_better_and_says_so_once() {
    let mut job = Job::new();
    job.network(0.001, 1e8);
    job.call();
    assert!(!job.strategy().is_dense());
    let p = job.call().report.in_force.unwrap();
    // Slower than predicted, yet far faster than dense, which takes 15 s here.
    let slow = (p.t_step_s * 1.8, p.t_comp_s, p.t_sync_s + p.t_step_s * 0.8, p.gain.get());
    let outcome = job.suffers(slow.0, slow.1, slow.2, slow.3);
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::NothingBetter), "{}", outcome.report.why);
    assert_eq!(job.keeps(), Keep::NothingMoved);
}

#[test]
fn steps_that_are_slow_because_the_network_changed_wait_for_the_probes() {
    let mut job = Job::new();
    job.call();
    let p = job.call().report.in_force.unwrap();
    for age in 0..30 {
        // The probes last saw the network before it changed.
        job.s.links.as_mut().unwrap().oldest = seconds(f64::from(age) + 5.0);
        job.measure(p.t_step_s * 10.0, p.t_comp_s, p.t_sync_s * 10.0 + p.t_step_s, p.gain.get());
        job.wait(1.0);
        let outcome = job.call();
        assert!(outcome.decision().is_none(), "{}", outcome.report.why);
    }
    job.network(0.001, 1e9);
    let outcome = job.call();
    assert!(outcome.decision().is_some() && !outcome.report.rollback, "{}", outcome.report.why);
}

/// A network that falls to a 25th, whose probes go on all the time but see it 4 s late, and a guard that does not wait for
/// as long: when the guard acted and when the strategy that is best on the new network came, in seconds.
fn fall_seen_late(mut job: Job, timeout_s: f64) -> (u32, u32, Job) {
    job.s.config.links_settle_s = seconds(2.0);
    job.s.config.guard_timeout_s = seconds(timeout_s);
    job.call();
    assert!(!job.strategy().is_dense());
    job.wait(60.0);
    job.call();
    let best = {
        let mut fresh = Job { s: job.s.clone(), ..Job::new() };
        (fresh.s.in_force, fresh.s.memory) = (None, Default::default());
        fresh.network(0.001, 1e9);
        fresh.call();
        fresh.strategy()
    };
    let (mut blamed, mut back) = (None, None);
    for t in 0..60 {
        if t == 4 {
            job.network(0.001, 1e9);
        }
        job.s.links.as_mut().unwrap().oldest = seconds(0.5);
        let (t_step, t_comp, t_sync, gain) = job.truth(0.001, 1e9);
        job.measure(t_step, t_comp, t_sync, gain);
        let outcome = job.call();
        assert!(!outcome.report.rollback || blamed.is_none(), "blamed again: {}", outcome.report.why);
        if outcome.report.rollback {
            blamed = Some(t);
        } else if blamed.is_some() && back.is_none() && job.strategy() == best {
            back = Some(t);
        }
        job.wait(1.0);
    }
    (blamed.expect("the guard fires"), back.expect("the best one never comes"), job)
}

#[test]
fn what_was_blamed_for_a_fall_that_the_probes_saw_late_is_back_as_soon_as_they_did() {
    // What is left is slower than dense on the new network, or it is dense alone.
    for (job, timeout_s) in [(Job::new(), 2.0), (with_allgather_alone(), 1.0)] {
        let (blamed, back, job) = fall_seen_late(job, timeout_s);
        // Links have to be steady for 2 s after the probes' news at 4 s.
        assert!((1..4).contains(&blamed) && (4..=7).contains(&back), "blamed after {blamed} s, back after {back} s");
        assert!(job.s.memory.blocked.is_empty(), "{:?}", job.s.memory.blocked);
    }
}

/// Twice as slow a network does not explain steps a hundred times as slow.
#[test]
fn a_block_ends_with_its_network_and_its_strike_stays() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.call();
    let failed = job.strategy();
    let fails = |job: &mut Job| {
        job.suffers(4.0, 0.004, 3.97, 0.6);
        job.wait(20.0);
        job.call();
        assert_ne!(job.strategy(), failed);
        job.s.memory.blocked[0].until.since(job.s.memory.blocked[0].at).get()
    };
    assert_eq!(fails(&mut job), 300.0);
    job.wait(20.0);
    job.network(0.001, 0.6e9);
    let near = job.call();
    assert!(near.report.alternatives.iter().any(|a| a.blocked), "1.7 times as slow is the same network");
    job.network(0.001, 5e9);
    let outcome = job.call();
    assert!(outcome.report.alternatives.iter().all(|a| !a.blocked) && outcome.report.blocked.is_empty());
    let decision = outcome.decision().expect("allgather is the best again");
    assert_eq!(decision.strategy.collective(), failed.collective());
    assert!(decision.reason.contains("may be tried again: it failed on other links"), "{}", decision.reason);
    job.wait(20.0);
    assert_eq!(fails(&mut job), 600.0, "the first failure is not forgotten");
}

/// Half of the links' estimates have followed a fall: nobody is blamed for the other half.
#[test]
fn the_guard_waits_for_links_that_move() {
    let mut job = Job::new();
    job.s.config.links_settle_s = seconds(2.0);
    job.network(0.001, 1e9);
    job.call();
    job.wait(60.0);
    job.measure(4.0, 0.004, 3.97, 0.6);
    job.call();
    job.wait(11.0);
    job.network(0.001, 0.7e9);
    assert!(!job.call().report.rollback);
    job.wait(1.9);
    assert!(!job.call().report.rollback);
    job.wait(0.2);
    assert!(job.call().report.rollback);
}

#[test]
fn a_guard_whose_links_are_never_measured_anew_acts_in_the_end() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.call();
    let mut rolled_back_after = None;
    for s in 0..200u32 {
        job.s.links.as_mut().unwrap().oldest = seconds(f64::from(s) + 5.0);
        job.measure(4.0, 0.004, 3.97, 0.6);
        if job.call().report.rollback {
            rolled_back_after = Some(s);
            break;
        }
        job.wait(1.0);
    }
    assert_eq!(rolled_back_after, Some(120), "the longest age of links that are acted on");
}

#[test]
fn a_slow_optimizer_is_no_reason_to_roll_back() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.call();
    let p = job.call().report.in_force.unwrap();
    let outcome = job.suffers(p.t_step_s * 3.0, p.t_comp_s, p.t_sync_s, p.gain.get());
    assert!(!outcome.report.rollback, "{}", outcome.report.why);
}

#[test]
fn returning_to_what_was_measured_better_ends_the_excursion() {
    let mut job = with_allgather_alone();
    job.network(0.001, 1e9);
    job.call();
    let compressed = job.strategy();
    job.wait(3.0);
    // The network is really worse than believed: everything is slow.
    assert!(job.suffers_in_doubt(1.5, 0.004, 1.4, 0.6).report.rollback);
    job.wait(3.0);
    let back = job.suffers(9.0, 0.0, 8.9, 1.0);
    assert!(back.report.rollback, "{}", back.report.why);
    assert_eq!(job.strategy(), compressed);
    job.wait(3.0);
    job.measure(1.5, 0.004, 1.4, 0.6);
    for _ in 0..20 {
        job.wait(1.0);
        job.call();
        assert_eq!(job.strategy(), compressed, "the same network, measured: no second excursion");
    }
}

/// A job whose ratio keeps a sixth of what it was chosen for and takes the time that was predicted.
fn keeps_a_sixth() -> (Job, flexcomm_planner::Alternative) {
    let mut job = Job::new();
    job.network(1e-4, 10e9);
    job.call();
    let p = job.call().report.in_force.unwrap();
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, p.gain.get() / 6.0);
    (job, p)
}

#[test]
fn on_links_that_cannot_be_trusted_the_steps_in_force_bound_the_next_larger_ratio() {
    let (mut job, before) = keeps_a_sixth();
    assert_eq!(rolled_back_after(&mut job), Some(10), "the timeout of the guard");
    let (from, to) = (before.strategy, job.strategy());
    assert_eq!((from.selector(), from.collective()), (to.selector(), to.collective()));
    let sends_more = |a: &&flexcomm_planner::Alternative| a.strategy.cr() > from.cr();
    let next = job.call().report.alternatives.iter().filter(sends_more).map(|a| a.strategy.cr().get()).reduce(f64::min);
    assert_eq!(Some(to.cr().get()), next);
    let reason = &job.s.in_force.as_ref().unwrap().decision.reason;
    assert!(reason.contains("; on to ") && reason.contains("at most"), "{reason}");
}

/// Where the collective takes most of the step, three times its time costs more than the gain is worth.
#[test]
fn a_larger_ratio_whose_bound_is_worse_is_not_taken_on_links_that_cannot_be_trusted() {
    let (mut job, p) = keeps_a_sixth();
    let m = job.s.measured.as_mut().unwrap();
    (m.t_sync, m.t_step) = (seconds(40.0 * p.t_step_s), seconds(41.0 * p.t_step_s));
    for _ in 0..60 {
        job.s.links.as_mut().unwrap().confidence = 0.05;
        assert_eq!(job.keeps(), Keep::UntrustedLinks);
        job.wait(1.0);
    }
}

/// Calls once a second on links that cannot be trusted; after how many the guard acts.
fn rolled_back_after(job: &mut Job) -> Option<usize> {
    (0..150).find(|_| {
        let links = job.s.links.as_mut().unwrap();
        (links.confidence, links.oldest) = (0.05, seconds(links.oldest.get() + 1.0));
        let left = job.call().report.rollback;
        job.wait(1.0);
        left
    })
}

/// Slower than predicted, for which nothing is known to be better on such links, and it keeps a sixth.
#[test]
fn a_regression_without_a_way_out_hides_none_that_has_one() {
    let (mut job, p) = keeps_a_sixth();
    let m = job.s.measured.as_mut().unwrap();
    (m.t_step, m.t_comp, m.t_sync) = (seconds(1.8 * p.t_step_s), seconds(10.0 * p.t_comp_s), seconds(1.8 * p.t_sync_s));
    assert_eq!(rolled_back_after(&mut job), Some(10));
    assert!(job.strategy().cr() > p.strategy.cr());
}
