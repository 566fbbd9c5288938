//! How well the law of delay tells the steps that fixed settings take (docs/decisions/price-of-delay.md).
//!
//! `cargo run --release -p flexcomm-suite --example quality > gains.jsonl` measures what settings keep; then
//! `cargo run --release -p flexcomm-suite --example law -- gains.jsonl [CURVES]` prints, by model, the rank correlation and the errors of the steps
//! that the law predicts with those that the curves show, and how well one seed's steps tell those of the others.
#![allow(clippy::print_stdout)]

use anyhow::{Context, Result, ensure};
use flexcomm_domain::{Gain, Strategy};
use flexcomm_estimation::{Delay, Quality};
use flexcomm_suite::fixed::{Curves, DENSE, points};
use flexcomm_suite::ranks::{Model, Recipe};
use flexcomm_suite::score;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Gains are those of steps from here on: residuals have filled.
const SETTLED: u64 = 100;
const SEEDS: u64 = 3;
/// Of the whole run is dense's budget, and of that the target, as the suite scores.
const BUDGET: (u64, f64) = (3, 0.9);

/// A line of the example `quality`.
#[derive(Deserialize)]
struct Window {
    recipe: Recipe,
    setting: String,
    from: u64,
    buckets: Vec<Bucket>,
}

#[derive(Deserialize)]
struct Bucket {
    sent: f64,
    compensated: f64,
}

/// A setting of a job.
struct Case {
    recipe: Recipe,
    predicted: f64,
    /// Logarithms of steps over dense's, by seed.
    measured: Vec<f64>,
}

impl Case {
    fn mean(&self) -> f64 {
        self.measured.iter().sum::<f64>() / self.measured.len() as f64
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let text = std::fs::read_to_string(args.next().context("name the file of gains")?)?;
    let curves: PathBuf = args.next().unwrap_or("suite/curves".into()).into();
    let mut energies: BTreeMap<(String, String), (Recipe, f64, f64)> = BTreeMap::new();
    for line in text.lines() {
        let window: Window = serde_json::from_str(line)?;
        let compressed = window.setting != DENSE && !window.setting.contains("dgc");
        if window.from >= SETTLED && compressed {
            let key = (serde_json::to_string(&window.recipe)?, window.setting);
            let sums = energies.entry(key).or_insert((window.recipe, 0.0, 0.0));
            sums.1 += window.buckets.iter().map(|bucket| bucket.sent).sum::<f64>();
            sums.2 += window.buckets.iter().map(|bucket| bucket.compensated).sum::<f64>();
        }
    }
    let mut cases = Vec::new();
    for ((_, setting), (recipe, sent, compensated)) in energies {
        let strategy: Strategy = setting.parse()?;
        let gain = Gain::new((sent / compensated).clamp(1e-6, 1.0))?;
        let law = Delay::of_training(Some(recipe.momentum.into()), None);
        let predicted = Quality::of(&strategy, gain, recipe.world).steps(law).ln();
        let measured: Result<Vec<f64>> =
            (1..=SEEDS).map(|seed| steps_over_dense(&Recipe { seed, ..recipe }, &setting, &curves)).collect();
        cases.push(Case { recipe, predicted, measured: measured? });
    }
    ensure!(!cases.is_empty(), "the file has no gains of steps after {SETTLED}");
    let of = |model: Model, momentum: Option<bool>| -> Vec<&Case> {
        let has = |case: &&Case| momentum.is_none_or(|with| (case.recipe.momentum > 0.0) == with);
        cases.iter().filter(|case| case.recipe.model == model).filter(has).collect()
    };
    println!(
        "model, momentum: settings; rank correlation; of one seed with the others' mean; median error, 90th percentile"
    );
    for model in [Model::Convolutional, Model::Perceptron] {
        for (name, momentum) in [("all", None), ("with", Some(true)), ("without", Some(false))] {
            let cases = of(model, momentum);
            if cases.len() < 3 {
                continue;
            }
            let (predicted, measured) = (each(&cases, |case| case.predicted), each(&cases, Case::mean));
            let seeds: Vec<String> = (0..SEEDS as usize).map(|seed| format!("{:.2}", of_seed(&cases, seed))).collect();
            let errors: Vec<f64> = predicted.iter().zip(&measured).map(|(p, m)| ((p - m).exp() - 1.0).abs()).collect();
            let quantile = |share| 100.0 * score::quantile(&errors, share).unwrap_or(f64::NAN);
            println!(
                "{model:?}, {name}: {}; {:.2}; {}; {:.1} %, {:.1} %",
                cases.len(),
                correlation(&ranks(&predicted), &ranks(&measured)),
                seeds.join(" "),
                quantile(0.5),
                quantile(0.9)
            );
        }
    }
    Ok(())
}

fn each(cases: &[&Case], of: impl Fn(&Case) -> f64) -> Vec<f64> {
    cases.iter().map(|case| of(case)).collect()
}

/// How well a seed's steps tell the mean of the others'.
fn of_seed(cases: &[&Case], seed: usize) -> f64 {
    let own = each(cases, |case| case.measured[seed]);
    let others = each(cases, |case| case.measured.iter().sum::<f64>() - case.measured[seed]);
    correlation(&ranks(&own), &ranks(&others))
}

/// The logarithm of a setting's steps to the target over dense's. One that does not get there takes at least as many as the run has.
fn steps_over_dense(recipe: &Recipe, setting: &str, folder: &std::path::Path) -> Result<f64> {
    let curves = Curves::read(folder, recipe)?.with_context(|| format!("no curves of {recipe:?}"))?;
    let curve = |setting: &str| Ok::<_, anyhow::Error>(score::smooth(&points(&curves.of(setting)?.losses)));
    let dense = curve(DENSE)?;
    let budget: Vec<_> = dense.iter().filter(|point| point.steps <= recipe.steps / BUDGET.0).copied().collect();
    let target = score::target(&budget, BUDGET.1).context("dense has no losses")?;
    let of_dense = score::steps_to(&dense, target).context("dense does not get to its own target")?;
    Ok((score::steps_to(&curve(setting)?, target).unwrap_or(recipe.steps as f64) / of_dense).ln())
}

/// Places in ascending order, those of equal values their mean.
fn ranks(values: &[f64]) -> Vec<f64> {
    let place = |value: &f64| {
        let below = values.iter().filter(|other| *other < value).count();
        let same = values.iter().filter(|other| *other == value).count();
        below as f64 + (same as f64 - 1.0) / 2.0
    };
    values.iter().map(place).collect()
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let (of_a, of_b) = (mean(a), mean(b));
    let sum = |x: &[f64], of_x: f64, y: &[f64], of_y: f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - of_x) * (y - of_y)).sum()
    };
    sum(a, of_a, b, of_b) / (sum(a, of_a, a, of_a) * sum(b, of_b, b, of_b)).sqrt()
}
