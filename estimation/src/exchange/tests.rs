use super::*;
use crate::Compute;

const GIGABIT_BETA: f64 = 8e-9;
const BYTES: f64 = 4e7;

fn strategy(text: &str) -> Strategy {
    text.parse().unwrap()
}

fn dense() -> Strategy {
    Strategy::DENSE_RING
}

fn sparse() -> Strategy {
    strategy("topk(k=0.01)+ef(vanilla)/allgather")
}

/// Eight latencies, and a share of the bytes by the bandwidth that is believed of one link.
fn path(exchange: &mut Exchange, share: f64) -> CriticalPath {
    CriticalPath { alpha_s: 8e-3, beta_s: share * BYTES * exchange.betas(2)(0, 1), common: exchange.common() }
}

fn seen(seconds: f64) -> Seen {
    Seen { seconds, sd: 0.05, compress_s: vec![0.0] }
}

fn shape() -> Shape {
    Shape::new(&[], &[], Compute::measured(0.1))
}

/// Of a network of 1 Gbit/s whose links, and dense steps, were measured for a while.
fn settled() -> Exchange {
    let mut exchange = Exchange::default();
    exchange.begin(GIGABIT_BETA);
    for second in 0..30 {
        exchange.widen(1.0);
        exchange.latency(1e-3 * (1.0 + 0.01 * f64::from(second % 2)), true);
        exchange.test((second % 4, (second + 1) % 4), GIGABIT_BETA, TestKind::Whole);
        let path = path(&mut exchange, 1.0);
        assert!(!exchange.steps(&[(dense(), path)], &[0], &shape(), &seen(0.34)), "after {second} s");
    }
    exchange
}

/// So many seconds with dense steps: latencies, which show a change after four, a test that finds the seconds per byte of so many times 1 Gbit/s
/// or, as a lower bound, at most that, and what steps wait.
fn run(exchange: &mut Exchange, latency_s: f64, test: Option<(f64, bool)>, step_s: f64, count: u32) {
    for second in 0..count {
        exchange.widen(1.0);
        exchange.latency(latency_s * (1.0 + 0.01 * f64::from(second % 2)), second > 3);
        if let Some((slower, is_lower_bound)) = test {
            let kind = if is_lower_bound { TestKind::LowerBound } else { TestKind::Whole };
            exchange.test((second % 4, (second + 1) % 4), slower * GIGABIT_BETA, kind);
        }
        let path = CriticalPath { alpha_s: 8.0 * latency_s, ..path(exchange, 1.0) };
        exchange.steps(&[(dense(), path)], &[0], &shape(), &seen(step_s));
    }
}

fn mean(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len() as f64
}

fn believed(exchange: &mut Exchange, of: Strategy, share: f64, in_force: Option<(usize, f64)>) -> Vec<f64> {
    let path = path(exchange, share);
    exchange
        .sampled(&[(of, path)], &[vec![0]], (&shape(), &[0.1; DRAWS], &[&[0.0; DRAWS]]), in_force, (Draws::shared(), 0))
        .of_plans
        .remove(0)
}

#[test]
fn a_job_takes_what_its_steps_take() {
    let is = mean(&believed(&mut settled(), dense(), 1.0, None));
    assert!((is / 0.34 - 1.0).abs() < 0.05, "{is}");
}

#[test]
fn a_later_run_knows_the_collectives_and_not_the_network() {
    let mut later = settled().carried_over();
    assert!(!later.knows_network());
    let factor = |exchange: &mut Exchange| {
        let places = exchange.places(&dense());
        exchange.joint.of(places.collective)
    };
    let (before, after) = (factor(&mut settled()), factor(&mut later));
    assert!((before.mean - after.mean).abs() < 1e-9 && after.sd > before.sd, "{before:?} {after:?}");
    // Ten times the bandwidth of the first.
    later.begin(0.1 * GIGABIT_BETA);
    later.latency(1e-3, true);
    for second in 0..3 {
        later.test((second, second + 1), 0.1 * GIGABIT_BETA, TestKind::Whole);
    }
    let is = mean(&believed(&mut later, dense(), 1.0, None));
    assert!((is / 0.055).ln().abs() < 0.3, "{is}");
}

