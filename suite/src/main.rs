//! The suite's commands; README.md says how they belong together.
#![allow(clippy::print_stdout)]

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Parser, Subcommand};
use flexcomm_lab::worker::DEFAULT_FOLDER;
use flexcomm_suite::baselines::Record;
use flexcomm_suite::calibrate::{Level, Measured};
use flexcomm_suite::cells::Cell;
use flexcomm_suite::fixed::{self, Library, Shared};
use flexcomm_suite::ranks::Recipe;
use flexcomm_suite::reality::{self, MeasuredRun};
use flexcomm_suite::report::{self, Results};
use flexcomm_suite::run::{self, Job, Suite};
use flexcomm_suite::summary::Provenance;
use flexcomm_suite::{calibrate, decider, digests, families, files, record, spot};
use flexcomm_truth::coefficients::Coefficients;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{self, AtomicBool};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Where the suite's cells are, seen from the repository's root.
const CELLS: &str = "suite/cells";
/// And the curves of fixed settings.
const CURVES: &str = "suite/curves";
/// And what does not hang on the deciding program.
const BASELINES: &str = "suite/baselines";
/// And the digest of cells and truth.
const FROZEN: &str = "suite/frozen.json";
/// And experiments with the cells that they played.
const REALITY: &str = "suite/reality";
/// Seeds of a cell whose interval is wide, in a whole run.
const MOST_SEEDS: usize = 6;
/// Fewest steps of a cell whose runs can be compared.
const LEAST_STEPS: u64 = 100;
/// Results.
const TARGET: &str = "target/suite";

/// Cells of `--quick`: each family, all lengths of phases and models, at most eight ranks; of half an hour's phases, where agents and
/// controller take longest, few ranks.
const QUICK: [&str; 12] = [
    "asymmetric-5",
    "bursts-2",
    "bursts-5",
    "c1-2",
    "c1-5",
    "c2-6",
    "good-2",
    "shared-nic-3",
    "slow-node-5",
    "swing-2",
    "swing-4",
    "walk-5",
];

