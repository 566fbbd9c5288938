//! Runs cells: fixed settings played through their networks, and what adapts trained anew, each kept in a file as soon as it is there.

use crate::adaptive::{AdaptiveRun, Experiments, RunUntil};
use crate::baselines::{Adapted, Baselines, Course, Lost, Record, oracle_script, random_script};
use crate::cells::Cell;
use crate::decider::{Decider, Wanted};
use crate::digests;
use crate::files;
use crate::fixed::{self, Curves, DENSE, Library, Setting};
use crate::ranks::{Data, Model, Recipe};
use crate::reaction;
use crate::score;
use crate::steps;
use anyhow::{Context, Result, anyhow, ensure};
use flexcomm_truth::coefficients::Coefficients;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Runs a cell, whoever decides. An argument of [`Suite`], so that tests need no training.
pub type Decided = dyn Fn(&Cell, &Coefficients, Arc<Data>, Wanted) -> Result<AdaptiveRun> + Send + Sync;

/// Whether a job's curves are what the deciding program, of that digest, trains. An argument of [`Suite`] for the same reason.
pub type Checked = dyn Fn(&Library, &Recipe, &Curves, &str) -> Result<()> + Send + Sync;

/// A panic is an error: one run does not end those of other cells.
fn unless_panicked<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(anyhow!("panicked: {}", text.unwrap_or("without a message")))
    })
}

/// Half of an interval's width, as a logarithm, above which a cell gets more seeds.
const WIDE: f64 = 0.05;

/// Whether the truth has the compressors of all fixed settings.
///
/// # Errors
/// Names the first that it lacks.
pub fn check_compressors(cells: &[Cell], truth: &Coefficients) -> Result<()> {
    let settings = |cell: &Cell| fixed::settings(cell.momentum);
    let mut of_cells = cells.iter().flat_map(|cell| settings(cell).into_iter().map(move |setting| (cell, setting)));
    of_cells.try_for_each(|(cell, (setting, strategy))| {
        let of_setting = || format!("the fixed setting {setting} of {}", cell.name);
        steps::codec(truth, cell, strategy.spec()).with_context(of_setting).map(|_| ())
    })
}

/// What cells are run with.
pub struct Suite {
    /// What networks and machines do.
    pub truth: Coefficients,
    /// Curves and images, and whether to stop.
    pub library: Library,
    /// Runs what adapts.
    pub decided: Box<Decided>,
    /// Checks curves before they are used.
    pub checked: Box<Checked>,
    /// Of the deciding program.
    pub binary: String,
    /// A file for each cell.
    pub results: PathBuf,
    /// Baselines that are kept, a file for each cell. Not written.
    pub baselines: PathBuf,
    /// Whether files of `results` are used again.
    pub resume: bool,
    /// A cell whose interval is wide gets as many, ...
    pub most_seeds: usize,
    /// ... of which none is begun that would not have ended so many seconds after the start.
    pub add_within_s: f64,
}

/// A cell, and its seeds to begin with.
#[derive(Debug, Clone)]
pub struct Job {
    /// The cell.
    pub cell: Cell,
    /// Those of its seeds that run.
    pub seeds: Vec<u64>,
}

impl Job {
    /// How long it takes, in seconds of a core here, within half and twice as long.
    fn size(&self) -> f64 {
        let Cell { world, steps, model, compute_s, .. } = self.cell;
        let train_s = match model {
            Model::Perceptron => 0.005,
            Model::Convolutional => 0.014,
        };
        // Agents probe and the controller looks as long as the network lasts.
        (self.seeds.len() * world) as f64 * steps as f64 * (train_s + 0.002 * compute_s)
    }
}

/// All that ended with an error: cells, and runs of flexcomm and of the controls.
pub fn failures(records: &[Record]) -> Vec<String> {
    let of = |record: &Record| {
        let Record { name, flexcomm, baselines: Baselines { oracle, random, .. }, .. } = record;
        let runs = [("flexcomm", flexcomm), ("oracle", oracle), ("random", random)];
        let failed = runs.into_iter().flat_map(|(who, runs)| runs.iter().map(move |run| (who, run)));
        let text = |(who, run): (&str, &Adapted)| {
            // A run that is missing since its cell failed is told with the cell.
            let error = run.error.as_ref().filter(|_| run.error != record.error)?;
            Some(format!("{name}, seed {}, {who}: {error}", run.seed))
        };
        let cell = record.error.as_ref().map(|error| format!("{name}: {error}"));
        cell.into_iter().chain(failed.filter_map(text)).collect::<Vec<_>>()
    };
    records.iter().flat_map(of).collect()
}