#[test]
fn another_job_begins_with_the_collectives_and_not_with_what_it_hides() {
    let (mut before, mut later) = (settled(), settled().of_another_job());
    let at = [before.places(&dense()), later.places(&dense())];
    let collective = [before.joint.of(at[0].collective), later.joint.of(at[1].collective)];
    assert!((collective[0].mean - collective[1].mean).abs() < 1e-9);
    assert!(collective[0].sd < collective[1].sd && collective[1].sd < OF_COLLECTIVE.sd, "{collective:?}");
    let backward = later.joint.of(at[1].backward);
    assert_eq!((backward.mean, backward.sd), (BACKWARD.mean, BACKWARD.sd));
    assert_eq!(at[1].own, None);
}

#[test]
fn a_step_far_off_is_the_network_and_tells_of_all_strategies() {
    let mut exchange = settled();
    let factor = |exchange: &mut Exchange| {
        let places = exchange.places(&dense());
        exchange.joint.of(places.collective)
    };
    let before = (factor(&mut exchange), mean(&believed(&mut exchange, sparse(), 0.1, None)));
    // Ten times less bandwidth.
    let of_dense = path(&mut exchange, 1.0);
    assert!(exchange.steps(&[(dense(), of_dense)], &[0], &shape(), &seen(3.2)));
    for _ in 0..10 {
        exchange.widen(1.0);
        exchange.latency(1e-3, true);
        let of_dense = path(&mut exchange, 1.0);
        exchange.steps(&[(dense(), of_dense)], &[0], &shape(), &seen(3.2));
    }
    let (is, sparse) = (factor(&mut exchange), mean(&believed(&mut exchange, sparse(), 0.1, None)));
    assert!((is.mean - before.0.mean).abs() < 0.05, "{is:?} {before:?}");
    assert!((sparse / 0.33).ln().abs() < 0.35, "{sparse}, before {}", before.1);
}

/// As farther off than anything that was ever expected.
#[test]
fn a_network_that_is_five_hundred_times_slower_is_learned() {
    let mut exchange = settled();
    for second in 0..20 {
        exchange.widen(1.0);
        let of_dense = path(&mut exchange, 1.0);
        exchange.steps(&[(dense(), of_dense)], &[0], &shape(), &seen(160.0));
        exchange.latency(1e-3 * (1.0 + 0.01 * f64::from(second % 2)), second > 3);
    }
    assert!(exchange.knows_network());
    let is = mean(&believed(&mut exchange, dense(), 1.0, None));
    assert!((is / 160.0 - 1.0).abs() < 0.1, "{is}");
}

#[test]
fn until_latencies_are_measured_both_are_possible_and_what_is_in_force_is_known() {
    let mut exchange = settled();
    let of_dense = path(&mut exchange, 1.0);
    exchange.steps(&[(dense(), of_dense)], &[0], &shape(), &seen(3.2));
    let of_dense = believed(&mut exchange, dense(), 1.0, Some((0, 3.2)));
    assert!(of_dense.iter().all(|seconds| (seconds / 3.2 - 1.0).abs() < 0.01));
    let paths = [1.0, 0.01].map(|share| path(&mut exchange, share));
    let both = [(dense(), paths[0]), (sparse(), paths[1])];
    let none = [&[0.0; DRAWS][..]; 2];
    let all = exchange.sampled(
        &both,
        &[vec![0], vec![1]],
        (&shape(), &[0.1; DRAWS], &none),
        Some((0, 3.2)),
        (Draws::shared(), 0),
    );
    let below = |limit: f64| all.of_plans[1].iter().filter(|seconds| **seconds < limit).count();
    assert!(below(0.3) > DRAWS / 10 && below(1.0) < DRAWS * 9 / 10, "{} {}", below(0.3), below(1.0));
}

