//! Ranks of one process, cells, and fixed settings played through them.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_domain::{Plan, Strategy, Version};
use flexcomm_suite::baselines::BUDGET_SHARE;
use flexcomm_suite::cells::{Cell, Net};
use flexcomm_suite::fixed::{self, Curves};
use flexcomm_suite::ranks::{Data, Model, Ranks, Recipe, Stepped};
use flexcomm_suite::{families, score};
use flexcomm_trainer::Tick;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job::Token;
use flexcomm_truth::network::NetworkEvent;
use std::collections::BTreeSet;
use std::sync::Arc;

fn recipe(world: usize, steps: u64) -> Recipe {
    Recipe { model: Model::Convolutional, world, momentum: 0.9, learning_rate: 0.05, batch: 32, steps, seed: 1 }
}

#[test]
fn every_fixed_setting_learns_and_sends_what_it_should() {
    let (world, steps) = (2, 50);
    let data = Arc::new(Data::synthetic(world));
    for setting in fixed::settings(0.9) {
        let curve = fixed::train(recipe(world, steps), &data, &setting).unwrap();
        assert!(!curve.diverged && curve.losses.len() == 3, "{curve:?}");
        assert!(curve.losses[2] < curve.losses[0], "{}: {:?}", setting.0, curve.losses);
        let bytes: f64 = curve.rounds.iter().flatten().map(|round| round.bytes).sum();
        let dense = 4.0 * Model::Convolutional.network().parameters() as f64;
        match setting.0.as_str() {
            fixed::DENSE => assert_eq!(bytes, dense),
            "fp16/dense-ring" => assert_eq!(bytes, dense / 2.0),
            _ => assert!(bytes < 0.9 * dense, "{}: {bytes} of {dense}", setting.0),
        }
        for (bucket, values) in curve.rounds.iter().zip(fixed::bucket_values(Model::Convolutional)) {
            let (bytes, fixed) = bucket.iter().fold((0.0, 0.0), |(b, f), round| (b + round.bytes, f + round.fixed));
            let sums = setting.0.ends_with("/dense-ring");
            assert!(fixed < bytes && (sums == (fixed == 0.0)), "{}: {fixed} of {bytes} for {values}", setting.0);
        }
    }
}

/// Ranks hold the same parameters whatever runs, so a run is the same each time, and a change of the strategy keeps the residual.
#[test]
fn a_run_is_the_same_each_time_and_strategies_may_change_at_any_step() {
    let run = || -> Vec<Stepped> {
        let mut ranks = Ranks::new(recipe(3, 12), Arc::new(Data::synthetic(3))).unwrap();
        let texts =
            ["none/dense-ring", "topk(k=0.01)+ef(vanilla)/art-ring:var", "qsgd(s=7,norm=max)+ef(vanilla)/allgather"];
        let strategies: Vec<Strategy> = texts.iter().map(|text| text.parse().unwrap()).collect();
        (0..12).map(|step| ranks.step(step, &strategies[(step / 2 % 3) as usize]).unwrap()).collect()
    };
    let steps = run();
    assert_eq!(steps, run());
    let of = |step: usize| &steps[step].buckets[0];
    assert!(of(2).energies.iter().all(|e| e.sent < e.compensated) && of(4).energies[0].gain() > 0.9);
    assert_eq!(of(2).rounds.len(), 3, "energies, indices, values");
}

