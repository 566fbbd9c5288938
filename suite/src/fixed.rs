//! Fixed settings: what they learn does not depend on the network, so each is trained once and its curve is played through every
//! network.

use crate::cells::{Cell, Chance, Net, Phase};
use crate::files;
use crate::ranks::{Carried, Data, Exchanged, Model, Ranks, Recipe, Stepped, buckets};
use crate::score::{self, Point};
use crate::steps::{self, StepOf, Stragglers, Timeline};
use anyhow::{Context, Result, anyhow, ensure};
use flexcomm_compression::codec::Element;
use flexcomm_domain::Strategy;
use flexcomm_exchange::How;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// How often the test loss is taken, in steps.
pub const TEST_EVERY: u64 = 25;

/// What all settings are compared with.
pub const DENSE: &str = "none/dense-ring";

/// A strategy with its text.
pub type Setting = (String, Strategy);

/// A setting's name in the summary: without the momentum of DGC's memory, which is always the optimizer's.
pub fn label(setting: &str) -> String {
    match setting.split_once(",mu=") {
        Some((before, rest)) => format!("{before}{}", rest.trim_start_matches(|c| c != ')')),
        None => setting.to_owned(),
    }
}

/// The settings, for an optimizer of this momentum.
pub fn settings(momentum: f32) -> Vec<Setting> {
    let mut texts: Vec<String> = [
        DENSE,
        "fp16/dense-ring",
        "eightbit+ef(vanilla)/allgather",
        "qsgd(s=7,norm=max)+ef(vanilla)/allgather",
        "powersgd(rank=1)+ef(vanilla)/dense-ring",
        "powersgd(rank=4)+ef(vanilla)/dense-ring",
    ]
    .map(String::from)
    .to_vec();
    for k in ["0.1", "0.01", "0.001"] {
        texts.push(format!("topk(k={k})+ef(vanilla)/allgather"));
        texts.push(format!("lwtopk(k={k})+ef(vanilla)/allgather"));
        texts.push(format!("topk(k={k})+ef(vanilla)/art-ring:star"));
    }
    for k in ["0.01", "0.001"] {
        texts.push(format!("topk(k={k})+ef(dgc,mu={momentum})/allgather"));
    }
    let parsed = |text: String| match text.parse() {
        Ok(strategy) => (text, strategy),
        Err(error) => unreachable!("{text}: {error}"),
    };
    texts.into_iter().map(parsed).collect()
}

/// What a setting learns, and what it sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// The strategy.
    pub setting: String,
    /// Test losses every [`TEST_EVERY`] steps, the first before any.
    pub losses: Vec<f64>,
    /// At the end.
    pub accuracy: f64,
    /// By bucket, its collectives with bytes in the mean over the steps.
    pub rounds: Vec<Vec<MeanRound>>,
    /// Whether training ended early: values that are not finite.
    pub diverged: bool,
}

/// One collective of a bucket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeanRound {
    /// Which.
    pub how: Way,
    /// Of one rank's part.
    pub bytes: f64,
    /// Of these, how many do not grow with the gradient.
    pub fixed: f64,
}

/// Which collective, whatever its elements and its root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Parts add up.
    Sum,
    /// Every rank gets every rank's part.
    Gather,
    /// From any rank in turn.
    Broadcast,
}

impl Way {
    fn of(how: How) -> Self {
        match how {
            How::Gather => Self::Gather,
            How::Broadcast(_) => Self::Broadcast,
            How::Sum(_) | How::Refused => Self::Sum,
        }
    }
}

impl Curve {
    /// The exchanges of a step.
    fn exchanged(&self, step: u64, world: usize) -> Vec<Exchanged> {
        let carried = |round: &MeanRound| {
            let how = match round.how {
                Way::Gather => How::Gather,
                Way::Broadcast => How::Broadcast((step % world as u64) as u32),
                Way::Sum => How::Sum(Element::F32),
            };
            Carried { how, bytes: round.bytes.round() as usize, fixed: round.fixed.round() as usize }
        };
        let bucket =
            |rounds: &Vec<MeanRound>| Exchanged { rounds: rounds.iter().map(carried).collect(), energies: Vec::new() };
        self.rounds.iter().map(bucket).collect()
    }
}

