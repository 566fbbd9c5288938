//! How far the planner is from the oracle, which knows the true cost of every candidate and switches for nothing, and from the best single
//! strategy in hindsight, on random networks; and how often the decision changes on one that stays as it is.
//!
//! `NETWORKS=60 STEPS=30,100,300 cargo test -p flexcomm-sim --test regret adapting -- --nocapture` plays sixty of them at three lengths of phase.
#![allow(clippy::unwrap_used)]

use flexcomm_domain::Collective;
use flexcomm_estimation::Delay;
use flexcomm_planner::{Config, Offer, PolicyConfig};
use flexcomm_sim::model::Model;
use flexcomm_sim::run::{Faults, Probes, Setup, fixed, oracle, run};
use flexcomm_sim::trace;
use flexcomm_sim::world::{Noise, World};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const PHASES: usize = 12;
/// p of gain^-p, as the suite's jobs have it without momentum.
const EXPONENT: f64 = 0.1;

fn setup(seed: u64, steps_per_epoch: f64) -> Setup {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let name = Model::PAPERS[rng.random_range(0..Model::PAPERS.len())];
    let mut model = Model::paper(name).unwrap();
    model.steps_per_epoch = steps_per_epoch;
    let noise = Noise { links: 0.05, gain: 0.02, times: 0.05, fresh: 0.3 };
    let world =
        World { model, ranks: rng.random_range(2..=16), oddities: vec![], noise, delay: Delay::of_exponent(EXPONENT) };
    let offer = Offer {
        codecs: ["topk"].map(|c| (c.parse().unwrap(), World::codec())).into(),
        collectives: Collective::ALL.to_vec(),
        ..Offer::default()
    };
    let schedule = trace::random(PHASES, &mut rng);
    let mut config = Config::default();
    if let PolicyConfig::TimeToQuality(policy) = &mut config.policy {
        policy.exponent = Some(EXPONENT);
    }
    let (probes, faults) = (Probes::default(), Faults::default());
    Setup { world, schedule, config, offer, probes, faults, breakages: vec![], most_looks: None }
}

/// Of some networks: seconds of a phase, and time over the oracle's and over the best fixed strategy's.
struct Played {
    phase_s: f64,
    of_oracle: Vec<f64>,
    of_fixed: Vec<f64>,
    changes: usize,
}

fn play(seeds: impl Iterator<Item = u64>, steps_per_epoch: f64) -> Played {
    let mut played = Played { phase_s: 0.0, of_oracle: vec![], of_fixed: vec![], changes: 0 };
    for seed in seeds {
        let setup = setup(seed, steps_per_epoch);
        let r = run(&setup, seed);
        assert!(r.violations.is_empty(), "{:?}", r.violations.first());
        let mut snapshot = flexcomm_planner::Snapshot::new(flexcomm_domain::JobId::new("sim").unwrap(), 2, 1);
        (snapshot.offer, snapshot.config) = (setup.offer.clone(), setup.config.clone());
        let all = snapshot.space().strategies();
        let best_s = all.iter().map(|x| fixed(&setup, x)).fold(f64::INFINITY, f64::min);
        played.of_oracle.push(r.time_s / oracle(&setup, &all));
        played.of_fixed.push(r.time_s / best_s);
        played.phase_s += r.time_s / PHASES as f64;
        played.changes += r.made.len();
    }
    played.phase_s /= played.of_oracle.len() as f64;
    played
}

fn mean(x: &[f64]) -> f64 {
    (x.iter().map(|v| v.ln()).sum::<f64>() / x.len() as f64).exp()
}

fn worst(x: &[f64]) -> f64 {
    x.iter().copied().fold(0.0, f64::max)
}

#[test]
fn adapting_costs_little_over_the_oracle_and_over_the_best_fixed_strategy() {
    let networks: u64 = std::env::var("NETWORKS").map_or(4, |text| text.parse().unwrap());
    let steps = std::env::var("STEPS").unwrap_or_else(|_| "60".to_owned());
    for steps in steps.split(',').map(|text| text.parse::<f64>().unwrap()) {
        let halves = std::thread::scope(|scope| {
            let half = |i: u64| scope.spawn(move || play((5000..5000 + networks).filter(|seed| seed % 2 == i), steps));
            [half(0), half(1)].map(|thread| thread.join().unwrap())
        });
        let of_oracle = halves.iter().flat_map(|h| h.of_oracle.clone()).collect::<Vec<_>>();
        let of_fixed = halves.iter().flat_map(|h| h.of_fixed.clone()).collect::<Vec<_>>();
        let phase_s = halves.iter().map(|h| h.phase_s).sum::<f64>() / 2.0;
        let changes = halves.iter().map(|h| h.changes).sum::<usize>() as f64 / (networks * PHASES as u64) as f64;
        eprintln!(
            "{networks} networks, phases of {phase_s:.0} s: {:.3} over the oracle (worst {:.3}), {:.3} over the best fixed (worst {:.3}), \
             {changes:.2} changes a phase",
            mean(&of_oracle),
            worst(&of_oracle),
            mean(&of_fixed),
            worst(&of_fixed)
        );
        assert!(mean(&of_oracle) < 1.08 && worst(&of_oracle) < 1.25, "{of_oracle:?}");
    }
}

/// What a job learns in its first minutes changes decisions, and noise is no part of that.
const LEARNT_S: f64 = 600.0;

/// Of a network that stays as it is, seen with noise of 10 %: hours after the first minutes, and changes in them.
fn steady(seed: u64, steps_per_epoch: f64) -> (f64, usize) {
    let mut setup = setup(seed, steps_per_epoch);
    setup.world.noise = Noise { links: 0.1, gain: 0.02, times: 0.1, fresh: 0.3 };
    setup.schedule = trace::random(1, &mut ChaCha8Rng::seed_from_u64(seed));
    let r = run(&setup, seed);
    assert!(r.violations.is_empty(), "{:?}", r.violations.first());
    let later = r.made.iter().filter(|made| made.at_s > LEARNT_S);
    ((r.time_s - LEARNT_S).max(0.0) / 3600.0, later.count())
}

#[test]
fn noise_changes_the_decision_at_most_once_an_hour() {
    let networks: u64 = std::env::var("NETWORKS").map_or(8, |text| text.parse().unwrap());
    let each: Vec<(f64, usize)> = (5000..5000 + networks).map(|seed| steady(seed, 1000.0)).collect();
    let (hours, changes) = each.iter().fold((0.0, 0), |all, of| (all.0 + of.0, all.1 + of.1));
    eprintln!("{networks} networks that stay as they are: {changes} changes in {hours:.1} hours");
    assert!(hours > 1.0 && changes as f64 <= hours, "{each:?}");
}