/// The regret suite: real training under a virtual clock, on networks that change.
#[derive(Parser)]
#[command(name = "flexcomm-suite")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs cells and says what they show.
    Run(RunArgs),
    /// What the results that there are show, as after a run: nothing runs.
    Summary {
        #[command(flatten)]
        of: OfCells,
        /// Results; where the files go (default: target/suite, with --recorded target/suite/recorded).
        #[arg(long)]
        target: Option<PathBuf>,
        /// Shows the recorded planner's runs instead, from the baselines.
        #[arg(long)]
        recorded: bool,
        /// Baselines.
        #[arg(long, default_value = BASELINES, requires = "recorded")]
        baselines: PathBuf,
    },
    /// The communication_ratio of a cell: of a dense step, transfers over computing, by the truth.
    Ratio {
        /// The cell's file; its own communication_ratio does not matter.
        cell: PathBuf,
        /// Other coefficients of the truth.
        #[arg(long)]
        truth: Option<PathBuf>,
    },
    /// Writes the suite's cells, one file each.
    Cells {
        /// Where to.
        #[arg(default_value = CELLS)]
        folder: PathBuf,
    },
    /// Trains all fixed settings that the cells of a folder need, and keeps their curves.
    Curves {
        /// Cells.
        #[arg(long, default_value = CELLS)]
        cells: PathBuf,
        /// Where to.
        #[arg(long, default_value = CURVES)]
        curves: PathBuf,
        #[command(flatten)]
        common: Common,
    },
    /// What each fixed setting took in the cells that ran.
    Fixed {
        /// Results.
        #[arg(long, default_value = TARGET)]
        target: PathBuf,
    },
    /// Keeps the results that there are as baselines.
    Record {
        /// Keeps flexcomm's runs as the recorded planner's, too: the commit whose planner ran.
        #[arg(long, value_name = "COMMIT")]
        planner: Option<String>,
        #[command(flatten)]
        of: OfCells,
        /// Where to.
        #[arg(long, default_value = BASELINES)]
        baselines: PathBuf,
        /// Results.
        #[arg(long, default_value = TARGET)]
        target: PathBuf,
    },
    /// Keeps the digest of the cells and the truth as the frozen one.
    Freeze,
    /// Coefficients with which the truth takes as long as a machine on which python/bench/calibrate.py measured.
    Calibrate {
        /// What was measured (measured.json).
        measured: PathBuf,
        /// The file for --truth.
        #[arg(long)]
        out: PathBuf,
        /// What was not measured.
        #[arg(long, default_value = "truth/src/truth.toml")]
        base: PathBuf,
        /// Fits to each collective's first decile, where other processes kept the machine busy, not to the median.
        #[arg(long)]
        first_decile: bool,
    },
    /// What an experiment's settings took (python/bench/experiment.py --cell) beside what the truth says, and whether that is near
    /// enough.
    Compare {
        /// The experiment's results.json; without it all cells of suite/reality are compared.
        #[arg(requires = "cell")]
        results: Option<PathBuf>,
        /// What was played.
        #[arg(long, requires = "results")]
        cell: Option<PathBuf>,
        /// Coefficients of the machine that played it.
        #[arg(long, default_value = "suite/reality/uml.toml")]
        truth: PathBuf,
        /// Also as JSON, a list.
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

#[derive(clap::Args)]
struct Common {
    /// Fashion-MNIST.
    #[arg(long, default_value = DEFAULT_FOLDER)]
    data: PathBuf,
    /// Jobs at once.
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,
}

/// What results are of.
#[derive(clap::Args)]
struct OfCells {
    /// Cells.
    #[arg(long, default_value = CELLS)]
    cells: PathBuf,
    /// Other coefficients of the truth.
    #[arg(long)]
    truth: Option<PathBuf>,
    /// Curves of fixed settings; those that it lacks are with the results.
    #[arg(long, default_value = CURVES)]
    curves: PathBuf,
}

impl OfCells {
    /// For results in a folder, which are shown: nothing is trained.
    fn read(&self, target: &Path) -> Result<(Vec<Cell>, Coefficients, Library)> {
        let (curves, trained) = (self.curves.clone(), target.join("curves"));
        let library = Library::new(curves, trained, Shared::new(DEFAULT_FOLDER.into()), Arc::default());
        Ok((Cell::read_all(&self.cells)?, truth(self.truth.as_deref())?, library))
    }
}

#[derive(clap::Args)]
struct RunArgs {
    #[command(flatten)]
    of: OfCells,
    /// Of those only some: names, with commas between them.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// A dozen cells with one seed each.
    #[arg(long, conflicts_with = "only")]
    quick: bool,
    /// Runs of each cell; its first seeds.
    #[arg(long)]
    seeds: Option<usize>,
    /// Where the whole has time left of so many hours, cells whose intervals are wide get further seeds, the widest first.
    #[arg(long, default_value_t = 2.5, value_parser = parse_hours)]
    hours: f64,
    /// Baselines; missing ones are computed and kept with the results.
    #[arg(long, default_value = BASELINES)]
    baselines: PathBuf,
    /// Where results go.
    #[arg(long, default_value = TARGET)]
    target: PathBuf,
    /// Uses no result of an earlier run.
    #[arg(long)]
    anew: bool,
    #[command(flatten)]
    common: Common,
}

/// The file that says what is frozen.
#[derive(Serialize, Deserialize)]
struct Frozen {
    /// Of cells and truth.
    digest: String,
}

fn main() -> Result<()> {
    match Args::parse().command {
        Command::Run(args) => run(args),
        Command::Cells { folder } => families::drawn().iter().try_for_each(|drawn| {
            let cell = families::fitted(drawn, &Coefficients::frozen())?;
            let text = toml::to_string(&cell).context("failed to write a cell as TOML")?;
            files::write(&folder.join(format!("{}.toml", cell.name)), &text)
        }),
        Command::Curves { cells, curves, common } => {
            let stop = flexcomm_signals::stop_or_end().context("failed to wait for Ctrl-C")?;
            let library = Library::new(curves.clone(), curves, Shared::new(common.data), stop.clone());
            let cells = Cell::read_all(&cells)?;
            let recipes = cells.iter().flat_map(|cell| cell.seeds.iter().map(|seed| cell.recipe(*seed)));
            unless_stopped(train(recipes, &library, common.threads), &stop)
        }
        Command::Fixed { target } => print_fixed(&target.join("results")),
        Command::Record { planner, of, baselines, target } => {
            let (cells, truth, library) = of.read(&target)?;
            let results = report::read(&target.join("results"), &cells, &truth, &library)?;
            record::record(&baselines, results, planner.as_deref())
        }
        Command::Summary { of, target, recorded, baselines } => {
            let default = if recorded { Path::new(TARGET).join("recorded") } else { TARGET.into() };
            summary(&of, &target.unwrap_or(default), recorded.then_some(&baselines))
        }
        Command::Ratio { cell, truth } => {
            let (cell, truth) = (Cell::read(&cell)?, self::truth(truth.as_deref())?);
            println!("communication_ratio = {}", families::communication_ratio(&cell, &truth)?);
            Ok(())
        }
        Command::Freeze => {
            let cells = Cell::read_all(CELLS.as_ref())?;
            let mut missing: Vec<String> = families::drawn().into_iter().map(|cell| cell.name).collect();
            missing.retain(|name| cells.iter().all(|cell| cell.name != *name));
            ensure!(missing.is_empty(), "{CELLS} lacks {}", missing.join(", "));
            let digest = digests::frozen_digest(&cells, &Coefficients::frozen())?;
            let before = frozen().map_or("none".to_owned(), |frozen| frozen.digest);
            println!("{FROZEN}: {} cells and the truth have the digest {digest}; it was {before}", cells.len());
            if digest != before {
                println!("{BASELINES} are of the cells and the truth before: run all cells, and `record` them");
            }
            files::write_json(FROZEN.as_ref(), &Frozen { digest })
        }
        Command::Calibrate { measured, out, base, first_decile } => {
            let level = if first_decile { Level::FirstDecile } else { Level::Median };
            let (path, measured): (_, Measured) = (&measured, files::read_json(&measured)?);
            let data = Shared::new(DEFAULT_FOLDER.into()).of(measured.world)?;
            let calibrated = calibrate::calibrate(&measured, level, &self::truth(Some(&base))?, &data)?;
            let coefficients = toml::to_string(&calibrated.truth).context("failed to write coefficients as TOML")?;
            files::write(&out, &format!("# By `flexcomm-suite calibrate {}`.\n\n{coefficients}", path.display()))?;
            print!("{calibrated}");
            Ok(())
        }
        Command::Compare { results, cell, truth, out } => {
            let given = results.zip(cell).map(|(results, cell)| vec![Played { cell, results }]);
            compare_with_reality(&given.map_or_else(kept_experiments, Ok)?, &truth, out.as_deref())
        }
    }
}

/// A number of hours that is not below 0.
fn parse_hours(text: &str) -> Result<f64> {
    let hours: f64 = text.parse().with_context(|| format!("{text} is no number of hours"))?;
    ensure!(hours >= 0.0 && hours.is_finite(), "{text} hours, allowed is 0 and more");
    Ok(hours)
}

/// Ends the process as shells expect it after Ctrl-C.
fn unless_stopped(result: Result<()>, stop: &AtomicBool) -> Result<()> {
    if stop.load(atomic::Ordering::Relaxed) {
        eprintln!("stopped; what is done is kept, the same command goes on from there");
        std::process::exit(flexcomm_signals::INTERRUPTED);
    }
    result
}

/// Trains what no file has yet.
fn train(recipes: impl Iterator<Item = Recipe>, library: &Library, threads: NonZeroUsize) -> Result<()> {
    let mut jobs: Vec<Recipe> = Vec::new();
    for recipe in recipes {
        if !jobs.contains(&recipe) && library.read(&recipe, &fixed::settings(recipe.momentum))?.is_none() {
            jobs.push(recipe);
        }
    }
    let (all, jobs) = (jobs.len(), Mutex::new(jobs.into_iter().enumerate()));
    let next = || jobs.lock().ok().and_then(|mut jobs| jobs.next());
    let work = || -> Result<()> {
        while let Some((number, recipe)) = next() {
            library.curves(&recipe, &fixed::settings(recipe.momentum))?;
            eprintln!("{}/{all}: {}", number + 1, fixed::file(&library.trained, &recipe).display());
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.get()).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
    })
}