/// All results of a folder, by name.
///
/// # Errors
/// There are none; a file that cannot be read, or is not named as its cell.
pub fn read_records(folder: &Path) -> Result<Vec<Record>> {
    let of = |path: &PathBuf| {
        let record: Record =
            files::read_json(path).with_context(|| format!("failed to read {} as a cell's results", path.display()))?;
        let (name, file) = (&record.name, path.display());
        ensure!(*path == path_of(folder, name), "{file} has the results of {name}: remove it, or name it {name}.json");
        Ok(record)
    };
    let paths = if folder.exists() { files::in_folder(folder, |name| name.ends_with(".json"))? } else { Vec::new() };
    ensure!(!paths.is_empty(), "{} has no results; `./dev suite` makes them", folder.display());
    paths.iter().map(of).collect()
}

pub(crate) fn path_of(folder: &Path, cell: &str) -> PathBuf {
    folder.join(format!("{cell}.json"))
}

impl Suite {
    fn digest(&self, cell: &Cell, seeds: &[u64]) -> Result<Option<String>> {
        digests::baselines_digest(&self.library, &self.truth, cell, seeds)
    }

    /// Baselines that hold for the cell as it is now.
    fn valid(&self, job: &Job, baselines: &Baselines) -> Result<bool> {
        let covers = job.seeds.iter().all(|seed| baselines.seeds.contains(seed));
        Ok(covers && self.digest(&job.cell, &baselines.seeds)?.as_ref() == Some(&baselines.digest))
    }

    /// A seed's curves, which are this program's.
    fn curves(&self, cell: &Cell, seed: u64, settings: &[Setting]) -> Result<Curves> {
        let recipe = cell.recipe(seed);
        let curves = self.library.curves(&recipe, settings)?;
        (self.checked)(&self.library, &recipe, &curves, &self.binary)?;
        Ok(curves)
    }

    /// What is known of a cell before it runs.
    fn begin(&self, job: &Job, record: &mut Record) -> Result<()> {
        let Job { cell, seeds } = job;
        let settings = fixed::settings(cell.momentum);
        for seed in seeds {
            self.curves(cell, *seed, &settings)?;
        }
        record.baselines.digest = self.digest(cell, seeds)?.context("curves are missing")?;
        let kept: Option<Baselines> = files::read_json_if_there(&path_of(&self.baselines, &cell.name))?;
        let before: Option<Record> =
            self.resume.then(|| files::read_json(&path_of(&self.results, &cell.name)).ok()).flatten();
        if let Some(before) = before
            && self.valid(job, &before.baselines)?
        {
            record.baselines = before.baselines;
            if before.binary == self.binary {
                let added = before.seeds.iter().filter(|seed| !seeds.contains(seed));
                record.seeds.extend(added.take(self.most_seeds.saturating_sub(seeds.len())));
                record.flexcomm = before.flexcomm;
            }
        }
        if let Some(kept) = kept
            && self.valid(job, &kept)?
        {
            // What was recorded since comes along; what ran here since stays.
            if record.baselines.fixed.is_empty() || record.baselines.digest != kept.digest {
                record.baselines = kept;
            } else {
                record.baselines.recorded_planner = kept.recorded_planner;
            }
        }
        let Baselines { oracle, random, .. } = &mut record.baselines;
        // A control's error may be gone with this program.
        [oracle, random].into_iter().for_each(|runs| runs.retain(|run| run.error.is_none()));
        Ok(())
    }

    fn keep(&self, record: &Record) -> Result<()> {
        files::write_json(&path_of(&self.results, &record.name), record)
    }

    /// A cell, as far as it could be run.
    pub fn cell(&self, job: &Job) -> Record {
        let mut record = Record::new(job, &self.binary);
        if let Err(error) = unless_panicked(|| self.complete(job, &mut record)) {
            record.fail(format!("{error:#}"));
        }
        record
    }

    /// All of a cell that is not there yet.
    fn complete(&self, job: &Job, record: &mut Record) -> Result<()> {
        self.begin(job, record)?;
        let cell = &job.cell;
        let settings = fixed::settings(cell.momentum);
        for seed in record.baselines.seeds.clone() {
            let curves = self.library.curves(&cell.recipe(seed), &settings)?;
            for (setting, _) in &settings {
                self.go_on()?;
                record.baselines.add_fixed(cell, &self.truth, &curves, setting)?;
            }
        }
        let curves = self.library.curves(&cell.recipe(record.baselines.seeds[0]), &settings)?;
        record.baselines.add_lines(cell, &self.truth, &curves)?;
        record.baselines.add_phases(cell, &self.truth, &curves)?;
        self.keep(record)?;
        for seed in job.seeds.clone() {
            self.adapt(record, seed, Decider::Flexcomm)?;
            self.adapt_oracle(record, cell, seed)?;
            let random = random_script(cell, seed, record.baselines.counts_until(seed)?);
            self.adapt(record, seed, Decider::Random(random))?;
        }
        self.keep(record)
    }