#[test]
fn one_test_tells_of_all_links_after_a_change_and_a_slow_node_stays_slow() {
    let mut exchange = Exchange::default();
    exchange.begin(GIGABIT_BETA);
    for second in 0..60u32 {
        exchange.widen(1.0);
        let (from, to) = (second % 4, (second + 1) % 4);
        exchange.test((from, to), if from == 3 { 4.0 * GIGABIT_BETA } else { GIGABIT_BETA }, TestKind::Whole);
    }
    let ratio = |exchange: &mut Exchange| exchange.betas(4)(3, 1) / exchange.betas(4)(0, 1);
    assert!((3.0..4.5).contains(&ratio(&mut exchange)), "{}", ratio(&mut exchange));
    assert!(exchange.test((0, 1), 20.0 * GIGABIT_BETA, TestKind::Whole));
    let other = exchange.betas(4)(2, 1) / (20.0 * GIGABIT_BETA);
    assert!((0.6..1.6).contains(&other), "{other}");
    assert!((3.0..4.5).contains(&ratio(&mut exchange)));
}

#[test]
fn a_lower_bound_is_news_only_where_it_is_faster_than_believed() {
    for slower in [30.0, 1.1, 1.0] {
        let mut exchange = settled();
        let before = exchange.common();
        for second in 0..200 {
            exchange.widen(1.0);
            let beta = exchange.betas(4)(second as usize % 4, (second as usize + 1) % 4);
            assert!(!exchange.test((second % 4, (second + 1) % 4), slower * beta, TestKind::LowerBound));
        }
        assert!((exchange.common() / before - 1.0).abs() < 0.01, "{slower}: {} {before}", exchange.common());
    }
    let mut faster = settled();
    assert!(faster.test((0, 1), GIGABIT_BETA / 30.0, TestKind::LowerBound));
    assert!((faster.common() / (GIGABIT_BETA / 30.0)).ln().abs() < 0.3, "{}", faster.common());
    assert!(!faster.knows_network(), "it may be faster still");
}

/// A token bucket of 64 KiB lets a test of as much pass at any rate.
#[test]
fn what_is_over_at_once_does_not_move_a_bandwidth_that_is_known() {
    let mut exchange = settled();
    let before = exchange.common();
    assert!(!exchange.test((0, 1), GIGABIT_BETA / 20.0, TestKind::Short), "no change");
    assert!((exchange.common() / before - 1.0).abs() < 1e-9);
    assert!(exchange.test((0, 1), GIGABIT_BETA / 20.0, TestKind::Whole), "a whole test is believed");
    let mut slower = settled();
    assert!(slower.test((0, 1), 4.0 * GIGABIT_BETA, TestKind::Short), "no token bucket makes a link look slower");
}

/// All of a first round of tests may have passed through token buckets.
#[test]
fn many_short_tests_are_no_surer_than_one() {
    let mut exchange = Exchange::default();
    exchange.begin(GIGABIT_BETA / 16.0);
    for (from, to) in (0..7).flat_map(|from| (0..7).map(move |to| (from, to))).filter(|(from, to)| from != to) {
        exchange.test((from, to), GIGABIT_BETA / 16.0, TestKind::Short);
    }
    assert!(!exchange.knows_network());
    assert!(!exchange.test((0, 1), GIGABIT_BETA, TestKind::Whole), "it is as it was");
    assert!((exchange.common() / GIGABIT_BETA).ln().abs() < 0.7, "{}", exchange.common() / GIGABIT_BETA);
}

/// Steps are ten times slower, and all tests find at least the bandwidth that was there.
#[test]
fn lower_bounds_tell_a_collective_from_the_network_as_tests_do() {
    let mut exchange = settled();
    run(&mut exchange, 1e-3, Some((1.0, true)), 3.2, 30);
    assert!(!exchange.network_suspected());
}