/// The first bucket of backward is dense, all others are compressed: each as under its own strategy alone.
#[test]
fn buckets_of_a_plan_are_exchanged_each_by_its_own_strategy() {
    const SPARSE: &str = "topk(k=0.01)+ef(vanilla)/allgather";
    let step = |plan: &str| {
        let mut ranks = Ranks::new(recipe(3, 12), Arc::new(Data::synthetic(3))).unwrap();
        let tick = Tick { step: 0, plan: plan.parse::<Plan>().unwrap(), version: Version(1), trial: None };
        let stepped = ranks.tick(&tick).unwrap();
        (ranks, stepped)
    };
    let (dense, sparse) = (step("none/dense-ring"), step(SPARSE));
    let (mut mixed, stepped) = step(&format!("none/dense-ring | {SPARSE}"));
    let means = |ranks: &Ranks| ranks.means().map(<[f32]>::to_vec).collect::<Vec<_>>();
    let (own, of_dense, of_sparse) = (means(&mixed), means(&dense.0), means(&sparse.0));
    assert_eq!((&own[0], &own[1..]), (&of_dense[0], &of_sparse[1..]));
    assert!(own[0] != of_sparse[0] && own[1] != of_dense[1]);
    for (rank, exchanged) in (0..3).map(|rank| (rank, &stepped.buckets)) {
        let fresh: Vec<f64> = mixed
            .buckets(rank)
            .map(|(_, gradient)| gradient.iter().map(|value| f64::from(*value).powi(2)).sum())
            .collect();
        let residuals: Vec<bool> = mixed.buckets(rank).map(|(bucket, _)| bucket.has_residual()).collect();
        assert!(!residuals[0] && residuals[1..].iter().all(|has| *has), "{residuals:?}");
        let gains: Vec<f64> = exchanged.iter().map(|bucket| bucket.energies[rank].gain()).collect();
        assert!(gains[0] == 1.0 && gains[1..].iter().all(|gain| *gain < 0.9), "{gains:?}");
        for (bucket, fresh) in exchanged.iter().zip(fresh) {
            let counted = bucket.energies[rank].compensated;
            assert!(
                (counted / fresh - 1.0).abs() < 1e-12,
                "{counted} of {fresh}: but for the order of additions the same"
            );
        }
    }
    let loss = |ranks: &mut Ranks| ranks.test().loss;
    let before = loss(&mut mixed);
    let plan: Plan = format!("none/dense-ring | {SPARSE}").parse().unwrap();
    for step in 1..12 {
        mixed.tick(&Tick { step, plan: plan.clone(), version: Version(1), trial: None }).unwrap();
    }
    assert!(loss(&mut mixed) < before);
}

#[test]
fn the_cells_are_written_and_read() {
    let cells = families::drawn();
    let names: BTreeSet<&str> = cells.iter().map(|cell| cell.name.as_str()).collect();
    assert_eq!((cells.len(), names.len()), (48, 48));
    let folder = tempfile::tempdir().unwrap();
    for cell in &cells {
        std::fs::write(folder.path().join(format!("{}.toml", cell.name)), toml::to_string(cell).unwrap()).unwrap();
    }
    let mut read = Cell::read_all(folder.path()).unwrap();
    let mut sorted = cells;
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    read.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(read, sorted);
    // What is fitted by the truth apart, the files are what is drawn.
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/cells");
    let mut files = Cell::read_all(kept.as_ref()).unwrap();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    for (file, drawn) in files.iter_mut().zip(&sorted) {
        (file.compute_s, file.values_factor) = (drawn.compute_s, drawn.values_factor);
        file.communication_ratio = drawn.communication_ratio;
        file.burst_mbytes = file.burst_mbytes.and(drawn.burst_mbytes);
        file.burst_mbit = file.burst_mbit.and(drawn.burst_mbit);
        for (phase, drawn) in file.phases.iter_mut().zip(&drawn.phases) {
            (phase.up_mbit, phase.down_mbit) = (drawn.up_mbit, drawn.down_mbit);
        }
    }
    assert!(files == sorted, "{kept}: `cargo run --release -p flexcomm-suite -- cells` draws and fits them");
    // Networks change while runs come to their targets; with phases of half an hour less often, and not only from good to bad.
    for cell in Cell::read_all(kept.as_ref()).unwrap() {
        let dense_s = cell.compute_s * cell.communication_ratio.max(1.0);
        let phases = BUDGET_SHARE * cell.steps as f64 * dense_s / cell.phase_s;
        assert!(phases > if cell.phase_s > 1000.0 { 2.0 } else { 4.0 }, "{}: {phases}", cell.name);
    }
    let text = toml::to_string(&read[0]).unwrap();
    let error = |from: &str, to: &str| {
        let path = folder.path().join("bad.toml");
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        format!("{:#}", Cell::read(&path).unwrap_err())
    };
    assert!(error("steps = 1500", "steps = 2000").contains("steps is 2000, allowed is 1 to 1500"));
    assert!(error("latency_ms = ", "latency_ms = -").contains("phase 1: latency_ms is -"));
    assert!(error("family", "famly").contains("famly"));
    assert!(error("communication_ratio = ", "communication_ratio = nan # ").contains("communication_ratio is NaN"));
    assert!(error("seeds = [1, ", "seeds = [2, 1, ").contains("seeds [2, 1, 2, 3] are not unique"));
    assert!(error("[codec_factors]", "[codec_factors]\ntopq = 1.0").contains("codec_factors.topq is of no compressor"));
    let twice = "[[phase]]\nnic = [{ nic = 1 }, { nic = 1 }]";
    assert!(error("[[phase]]", twice).contains("phase 1: a nic is there twice"));
    let burst = |keys: &str| error("ranks_per_nic", &format!("{keys}\nranks_per_nic"));
    assert!(burst("burst_mbit = 1e6").contains("it has one of burst_mbytes and burst_mbit"));
    assert!(burst("burst_mbytes = 0.0\nburst_mbit = 1e6").contains("burst_mbytes is 0, allowed is 0.001 to"));
    let slow = burst("burst_mbytes = 1.0\nburst_mbit = 1e-3");
    assert!(slow.contains("a burst must be as fast as the least up_mbit or down_mbit: burst_mbit is 0.001"), "{slow}");
}