    /// Adds seeds to the cells that are done, to those with the widest intervals first, while there is time.
    fn narrow(&self, done: &Mutex<Vec<(f64, Record)>>, begun: Instant) {
        while self.go_on().is_ok() {
            let widest = {
                let Ok(mut done) = done.lock() else { return };
                let left_s = self.add_within_s - begun.elapsed().as_secs_f64();
                let wide = |(at, (_, record)): (usize, &(f64, Record))| {
                    let one = Job { cell: record.cell.clone(), seeds: vec![0] };
                    Some((self.wide(record).filter(|_| one.size() <= left_s)?, at))
                };
                let widest = done.iter().enumerate().filter_map(wide).max_by(|a, b| a.0.total_cmp(&b.0));
                widest.map(|(half, at)| (half, done.swap_remove(at)))
            };
            let Some((half, (size, mut record))) = widest else { return };
            let before = record.clone();
            let added = unless_panicked(|| self.add_seed(half, &mut record));
            if let Err(error) = &added {
                eprintln!("{}: no seed is added: {error:#}", record.name);
            }
            let Ok(mut done) = done.lock() else { return };
            done.push((size, if added.is_ok() { record } else { before }));
            if added.is_err() {
                return;
            }
        }
    }

    /// A further seed of a cell, of dense, the best fixed setting, flexcomm and the oracle.
    fn add_seed(&self, half: f64, record: &mut Record) -> Result<()> {
        let seed = 1 + record.seeds.iter().max().copied().unwrap_or(0);
        let cell = Cell { name: record.name.clone(), ..record.cell.clone() };
        let best = record.baselines.best_fixed().context("no fixed setting ran")?.to_owned();
        eprintln!("{}: its interval is ±{half:.2}, seed {seed} is added", cell.name);
        let mut few = fixed::settings(cell.momentum);
        few.retain(|(name, _)| name == DENSE || *name == best);
        let curves = self.curves(&cell, seed, &few)?;
        for (setting, _) in &few {
            record.baselines.add_fixed(&cell, &self.truth, &curves, setting)?;
        }
        self.adapt(record, seed, Decider::Flexcomm)?;
        self.adapt_oracle(record, &cell, seed)?;
        record.seeds.push(seed);
        self.keep(record)
    }

    fn adapt_oracle(&self, record: &mut Record, cell: &Cell, seed: u64) -> Result<()> {
        let until = record.baselines.counts_until(seed)?;
        let script = oracle_script(cell, &record.baselines.phases, until)?;
        self.adapt(record, seed, Decider::Oracle(script))
    }

    fn go_on(&self) -> Result<()> {
        ensure!(!self.library.stop.load(Ordering::Relaxed), "stopped");
        Ok(())
    }

    /// Half of the width of a cell's interval where that asks for another seed.
    fn wide(&self, record: &Record) -> Option<f64> {
        let failed = record.error.is_some() || record.flexcomm.iter().any(|run| run.error.is_some());
        if failed || record.seeds.len() >= self.most_seeds {
            return None;
        }
        let ratios = record.ratios(&record.flexcomm, record.baselines.best_fixed()?);
        score::half_width(&ratios).filter(|half| *half > WIDE)
    }