/// A slow network, and after the fast one is back a collective as slow as on it.
#[test]
fn a_collective_as_slow_as_on_a_network_before_is_told_from_it_by_tests() {
    let mut exchange = settled();
    run(&mut exchange, 1e-3, Some((10.0, false)), 3.2, 30);
    run(&mut exchange, 1e-3, Some((1.0, false)), 0.34, 30);
    let factor = |exchange: &mut Exchange| {
        let places = exchange.places(&dense());
        exchange.joint.of(places.collective).mean
    };
    let before = factor(&mut exchange);
    run(&mut exchange, 1e-3, Some((1.0, false)), 3.2, 30);
    assert!((exchange.common() / GIGABIT_BETA).ln().abs() < 0.4, "{}", exchange.common());
    assert!(factor(&mut exchange) - before > 1.5, "{} {before}", factor(&mut exchange));
}

/// A network of 1 Gbit/s, as tests find it, on which dense rings take ten times what they did.
fn deviating() -> Exchange {
    let mut exchange = settled();
    run(&mut exchange, 1e-3, Some((1.0, false)), 3.4, 12);
    let places = exchange.places(&dense());
    assert!(exchange.joint.of(places.collective).mean > 1.5 && !exchange.deviations.is_empty());
    exchange
}

fn factor(exchange: &mut Exchange) -> Normal {
    let places = exchange.places(&dense());
    exchange.joint.of(places.collective)
}

/// So many seconds with steps of another collective, which take what they should, and tests now and then.
fn another_runs(exchange: &mut Exchange, seconds: u32) {
    for second in 0..seconds {
        exchange.widen(1.0);
        exchange.latency(1e-3 * (1.0 + 0.01 * f64::from(second % 2)), true);
        if second % 10 == 0 {
            exchange.test((second % 4, (second + 1) % 4), GIGABIT_BETA, TestKind::Whole);
        }
        let path = path(exchange, 0.02);
        exchange.steps(&[(sparse(), path)], &[0], &shape(), &seen(0.016));
    }
}

#[test]
fn a_collective_that_deviates_is_usual_again_after_some_minutes_and_later_the_second_time() {
    let mut exchange = deviating();
    let left = |exchange: &mut Exchange| factor(exchange).mean - OF_COLLECTIVE.mean;
    let at_first = left(&mut exchange);
    another_runs(&mut exchange, 60);
    let once = left(&mut exchange) / at_first;
    another_runs(&mut exchange, 240);
    let usual = factor(&mut exchange);
    assert!((usual.mean - OF_COLLECTIVE.mean).abs() < 0.1 && usual.sd > 0.25, "{usual:?}");
    // It is tried again and is no better.
    run(&mut exchange, 1e-3, Some((1.0, false)), 3.4, 12);
    let at_first = left(&mut exchange);
    assert!(at_first > 1.4, "{at_first}");
    another_runs(&mut exchange, 60);
    let twice = left(&mut exchange) / at_first;
    assert!(once < 0.5 && twice > 0.55, "the second time it takes twice as long: {once} of it are left, then {twice}");
}

/// What a collective in force takes is what its steps show, however long, and nothing else is put down to it.
#[test]
fn a_collective_in_force_that_deviates_goes_on_doing_so_on_the_network_as_it_is() {
    let mut exchange = deviating();
    let bandwidth = |exchange: &mut Exchange| exchange.common().ln();
    let before = bandwidth(&mut exchange);
    for _ in 0..20 {
        run(&mut exchange, 1e-3, None, 3.4, 30);
        run(&mut exchange, 1e-3, Some((1.0, false)), 3.4, 1);
    }
    assert!(!exchange.deviations.is_empty() && factor(&mut exchange).mean > 1.5, "{:?}", factor(&mut exchange));
    assert!((bandwidth(&mut exchange) - before).abs() < 0.3, "{} to {before}", bandwidth(&mut exchange));
    // It takes what it did before: no other network.
    run(&mut exchange, 1e-3, Some((1.0, false)), 0.34, 3);
    assert!(exchange.deviations.is_empty() && exchange.cause == Cause::None && factor(&mut exchange).mean < 0.7);
}

