use super::*;
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

fn at(seconds: f64) -> Timestamp {
    Timestamp((seconds * 1e6) as u64)
}

fn within(value: f64, truth: f64, share: f64) -> bool {
    (value / truth - 1.0).abs() <= share
}

fn alpha(estimator: &LinkEstimator, t: f64) -> f64 {
    estimator.estimate(at(t)).alpha.unwrap().get()
}

fn bps(estimator: &LinkEstimator, t: f64) -> f64 {
    estimator.estimate(at(t)).bandwidth.unwrap().get()
}

#[test]
fn nothing_is_known_before_the_first_sample() {
    let e = LinkEstimator::new(EstimatorConfig::default()).estimate(at(1.0));
    assert_eq!((e.alpha, e.bandwidth, e.alpha_confidence, e.bandwidth_confidence), (None, None, 0.0, 0.0));
}

#[test]
fn impossible_samples_are_refused() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    e.echo(at(1.0), 0.002).unwrap();
    e.throughput(at(1.0), 1e8).unwrap();
    let before = e.estimate(at(1.0));
    for bad in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
        assert!(e.echo(at(1.0), bad).is_err());
        assert!(e.throughput(at(1.0), bad).is_err());
        assert!(e.transfer(at(1.0), bad, 1.0).is_err());
        assert!(e.transfer(at(1.0), 1.0, bad).is_err());
    }
    assert!(e.echo(at(1.0), 61.0).is_err());
    assert!(e.throughput(at(1.0), 1e15).is_err());
    assert_eq!(e.estimate(at(1.0)), before);
}

#[test]
fn a_clock_that_jumps_loses_nothing() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..20 {
        e.echo(at(1000.0 + 0.1 * f64::from(i)), 0.002).unwrap();
    }
    for i in 0..20 {
        e.echo(at(5.0 + 0.1 * f64::from(i)), 0.002).unwrap();
    }
    assert!(within(alpha(&e, 7.0), 0.001, 0.01));
    // A leap ahead ages what is known; new samples heal it.
    assert!(e.estimate(at(9e6)).alpha_confidence < 0.01);
    for i in 0..10 {
        e.echo(at(9e6 + 0.1 * f64::from(i)), 0.004).unwrap();
    }
    assert!(within(alpha(&e, 9e6 + 1.0), 0.002, 0.01));
    assert!(e.estimate(at(9e6 + 1.0)).alpha_confidence > 0.9);
}

/// Feeds echoes every 100 ms and transfers every 250 ms; `f` gives (rtt, bps) and noise factors.
fn drive(e: &mut LinkEstimator, from: f64, to: f64, mut f: impl FnMut(f64) -> (f64, Option<(f64, f64)>)) {
    let steps = ((to - from) / 0.05).round() as usize;
    for i in 0..steps {
        let t = from + 0.05 * i as f64;
        let (rtt, transfer) = f(t);
        if i % 2 == 0 {
            e.echo(at(t), rtt).unwrap();
        }
        if let Some((bytes, seconds)) = transfer.filter(|_| i % 5 == 0) {
            e.transfer(at(t), bytes, seconds).unwrap();
        }
    }
}

#[test]
fn a_step_of_latency_is_followed_within_five_seconds_up_and_one_down() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    drive(&mut e, 0.0, 20.0, |_| (0.002, None));
    assert!(within(alpha(&e, 20.0), 0.001, 0.01));
    drive(&mut e, 20.0, 25.0, |_| (0.1, None));
    assert!(within(alpha(&e, 25.0), 0.05, 0.01));
    drive(&mut e, 25.0, 26.0, |_| (0.002, None));
    assert!(within(alpha(&e, 26.0), 0.001, 0.01));
}

