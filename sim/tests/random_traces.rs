//! Thousands of decisions on random traces, with faults, the checker on every one. `./dev soak` plays a million looks,
//! half of its jobs with a gradient in several buckets.
#![allow(clippy::unwrap_used)]

use flexcomm_domain::Collective;
use flexcomm_estimation::Delay;
use flexcomm_planner::{Config, Offer};
use flexcomm_sim::loss::LossCourse;
use flexcomm_sim::model::Model;
use flexcomm_sim::run::{Faults, Probes, Run, Setup, run};
use flexcomm_sim::schedule::Schedule;
use flexcomm_sim::trace;
use flexcomm_sim::world::{Noise, World};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Most looks of one run in the soak and in CI: a loss that holds a job dense on a slow network makes it hours long.
const MOST_LOOKS_IN_SOAK: u64 = 2_000;
const MOST_LOOKS: u64 = 300;
/// The same in CI where the gradient has several buckets: a look then searches plans, and takes several times as long.
const MOST_LOOKS_IN_BUCKETS: u64 = 40;

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
    let (config, probes) = (Config::default(), Probes::default());
    Setup { world, schedule, config, offer, probes, faults, breakages: vec![], most_looks: None }
}

/// The same with losses and with throughput tests that are lower bounds, each in some, and by this share in several buckets.
fn varied(seed: u64, faults: Faults, share_in_buckets: f64) -> Setup {
    let mut setup = setup(seed, faults, 20.0);
    // Numbers of its own, so that the network of a seed is what it is without them.
    let mut rng = ChaCha8Rng::seed_from_u64(!seed);
    setup.world.model.loss = *LossCourse::ALL.choose(&mut rng).unwrap();
    setup.probes.lower_bounds = *[0.0, 0.0, 0.5, 1.0].choose(&mut rng).unwrap();
    if rng.random_bool(share_in_buckets) {
        setup.world.model = in_buckets(setup.world.model, &mut rng);
    }
    setup
}

/// In 2 to 12 buckets, in one of two with energies that are not those of their values.
fn in_buckets(model: Model, rng: &mut ChaCha8Rng) -> Model {
    let count = rng.random_range(2..=12);
    let model = model.in_buckets(count, rng);
    // Of a larger batch computing takes longer: otherwise backward hides little on most networks.
    let compute_s = model.compute_s * 30f64.powf(rng.random_range(0.0..=1.0));
    let model = Model { compute_s, ..model };
    if rng.random_bool(0.5) { model.with_energies(rng) } else { model }
}

/// A network that stays as it is.
fn still(latency: &str, bandwidth: &str) -> Schedule {
    let phase = format!("[[phase]]\nepochs = 50\nlatency = \"{latency}\"\nbandwidth = \"{bandwidth}\"\n");
    Schedule::from_toml(&format!("name = \"still\"\n{phase}")).unwrap()
}

/// What runs came to.
#[derive(Default)]
struct Counts {
    looks: u64,
    /// Changes to a plan of several strategies.
    by_bucket: usize,
    /// Looks at which dense stayed because of the loss.
    for_loss: u64,
}

impl Counts {
    fn add(&mut self, r: &Run) {
        let is_by_bucket = |plan: &flexcomm_domain::Plan| plan.alike().is_none();
        self.looks += r.looks;
        self.by_bucket += r.made.iter().filter(|m| m.outcome.decision().is_some_and(|d| is_by_bucket(&d.plan))).count();
        self.for_loss += ["loss-rose", "loss-flat"].iter().filter_map(|keep| r.kept.get(keep)).sum::<u64>();
    }
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
    // `./dev soak` plays far more, half of them in buckets. Of those CI has a test of its own.
    let soak = std::env::var("LOOKS").ok();
    let least: u64 = soak.as_deref().map_or(1_000, |text| text.parse().unwrap());
    let (share, most) = if soak.is_some() { (0.5, MOST_LOOKS_IN_SOAK) } else { (0.0, MOST_LOOKS) };
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let play = |first: u64| {
        let (mut counts, mut seed) = (Counts::default(), first);
        while counts.looks < least / threads {
            let setup = Setup { most_looks: Some(most), ..varied(seed, faults(seed), share) };
            let r = run(&setup, seed);
            check(&setup, &r);
            counts.add(&r);
            seed += threads;
        }
        counts
    };
    let parts: Vec<Counts> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|i| scope.spawn(move || play(100 + i))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let looks: u64 = parts.iter().map(|of| of.looks).sum();
    let by_bucket: usize = parts.iter().map(|of| of.by_bucket).sum();
    let for_loss: u64 = parts.iter().map(|of| of.for_loss).sum();
    eprintln!("{looks} looks, no broken rule; {by_bucket} changes by bucket, dense for the loss at {for_loss} looks");
    assert!(soak.is_none() || looks < 100_000 || by_bucket > 0 && for_loss > 0, "too little was tested");
}

/// Four runs, 160 looks: two on a network where early buckets are worth leaving dense, and two where everything fails.
#[test]
fn plans_by_bucket_are_decided_and_break_no_rule() {
    let mut counts = Counts::default();
    for seed in 0..4 {
        let faults = if seed < 2 { Faults::default() } else { faults(seed) };
        let mut setup = Setup { most_looks: Some(MOST_LOOKS_IN_BUCKETS), ..varied(seed, faults, 1.0) };
        if seed < 2 {
            // Backward hides half of a dense exchange.
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let model = Model::paper("vit").unwrap().in_buckets(10, &mut rng);
            let model = if seed == 0 { model } else { model.with_energies(&mut rng) };
            setup.world = World { model, ranks: 8, ..setup.world };
            (setup.schedule, setup.probes) = (still("100us", "25gbit"), Probes::default());
        }
        let r = run(&setup, seed);
        check(&setup, &r);
        counts.add(&r);
    }
    assert!(counts.by_bucket > 0, "in {} looks no plan by bucket was decided", counts.looks);
}

#[test]
fn a_loss_that_compression_raises_is_answered_by_dense() {
    let mut setup = setup(0, Faults::default(), 200.0);
    let model = Model { loss: LossCourse::RisesUnderCompression, ..Model::paper("resnet18").unwrap() };
    setup.world = World { model, ranks: 8, ..setup.world };
    // Dense steps take 0.7 s here, and most of that is saved.
    setup.schedule = still("1ms", "1gbit");
    setup.most_looks = Some(150);
    let r = run(&setup, 1);
    check(&setup, &r);
    let mut counts = Counts::default();
    counts.add(&r);
    assert!(counts.for_loss > 0, "{:#?}", r.log);
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
    let in_buckets = || run(&Setup { most_looks: Some(20), ..varied(3, faults, 1.0) }, 5).transcript;
    assert_eq!(in_buckets(), in_buckets());
}