#[test]
fn a_later_run_begins_with_nothing_deviating() {
    for mut later in [deviating().carried_over(), deviating().of_another_job()] {
        assert!(later.deviations.is_empty());
        let factor = factor(&mut later);
        assert!((factor.mean - OF_COLLECTIVE.mean).abs() < 1e-9 && factor.sd >= OF_COLLECTIVE.sd, "{factor:?}");
    }
}

#[test]
fn what_deviates_on_one_network_is_usual_on_the_next() {
    let mut exchange = deviating();
    run(&mut exchange, 50e-3, Some((1.0, false)), 0.7, 12);
    assert!(exchange.deviations.is_empty() && factor(&mut exchange).mean < 1.0, "{:?}", factor(&mut exchange));
}

#[test]
fn a_trial_shows_that_a_collective_is_not_what_it_was_believed_to_be() {
    let mut exchange = deviating();
    let path = path(&mut exchange, 1.0);
    exchange.trial(&(dense(), path), &shape(), &Seen { sd: 0.3, ..seen(0.34) });
    let is = mean(&believed(&mut exchange, dense(), 1.0, None));
    assert!((is / 0.34).ln().abs() < 0.4, "{is}");
    // Of a network that has changed and is not measured it says nothing.
    let mut unknown = settled();
    unknown.latency(50e-3, false);
    let before = factor(&mut unknown);
    unknown.trial(&(dense(), path), &shape(), &seen(9.0));
    assert_eq!((factor(&mut unknown), unknown.deviations.len()), (before, 0));
}

/// Waits far below what computing varies by tell nothing of the network but that it hides them.
#[test]
fn waits_that_computing_varies_by_are_no_change() {
    let mut exchange = settled();
    let (long, before) = (Shape::new(&[], &[], Compute::measured(1.0)), exchange.common());
    for seconds in [1e-3, 3e-3, 0.0, 1e-4] {
        let of_sparse = path(&mut exchange, 0.01);
        assert!(!exchange.steps(&[(sparse(), of_sparse)], &[0], &long, &seen(seconds)), "{seconds}");
    }
    assert!((exchange.common() / before).ln().abs() < 0.2, "{}", exchange.common());
}

/// Two networks in turns: of ten times the latency and a tenth of the bandwidth, and as before.
#[test]
fn a_network_that_is_back_is_known_by_its_latency() {
    let mut exchange = settled();
    run(&mut exchange, 1e-2, Some((10.0, false)), 3.4, 30);
    let slow = exchange.common();
    assert!((slow / (10.0 * GIGABIT_BETA)).ln().abs() < 0.3, "{slow}");
    // The links follow one after the other.
    for latency_s in [7.75e-3, 5.5e-3, 3.25e-3, 1e-3, 1.01e-3] {
        exchange.latency(latency_s, true);
    }
    assert!((exchange.common() / GIGABIT_BETA).ln().abs() < 0.3 && exchange.knows_network(), "{}", exchange.common());
    for latency_s in [3.25e-3, 5.5e-3, 7.75e-3, 1e-2, 1.01e-2] {
        exchange.latency(latency_s, true);
    }
    assert!((exchange.common() / slow).ln().abs() < 0.1 && exchange.knows_network(), "{}", exchange.common());
}

/// Another latency that is learned, and then a test of a tenth of its bandwidth: that stands.
#[test]
fn what_a_test_finds_is_not_put_down_to_a_network_that_is_over() {
    let mut exchange = settled();
    for second in 0..30u32 {
        exchange.widen(1.0);
        exchange.latency(1e-2 * (1.0 + 0.01 * f64::from(second % 2)), second > 2);
        exchange.test((second % 4, (second + 1) % 4), GIGABIT_BETA, TestKind::Whole);
    }
    assert!(exchange.test((0, 1), 10.0 * GIGABIT_BETA, TestKind::Whole));
    for latency_s in [1.01e-2, 1e-2, 1.01e-2] {
        exchange.latency(latency_s, true);
    }
    assert!((exchange.common() / (10.0 * GIGABIT_BETA)).ln().abs() < 0.5, "{}", exchange.common());
}