/// A job whose transfers nobody reports fills the link for 1.9 of every 2 seconds: one echo in twenty finds no queue.
/// What rises under it is believed all the same once no echo finds the old latency.
#[test]
fn a_queue_that_scatters_is_no_rise_and_a_rise_under_it_is_seen_later() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    let mut rng = SmallRng::seed_from_u64(3);
    let queued = |one_way: f64| {
        move |t: f64, rng: &mut SmallRng| {
            let queue = if t.rem_euclid(2.0) < 0.1 { 0.0 } else { rng.random_range(0.02..0.16) };
            (2.0 * one_way + queue, None)
        }
    };
    drive(&mut e, 0.0, 20.0, |_| (0.002, None));
    let (near, far) = (queued(0.001), queued(0.05));
    for second in 20..60 {
        drive(&mut e, f64::from(second), f64::from(second + 1), |t| near(t, &mut rng));
        assert!(
            within(alpha(&e, f64::from(second + 1)), 0.001, 0.15),
            "{} after {second} s",
            alpha(&e, f64::from(second))
        );
    }
    drive(&mut e, 60.0, 82.0, |t| far(t, &mut rng));
    assert!(within(alpha(&e, 82.0), 0.05, 0.15), "{}", alpha(&e, 82.0));
}

/// A job fills the link for three quarters of every second, so that most echoes meet a queue; the others lie together.
#[test]
fn a_rise_with_a_sharp_floor_under_a_queue_is_believed_within_a_window() {
    for seed in 0..50 {
        let mut e = LinkEstimator::new(EstimatorConfig::default());
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut step = |one_way: f64, t: f64| {
            let queue =
                if t.rem_euclid(1.0) < 0.25 { rng.random_range(0.0..1e-4) } else { rng.random_range(0.02..0.16) };
            (2.0 * one_way + queue, None)
        };
        drive(&mut e, 0.0, 20.0, |t| step(0.001, t));
        drive(&mut e, 20.0, 24.5, |t| step(0.05, t));
        for half in 49..80 {
            let now = f64::from(half) / 2.0;
            assert!(within(alpha(&e, now), 0.05, 0.02), "seed {seed}: {} at {now} s", alpha(&e, now));
            drive(&mut e, now, now + 0.5, |t| step(0.05, t));
        }
    }
}

/// Streams limited by their windows keep a queue at one level for each number of them: its floor is sharp, too. An echo
/// every three seconds finds none.
#[test]
fn a_queue_of_two_levels_is_no_rise() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..600 {
        let level = if i % 3 == 0 { 0.02 } else { 0.04 };
        let queue = if i < 100 || i % 15 == 0 { 0.0 } else { level };
        let t = 0.2 * f64::from(i);
        e.echo(at(t), 0.002 + queue).unwrap();
        assert!(within(alpha(&e, t), 0.001, 0.1), "{} at {t} s", alpha(&e, t));
    }
}

#[test]
fn a_step_of_bandwidth_is_seen_from_passive_transfers_alone() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    let transfer = |bps: f64| Some((1e5, 0.001 + 1e5 * 8.0 / bps));
    drive(&mut e, 0.0, 60.0, |_| (0.002, transfer(250e6)));
    assert!(within(bps(&e, 60.0), 250e6, 0.05));
    drive(&mut e, 60.0, 61.5, |_| (0.002, transfer(10e6)));
    assert!(within(bps(&e, 61.5), 10e6, 0.05), "{}", bps(&e, 61.5));
    drive(&mut e, 61.5, 63.0, |_| (0.002, transfer(250e6)));
    assert!(within(bps(&e, 63.0), 250e6, 0.05));
}

/// Pieces are cut by time: before a fall they had more bytes, which was no advantage.
#[test]
fn a_fall_of_any_size_is_seen_from_pieces_of_streams() {
    for factor in [1.6, 2.0, 2.4, 4.0, 25.0] {
        let mut e = LinkEstimator::new(EstimatorConfig::default());
        let mut piece = |t: f64, bps: f64| e.transfer_rounds(at(t), 0.2 * bps / 8.0, 0.2, 0.0).unwrap();
        (0..40).for_each(|i| piece(0.3 * f64::from(i), 100e6));
        (40..44).for_each(|i| piece(0.3 * f64::from(i), 100e6 / factor));
        assert!(within(bps(&e, 13.2), 100e6 / factor, 0.05), "{factor}: {}", bps(&e, 13.2));
    }
}

