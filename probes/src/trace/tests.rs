use super::*;
use proptest::prelude::*;

fn ip(i: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, i])
}

/// Drives a run over a chain of routers; `silent` hops never answer. Returns the path and the probes sent.
fn drive(plan: TracePlan, distance: u8, silent: &[u8], last: Answer) -> (Path, usize) {
    let mut run = TraceRun::new(Nanos(0), ip(100), plan).unwrap();
    let mut answers: Vec<(Nanos, u16, IpAddr, Answer)> = Vec::new();
    let (mut now, mut sent) = (Nanos(0), 0);
    for _ in 0..10_000 {
        while let Some(i) = answers.iter().position(|(at, ..)| *at <= now) {
            let (at, port, from, kind) = answers.remove(i);
            run.answer(at, port, from, kind);
        }
        match run.step(now) {
            Step::Send { ttl, port } => {
                sent += 1;
                let at = now.plus(0.01 * f64::from(ttl.min(distance)));
                if silent.contains(&ttl) {
                    continue;
                }
                let end = ttl >= distance;
                let from = if end { ip(100) } else { ip(ttl) };
                answers.push((at, port, from, if end { last } else { Answer::TimeExceeded }));
            }
            Step::Wait(until) => {
                assert!(until > now, "waits for the past");
                now = answers.iter().map(|(at, ..)| *at).fold(until, |a, b| a.min(b)).max(Nanos(now.0 + 1));
            }
            Step::Finished => return (run.path(), sent),
        }
    }
    panic!("never finished");
}

#[test]
fn finds_all_hops_and_stops_at_the_target() {
    let (path, sent) = drive(TracePlan::default(), 3, &[], Answer::Reached);
    assert!(path.reached);
    assert_eq!(path.addresses(), vec![Some(ip(1)), Some(ip(2)), Some(ip(100))]);
    assert_eq!(path.hops[1].rtts_s.len(), 3);
    assert!((path.hops[1].median_s.unwrap() - 0.02).abs() < 1e-9);
    assert!(sent <= 3 * 3 + usize::from(AHEAD) + 8, "{sent}");
}

#[test]
fn silent_hops_stay_open_and_do_not_stop_it() {
    let (path, _) = drive(TracePlan::default(), 14, &[2, 5, 6, 7], Answer::Reached);
    assert!(path.reached);
    assert_eq!(path.hops.len(), 14);
    assert_eq!(path.hops[4].addr, None);
    let (path, _) = drive(TracePlan::default(), 40, &(1..=40).collect::<Vec<u8>>(), Answer::Reached);
    assert!(!path.reached && path.hops.is_empty());
}

#[test]
fn a_refusal_is_named() {
    let (path, _) = drive(TracePlan::default(), 4, &[], Answer::Unreachable);
    assert_eq!((path.reached, path.refused_by), (false, Some(ip(100))));
}

#[test]
fn a_stranger_cannot_say_that_the_target_was_reached() {
    let mut run = TraceRun::new(Nanos(0), ip(100), TracePlan::default()).unwrap();
    let Step::Send { port, .. } = run.step(Nanos(0)) else { panic!("nothing to send") };
    assert!(run.answer(Nanos(1_000), port, ip(66), Answer::Reached));
    let path = run.path();
    assert_eq!((path.reached, path.refused_by), (false, Some(ip(66))));
}

#[test]
fn plans_are_checked() {
    let bad = |plan| TraceRun::new(Nanos(0), ip(1), plan).is_err();
    assert!(bad(TracePlan { max_hops: 0, ..TracePlan::default() }));
    assert!(bad(TracePlan { queries: 11, ..TracePlan::default() }));
    assert!(bad(TracePlan { timeout_s: f64::NAN, ..TracePlan::default() }));
}

#[test]
fn a_path_changes_when_it_is_seen_twice() {
    let path = |last: u8| vec![Some(ip(1)), Some(ip(last)), Some(ip(100))];
    let mut watch = PathWatch::default();
    assert!(watch.observe(path(2)).is_some());
    assert_eq!(watch.observe(path(2)), None);
    assert_eq!(watch.observe(vec![Some(ip(1)), None, Some(ip(100))]), None);
    assert_eq!(watch.observe(path(3)), None);
    assert_eq!(watch.observe(path(2)), None, "it was there once only");
    assert_eq!(watch.observe(path(3)), None);
    assert_eq!(watch.observe(path(3)), Some(path(3)));
    assert_eq!(watch.observe(path(3)), None);
}

#[test]
fn a_longer_path_is_another_path() {
    let mut watch = PathWatch::default();
    watch.observe(vec![Some(ip(1)), Some(ip(100))]);
    let longer = vec![Some(ip(1)), None, Some(ip(100))];
    assert_eq!(watch.observe(longer.clone()), None);
    assert_eq!(watch.observe(longer.clone()), Some(longer));
}

proptest! {
    #[test]
    fn any_answers_are_survived(answers in prop::collection::vec((any::<u64>(), any::<u16>(), any::<u8>()), 0..200)) {
        let mut run = TraceRun::new(Nanos(0), ip(100), TracePlan::default()).unwrap();
        for (at, port, from) in answers {
            run.step(Nanos(at));
            run.answer(Nanos(at), port, ip(from), Answer::TimeExceeded);
        }
        let _ = run.path();
    }

    #[test]
    fn every_run_ends(distance in 1u8..64, silent in prop::collection::vec(1u8..64, 0..64), queries in 1u8..=10) {
        let plan = TracePlan { queries, ..TracePlan::default() };
        let (path, _) = drive(plan, distance, &silent, Answer::Reached);
        prop_assert!(path.hops.len() <= 64);
    }
}