/// Bytes of collectives over a run.
#[derive(Default)]
struct Means {
    /// Their sums.
    rounds: Vec<Vec<MeanRound>>,
    steps: f64,
}

impl Means {
    fn add(&mut self, stepped: &Stepped) {
        let none = |round: &Carried| MeanRound { how: Way::of(round.how), bytes: 0.0, fixed: 0.0 };
        if self.rounds.is_empty() {
            self.rounds = stepped.buckets.iter().map(|b| b.rounds.iter().map(none).collect()).collect();
        }
        for (sums, bucket) in self.rounds.iter_mut().zip(&stepped.buckets) {
            for (sum, round) in sums.iter_mut().zip(&bucket.rounds) {
                sum.bytes += round.bytes as f64;
                sum.fixed += round.fixed as f64;
            }
        }
        self.steps += 1.0;
    }

    fn rounds(&self) -> Vec<Vec<MeanRound>> {
        let steps = self.steps.max(1.0);
        let mean = |sum: &MeanRound| MeanRound { how: sum.how, bytes: sum.bytes / steps, fixed: sum.fixed / steps };
        self.rounds.iter().map(|bucket| bucket.iter().map(mean).collect()).collect()
    }
}

/// Losses as points of a curve, one every [`TEST_EVERY`] steps, the first before any.
pub fn points(losses: &[f64]) -> Vec<Point> {
    (0..).step_by(TEST_EVERY as usize).zip(losses).map(|(steps, loss)| Point { steps, loss: *loss }).collect()
}

/// A loss as JSON can hold it, which has no NaN.
pub fn finite(loss: f64) -> f64 {
    if loss.is_finite() { loss } else { 1e9 }
}

/// To five significant digits: what the files keep.
pub fn rounded(x: f64) -> f64 {
    format!("{x:.4e}").parse().unwrap_or(x)
}

/// Trains by a fixed setting.
pub fn train(recipe: Recipe, data: &Arc<Data>, setting: &Setting) -> Result<Curve> {
    train_until(recipe.steps, recipe, data, setting)
}

/// The first so many steps of a job by a fixed setting.
pub fn train_until(steps: u64, recipe: Recipe, data: &Arc<Data>, (setting, strategy): &Setting) -> Result<Curve> {
    let mut ranks = Ranks::new(recipe, data.clone())?;
    let mut means = Means::default();
    let mut losses = vec![ranks.test().loss];
    let mut diverged = false;
    for step in 0..steps.min(recipe.steps) {
        match ranks.step(step, strategy) {
            Ok(stepped) => means.add(&stepped),
            // Refused by all ranks, for values that are not finite: what is learned ends here.
            Err(_) if step > 0 => {
                diverged = true;
                break;
            }
            Err(error) => return Err(error.context(format!("train by {setting}"))),
        }
        if (step + 1) % TEST_EVERY == 0 {
            losses.push(ranks.test().loss);
        }
    }
    losses.iter_mut().for_each(|loss| *loss = rounded(finite(*loss)));
    let accuracy = ranks.test().accuracy;
    Ok(Curve { setting: setting.clone(), losses, accuracy, rounds: means.rounds(), diverged })
}

/// A curve as far as it tells what a setting sends, which hangs on the strategy and hardly on what is learned.
pub fn sizes(cell: &Cell, setting: &str, data: &Arc<Data>) -> Result<Curve> {
    const STEPS: u64 = 8;
    let strategy: Strategy = setting.parse().with_context(|| format!("failed to read the strategy {setting}"))?;
    let seed = cell.seeds.first().copied().unwrap_or_default();
    train(Recipe { steps: STEPS, ..cell.recipe(seed) }, data, &(setting.to_owned(), strategy))
}

/// All fixed settings of a job and seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Curves {
    /// How they trained.
    pub recipe: Recipe,
    /// One for each setting.
    pub curves: Vec<Curve>,
}

/// The file of a job's curves in a folder.
pub fn file(folder: &Path, recipe: &Recipe) -> PathBuf {
    let model = match recipe.model {
        Model::Perceptron => "perceptron",
        Model::Convolutional => "convolutional",
    };
    let Recipe { world, momentum, learning_rate, batch, steps, seed, .. } = recipe;
    folder.join(format!("{model}-n{world}-m{momentum}-lr{learning_rate}-b{batch}-t{steps}-s{seed}.json"))
}