#[test]
fn a_step_of_bandwidth_is_seen_from_three_tests() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..10 {
        e.throughput(at(3.0 * f64::from(i)), 250e6).unwrap();
    }
    for i in 10..13 {
        e.throughput(at(3.0 * f64::from(i)), 10e6).unwrap();
    }
    assert!(within(bps(&e, 39.0), 10e6, 0.01));
}

/// A link that carries no passive traffic, saturated by others of its node: tests find a 25th of what they found, each
/// another part of it.
#[test]
fn a_far_fall_is_seen_from_three_tests_that_hardly_agree() {
    let mut link = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..8 {
        link.echo(at(f64::from(i)), 0.002).unwrap();
        link.throughput(at(f64::from(i)), 90e6).unwrap();
    }
    for (i, bps) in [3.6e6, 2.9e6, 2.6e6].into_iter().enumerate() {
        link.throughput(at(10.0 + i as f64), bps).unwrap();
    }
    let bps = link.estimate(at(13.0)).bandwidth.unwrap().get();
    assert!((2.5e6..3.7e6).contains(&bps), "{bps}");
}

/// What was seen once stays seen: later transfers on the slow link scatter so much that no three of them agree, and the
/// three that did have left the window long before the fast past.
#[test]
fn a_fall_that_was_believed_is_not_taken_back() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    let mut rng = SmallRng::seed_from_u64(5);
    for i in 0..20 {
        e.echo(at(f64::from(i)), 0.002).unwrap();
        e.throughput(at(f64::from(i)), 95e6).unwrap();
        e.transfer(at(f64::from(i) + 0.5), 1.3e5, 0.001 + 1.3e5 * 8.0 / 70e6).unwrap();
    }
    for i in 0..3 {
        e.transfer(at(21.0 + f64::from(i)), 1.3e5, 0.001 + 1.3e5 * 8.0 / 3.2e6).unwrap();
    }
    assert!(within(bps(&e, 24.0), 3.2e6, 0.05), "{}", bps(&e, 24.0));
    for i in 0..200 {
        let t = 24.0 + 0.3 * f64::from(i);
        let rate = 3e6 * 1.3f64.powi([0, 2, 4][i as usize % 3]) * rng.random_range(0.97..1.03);
        e.transfer(at(t), 1.3e5, 0.001 + 1.3e5 * 8.0 / rate).unwrap();
        assert!(bps(&e, t) < 12e6, "{} after {i} more", bps(&e, t));
    }
}

#[test]
fn a_rise_of_bandwidth_is_seen_from_three_tests_that_differ() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..10 {
        e.throughput(at(3.0 * f64::from(i)), 10e6).unwrap();
    }
    for (i, mbit) in [(10, 193.0), (11, 115.0), (12, 240.0)] {
        e.throughput(at(3.0 * f64::from(i)), mbit * 1e6).unwrap();
    }
    assert!(bps(&e, 39.0) > 100e6, "{}", bps(&e, 39.0));
}

/// A job that saturates the link for 0.8 s of every second: its queue adds up to ten times the latency. From the
/// first full window on, the estimate is never off by more than 15 %.
#[test]
fn the_jobs_own_queue_is_not_the_links_latency() {
    for (one_way, rate) in [(0.001, 250e6), (0.001, 10e6), (0.05, 10e6), (0.05, 250e6)] {
        let mut e = LinkEstimator::new(EstimatorConfig::default());
        let mut rng = SmallRng::seed_from_u64(7);
        let mut worst: f64 = 0.0;
        for second in 0..30 {
            let from = f64::from(second);
            drive(&mut e, from, from + 1.0, |t| {
                let busy = t.fract() < 0.8;
                let queue = if busy { rng.random_range(0.0..10.0) * one_way } else { 0.0 };
                let seconds = one_way + 1e6 * 8.0 / rate * rng.random_range(1.0..1.1);
                (2.0 * one_way + queue, Some((1e6, seconds)).filter(|_| t.fract() < 0.05))
            });
            if second >= 3 {
                worst = worst.max((alpha(&e, from + 1.0) / one_way - 1.0).abs());
            }
        }
        assert!(worst <= 0.15, "alpha off by {worst} at {one_way} s, {rate} bit/s");
        assert!(within(bps(&e, 30.0), rate, 0.15), "{} at {one_way} s, {rate} bit/s", bps(&e, 30.0));
    }
}

