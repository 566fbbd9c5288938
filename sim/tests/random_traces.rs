//! Thousands of decisions on random traces, with faults, the checker on every one.
#![allow(clippy::unwrap_used)]

use flexcomm_domain::Collective;
use flexcomm_optimizer::Delay;
use flexcomm_planner::{Config, Offer};
use flexcomm_sim::model::Model;
use flexcomm_sim::run::{Faults, Probes, Run, Setup, run};
use flexcomm_sim::trace;
use flexcomm_sim::world::{Noise, World};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn setup(seed: u64, faults: Faults, steps_per_epoch: f64) -> Setup {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let name = Model::PAPERS[rng.random_range(0..Model::PAPERS.len())];
    let mut model = Model::paper(name).unwrap();
    model.steps_per_epoch = steps_per_epoch;
    let noise = Noise { links: 0.05, gain: 0.02, times: 0.05, fresh: 0.0 };
    let world = World {
        model,
        ranks: rng.random_range(2..=16),
        oddities: vec![],
        noise,
        delay: Delay::of_exponent(rng.random_range(0.02..=1.0)),
    };
    let offer = Offer {
        codecs: ["topk"].map(|c| (c.parse().unwrap(), World::codec())).into(),
        collectives: Collective::ALL.to_vec(),
        ..Offer::default()
    };
    let schedule = trace::random(12, &mut rng);
    Setup { world, schedule, config: Config::default(), offer, probes: Probes::default(), faults, breakages: vec![] }
}

fn check(setup: &Setup, r: &Run) {
    assert!(r.violations.is_empty(), "{:?}", r.violations.first());
    assert!(!r.stuck);
    let versions: Vec<u64> = r.made.iter().filter_map(|m| m.outcome.decision()).map(|d| d.version.0).collect();
    let expected: Vec<u64> = (1..=versions.len() as u64).collect();
    assert_eq!(versions, expected, "versions grow by one");
    for two in r.made.windows(2) {
        let dwell_s = setup.config.dwell_s.get();
        let dense = two[1].outcome.decision().is_some_and(|d| d.plan.is_dense());
        // The clock of a run with faults jumps; its simulated seconds do not.
        let calm = setup.faults.clock_jumps == 0.0 && !dense;
        assert!(!calm || two[1].at_s - two[0].at_s >= dwell_s - 1e-3, "{} s apart", two[1].at_s - two[0].at_s);
    }
}

#[test]
fn thousands_of_looks_break_no_rule() {
    let mut looks = 0;
    let mut changes = 0;
    for seed in 0..8 {
        let setup = setup(seed, Faults::default(), 20.0);
        let r = run(&setup, seed);
        check(&setup, &r);
        looks += r.looks;
        changes += r.made.len();
        // A phase is worth a change or two, seldom more.
        let phases = setup.schedule.phases().len();
        assert!(r.made.len() <= 3 * phases, "{} changes over {phases} phases: {:#?}", r.made.len(), r.log);
    }
    assert!(looks > 1_000 && changes > 25, "{looks} looks, {changes} changes: too little was tested");
}

#[test]
fn thousands_of_looks_with_everything_failing_break_no_rule() {
    // `./dev soak` plays far more.
    let least: u64 = std::env::var("LOOKS").map_or(1_000, |text| text.parse().unwrap());
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let play = |first: u64| {
        let (mut looks, mut seed) = (0, first);
        while looks < least / threads {
            let setup = setup(seed, faults(seed), 20.0);
            let r = run(&setup, seed);
            check(&setup, &r);
            looks += r.looks;
            seed += threads;
        }
        looks
    };
    let looks: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|i| scope.spawn(move || play(100 + i))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    eprintln!("{looks} looks, no broken rule");
}

/// The checker has its own rules for policies: of each kind some look must have been judged by them.
#[test]
fn policies_that_change_break_no_rule_and_are_followed() {
    let mut kept = std::collections::BTreeMap::<&str, u64>::new();
    let mut pinned = 0;
    for seed in 0..6 {
        let r = run(&setup(seed, Faults { policies: 0.05, ..Faults::default() }, 20.0), seed);
        assert!(r.violations.is_empty() && !r.stuck, "{:?}", r.violations.first());
        r.kept.iter().for_each(|(keep, looks)| *kept.entry(keep).or_default() += looks);
        pinned += r.made.iter().filter(|m| m.outcome.report.why.contains("is pinned")).count();
    }
    assert!(kept["pinned"] > 20 && kept["observing"] > 20 && pinned > 5, "{pinned} pins followed, {kept:?}");
}

/// Everything fails now and then, and in one run of three a node is wrong about its links.
fn faults(seed: u64) -> Faults {
    let lying = if seed.is_multiple_of(3) { [0.001, 0.1, 10.0, 1000.0][(seed / 3 % 4) as usize] } else { 0.0 };
    Faults { silent: 0.3, blind: 0.2, lost_trials: 0.5, clock_jumps: 0.02, amnesia: 0.02, policies: 0.02, lying }
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_others() {
    let faults = Faults { silent: 0.1, blind: 0.1, lost_trials: 0.5, clock_jumps: 0.01, ..Faults::default() };
    let faults = Faults { amnesia: 0.01, policies: 0.05, ..faults };
    let play = |seed| run(&setup(3, faults, 10.0), seed).transcript;
    assert_eq!(play(5), play(5));
    assert_ne!(play(5), play(6));
}