/// The latency of a network that was slow before, on which a lower bound has been found since that is three hundred times faster.
#[test]
fn a_network_that_tests_rule_out_is_not_recognised() {
    let mut exchange = settled();
    run(&mut exchange, 1e-2, Some((10.0, false)), 3.4, 30);
    run(&mut exchange, 1e-3, Some((1.0, false)), 0.34, 30);
    exchange.latency(1e-2, true);
    exchange.test((0, 1), GIGABIT_BETA / 30.0, TestKind::LowerBound);
    exchange.latency(1.01e-2, true);
    assert!(exchange.common() < GIGABIT_BETA, "{}", exchange.common());
}

/// The same latency, and steps as on a network before.
#[test]
fn a_network_that_is_back_is_known_by_what_steps_take() {
    let mut exchange = settled();
    run(&mut exchange, 1e-3, None, 3.2, 30);
    let slow = exchange.common();
    assert!(slow > 5.0 * GIGABIT_BETA, "{slow}");
    run(&mut exchange, 1e-3, None, 0.34, 1);
    assert!((exchange.common() / GIGABIT_BETA).ln().abs() < 0.3 && exchange.knows_network(), "{}", exchange.common());
    run(&mut exchange, 1e-3, None, 3.2, 1);
    assert!((exchange.common() / slow).ln().abs() < 0.3 && exchange.knows_network(), "{}", exchange.common());
}

#[test]
fn latencies_that_fall_leave_the_bandwidth_in_doubt() {
    let mut exchange = settled();
    let before = exchange.network_sd();
    assert!(exchange.latency(1e-5, true));
    assert!(exchange.network_sd() > 3.0 * before, "{before} {}", exchange.network_sd());
}

/// Four equal buckets, and steps that wait as they would if these became ready in half of the time that is assumed.
#[test]
fn the_share_of_computing_in_which_buckets_become_ready_is_learnt_from_what_steps_wait() {
    const COMPUTE_S: f64 = 0.5;
    const SHARE: f64 = 0.3;
    let mut exchange = settled();
    let shape = Shape::new(&[1; 4], &[], Compute::measured(COMPUTE_S));
    let of = [(dense(), 1.0), (strategy("topk(k=0.1)+ef(vanilla)/allgather"), 0.5), (sparse(), 0.1)];
    let paths = of.map(|(strategy, share)| (strategy, path(&mut exchange, share)));
    let (costs, backward_s) = exchange.expected(&paths, &shape);
    assert!((backward_s / COMPUTE_S - BACKWARD_SHARE).abs() < 0.01, "{backward_s}");
    for second in 0..10 {
        for ((strategy, share), cost) in of.iter().zip(&costs) {
            exchange.widen(1.0);
            exchange.latency(1e-3 * (1.0 + 0.01 * f64::from(second % 2)), true);
            let seconds = shape.exposed(SHARE * COMPUTE_S, |_| *cost);
            let path = path(&mut exchange, *share);
            assert!(!exchange.steps(&[(*strategy, path)], &[0; 4], &shape, &seen(seconds)), "{strategy}: {seconds}");
        }
    }
    let places = exchange.places(&dense());
    let is = exchange.joint.of(places.backward);
    assert!((is.mean - SHARE).abs() < 0.1 && is.sd < 0.5 * BACKWARD.sd, "{is:?}");
}

#[test]
fn what_steps_wait_is_the_less_sure_the_longer_ago_it_was_seen() {
    let spread = |exchange: &mut Exchange| {
        let logarithms: Vec<f64> = believed(exchange, dense(), 1.0, None).iter().map(|seconds| seconds.ln()).collect();
        let middle = mean(&logarithms);
        mean(&logarithms.iter().map(|x| (x - middle).powi(2)).collect::<Vec<f64>>()).sqrt()
    };
    let mut exchange = settled();
    let mut before = spread(&mut exchange);
    assert!(before < 0.1, "{before}");
    for seconds in [60.0, 600.0, 3600.0] {
        exchange.widen(seconds);
        let now = spread(&mut exchange);
        assert!(now > 1.5 * before, "{now} after {seconds} s, before {before}");
        before = now;
    }
}

