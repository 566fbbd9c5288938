//! What holds for every job, network and sequence of measurements.

use crate::common::{Job, learn, profile, seconds};
use flexcomm_domain::Timestamp;
use flexcomm_planner::{Losses, MeanLoss, Outcome, PolicyConfig, Snapshot, decide};
use proptest::prelude::{
    Just, ProptestConfig, Strategy as _, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::test_runner::{RngSeed, TestCaseError};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// One thing that happens to a job.
#[derive(Debug, Clone)]
enum Event {
    Wait(f64),
    Network { alpha: f64, bandwidth: f64 },
    Measured { slower: f64, gain: f64 },
    Profile { exponent: f64, scan: f64 },
    Compute(f64),
    NotApplied,
    Confidence(f64),
    Blind,
    ClockBack(u64),
    Amnesia,
    Buckets { sizes: Vec<u64>, energies: Vec<f32> },
    Loss { before: Option<f64>, newest: f64, last_step: u64 },
    NoLoss,
}

/// A new run of the job, whose gradient is one bucket or has 2 to 12 of these sizes; their energies may be known.
fn buckets() -> impl proptest::strategy::Strategy<Value = Event> {
    let several = (prop::collection::vec((1..1000u64, 0.0..1.0f32), 2..=12), any::<bool>());
    let several = several.prop_map(|(buckets, knows_energies)| {
        let (sizes, energies): (Vec<u64>, Vec<f32>) = buckets.into_iter().unzip();
        Event::Buckets { sizes, energies: if knows_energies { energies } else { Vec::new() } }
    });
    prop_oneof![Just(Event::Buckets { sizes: Vec::new(), energies: Vec::new() }), several]
}

/// The mean loss of the newest steps up to one, and maybe of those before the decision in force.
fn loss() -> impl proptest::strategy::Strategy<Value = Event> {
    let losses = (prop::option::of(0.1..3.0f64), 0.1..3.0f64, 23..1000u64);
    losses.prop_map(|(before, newest, last_step)| Event::Loss { before, newest, last_step })
}

fn event() -> impl proptest::strategy::Strategy<Value = Event> {
    prop_oneof![
        4 => (0.1..40.0f64).prop_map(Event::Wait),
        3 => ((-5.0..-0.7f64), (6.0..11.5f64))
            .prop_map(|(a, b)| Event::Network { alpha: 10f64.powf(a), bandwidth: 10f64.powf(b) }),
        3 => ((0.3..6.0f64), (0.001..1.0f64)).prop_map(|(slower, gain)| Event::Measured { slower, gain }),
        2 => ((0.01..1.0f64), (0.0..0.3f64)).prop_map(|(exponent, scan)| Event::Profile { exponent, scan }),
        1 => (0.0..2.0f64).prop_map(Event::Compute),
        1 => Just(Event::NotApplied),
        1 => (0.0..1.0f64).prop_map(Event::Confidence),
        1 => Just(Event::Blind),
        1 => (1..10_000_000_000u64).prop_map(Event::ClockBack),
        1 => Just(Event::Amnesia),
        // Few, since looks at a gradient in several buckets take several times as long.
        1 => buckets(),
        3 => loss(),
        1 => Just(Event::NoLoss),
    ]
}

fn happen(job: &mut Job, event: &Event) {
    match *event {
        Event::Wait(s) => job.wait(s),
        Event::Network { alpha, bandwidth } => job.network(alpha, bandwidth),
        Event::Measured { slower, gain } => {
            let gain = if job.s.plan().is_dense() { 1.0 } else { gain };
            job.measure(0.01 * slower, 0.09 * slower, gain);
        }
        Event::Profile { exponent, scan } => {
            learn(&mut job.s, profile(exponent, scan));
            (job.s.profiles.measured_at, job.s.profiles.ended_at) = (Some(job.now), Some(job.now));
        }
        Event::Compute(s) => job.s.compute = Some(seconds(s)),
        Event::NotApplied => {
            if let Some(f) = &mut job.s.in_force {
                f.applied_at_step = None;
            }
        }
        Event::Confidence(c) => {
            if let Some(links) = &mut job.s.links {
                links.confidence = c;
            }
        }
        Event::Blind => job.s.links = None,
        Event::ClockBack(us) => job.now = Timestamp(job.now.0.saturating_sub(us)),
        Event::Amnesia => job.s.memory = Default::default(),
        Event::Buckets { ref sizes, ref energies } => begin_anew(job, sizes, energies),
        Event::Loss { before, newest, last_step } => {
            let mean = |mean: f64, last_step: u64| MeanLoss { mean, sd: 0.05, first_step: last_step - 23, last_step };
            job.s.losses = Some(Losses {
                version: job.s.version(),
                began: (last_step < 256).then_some(2.5),
                before: before.map(|loss| mean(loss, 23)),
                newest: mean(newest, last_step),
            });
        }
        Event::NoLoss => job.s.losses = None,
    }
}

/// A run that goes on from the versions of the one before, with a gradient in buckets of which these sizes say how large they are.
fn begin_anew(job: &mut Job, sizes: &[u64], energies: &[f32]) {
    let s = &mut job.s;
    (s.earlier, s.begun) = (s.newest_version(), job.now);
    (s.in_force, s.measured, s.losses) = (None, None, None);
    let all: u64 = sizes.iter().sum();
    s.buckets = sizes.iter().map(|size| size * s.gradient_values / all).collect();
    let rest = s.gradient_values - s.buckets.iter().sum::<u64>();
    if let Some(last) = s.buckets.last_mut() {
        *last += rest;
    }
    s.energies = energies.to_vec();
}

/// A change comes after the dwell time unless it goes back to dense, with the next version.
fn holds(before: &Snapshot, outcome: &Outcome, now: Timestamp) -> Result<(), TestCaseError> {
    let Some(decision) = outcome.decision() else { return Ok(()) };
    prop_assert_eq!(decision.version, before.newest_version().next());
    prop_assert_eq!(decision.parent, before.newest_version());
    let from = before.memory.dwell_from.filter(|_| before.in_force.is_some() && !decision.plan.is_dense());
    if let Some(from) = from {
        prop_assert!(now.since(from) >= before.config.dwell_s, "changed within the dwell time");
    }
    Ok(())
}

fn policies() -> impl proptest::strategy::Strategy<Value = PolicyConfig> {
    prop::sample::select(PolicyConfig::NAMES.to_vec()).prop_map(|name| PolicyConfig::by_name(name).unwrap())
}

/// The looks, of 400 with 5 s between, at which a job changes whose network does not; logarithms of latency and bandwidth, the gain's
/// exponent, and seconds of computing.
fn changes_under_noise(seed: u64, [alpha, bandwidth, exponent, compute]: [f64; 4]) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut job = Job::new();
    job.s.compute = Some(seconds(compute));
    learn(&mut job.s, profile(exponent, 0.004));
    let mut changed = Vec::new();
    for look in 0..400u32 {
        let mut off = || 1.0 + rng.random_range(-0.1..=0.1);
        job.network(10f64.powf(alpha) * off(), 10f64.powf(bandwidth) * off());
        let (t_comp, t_sync, gain) = job.truth(&job.strategy());
        let gain = if job.strategy().is_dense() { 1.0 } else { (gain * off()).min(1.0) };
        job.measure(t_comp * off(), t_sync * off(), gain);
        job.s.measured.as_mut().unwrap().gain_spread = 0.1;
        if job.call().decision().is_some() {
            changed.push(look);
        }
        job.wait(5.0);
    }
    changed
}

