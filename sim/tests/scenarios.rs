//! Every file in `sim/scenarios/` must come out as it says. `SCENARIO=name` plays those whose names begin so and
//! prints what happened.
#![allow(clippy::unwrap_used)]

use flexcomm_sim::run::{Run, run};
use flexcomm_sim::scenario::Scenario;
use std::path::Path;

fn describe(scenario: &Scenario, seed: u64, r: &Run) -> String {
    let (best, best_s) = scenario.best_fixed();
    let mut text = format!(
        "{} seed {seed}: {:.1} s ({:.3} of the oracle, {:.3} of the best fixed, {best}), {} looks, {} changes, {:.1} s of trials, kept {:?}\n",
        scenario.name,
        r.time_s,
        r.time_s / scenario.oracle_s(),
        r.time_s / best_s,
        r.looks,
        r.made.len(),
        r.trial_s,
        r.kept
    );
    for made in &r.made {
        text += &format!("  epoch {:>3} {:>7.1} s: {}\n", made.epoch, made.at_s, made.outcome.report.why);
    }
    text
}

/// Plays one file; a text for everything that did not come out as it says, or for everything when `talk`.
fn play(file: &Path, only: Option<&str>) -> (usize, Vec<String>) {
    let text = std::fs::read_to_string(file).unwrap();
    let scenario = Scenario::from_toml(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    if only.is_some_and(|name| !scenario.name.starts_with(name)) {
        return (0, Vec::new());
    }
    let mut failures = Vec::new();
    for &seed in &scenario.seeds {
        let r = run(&scenario.setup, seed);
        let failed = scenario.failures(&r);
        if only.is_some() {
            eprintln!("{}", describe(&scenario, seed, &r));
        }
        if !failed.is_empty() {
            failures.push(format!("{}{failed:?}", describe(&scenario, seed, &r)));
        }
    }
    (scenario.seeds.len(), failures)
}

#[test]
fn every_scenario_comes_out_as_it_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let only = std::env::var("SCENARIO").ok();
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "toml"));
    files.sort();
    // Every fourth file to each of four threads.
    let only = only.as_deref();
    let share = |i| files.iter().skip(i).step_by(4).map(|f| play(f, only)).collect::<Vec<_>>();
    let parts: Vec<(usize, Vec<String>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|i| {
                let share = &share;
                scope.spawn(move || share(i))
            })
            .collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    assert!(parts.iter().map(|p| p.0).sum::<usize>() > 0, "no scenario of that name");
    let failures: Vec<String> = parts.into_iter().flat_map(|p| p.1).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