    /// Adds a run that adapts, unless it is there.
    fn adapt(&self, record: &mut Record, seed: u64, who: Decider) -> Result<()> {
        self.go_on()?;
        let runs = match &who {
            Decider::Flexcomm => &record.flexcomm,
            Decider::Oracle(_) => &record.baselines.oracle,
            Decider::Random(_) => &record.baselines.random,
        };
        if runs.iter().any(|run| run.seed == seed) {
            return Ok(());
        }
        let cell = Cell { name: record.name.clone(), ..record.cell.clone() };
        let data = self.library.data.of(cell.world)?;
        // Only of flexcomm's runs is the final accuracy asked for.
        let (target, is_whole) = (record.baselines.target(seed)?, who == Decider::Flexcomm);
        let goal = RunUntil { target, late_s: record.baselines.counts_until(seed)?, is_whole };
        let wanted = Wanted { seed, goal, who: who.clone() };
        let adapted = match unless_panicked(|| (self.decided)(&cell, &self.truth, data, wanted)) {
            Ok(ran) => {
                let adapted = adapted(record, seed, ran)?;
                // A cell takes minutes.
                if who == Decider::Flexcomm {
                    let after = adapted.seconds.map_or("not".to_owned(), |seconds| format!("after {seconds:.0} s"));
                    eprintln!("{}, seed {seed}: flexcomm reaches the target {after}", cell.name);
                }
                adapted
            }
            Err(error) => {
                let error = format!("{error:#}");
                eprintln!("{}, seed {seed}, {}: {error}", cell.name, who.name());
                Adapted { seed, error: Some(error), ..Adapted::default() }
            }
        };
        match who {
            Decider::Flexcomm => &mut record.flexcomm,
            Decider::Oracle(_) => &mut record.baselines.oracle,
            Decider::Random(_) => &mut record.baselines.random,
        }
        .push(adapted);
        self.keep(record)
    }

    /// All jobs, the longest first, by so many threads; then further seeds of those that need them.
    pub fn all(&self, jobs: &[Job], threads: NonZeroUsize) -> Vec<Record> {
        let mut sorted: Vec<&Job> = jobs.iter().collect();
        sorted.sort_by(|a, b| b.size().total_cmp(&a.size()));
        let (left, done) = (Mutex::new(sorted.into_iter()), Mutex::new(Vec::new()));
        let (begun, all) = (Instant::now(), jobs.iter().map(Job::size).sum::<f64>());
        let next = || left.lock().ok().and_then(|mut left| left.next()).filter(|_| self.go_on().is_ok());
        let work = |number: usize| {
            stay_on_processor(number);
            while let Some(job) = next() {
                let (began, record) = (Instant::now(), self.cell(job));
                let Ok(mut done) = done.lock() else { return };
                let outcome = in_words(&record);
                done.push((job.size(), record));
                let share = done.iter().map(|(size, _)| size).sum::<f64>() / all;
                let elapsed = begun.elapsed().as_secs_f64();
                let (number, count, seconds) = (done.len(), jobs.len(), began.elapsed().as_secs_f64());
                let minutes = elapsed * (1.0 - share) / share / 60.0;
                eprintln!("[{number}/{count}] {}: {outcome}, {seconds:.0} s; {minutes:.0} min left", job.cell.name);
            }
            self.narrow(&done, begun);
        };
        let work = &work;
        std::thread::scope(|scope| (0..threads.get()).for_each(|number| drop(scope.spawn(move || work(number)))));
        let done = done.into_inner().unwrap_or_default();
        let mut records: Vec<Record> = done.into_iter().map(|(_, record)| record).collect();
        records.sort_by_key(|record| jobs.iter().position(|job| job.cell.name == record.name));
        records
    }
}

/// Keeps a thread, and those that it starts, on one of the processors that it may use: a run and the SQLite of its controller hand over
/// to each other many times a second, which wakes another processor each time where they are not on the same.
fn stay_on_processor(number: usize) {
    let this = Pid::from_raw(0);
    let Ok(allowed) = sched_getaffinity(this) else { return };
    let usable: Vec<usize> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu) == Ok(true)).collect();
    let mut one = CpuSet::new();
    // Where that fails the run is slower, and the same.
    if usable.get(number % usable.len().max(1)).is_some_and(|cpu| one.set(*cpu).is_ok()) {
        _ = sched_setaffinity(this, &one);
    }
}

fn in_words(record: &Record) -> String {
    if let Some(error) = &record.error {
        return error.clone();
    }
    let best = record.baselines.best_fixed().unwrap_or_default();
    let ratio = score::geometric_mean(record.ratios(&record.flexcomm, best)).unwrap_or(f64::NAN);
    format!("{ratio:.2} times the best fixed setting ({best})")
}

/// What is kept of a run.
fn adapted(record: &Record, seed: u64, ran: AdaptiveRun) -> Result<Adapted> {
    let course = Course::new(&ran.ends, &ran.losses);
    let reached = course.reached(record.baselines.measure(seed).context("dense comes first")?.target);
    let counted = record.baselines.counted(seed, reached.map(|r| r.seconds)).context("dense comes first")?;
    let (until, phases) = (ran.until(counted), &record.baselines.phases);
    let experiments: Experiments = until.spent.iter().map(|spent| spent.on).sum();
    let reactions = reaction::of(&until, &record.cell, phases);
    let lost = Lost { waiting_s: reactions.lost_s, exploring_s: experiments.seconds + experiments.shadow_seconds };
    let predictions = ran.predictions.into_iter().filter(|prediction| prediction.at_s <= counted).collect();
    Ok(Adapted {
        seed,
        error: None,
        steps: reached.map(|r| r.steps),
        seconds: reached.map(|r| r.seconds),
        accuracy: ran.accuracy,
        line: course.line(),
        reactions,
        lost,
        switches: ran.switches,
        experiments,
        predictions,
        problems: ran.problems,
    })
}