/// Five seconds of each do not tell these two strategies apart.
#[test]
fn two_strategies_of_the_same_worth_do_not_change_places_for_ever() {
    let job = [-3.044_679_244_947_008, 9.245_236_424_653_33, 0.041_102_830_094_168_444, 0.030_394_029_408_216_394];
    let changed = changes_under_noise(5_642_686_593_269_149_486, job);
    assert!(changed.len() <= 10, "changed at looks {changed:?}");
}

proptest! {
    // How much noise leads to is a matter of probability: the same cases every time.
    #![proptest_config(ProptestConfig { rng_seed: RngSeed::Fixed(1), cases: 64, ..ProptestConfig::default() })]

    /// `Job::call` also runs the checker on each answer.
    #[test]
    fn any_life_of_a_job(policy in policies(), events in prop::collection::vec(event(), 1..60)) {
        let mut job = Job::new();
        job.s.config.policy = policy;
        for event in &events {
            happen(&mut job, event);
            let (before, mut rng) = (job.s.clone(), job.rng.clone());
            let outcome = job.call();
            holds(&before, &outcome, job.now)?;
            let text = serde_json::to_string(&outcome).unwrap();
            if !before.buckets.is_empty() || before.losses.is_some() {
                let again = decide(&before, job.now, &mut rng);
                prop_assert_eq!(&serde_json::to_string(&again).unwrap(), &text, "another answer to the same");
            }
            let back: Outcome = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(back, outcome, "an answer changes when it is stored and read back");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes(seed: u64, events in prop::collection::vec(event(), 1..25)) {
        let play = || {
            let mut job = Job::new();
            job.rng = ChaCha8Rng::seed_from_u64(seed);
            let mut bytes = String::new();
            for event in &events {
                happen(&mut job, event);
                bytes += &serde_json::to_string(&job.call()).unwrap();
            }
            bytes
        };
        prop_assert_eq!(play(), play());
    }

    /// A snapshot that was stored and read back leads to the same answer: decisions can be replayed.
    #[test]
    fn decisions_can_be_replayed(events in prop::collection::vec(event(), 1..25)) {
        let mut job = Job::new();
        for event in &events {
            happen(&mut job, event);
            let text = serde_json::to_string(&job.s).unwrap();
            let stored: Snapshot = serde_json::from_str(&text).unwrap();
            let replayed = decide(&stored, job.now, &mut job.rng.clone());
            prop_assert_eq!(replayed, job.call());
        }
    }

    /// Ten percent of noise on latency, bandwidth, times and gain on a network that does not change for half an hour.
    #[test]
    fn noise_leads_to_few_changes(
        seed: u64, alpha in -4.5..-1.0f64, bandwidth in 7.0..11.0f64, exponent in 0.02..0.4f64, compute in 0.01..0.5f64
    ) {
        let changed = changes_under_noise(seed, [alpha, bandwidth, exponent, compute]);
        let late = changed.iter().filter(|look| **look >= 200).count();
        prop_assert!(changed.len() <= 10 && late <= 4, "changed at looks {changed:?}");
    }

    #[test]
    fn any_time_and_seed_are_harmless(now: u64, later: u64, seed: u64, applied in any::<bool>()) {
        let mut job = Job::new();
        job.rng = ChaCha8Rng::seed_from_u64(seed);
        job.now = Timestamp(now);
        job.call();
        if !applied {
            happen(&mut job, &Event::NotApplied);
        }
        job.now = Timestamp(later);
        job.network(0.05, 1e7);
        job.call();
    }
}