/// Tests that share the link with the job get half of it; the transfers in between know better.
#[test]
fn tests_on_a_busy_link_do_not_halve_it() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..40 {
        let t = f64::from(i);
        e.echo(at(t), 0.002).unwrap();
        e.transfer(at(t + 0.1), 1e6, 0.001 + 1e6 * 8.0 / 100e6).unwrap();
        if i % 3 == 0 {
            e.throughput(at(t + 0.2), 50e6).unwrap();
        }
    }
    assert!(within(bps(&e, 40.0), 100e6, 0.05));
}

/// Slow start after each pause keeps the job at two thirds of a long link; tests are rarer than its transfers.
#[test]
fn a_job_that_never_fills_the_link_does_not_hide_it() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    let mut rng = SmallRng::seed_from_u64(3);
    for i in 0..200 {
        let t = 0.5 * f64::from(i);
        e.echo(at(t), 0.1).unwrap();
        e.transfer(at(t + 0.1), 1e7, 0.05 + 8e7 / (165e6 * rng.random_range(0.97..1.03))).unwrap();
        if i % 20 == 0 {
            e.throughput(at(t + 0.2), 250e6 * rng.random_range(0.95..1.02)).unwrap();
        }
        assert!(i <= 40 || within(bps(&e, t + 0.2), 250e6, 0.1), "{} at {t} s", bps(&e, t + 0.2));
    }
}

/// Tests take half of the link from a job and get no more themselves, three times in a row.
#[test]
fn a_test_beside_a_job_is_no_fall() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..60 {
        let t = f64::from(i);
        e.echo(at(t), 0.002).unwrap();
        let tested = i >= 30 && i % 3 == 0;
        let share = if tested { 0.5 } else { 1.0 };
        e.transfer(at(t + 0.3), 1e6, 0.001 + 8e6 / (100e6 * share)).unwrap();
        if tested {
            e.throughput(at(t + 0.4), 50e6).unwrap();
        }
        assert!(i < 3 || within(bps(&e, t + 0.4), 100e6, 0.1), "{} at {t} s", bps(&e, t + 0.4));
    }
}

/// What was measured while the latency was low did not contain the one of today.
#[test]
fn a_rise_of_latency_does_not_rewrite_the_past() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..400 {
        let t = 0.1 * f64::from(i);
        let one_way = if i < 200 { 0.001 } else { 0.05 };
        e.echo(at(t), 2.0 * one_way).unwrap();
        if i % 10 == 0 {
            e.transfer_rounds(at(t), 625e3, 2.0 * one_way + 5e6 / 9.6e6, 2.0).unwrap();
        }
        assert!(i < 30 || bps(&e, t) < 10.2e6, "{} at {t} s", bps(&e, t));
    }
    assert!(within(bps(&e, 40.0), 9.6e6, 0.02), "{}", bps(&e, 40.0));
}

/// A long test on a machine that is short of processor time, beside a stream of pieces.
#[test]
fn a_long_test_that_was_announced_is_no_fall() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..80 {
        let t = 0.25 * f64::from(i);
        e.echo(at(t), 0.002).unwrap();
        let testing = (40..68).contains(&i);
        if i == 40 {
            e.test_begins(at(t - 0.2));
        }
        e.transfer_rounds(at(t), 2.5e6, 20e6 / if testing { 105e6 } else { 235e6 }, 0.0).unwrap();
        if i == 68 {
            e.throughput(at(t), 70e6).unwrap();
        }
        assert!(i < 3 || within(bps(&e, t), 235e6, 0.1), "{} at {t} s", bps(&e, t));
    }
    // Nobody said that it was over: it does not hold for ever.
    e.test_begins(at(20.0));
    for i in 0..60 {
        e.transfer_rounds(at(21.0 + f64::from(i)), 2.5e6, 20e6 / 105e6, 0.0).unwrap();
    }
    assert!(within(bps(&e, 81.0), 105e6, 0.1), "{}", bps(&e, 81.0));
}