impl Record {
    /// Of a cell that nothing is known of.
    fn new(Job { cell, seeds }: &Job, binary: &str) -> Self {
        Self {
            name: cell.name.clone(),
            cell: cell.clone(),
            seeds: seeds.clone(),
            baselines: Baselines { seeds: seeds.clone(), ..Baselines::default() },
            binary: binary.to_owned(),
            flexcomm: Vec::new(),
            error: None,
        }
    }

    /// No run comes after this error: those that are missing end with it.
    pub(crate) fn fail(&mut self, error: String) {
        let missing = self.seeds.iter().filter(|seed| self.flexcomm.iter().all(|run| run.seed != **seed));
        let failed = |seed: &u64| Adapted { seed: *seed, error: Some(error.clone()), ..Adapted::default() };
        let failed: Vec<Adapted> = missing.map(failed).collect();
        self.flexcomm.extend(failed);
        self.error = Some(error);
    }

    /// Seconds of runs over those of a fixed setting, seed by seed; a run that is missing counts as unreached.
    pub fn ratios(&self, runs: &[Adapted], setting: &str) -> Vec<f64> {
        let ratio = |seed: &u64| Some(self.seconds(runs, *seed)? / self.baselines.fixed_seconds(setting, *seed)?);
        self.seeds.iter().filter_map(ratio).collect()
    }

