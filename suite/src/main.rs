//! The suite's commands; README.md says how they belong together.
#![allow(clippy::print_stdout)]

use anyhow::{Context, Result, anyhow};
use clap::{Parser, Subcommand};
use flexcomm_lab::worker::DEFAULT_FOLDER;
use flexcomm_suite::cells::Cell;
use flexcomm_suite::fixed::{self, Curves};
use flexcomm_suite::ranks::{Data, Recipe};
use flexcomm_suite::{families, score};
use flexcomm_truth::coefficients::Coefficients;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The regret suite: real training under a virtual clock, on networks that change.
#[derive(Parser)]
#[command(name = "flexcomm-suite")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Writes the suite's cells, one file each.
    Cells {
        /// Where to.
        folder: PathBuf,
    },
    /// Trains all fixed settings that the cells of a folder need, and keeps their curves.
    Curves {
        /// Cells.
        #[arg(long, default_value = "target/suite/cells")]
        cells: PathBuf,
        /// Where to.
        #[arg(long, default_value = "target/suite/curves")]
        curves: PathBuf,
        /// Jobs at once.
        #[arg(long, default_value_t = 2)]
        threads: usize,
    },
    /// What the fixed settings take in the cells of a folder.
    Fixed {
        /// Cells.
        #[arg(long, default_value = "target/suite/cells")]
        cells: PathBuf,
        /// Their curves.
        #[arg(long, default_value = "target/suite/curves")]
        curves: PathBuf,
    },
}

fn main() -> Result<()> {
    match Args::parse().command {
        Command::Cells { folder } => {
            std::fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", folder.display()))?;
            for cell in families::cells() {
                let path = folder.join(format!("{}.toml", cell.name));
                let text = toml::to_string(&cell).context("failed to write a cell as TOML")?;
                std::fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
            }
            Ok(())
        }
        Command::Curves { cells, curves, threads } => train(&cells, &curves, threads),
        Command::Fixed { cells, curves } => compare(&cells, &curves),
    }
}

/// Images by number of ranks, read once.
#[derive(Default)]
struct Shared(Mutex<BTreeMap<usize, Arc<Data>>>);

impl Shared {
    fn of(&self, world: usize) -> Result<Arc<Data>> {
        let mut all = self.0.lock().map_err(|_| anyhow!("another thread failed"))?;
        if let Some(data) = all.get(&world) {
            return Ok(data.clone());
        }
        let read = Arc::new(Data::read(DEFAULT_FOLDER.as_ref(), world)?);
        all.insert(world, read.clone());
        Ok(read)
    }
}

/// Trains what no file has yet.
fn train(cells: &Path, curves: &Path, threads: usize) -> Result<()> {
    let mut jobs: Vec<Recipe> = Vec::new();
    for recipe in Cell::read_all(cells)?.iter().flat_map(|cell| cell.seeds.iter().map(|seed| cell.recipe(*seed))) {
        if !jobs.contains(&recipe) && Curves::read(curves, &recipe)?.is_none() {
            jobs.push(recipe);
        }
    }
    let (all, data, jobs) = (jobs.len(), Shared::default(), Mutex::new(jobs.into_iter().enumerate()));
    let next = || jobs.lock().ok().and_then(|mut jobs| jobs.next());
    let work = || -> Result<()> {
        while let Some((number, recipe)) = next() {
            let (begun, data) = (Instant::now(), data.of(recipe.world)?);
            let trained =
                fixed::settings(recipe.momentum).into_iter().map(|setting| fixed::train(recipe, &data, &setting));
            Curves { recipe, curves: trained.collect::<Result<_>>()? }.write(curves)?;
            let (file, seconds) = (fixed::file(curves, &recipe), begun.elapsed().as_secs_f64());
            eprintln!("{}/{all}: {} in {seconds:.0} s", number + 1, file.display());
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
    })
}

/// Seconds to the target by setting, best first, cell by cell.
fn compare(cells: &Path, curves: &Path) -> Result<()> {
    let truth = Coefficients::frozen();
    for cell in Cell::read_all(cells)? {
        let mut seconds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for seed in &cell.seeds {
            let Some(curves) = Curves::read(curves, &cell.recipe(*seed))? else { continue };
            let dense = curves.of(fixed::DENSE).with_context(|| format!("the curves lack {}", fixed::DENSE))?;
            let target = score::target(&score::smooth(&dense.points()), 0.9).context("dense has no points")?;
            for curve in &curves.curves {
                let ends = fixed::replay(&cell, &truth, *seed, curve)?;
                let steps = score::steps_to(&score::smooth(&curve.points()), target);
                let reached = steps.and_then(|steps| score::seconds_at(&ends, steps)).unwrap_or(f64::INFINITY);
                seconds.entry(curve.setting.clone()).or_default().push(reached);
            }
        }
        let Cell { name, world, model, momentum, phase_s, communication_ratio, .. } = &cell;
        let mean = |seconds: &[f64]| score::geometric_mean(seconds.iter().copied()).unwrap_or(f64::INFINITY);
        let mut sorted: Vec<(f64, String)> =
            seconds.iter().map(|(name, seconds)| (mean(seconds), name.clone())).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        println!(
            "{name}: N {world}, {model:?}, momentum {momentum}, phases of {phase_s} s, ratio {communication_ratio}"
        );
        for (seconds, setting) in sorted {
            println!("  {seconds:12.2} s  {setting}");
        }
    }
    Ok(())
}