/// A cell, and what an experiment that played it took.
struct Played {
    cell: PathBuf,
    results: PathBuf,
}

/// What suite/reality keeps.
fn kept_experiments() -> Result<Vec<Played>> {
    let cells = files::in_folder(REALITY.as_ref(), |name| name.ends_with(".toml"))?;
    let played = |cell: PathBuf| Played { results: cell.with_extension("json"), cell };
    // Coefficients are there, too.
    Ok(cells.into_iter().map(played).filter(|played| played.results.exists()).collect())
}

/// What experiments took beside what the truth says.
fn compare_with_reality(all: &[Played], truth: &Path, out: Option<&Path>) -> Result<()> {
    let (truth, data) = (self::truth(Some(truth))?, Shared::new(DEFAULT_FOLDER.into()));
    let mut compared = Vec::new();
    for Played { cell, results } in all {
        let (runs, cell): (Vec<MeasuredRun>, _) = (files::read_json(results)?, Cell::read(cell)?);
        if !reality::check_plan(results, &cell)? && results.file_stem() != Some(cell.name.as_ref()) {
            eprintln!(
                "no plan.json is beside {}: that it is of the cell {} is not known",
                results.display(),
                cell.name
            );
        }
        let one = reality::compare(&runs, &cell, &truth, &data.of(cell.world)?)?;
        println!("{one}");
        compared.push(one);
    }
    out.map_or(Ok(()), |out| files::write_json(out, &compared))?;
    let closing = reality::closing(&compared);
    ensure!(!compared.is_empty() && compared.iter().all(reality::Comparison::passes), "{closing}");
    println!("{closing}");
    Ok(())
}