impl Curves {
    /// From the file, if it is of this job.
    pub fn read(folder: &Path, recipe: &Recipe) -> Result<Option<Self>> {
        let path = file(folder, recipe);
        if !path.exists() {
            return Ok(None);
        }
        let curves: Self = files::read_json(&path)?;
        Ok((curves.recipe == *recipe).then_some(curves))
    }

    /// Into its file.
    pub fn write(&self, folder: &Path) -> Result<()> {
        files::write_json(&file(folder, &self.recipe), self)
    }

    /// One setting's.
    pub fn of(&self, setting: &str) -> Result<&Curve> {
        let found = self.curves.iter().find(|curve| curve.setting == setting);
        found.with_context(|| format!("the curves lack {setting}"))
    }

    /// Of these settings, those without a curve.
    fn lacks<'a>(&self, settings: &'a [Setting]) -> Vec<&'a Setting> {
        settings.iter().filter(|(setting, _)| self.of(setting).is_err()).collect()
    }
}

/// Images by number of ranks, read once.
pub struct Shared {
    folder: PathBuf,
    read: Mutex<BTreeMap<usize, Arc<Data>>>,
}

impl Shared {
    /// From the files of a folder.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, read: Mutex::default() }
    }

    /// Made up, for tests without files.
    pub fn synthetic(worlds: &[usize]) -> Self {
        let made = worlds.iter().map(|&world| (world, Arc::new(Data::synthetic(world)))).collect();
        Self { folder: PathBuf::new(), read: Mutex::new(made) }
    }

    /// For so many ranks.
    pub fn of(&self, world: usize) -> Result<Arc<Data>> {
        let mut all = self.read.lock().map_err(|_| anyhow!("another thread failed"))?;
        if let Some(data) = all.get(&world) {
            return Ok(data.clone());
        }
        let read = Arc::new(Data::read(&self.folder, world).context("failed to read the images")?);
        all.insert(world, read.clone());
        Ok(read)
    }
}

/// Curves: those that are kept, and those that are trained when they are asked for.
pub struct Library {
    /// Not written.
    pub kept: PathBuf,
    /// Where further ones go.
    pub trained: PathBuf,
    /// What to train with.
    pub data: Shared,
    /// Ends training between two settings.
    pub stop: Arc<AtomicBool>,
    /// One thread at a time for each file.
    at_work: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>>,
}

impl Library {
    /// Of two folders, which may be one.
    pub fn new(kept: PathBuf, trained: PathBuf, data: Shared, stop: Arc<AtomicBool>) -> Self {
        Self { kept, trained, data, stop, at_work: Mutex::default() }
    }

    /// A job's curves of these settings, as far as there are any: whether all are there, too.
    fn found(&self, recipe: &Recipe, settings: &[Setting]) -> Result<(Curves, bool)> {
        let mut curves = Curves { recipe: *recipe, curves: Vec::new() };
        for folder in [&self.kept, &self.trained] {
            let further = Curves::read(folder, recipe)?.map_or(Vec::new(), |read| read.curves);
            let new = further.into_iter().filter(|curve| curves.of(&curve.setting).is_err());
            let new: Vec<Curve> = new.collect();
            curves.curves.extend(new);
        }
        let all = curves.lacks(settings).is_empty();
        Ok((curves, all))
    }

    /// A job's curves of these settings, if all are there.
    pub fn read(&self, recipe: &Recipe, settings: &[Setting]) -> Result<Option<Curves>> {
        let (curves, all) = self.found(recipe, settings)?;
        Ok(all.then_some(curves))
    }