    /// Seconds of the run with a seed, as they count.
    pub fn seconds(&self, runs: &[Adapted], seed: u64) -> Option<f64> {
        self.baselines.counted(seed, runs.iter().find(|run| run.seed == seed).and_then(|run| run.seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::Spent;
    use crate::baselines::{PhaseBest, RecordedPlanner};
    use crate::families;
    use crate::fixed::{Curve, MeanRound, Shared, Way, bucket_values};
    use crate::ranks::Model;
    use crate::steps::Stragglers;
    use flexcomm_domain::Strategy;
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use tempfile::TempDir;

    const TOP_K: &str = "topk(k=0.01)+ef(vanilla)/allgather";
    const HASTY: &str = "topk(k=0.001)+ef(vanilla)/allgather";

    fn cell() -> Cell {
        let mut cell = Cell {
            world: 2,
            model: Model::Convolutional,
            steps: 50,
            batch: 32,
            seeds: vec![1, 2],
            compute_s: 0.1,
            values_factor: 1000.0,
            ..families::drawn()[2].clone()
        };
        for (phase, mbit) in cell.phases.iter_mut().zip([1e3, 1e5, 1e3, 1e5]) {
            (phase.seconds, phase.up_mbit, phase.down_mbit, phase.latency_ms) = (2.0, mbit, mbit, 0.05);
        }
        cell
    }

    /// Made up: dense, top-k that learns alike and sends little, one that sends least and ends worse, and others that learn nothing.
    fn curves(recipe: crate::ranks::Recipe) -> Curves {
        let curve = |(setting, _): (String, Strategy)| {
            let (losses, accuracy, share) = match setting.as_str() {
                DENSE => (vec![2.0, 1.0, 0.5], 0.9, 1.0),
                TOP_K => (vec![2.0, 1.0, 0.5], 0.895, 0.02),
                HASTY => (vec![2.0, 0.9, 0.1], 0.89, 0.002),
                _ => (vec![2.0, 1.9, 1.8], 0.9, 0.5),
            };
            let how = if setting == DENSE { Way::Sum } else { Way::Gather };
            let round = |values: usize| vec![MeanRound { how, bytes: 4.0 * share * values as f64, fixed: 0.0 }];
            let rounds = bucket_values(recipe.model).into_iter().map(round).collect();
            Curve { setting, losses, accuracy, rounds, diverged: false }
        };
        Curves { recipe, curves: fixed::settings(recipe.momentum).into_iter().map(curve).collect() }
    }

    /// Of a cell that did not fail.
    fn whole(record: Record) -> Record {
        assert_eq!(record.error, None);
        record
    }

    struct World {
        folder: TempDir,
        calls: Arc<AtomicUsize>,
    }

    impl World {
        fn new() -> Self {
            let world = Self { folder: tempfile::tempdir().unwrap(), calls: Arc::default() };
            cell().seeds.iter().for_each(|seed| curves(cell().recipe(*seed)).write(&world.path("kept")).unwrap());
            world
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// Whoever decides: a step in 0.1 s, and dense's losses. With seed 2 flexcomm panics.
        fn suite(&self) -> Suite {
            let calls = self.calls.clone();
            let decided = move |_: &Cell, _: &Coefficients, _: Arc<Data>, Wanted { seed, who, .. }: Wanted| {
                calls.fetch_add(1, Ordering::Relaxed);
                assert!(seed != 2 || who != Decider::Flexcomm, "made to fail");
                let ends = (1..=50).map(|step| f64::from(step) / 10.0).collect();
                let on = |seconds, shadow_seconds| Experiments { seconds, shadow_seconds, ..Experiments::default() };
                let spent = [(0.5, on(0.0, 0.25)), (1.2, on(0.5, 0.0)), (4.0, on(1.0, 0.0))];
                let (losses, spent) = (vec![2.0, 1.0, 0.5], spent.map(|(at_s, on)| Spent { at_s, on }).to_vec());
                Ok(AdaptiveRun { ends, losses, accuracy: Some(0.9), spent, ..AdaptiveRun::default() })
            };
            let images = Shared::synthetic(&[2]);
            Suite {
                truth: Coefficients::frozen(),
                library: Library::new(
                    self.path("kept"),
                    self.path("trained"),
                    images,
                    Arc::new(AtomicBool::new(false)),
                ),
                decided: Box::new(decided),
                checked: Box::new(|_, _, _, _| Ok(())),
                binary: "a".into(),
                results: self.path("results"),
                baselines: self.path("baselines"),
                resume: true,
                most_seeds: 0,
                add_within_s: 60.0,
            }
        }

        /// How many runs adapted.
        fn runs(&self, suite: &Suite) -> usize {
            let before = self.calls.load(Ordering::Relaxed);
            whole(suite.cell(&Job { cell: cell(), seeds: vec![1, 2] }));
            self.calls.load(Ordering::Relaxed) - before
        }
    }

    #[test]
    fn a_cell_is_run_and_measured_as_defined() {
        let world = World::new();
        let suite = world.suite();
        let record = whole(suite.cell(&Job { cell: cell(), seeds: vec![1, 2] }));
        let baselines = &record.baselines;
        // Smoothed: 1.5, 1.1667, 0.75; at 15 of 50 steps three fifths of the way between the first two.
        let measure = baselines.measure(1).unwrap();
        assert!((measure.target - (1.5 - 0.6 * 0.33333)).abs() < 1e-4, "{measure:?}");
        assert!((baselines.fixed(DENSE, 1).unwrap().steps.unwrap() - 15.0).abs() < 1e-9);
        assert!(baselines.fixed(HASTY, 1).unwrap().seconds < baselines.fixed(TOP_K, 1).unwrap().seconds);
        assert_eq!(baselines.best_fixed(), Some(TOP_K), "{HASTY} is a point below dense");
        assert_eq!(baselines.fixed("fp16/dense-ring", 1).unwrap().seconds, None);
        assert_eq!(baselines.fixed_seconds("fp16/dense-ring", 1), Some(3.0 * measure.budget_s));
        // The slow phases are for top-k.
        assert_eq!(baselines.phases.len(), 4);
        assert_eq!(baselines.phases[2].setting, TOP_K);
        assert!(baselines.lines.keys().eq([DENSE, TOP_K]));
        let [first, second] = &record.flexcomm[..] else { panic!("two seeds") };
        assert!((first.seconds.unwrap() - 1.5).abs() < 1e-9 && first.line.at_s == [0.0, 2.5, 5.0]);
        assert_eq!(second.error.as_deref(), Some("panicked: made to fail"));
        let top_k = |seed| baselines.fixed_seconds(TOP_K, seed).unwrap();
        let budget = baselines.measure(2).unwrap().budget_s;
        // Of what it lost in the whole run only what it did before its target.
        assert!(first.lost.exploring_s == 0.75 && first.experiments.seconds == 0.5, "{:?}", first.lost);
        let ratios = record.ratios(&record.flexcomm, TOP_K);
        let expected = [1.5 / top_k(1), 3.0 * budget / top_k(2)];
        assert!(ratios.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9), "{ratios:?} {expected:?}");
        assert_eq!(record.ratios(&record.flexcomm[..1], TOP_K), ratios, "a missing run counts as much");
        assert_eq!(failures(&[record]), [format!("{}, seed 2, flexcomm: panicked: made to fail", cell().name)]);
    }

    #[test]
    fn a_cell_with_curves_of_another_program_does_not_run() {
        let world = World::new();
        let suite = Suite { checked: Box::new(crate::spot::check), ..world.suite() };
        let record = suite.cell(&Job { cell: cell(), seeds: vec![1] });
        assert!(record.error.as_ref().unwrap().contains("of another program"), "{:?}", record.error);
        assert_eq!((world.calls.load(Ordering::Relaxed), record.baselines.fixed.len()), (0, 0));
    }

    #[test]
    fn results_are_used_again_while_they_hold() {
        let world = World::new();
        assert_eq!(world.runs(&world.suite()), 6);
        let path = world.path("results").join(format!("{}.json", cell().name));
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(world.runs(&world.suite()), 0);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        assert_eq!(world.runs(&Suite { binary: "b".into(), ..world.suite() }), 2, "another program decides");
        // Kept baselines hold for any program, and serve runs with fewer seeds.
        let Record { baselines, flexcomm, .. } = files::read_json(&path).unwrap();
        let planner = RecordedPlanner { commit: "abc".into(), binary: "a".into(), runs: flexcomm };
        let kept = Baselines { recorded_planner: Some(planner), ..baselines };
        files::write_json(&world.path("baselines").join(format!("{}.json", cell().name)), &kept).unwrap();
        let anew = Suite { resume: false, ..world.suite() };
        assert_eq!(world.runs(&anew), 2);
        let one = whole(anew.cell(&Job { cell: cell(), seeds: vec![1] }));
        assert_eq!((one.flexcomm.len(), one.baselines.seeds.len(), one.baselines.recorded().len()), (1, 2, 2));
        let mut truth = Coefficients::frozen();
        truth.tcp.timeout_s = 0.3;
        assert_eq!(world.runs(&Suite { truth, ..world.suite() }), 6, "another truth");
        assert_eq!(world.runs(&world.suite()), 2, "the kept baselines are of this one");
        let mut other = curves(cell().recipe(1));
        other.curves[1].losses[1] = 1.8;
        other.write(&world.path("kept")).unwrap();
        assert_eq!(world.runs(&world.suite()), 6, "another curve");
        let slower = Cell { compute_s: 0.2, ..cell() };
        let before = world.calls.load(Ordering::Relaxed);
        whole(world.suite().cell(&Job { cell: slower, seeds: vec![1] }));
        assert_eq!(world.calls.load(Ordering::Relaxed) - before, 3, "another cell");
        std::fs::write(&path, "{").unwrap();
        assert_eq!(world.runs(&world.suite()), 6, "half a file is none");
    }

    /// Real training by the controls, on images that are made up.
    #[test]
    fn controls_train_and_switch_at_changes() {
        let world = World::new();
        let run = |name: &str| {
            let suite =
                Suite { decided: Box::new(crate::decider::decided), results: world.path(name), ..world.suite() };
            whole(suite.cell(&Job { cell: cell(), seeds: vec![1] })).baselines
        };
        let baselines = run("once");
        let [oracle, random] = [&baselines.oracle[0], &baselines.random[0]];
        for control in [oracle, random] {
            assert_eq!(control.error, None);
            assert!(control.line.losses.last() < control.line.losses.first(), "{control:?}");
        }
        let text = |phase: usize| baselines.phases[phase].setting.as_str();
        let switch = oracle.switches.iter().find(|switch| switch.at_s > 2.0).unwrap();
        assert_eq!((switch.strategy.as_str(), text(0) == text(1)), (text(1), false), "{:?}", oracle.switches);
        assert!(random.switches.len() > 2);
        assert_eq!(run("twice"), baselines);
    }

    #[test]
    fn all_cells_run_and_a_stop_ends_them() {
        let world = World::new();
        let suite = world.suite();
        let broken = Cell { name: "broken".into(), momentum: 0.5, ..cell() };
        let jobs = [Job { cell: broken, seeds: vec![1] }, Job { cell: cell(), seeds: vec![1] }];
        let suite = Suite { truth: Coefficients { codec: BTreeMap::new(), ..suite.truth.clone() }, ..suite };
        let two = NonZeroUsize::new(2).unwrap();
        let all = suite.all(&jobs[1..], two);
        let error = all[0].error.as_ref().unwrap();
        assert!(error.contains("the truth has no [codec"), "{error}");
        assert_eq!(all[0].flexcomm[0].error.as_ref(), Some(error));
        assert_eq!(failures(&all), [format!("{}: {error}", cell().name)]);
        let suite = world.suite();
        assert!(suite.all(&jobs[1..], two)[0].error.is_none());
        suite.library.stop.store(true, Ordering::Relaxed);
        let stopped = suite.cell(&jobs[0]);
        assert_eq!(stopped.error.as_deref(), Some("stopped"), "curves of another momentum would be trained");
        assert!(suite.all(&jobs, two).is_empty());
    }

    #[test]
    fn scripts_follow_the_phases() {
        let cell = cell();
        let phase = |setting: &str| PhaseBest { setting: setting.into(), step_s: 1.0 };
        let phases = [DENSE, TOP_K, TOP_K, DENSE].map(phase);
        let script = oracle_script(&cell, &phases, 20.0).unwrap();
        assert!(
            script.iter().take(3).map(|change| change.at_s).eq([0.0, 2.0, 6.0]),
            "the third phase is as the second"
        );
        assert_eq!(script[1].strategy, TOP_K.parse().unwrap());
        let random = random_script(&cell, 1, 20.0);
        assert_eq!(random, random_script(&cell, 1, 20.0));
        assert_ne!(random, random_script(&cell, 2, 20.0));
        assert_eq!(random.len(), 11, "none after 20 s");
        assert!(random.iter().take(4).map(|change| change.at_s).eq([0.0, 2.0, 4.0, 6.0]));
    }

    #[test]
    fn more_seeds_narrow_a_wide_interval() {
        let world = World::new();
        (3..=6).for_each(|seed| curves(cell().recipe(seed)).write(&world.path("kept")).unwrap());
        let decided = |_: &Cell, _: &Coefficients, _: Arc<Data>, Wanted { seed, .. }: Wanted| {
            let ends = (1..=50).map(|step| f64::from(step) * if seed == 1 { 0.1 } else { 0.2 }).collect();
            Ok(AdaptiveRun { ends, losses: vec![2.0, 1.0, 0.5], accuracy: Some(0.9), ..AdaptiveRun::default() })
        };
        let suite = Suite { decided: Box::new(decided), most_seeds: 4, ..world.suite() };
        let all = |suite: &Suite, cell: Cell, seeds: &[u64]| {
            let mut records = suite.all(&[Job { cell, seeds: seeds.to_vec() }], NonZeroUsize::MIN);
            whole(records.pop().unwrap())
        };
        let hurried = Suite { add_within_s: 0.0, ..suite };
        assert_eq!(all(&hurried, cell(), &[1, 2]).seeds, [1, 2], "there is no time for more");
        let suite = Suite { add_within_s: 60.0, ..hurried };
        let record = all(&suite, cell(), &[1, 2]);
        assert_eq!(record.seeds, [1, 2, 3, 4]);
        assert_eq!((record.flexcomm.len(), record.baselines.oracle.len(), record.baselines.random.len()), (4, 4, 2));
        assert_eq!(record.ratios(&record.flexcomm, TOP_K).len(), 4);
        assert_eq!(suite.cell(&Job { cell: cell(), seeds: vec![1, 2] }), record, "they are there when it goes on");
        let few = Suite { most_seeds: 0, ..suite };
        assert_eq!(few.cell(&Job { cell: cell(), seeds: vec![1, 2] }).seeds, [1, 2], "more are not asked for");
        // The range of three is not wide, the interval of their mean is.
        let decided = |_: &Cell, _: &Coefficients, _: Arc<Data>, Wanted { seed, .. }: Wanted| {
            let step_s = [1.0, 1.04, 1.08][(seed as usize - 1) % 3] * 0.1;
            let ends = (1..=50).map(|step| f64::from(step) * step_s).collect();
            Ok(AdaptiveRun { ends, losses: vec![2.0, 1.0, 0.5], accuracy: Some(0.9), ..AdaptiveRun::default() })
        };
        let stragglers = Stragglers { spread: 0.0, pause_share: 0.0, pause: 0.0 };
        let (results, even) = (world.path("even"), Cell { stragglers, ..cell() });
        let suite = Suite { decided: Box::new(decided), most_seeds: 4, results, ..world.suite() };
        assert_eq!(all(&suite, even, &[1, 2, 3]).seeds, [1, 2, 3, 4]);
        // All the same: no further seed.
        let suite = Suite { most_seeds: 4, results: world.path("same"), ..world.suite() };
        assert_eq!(all(&suite, cell(), &[1]).seeds, [1]);
    }
}