/// Those of the cells that are asked for.
fn chosen(cells: &[Cell], args: &RunArgs) -> Result<Vec<Job>> {
    let only: Vec<&str> = args.only.iter().map(|name| name.trim()).collect();
    ensure!(!only.contains(&""), "--only names a cell without a name");
    let names: Vec<&str> = cells.iter().map(|cell| cell.name.as_str()).collect();
    let wanted: Vec<&str> = match (args.quick, only.is_empty()) {
        (true, _) => QUICK.into(),
        (_, false) => only,
        _ => names.clone(),
    };
    let unknown: Vec<&str> = wanted.iter().filter(|name| !names.contains(name)).copied().collect();
    let (unknown, there, folder) = (unknown.join(", "), names.join(", "), args.of.cells.display());
    ensure!(unknown.is_empty(), "{folder} has no cell {unknown}; it has {there}");
    let most = args.seeds.unwrap_or(if args.quick { 1 } else { usize::MAX });
    ensure!(most > 0, "--seeds is 0, at least one is needed");
    let job = |cell: &Cell| {
        let (there, name) = (cell.seeds.len(), &cell.name);
        ensure!(
            cell.steps >= LEAST_STEPS,
            "{name} has {} steps: at least {LEAST_STEPS} are needed, since dense's budget is a third of them and its loss is \
             taken every 25",
            cell.steps
        );
        ensure!(args.seeds.is_none_or(|most| most <= there), "--seeds is {most}, {name} has {there}");
        Ok(Job { cell: cell.clone(), seeds: cell.seeds.iter().copied().take(most).collect() })
    };
    cells.iter().filter(|cell| wanted.contains(&cell.name.as_str())).map(job).collect()
}

fn truth(file: Option<&Path>) -> Result<Coefficients> {
    let Some(path) = file else { return Ok(Coefficients::frozen()) };
    let text = std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))?;
    Coefficients::parse(&path.display().to_string(), &text).map_err(|error| anyhow!("failed to {error}"))
}

fn frozen() -> Option<Frozen> {
    files::read_json(FROZEN.as_ref()).ok()
}

/// What a table of these cells under this truth, by that program, is of.
fn provenance(cells: &[Cell], truth: &Coefficients, binary: String, incomplete: Vec<String>) -> Result<Provenance> {
    let digest = digests::frozen_digest(cells, truth)?;
    let frozen = frozen().is_some_and(|frozen| frozen.digest == digest);
    Ok(Provenance { digest, frozen, binary, incomplete })
}

fn run(args: RunArgs) -> Result<()> {
    let begun = Instant::now();
    let cells = Cell::read_all(&args.of.cells)?;
    let jobs = chosen(&cells, &args)?;
    let truth = truth(args.of.truth.as_deref())?;
    run::check_compressors(&cells, &truth)?;
    let binary = digests::binary_digest()?;
    let provenance = provenance(&cells, &truth, binary.clone(), Vec::new())?;
    let Common { data, threads } = args.common;
    ensure!(
        data.join("train-images-idx3-ubyte.gz").exists(),
        "{} has no Fashion-MNIST (Debian: apt install dataset-fashion-mnist; another folder: --data)",
        data.display()
    );
    let stop = flexcomm_signals::stop_or_end().context("failed to wait for Ctrl-C")?;
    let library = Library::new(args.of.curves, args.target.join("curves"), Shared::new(data), stop.clone());
    let is_part = args.quick || !args.only.is_empty() || args.seeds.is_some();
    let mut suite = Suite {
        truth,
        library,
        decided: Box::new(decider::decided),
        checked: Box::new(spot::check),
        binary,
        results: args.target.join("results"),
        baselines: args.baselines,
        resume: !args.anew,
        most_seeds: if is_part { 0 } else { MOST_SEEDS },
        add_within_s: args.hours * 3600.0,
    };
    let recipes = jobs.iter().flat_map(|job| job.seeds.iter().map(|seed| job.cell.recipe(*seed)));
    unless_stopped(train(recipes, &suite.library, threads), &stop)?;
    suite.add_within_s -= begun.elapsed().as_secs_f64();
    let records = suite.all(&jobs, threads);
    unless_stopped(Ok(()), &stop)?;
    show(&args.target, &records, provenance)
}

