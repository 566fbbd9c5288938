//! Fixed settings: what they learn does not depend on the network, so each is trained once and its curve is played through every
//! network.

use crate::cells::{Cell, Net};
use crate::ranks::{Carried, Data, Exchanged, Model, Ranks, Recipe, Stepped, buckets};
use crate::score::Point;
use crate::steps::{self, Timeline};
use anyhow::{Context, Result};
use flexcomm_compression::codec::Element;
use flexcomm_domain::Strategy;
use flexcomm_exchange::How;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How often the test loss is taken, in steps.
pub const TEST_EVERY: u64 = 25;

/// What all settings are compared with.
pub const DENSE: &str = "none/dense-ring";

/// The settings, for an optimizer of this momentum: names as in the summary, and strategies.
pub fn settings(momentum: f32) -> Vec<(String, Strategy)> {
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

impl Curve {
    /// Its points.
    pub fn points(&self) -> Vec<Point> {
        (0..).step_by(TEST_EVERY as usize).zip(&self.losses).map(|(steps, loss)| Point { steps, loss: *loss }).collect()
    }

    /// The exchanges of a step.
    fn exchanged(&self, step: u64, world: usize) -> Vec<Exchanged> {
        let carried = |round: &MeanRound| {
            let how = match round.how {
                Way::Gather => How::Gather,
                Way::Broadcast => How::Broadcast((step % world as u64) as u32),
                Way::Sum => How::Sum(Element::F32),
            };
            Carried { how, bytes: round.bytes.round() as usize }
        };
        let bucket =
            |rounds: &Vec<MeanRound>| Exchanged { rounds: rounds.iter().map(carried).collect(), energies: Vec::new() };
        self.rounds.iter().map(bucket).collect()
    }
}

/// Bytes of collectives over a run.
#[derive(Default)]
struct Means {
    rounds: Vec<Vec<(How, f64)>>,
    steps: f64,
}

impl Means {
    fn add(&mut self, stepped: &Stepped) {
        if self.rounds.is_empty() {
            self.rounds =
                stepped.buckets.iter().map(|b| b.rounds.iter().map(|round| (round.how, 0.0)).collect()).collect();
        }
        for (means, bucket) in self.rounds.iter_mut().zip(&stepped.buckets) {
            means.iter_mut().zip(&bucket.rounds).for_each(|(mean, round)| mean.1 += round.bytes as f64);
        }
        self.steps += 1.0;
    }

    fn rounds(&self) -> Vec<Vec<MeanRound>> {
        let way = |how: &How| match how {
            How::Gather => Way::Gather,
            How::Broadcast(_) => Way::Broadcast,
            How::Sum(_) | How::Refused => Way::Sum,
        };
        let mean = |(how, bytes): &(How, f64)| MeanRound { how: way(how), bytes: bytes / self.steps.max(1.0) };
        self.rounds.iter().map(|bucket| bucket.iter().map(mean).collect()).collect()
    }
}

/// Trains by a fixed setting.
pub fn train(recipe: Recipe, data: &Arc<Data>, (setting, strategy): &(String, Strategy)) -> Result<Curve> {
    let mut ranks = Ranks::new(recipe, data.clone())?;
    let mut means = Means::default();
    let mut losses = vec![ranks.test().loss];
    let mut diverged = false;
    for step in 0..recipe.steps {
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
    // JSON has no NaN.
    losses.iter_mut().for_each(|loss| *loss = if loss.is_finite() { *loss } else { 1e9 });
    let accuracy = ranks.test().accuracy;
    Ok(Curve { setting: setting.clone(), losses, accuracy, rounds: means.rounds(), diverged })
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
    let Recipe { world, momentum, seed, .. } = recipe;
    folder.join(format!("{model}-n{world}-m{momentum}-s{seed}.json"))
}

impl Curves {
    /// From the file, if it is of this job.
    pub fn read(folder: &Path, recipe: &Recipe) -> Result<Option<Self>> {
        let path = file(folder, recipe);
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
        let curves: Self = serde_json::from_str(&text).with_context(|| format!("failed to read {}", path.display()))?;
        Ok((curves.recipe == *recipe).then_some(curves))
    }

    /// Into its file.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = file(folder, &self.recipe);
        let text = serde_json::to_string(self).context("failed to write curves as JSON")?;
        std::fs::create_dir_all(folder).with_context(|| format!("failed to make {}", folder.display()))?;
        std::fs::write(&path, text + "\n").with_context(|| format!("failed to write {}", path.display()))
    }

    /// One setting's.
    pub fn of(&self, setting: &str) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.setting == setting)
    }
}

/// A random generator of what happens to a job's steps in a cell, whatever it runs: settings of one seed meet the same stragglers.
pub fn step_rng(seed: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(2);
    rng
}

/// Values of a model's buckets, in the order of backward.
pub fn bucket_values(model: Model) -> Vec<usize> {
    buckets(&model.network()).iter().map(|layout| layout.range.len()).collect()
}

/// Plays a curve through a cell's network: when each step ended, in seconds.
pub fn replay(cell: &Cell, truth: &Coefficients, seed: u64, curve: &Curve) -> Result<Vec<f64>> {
    let strategy: Strategy = curve.setting.parse().with_context(|| format!("read the strategy {}", curve.setting))?;
    let mut net: Net<()> = Net::new(cell, truth, seed);
    let mut timeline = Timeline::new(cell.world, bucket_values(cell.model), cell.compute(), cell.stragglers);
    let codec = steps::codec(truth, &strategy, cell.codec_factor)?;
    let mut rng = step_rng(seed);
    let (mut starts, mut ends) = (vec![0.0; cell.world], Vec::new());
    for step in 0..cell.steps {
        let plan = timeline.step(&strategy, &curve.exchanged(step, cell.world), codec, &mut rng)?;
        let times = job::run(&mut net.network, &net.mesh, truth.software, &plan, &starts, &mut |_, _| ());
        starts = times.ranks.iter().map(|rank| rank.ended).collect();
        ends.push(starts.iter().copied().fold(0.0, f64::max));
    }
    Ok(ends)
}