/// Ports that carry nothing beside the payload.
fn payload_alone() -> Coefficients {
    let mut truth = Coefficients::frozen();
    truth.tcp.overhead_bytes = 0.0;
    truth
}

/// Five thousand phases of a tenth of a second.
#[test]
fn phases_go_on_for_ever() {
    let mut cell = Cell { world: 2, ranks_per_nic: 1, ..families::drawn()[0].clone() };
    cell.phases.truncate(2);
    for (phase, mbit) in cell.phases.iter_mut().zip([80.0, 8.0]) {
        (phase.seconds, phase.up_mbit, phase.down_mbit, phase.latency_ms) = (0.1, mbit, mbit, 0.0);
    }
    let changes = cell.changes(500.05);
    assert!(changes.len() == 5000 && (changes[4999] - 500.0).abs() < 1e-9, "{:?}", changes.last());
    for (at, expected) in [(500.01, 0.005), (500.11, 0.05)] {
        let mut net: Net<()> = Net::new(&cell, &payload_alone(), 1);
        net.network.timer(at, Token::Other(()));
        assert_eq!(net.network.advance(), Some(NetworkEvent::Timer(Token::Other(()))));
        net.network.send(net.mesh.groups[0][0][1].unwrap(), 5e4, Token::Other(()));
        assert!(net.network.advance().is_some());
        assert!((net.network.now() - at - expected).abs() < 1e-3, "{}", net.network.now());
    }
}

#[test]
fn a_credit_goes_at_the_peak_and_the_rest_at_the_rate() {
    let mut cell = Cell { world: 2, ranks_per_nic: 1, ..families::drawn()[0].clone() };
    cell.phases.truncate(1);
    (cell.phases[0].up_mbit, cell.phases[0].down_mbit, cell.phases[0].latency_ms) = (80.0, 80.0, 0.0);
    let took = |cell: &Cell, mbytes: f64| {
        let mut net: Net<()> = Net::new(cell, &payload_alone(), 1);
        net.network.send(net.mesh.groups[0][0][1].unwrap(), mbytes * 1e6, Token::Other(()));
        assert_eq!(net.network.advance(), Some(NetworkEvent::Delivered(Token::Other(()))));
        net.network.now()
    };
    let near = |seconds: f64, expected: f64| assert!((seconds / expected - 1.0).abs() < 0.01, "{seconds} {expected}");
    let plain = cell.clone();
    (cell.burst_mbytes, cell.burst_mbit) = (Some(9.0), Some(800.0));
    near(took(&plain, 1.0), 0.1);
    near(took(&cell, 1.0), 0.01);
    // The credit lasts for 10 MB, since it is filled up in the meantime.
    near(took(&plain, 100.0), 10.0);
    near(took(&cell, 100.0), 0.1 + 9.0);
}