/// Smaller messages are slower by themselves; the link has not changed, and tests say so.
#[test]
fn another_kind_of_transfer_is_no_fall() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..40 {
        let t = f64::from(i);
        e.echo(at(t), 0.002).unwrap();
        let (bytes, rate) = if i < 20 { (1e7, 240e6) } else { (1e6, 120e6) };
        e.transfer(at(t + 0.3), bytes, 0.001 + bytes * 8.0 / rate).unwrap();
        if i % 10 == 0 {
            e.throughput(at(t + 0.5), 250e6).unwrap();
        }
    }
    assert!(within(bps(&e, 40.0), 250e6, 0.1), "{}", bps(&e, 40.0));
}

/// One test and two transfers after it are enough, where either alone needs three.
#[test]
fn a_fall_seen_by_a_test_and_by_the_job_is_believed_sooner() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    let transfer = |e: &mut LinkEstimator, t: f64, rate: f64| e.transfer(at(t), 1e6, 0.001 + 8e6 / rate).unwrap();
    for i in 0..20 {
        e.echo(at(f64::from(i)), 0.002).unwrap();
        transfer(&mut e, f64::from(i), 230e6);
        if i % 5 == 0 {
            e.throughput(at(f64::from(i)), 250e6).unwrap();
        }
    }
    e.throughput(at(21.0), 100e6).unwrap();
    transfer(&mut e, 23.0, 95e6);
    assert!(within(bps(&e, 23.0), 250e6, 0.1));
    transfer(&mut e, 24.0, 93e6);
    assert!(within(bps(&e, 24.0), 97e6, 0.05), "{}", bps(&e, 24.0));
}

/// The job stays below both rates, so only tests see the fall.
#[test]
fn a_fall_that_the_job_does_not_feel_is_seen_by_tests() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..30 {
        let t = 2.0 * f64::from(i);
        e.echo(at(t), 0.002).unwrap();
        e.transfer(at(t), 1e6, 0.001 + 8e6 / 40e6).unwrap();
        e.throughput(at(t + 1.5), if i < 27 { 250e6 } else { 100e6 }).unwrap();
    }
    assert!(within(bps(&e, 60.0), 100e6, 0.05), "{}", bps(&e, 60.0));
}

#[test]
fn a_transfer_bounds_the_latency() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    for i in 0..30 {
        let t = 0.1 * f64::from(i);
        e.echo(at(t), 0.2).unwrap();
        e.transfer(at(t + 0.05), 100.0, 0.005).unwrap();
    }
    assert!(alpha(&e, 3.0) <= 0.005);
}

#[test]
fn confidence_grows_with_samples_and_falls_with_age() {
    let mut e = LinkEstimator::new(EstimatorConfig::default());
    e.echo(at(0.0), 0.002).unwrap();
    e.throughput(at(0.0), 1e8).unwrap();
    let one = e.estimate(at(0.0));
    for i in 1..10 {
        e.echo(at(0.1 * f64::from(i)), 0.002).unwrap();
        e.throughput(at(0.1 * f64::from(i)), 1e8).unwrap();
    }
    let ten = e.estimate(at(0.9));
    let later = e.estimate(at(60.9));
    assert!(one.alpha_confidence < ten.alpha_confidence && one.bandwidth_confidence < ten.bandwidth_confidence);
    assert!(later.alpha_confidence < ten.alpha_confidence && later.bandwidth_confidence < ten.bandwidth_confidence);
    assert_eq!(later.alpha_age.unwrap().get(), 60.0);
    assert_eq!(ten.alpha_confidence, 1.0);
}