/// The same of results that are there, or of what baselines have recorded.
fn summary(of: &OfCells, target: &Path, baselines: Option<&PathBuf>) -> Result<()> {
    let (cells, truth, library) = of.read(target)?;
    let results = match baselines {
        Some(baselines) => report::recorded(baselines, &cells, &truth, &library),
        None => report::read(&target.join("results"), &cells, &truth, &library),
    };
    let Results { records, incomplete, binary } = results?;
    let provenance = provenance(&cells, &truth, binary, incomplete)?;
    show(target, &records, provenance)
}

/// Writes and prints what results show. Those that ended with an error make it fail.
fn show(target: &Path, records: &[Record], provenance: Provenance) -> Result<()> {
    let summary = report::write(target, records, provenance)?;
    // Who closes the pipe has seen enough.
    _ = writeln!(
        std::io::stdout(),
        "{}\n{1}/summary.json, {1}/*.svg, {1}/cells/*.svg",
        summary.table(),
        target.display()
    );
    let failures = run::failures(records);
    ensure!(failures.is_empty(), "{} cells or runs ended with an error\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

/// Seconds to the target by setting, best first, cell by cell.
fn print_fixed(results: &Path) -> Result<()> {
    for Record { name, cell, baselines, .. } in run::read_records(results)? {
        let Cell { world, model, momentum, phase_s, communication_ratio, .. } = cell;
        println!(
            "{name}: N {world}, {model:?}, momentum {momentum}, phases of {phase_s} s, ratio {communication_ratio}"
        );
        let mut sorted: Vec<_> =
            baselines.settings().into_iter().map(|setting| (baselines.mean_seconds(setting), setting)).collect();
        sorted.sort_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
        for (seconds, setting) in sorted {
            let points = 100.0 * baselines.accuracy_over_dense(setting).unwrap_or(f64::NAN);
            println!("  {:12.2} s  {points:+6.2} points  {setting}", seconds.unwrap_or(f64::NAN));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen_of(cells: &[Cell], given: &[&str]) -> Result<Vec<Job>> {
        let Command::Run(args) = Args::try_parse_from([&["suite", "run"], given].concat())?.command else {
            panic!("run")
        };
        chosen(cells, &args)
    }

    fn chosen_by(given: &[&str]) -> Result<Vec<Job>> {
        chosen_of(&Cell::read_all(concat!(env!("CARGO_MANIFEST_DIR"), "/cells").as_ref()).unwrap(), given)
    }

    #[test]
    fn cells_of_few_steps_are_refused() {
        let mut cells = Cell::read_all(concat!(env!("CARGO_MANIFEST_DIR"), "/cells").as_ref()).unwrap();
        cells[0].steps = 99;
        let error = chosen_of(&cells, &[]).unwrap_err().to_string();
        assert!(error.starts_with("asymmetric-1 has 99 steps: at least 100"), "{error}");
        assert_eq!(chosen_of(&cells[1..], &[]).unwrap().len(), cells.len() - 1);
    }

    #[test]
    fn cells_and_seeds_are_those_that_are_asked_for() {
        let jobs = chosen_by(&["--only", "swing-4, good-2", "--seeds", "2"]).unwrap();
        let chosen: Vec<_> = jobs.iter().map(|job| (job.cell.name.as_str(), job.seeds.len())).collect();
        assert_eq!(chosen, [("good-2", 2), ("swing-4", 2)]);
        let error = |given: &[&str]| chosen_by(given).unwrap_err().to_string();
        assert!(error(&["--only", "swing-4, "]).contains("a cell without a name"));
        assert!(error(&["--only", "swing-4", "--seeds", "99"]).contains("--seeds is 99, swing-4 has 3"));
        assert!(error(&["--seeds", "0"]).contains("--seeds is 0, at least one"));
        for hours in ["-1", "nan", "soon"] {
            assert!(error(&["--hours", hours]).contains(hours), "{}", error(&["--hours", hours]));
        }
        assert!(error(&["--threads", "0"]).contains("--threads <THREADS>'"), "{}", error(&["--threads", "0"]));
    }
}