#[test]
fn a_bandwidth_that_tests_have_found_is_not_known_for_ever() {
    let test = |exchange: &mut Exchange| {
        for second in 0..20 {
            exchange.widen(1.0);
            assert!(!exchange.test((second % 4, (second + 1) % 4), GIGABIT_BETA, TestKind::Whole), "after {second} s");
        }
        exchange.knows_network()
    };
    let mut exchange = Exchange::default();
    exchange.begin(GIGABIT_BETA);
    exchange.latency(1e-3, true);
    assert!(!exchange.knows_network() && test(&mut exchange));
    exchange.widen(10.0);
    assert!(exchange.knows_network());
    exchange.widen(3600.0);
    // Latencies are measured anew, and are about what they were.
    assert!(!exchange.latency(1.005e-3, true) && !exchange.knows_network());
    assert!(test(&mut exchange), "tests find it again");
}

#[test]
fn what_cannot_be_is_not_taken_in() {
    let mut exchange = settled();
    let before = exchange.clone();
    let of_dense = path(&mut exchange, 1.0);
    for seconds in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(!exchange.steps(&[(dense(), of_dense)], &[0], &shape(), &seen(seconds)));
    }
    let unknown = Seen { compress_s: vec![f64::NAN], ..seen(0.34) };
    assert!(!exchange.steps(&[(dense(), of_dense)], &[0], &shape(), &unknown));
    assert!(
        !exchange.latency(f64::NAN, true)
            && !exchange.test((0, 1), f64::NAN, TestKind::Whole)
            && !exchange.test((0, 1), 0.0, TestKind::LowerBound)
    );
    assert_eq!(exchange.joint, before.joint);
}

/// Of 122 Mbit/s and 0.15 ms, where every message waits for 8.5 ms until a processor comes round.
struct Busy {
    exchange: Exchange,
}

impl Busy {
    const LATENCY_S: f64 = 1.5e-4;
    const SOFTWARE_S: f64 = 8.5e-3;

    fn new() -> Self {
        let mut exchange = Exchange::default();
        exchange.begin(8.0 / 122e6);
        let mut busy = Self { exchange };
        for second in 0..30 {
            busy.exchange.test((second % 4, (second + 1) % 4), 8.0 / 122e6, TestKind::Whole);
            assert!(!busy.step(dense(), 6.0, 5.9e7), "after {second} s");
        }
        busy
    }

    /// Whether a second with steps of so many messages one after the other and so many bytes shows another network.
    fn step(&mut self, of: Strategy, messages: f64, bytes: f64) -> bool {
        self.exchange.widen(1.0);
        self.exchange.latency(Self::LATENCY_S * (1.0 + 0.001 * messages), true);
        let waits_s = messages * (Self::LATENCY_S + Self::SOFTWARE_S) + bytes * 8.0 / 122e6;
        let path = self.path(messages, bytes);
        self.exchange.steps(&[(of, path)], &[0], &shape(), &seen(waits_s))
    }

    fn path(&mut self, messages: f64, bytes: f64) -> CriticalPath {
        let common = self.exchange.common();
        CriticalPath { alpha_s: messages * Self::LATENCY_S, beta_s: bytes * common, common }
    }

    fn software(&mut self) -> Normal {
        let places = self.exchange.places(&dense());
        self.exchange.joint.of(places.software)
    }
}