/// Noise of which 3 in every 10 samples are outliers, high or low, in random places; the others are off by up to 3 %.
/// What the estimator takes for the link by definition does not occur: three outliers in a row, two in a row of
/// which one is too fast, and so many that are too fast that they can support each other.
struct Outliers {
    low: f64,
    deck: Vec<bool>,
    run: usize,
    fast: usize,
}

/// Too fast ones among 40 samples: fewer than the 8 % that alpha's rule asks for.
const MOST_FAST: usize = 3;

impl Outliers {
    /// `low` (0 to 1) scales the share of outliers that are too fast.
    fn new(low: f64) -> Self {
        Self { low, deck: Vec::new(), run: 0, fast: 0 }
    }

    fn next(&mut self, truth: f64, rng: &mut SmallRng) -> f64 {
        if self.deck.is_empty() {
            self.deck = self.shuffled(rng);
        }
        if !self.deck.pop().unwrap() {
            self.run = 0;
            return truth * rng.random_range(0.97..1.03);
        }
        self.run += 1;
        let alone = self.run == 1 && self.deck.last() == Some(&false);
        if alone && self.fast < MOST_FAST && rng.random_bool(self.low * 0.3) {
            self.fast += 1;
            truth * rng.random_range(0.01..0.8)
        } else {
            truth * rng.random_range(1.3..20.0)
        }
    }

    fn shuffled(&self, rng: &mut SmallRng) -> Vec<bool> {
        loop {
            let mut deck: Vec<bool> = (0..10).map(|i| i < 3).collect();
            for j in (1..10).rev() {
                deck.swap(j, rng.random_range(0..=j));
            }
            let begins = deck.iter().rev().take_while(|outlier| **outlier).count();
            let three = deck.windows(3).any(|w| w.iter().all(|outlier| *outlier));
            if !three && self.run + begins < 3 {
                return deck;
            }
        }
    }
}

proptest! {
    #[test]
    fn within_15_percent_with_30_percent_outliers(
        seed in any::<u64>(), one_way_us in 50.0..100_000.0f64, mbit in 1.0..40_000.0f64, low in 0.0..1.0f64,
    ) {
        let (one_way, rate) = (one_way_us * 1e-6, mbit * 1e6);
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut e = LinkEstimator::new(EstimatorConfig::default());
        let mut noise = [Outliers::new(low), Outliers::new(low)];
        for i in 0..40 {
            let t = 0.1 * i as f64;
            let rtt = noise[0].next(2.0 * one_way, &mut rng);
            e.echo(at(t), rtt.min(MAX_RTT_S)).unwrap();
            let beta = noise[1].next(8.0 / rate, &mut rng);
            e.throughput(at(t), (8.0 / beta).max(1e3)).unwrap();
        }
        let found = e.estimate(at(4.0));
        prop_assert!(within(found.alpha.unwrap().get(), one_way, 0.15), "alpha {:?}, truth {one_way}", found.alpha);
        prop_assert!(within(found.bandwidth.unwrap().get(), rate, 0.15), "{:?}, truth {rate}", found.bandwidth);
    }

    #[test]
    fn any_input_gives_a_valid_estimate(
        inputs in prop::collection::vec((0u8..3, any::<u64>(), any::<f64>(), any::<f64>()), 0..100), now in any::<u64>(),
    ) {
        let mut e = LinkEstimator::new(EstimatorConfig::default());
        for (kind, t, a, b) in inputs {
            let _ = match kind {
                0 => e.echo(Timestamp(t), a),
                1 => e.throughput(Timestamp(t), a),
                _ => e.transfer(Timestamp(t), a, b),
            };
        }
        let found = e.estimate(Timestamp(now));
        prop_assert!((0.0..=1.0).contains(&found.alpha_confidence));
        prop_assert!((0.0..=1.0).contains(&found.bandwidth_confidence));
    }
}