    /// A job's curves of these settings; what is missing is trained and kept, one after the other.
    pub fn curves(&self, recipe: &Recipe, settings: &[Setting]) -> Result<Curves> {
        if let Some(curves) = self.read(recipe, settings)? {
            return Ok(curves);
        }
        let path = file(&self.trained, recipe);
        let lock = |what: &Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>>| {
            Some(what.lock().ok()?.entry(path.clone()).or_default().clone())
        };
        let file_lock = lock(&self.at_work).context("another thread failed")?;
        let _only = file_lock.lock().map_err(|_| anyhow!("another thread failed"))?;
        let (mut curves, _) = self.found(recipe, settings)?;
        let data = self.data.of(recipe.world)?;
        for setting in curves.lacks(settings) {
            ensure!(!self.stop.load(Ordering::Relaxed), "stopped");
            let begun = Instant::now();
            curves.curves.push(train(*recipe, &data, setting)?);
            curves.write(&self.trained)?;
            eprintln!("{}: {} trained in {:.0} s", path.display(), setting.0, begun.elapsed().as_secs_f64());
        }
        Ok(curves)
    }
}

/// Values of a model's buckets, in the order of backward.
pub fn bucket_values(model: Model) -> Vec<usize> {
    buckets(&model.network()).iter().map(|layout| layout.range.len()).collect()
}

/// Seconds of a step at the median with the network as it is in one phase, once windows have grown and credits are spent.
pub fn step_in_phase(cell: &Cell, phase: &Phase, truth: &Coefficients, seed: u64, curve: &Curve) -> Result<f64> {
    const WARM_UP: usize = 10;
    const STEPS: u64 = 40;
    let phases = vec![phase.clone()];
    let alone = Cell { phases, steps: cell.steps.min(STEPS), burst_mbytes: None, burst_mbit: None, ..cell.clone() };
    let ends = replay(&alone, truth, seed, curve)?;
    let seconds: Vec<f64> = ends[WARM_UP - 1..].windows(2).map(|pair| pair[1] - pair[0]).collect();
    score::quantile(&seconds, 0.5).context("a phase has no steps")
}

/// Seconds that a dense step's transfers take without computing beside them, in the mean over the phases of a cell, and without a
/// credit of bytes that go faster.
pub fn dense_transfers(cell: &Cell, truth: &Coefficients) -> Result<f64> {
    let stragglers = Stragglers { spread: 0.0, pause_share: 0.0, pause: 0.0 };
    let sum = |values: usize| vec![MeanRound { how: Way::Sum, bytes: 4.0 * values as f64, fixed: 0.0 }];
    let rounds = bucket_values(cell.model).into_iter().map(sum).collect();
    let curve = Curve { setting: DENSE.to_owned(), losses: Vec::new(), accuracy: 0.0, rounds, diverged: false };
    let idle = Cell { stragglers, steps: 14, compute_s: 1e-6, ..cell.clone() };
    let seconds = |phase: &Phase| step_in_phase(&idle, phase, truth, 1, &curve);
    let all: Vec<f64> = cell.phases.iter().map(seconds).collect::<Result<_>>()?;
    Ok(all.iter().sum::<f64>() / all.len().max(1) as f64)
}

/// Plays a curve through a cell's network: when each step ended, in seconds.
pub fn replay(cell: &Cell, truth: &Coefficients, seed: u64, curve: &Curve) -> Result<Vec<f64>> {
    let strategy: Strategy = curve.setting.parse().with_context(|| format!("read the strategy {}", curve.setting))?;
    let mut net: Net<()> = Net::new(cell, truth, seed);
    let mut timeline =
        Timeline::new(cell.world, bucket_values(cell.model), cell.compute(), cell.stragglers, truth.gather);
    let codec = steps::codec(truth, cell, strategy.spec())?;
    let (strategies, codecs) = (strategy.into(), vec![codec; bucket_values(cell.model).len()]);
    let mut rng = cell.rng(seed, Chance::Steps);
    let (mut starts, mut ends) = (vec![0.0; cell.world], Vec::new());
    for step in 0..cell.steps {
        let exchanged = &curve.exchanged(step, cell.world);
        let of = StepOf { plan: &strategies, exchanged, codecs: &codecs, besides: &[], control: &[] };
        let plan = timeline.step(&of, &mut rng)?;
        let times = job::run(&mut net.network, &net.mesh, truth.software, &plan.step, &starts, &mut |_, _| ())?;
        starts = times.ranks.iter().map(|rank| rank.ended).collect();
        ends.push(starts.iter().copied().fold(0.0, f64::max));
    }
    Ok(ends)
}