#[test]
fn the_last_swing_has_a_credit_that_is_fitted_with_its_bandwidths() {
    let with: Vec<Cell> = families::drawn().into_iter().filter(|cell| cell.burst_mbit.is_some()).collect();
    assert!(with.len() == 1 && with[0].name == "swing-6", "{with:?}");
    let drawn = Cell { world: 2, ..with[0].clone() };
    let fitted = families::fitted(&drawn, &Coefficients::frozen()).unwrap();
    let least = |cell: &Cell| cell.phases.iter().map(|phase| phase.up_mbit).fold(f64::INFINITY, f64::min);
    let over = |cell: &Cell| [cell.burst_mbit, cell.burst_mbytes].map(|of_burst| of_burst.unwrap() / least(cell));
    let (before, after) = (over(&drawn), over(&fitted));
    assert!((2.0..6.0).contains(&after[0]), "{after:?}");
    assert!((0..2).all(|i| (after[i] / before[i] - 1.0).abs() < 1e-3), "{before:?} {after:?}");
}

#[test]
fn a_curve_takes_longer_on_a_slower_network_and_the_same_each_time() {
    let cell = Cell { steps: 30, world: 2, model: Model::Convolutional, batch: 32, ..families::drawn()[6].clone() };
    let mut cell = Cell { ranks_per_nic: 1, ..cell };
    cell.phases.iter_mut().for_each(|phase| phase.nics.clear());
    let (truth, data) = (Coefficients::frozen(), Arc::new(Data::synthetic(2)));
    let setting = (fixed::DENSE.to_owned(), fixed::DENSE.parse().unwrap());
    let curve = fixed::train(cell.recipe(1), &data, &setting).unwrap();
    let ends = |cell: &Cell| fixed::replay(cell, &truth, 1, &curve).unwrap();
    let here = ends(&cell);
    assert_eq!(here, ends(&cell));
    assert!(here.windows(2).all(|pair| pair[0] < pair[1]) && here[29] > 29.0 * 0.9 * cell.compute_s);
    let mut slow = cell.clone();
    slow.phases
        .iter_mut()
        .for_each(|phase| (phase.up_mbit, phase.down_mbit) = (phase.up_mbit / 100.0, phase.down_mbit / 100.0));
    assert!(ends(&slow)[29] > 2.0 * here[29]);
    let folder = tempfile::tempdir().unwrap();
    let curves = Curves { recipe: cell.recipe(1), curves: vec![curve] };
    curves.write(folder.path()).unwrap();
    assert_eq!(Curves::read(folder.path(), &curves.recipe).unwrap(), Some(curves.clone()));
    let other = Recipe { batch: 64, ..curves.recipe };
    assert_eq!(Curves::read(folder.path(), &other).unwrap(), None, "another job's");
    let smoothed = score::smooth(&fixed::points(&curves.curves[0].losses));
    assert!(score::steps_to(&smoothed, smoothed[0].loss) == Some(0.0));
}

#[test]
fn a_fitted_cell_has_its_ratio_and_what_latency_forbids_is_told() {
    let truth = Coefficients::frozen();
    let small = |latency_ms: f64, ratio: f64| {
        let mut cell = Cell { world: 2, communication_ratio: ratio, compute_s: 0.05, ..families::drawn()[6].clone() };
        cell.phases.truncate(2);
        cell.phases.iter_mut().for_each(|phase| phase.latency_ms = latency_ms);
        families::fitted(&cell, &truth).unwrap()
    };
    let near = small(0.05, 2.0);
    assert!((near.communication_ratio / 2.0 - 1.0).abs() < 0.05 && near.compute_s == 0.05, "{near:?}");
    let far = small(1000.0, 0.1);
    assert!(far.compute_s > 0.05 && far.communication_ratio > 0.2, "{far:?}");
    assert!(far.phases.iter().all(|phase| phase.up_mbit <= 1e5), "{far:?}");
}