#[test]
fn what_software_takes_for_a_message_is_told_from_the_network() {
    let mut busy = Busy::new();
    assert!(busy.software().sd > 1.2, "of steps of 4 s it cannot be seen: {:?}", busy.software());
    for second in 0..10 {
        assert!(!busy.step(sparse(), 3.0, 4e4), "after {second} s of {:?}", busy.software());
    }
    let is = busy.software();
    assert!((is.mean - Busy::SOFTWARE_S.ln()).abs() < 0.5 && is.sd < 0.6, "{is:?}");
    assert!((busy.exchange.common() * 122e6 / 8.0).ln().abs() < 0.3, "{}", busy.exchange.common());
    let powersgd = strategy("powersgd(rank=4)+ef(vanilla)/dense-ring");
    let path = busy.path(12.0, 4e4);
    let of = [(powersgd, path)];
    let (costs, _) = busy.exchange.expected(&of, &shape());
    assert!((costs[0].each_s / 0.1).ln().abs() < 0.4, "twelve messages: {:?}", costs[0]);
}

#[test]
fn what_would_have_shown_is_no_software() {
    let mut exchange = settled();
    // 200 messages of 1 ms.
    let of = |exchange: &mut Exchange| [(sparse(), CriticalPath { alpha_s: 0.2, ..path(exchange, 1e-3) })];
    for second in 0..20 {
        exchange.widen(1.0);
        exchange.latency(1e-3 * (1.0 + 0.01 * f64::from(second % 2)), true);
        let of = of(&mut exchange);
        assert!(!exchange.steps(&of, &[0], &shape(), &seen(0.28)), "after {second} s");
    }
    let places = exchange.places(&dense());
    let is = exchange.joint.of(places.software);
    assert!(is.mean + 2.0 * is.sd < 1e-3f64.ln(), "at most what is seen: {is:?}");
    let of = of(&mut exchange);
    assert!(exchange.steps(&of, &[0], &shape(), &seen(1.4)), "five times as much is another network");
}

#[test]
fn what_was_learned_of_a_collective_just_before_a_change_was_found_is_not_kept() {
    let of_sparse = |exchange: &mut Exchange| {
        let places = exchange.places(&sparse());
        exchange.joint.of(places.collective)
    };
    for passed_s in [3.0, 30.0] {
        let mut exchange = settled();
        exchange.widen(1.0);
        let path = path(&mut exchange, 0.1);
        assert!(!exchange.steps(&[(sparse(), path)], &[0], &shape(), &seen(0.08)));
        let learned = of_sparse(&mut exchange);
        assert!(learned.mean > OF_COLLECTIVE.mean + OF_COLLECTIVE.sd, "{learned:?}");
        exchange.widen(passed_s);
        assert!(exchange.test((0, 1), 10.0 * GIGABIT_BETA, TestKind::Whole));
        let is = of_sparse(&mut exchange);
        if passed_s < 10.0 {
            assert!((is.mean - OF_COLLECTIVE.mean).abs() < 1e-6 && is.sd >= OF_COLLECTIVE.sd, "{is:?}");
        } else {
            assert!((is.mean - learned.mean).abs() < 0.05, "{is:?}, learned {learned:?}");
        }
    }
}

#[test]
fn another_load_of_the_processors_is_learnt() {
    let mut busy = Busy::new();
    (0..10).for_each(|_| assert!(!busy.step(sparse(), 3.0, 4e4)));
    let mut later = busy.exchange.of_another_job();
    later.begin(8.0 / 122e6);
    for second in 0..20 {
        later.widen(1.0);
        later.latency(1.5e-4 * (1.0 + 0.001 * f64::from(second % 2)), true);
        later.test((second % 4, (second + 1) % 4), 8.0 / 122e6, TestKind::Whole);
        let common = later.common();
        let path = CriticalPath { alpha_s: 4.5e-4, beta_s: 4e4 * common, common };
        later.steps(&[(sparse(), path)], &[0], &shape(), &seen(3.0 * 2.5e-4 + 2.6e-3));
    }
    let places = later.places(&dense());
    let is = later.joint.of(places.software);
    assert!(is.mean < 1e-3f64.ln(), "{is:?}");
    assert!((later.common() * 122e6 / 8.0).ln().abs() < 0.5, "{}", later.common());
}
