//! All ranks of a job in one process: real gradients, real compressors, real exchanges; only the wire is missing.

use crate::model::{Evaluated, Network};
use anyhow::{Context, Result, bail};
use flexcomm_compression::Energy;
use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::{Member, Step, add_elements};
use flexcomm_domain::spec::MemoryKind;
use flexcomm_domain::{Plan, Selection, Strategy, Version};
use flexcomm_exchange::{
    Bucket, ExchangeError, HEAD_BYTES, Host, How, LastRound, Leader, Param, Place, Ran, Round, Status, head,
};
use flexcomm_lab::worker::{Images, Order, sgd_update};
use flexcomm_trainer::{Tick, squared_norm, weighted};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Images of all ranks, and those that are held out.
#[derive(Debug)]
pub struct Data {
    shards: Vec<Images>,
    held_out: Images,
}

impl Data {
    /// From the files of a folder, for so many ranks.
    pub fn read(folder: &Path, world: usize) -> Result<Self> {
        let shards = (0..world).map(|rank| Ok(Images::training_shard(folder, rank, world)?.0));
        Ok(Self { shards: shards.collect::<Result<_>>()?, held_out: Images::held_out(folder, usize::MAX)? })
    }

    /// Made up, for tests without files.
    pub fn synthetic(world: usize) -> Self {
        let shard = |rank: usize| Images::synthetic(256, rank as u64);
        Self { shards: (0..world).map(shard).collect(), held_out: Images::synthetic(200, 1000) }
    }

    /// N.
    pub fn world(&self) -> usize {
        self.shards.len()
    }
}

/// Which network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Model {
    /// The lab's: 235,146 parameters.
    Perceptron,
    /// Two convolutions: 14,318 parameters.
    Convolutional,
}

impl Model {
    /// As a network.
    pub fn network(self) -> Network {
        match self {
            Self::Perceptron => Network::perceptron(),
            Self::Convolutional => Network::convolutional(),
        }
    }
}

/// How a job trains, whatever network it is on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The network.
    pub model: Model,
    /// N.
    pub world: usize,
    /// Of SGD.
    pub momentum: f32,
    /// At the start; it falls linearly to a tenth at the last step.
    pub learning_rate: f64,
    /// Images of all ranks in a step.
    pub batch: usize,
    /// Of the whole run.
    pub steps: u64,
    /// Of the first parameters, the order of images, and random compressors.
    pub seed: u64,
}

impl Recipe {
    /// Of a step.
    pub fn rate(&self, step: u64) -> f64 {
        let done = step as f64 / self.steps.max(1) as f64;
        self.learning_rate * (1.0 - 0.9 * done.min(1.0))
    }
}

/// A collective that ran, as bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Carried {
    /// Which.
    pub how: How,
    /// Of one rank's part, headers included.
    pub bytes: usize,
    /// Of these, how many do not grow with the gradient: see [`Bucket::fixed_bytes`].
    pub fixed: usize,
}

/// A bucket's exchange.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exchanged {
    /// Its collectives, in order.
    pub rounds: Vec<Carried>,
    /// By rank: what left the residual, and the compensated gradient; where buckets run different strategies see [`weighted`]. Empty
    /// where all of them are dense and nothing was held back.
    pub energies: Vec<Energy>,
}

/// A step of all ranks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stepped {
    /// By rank: mean loss of its batch. NaN in a trial where the ranks refuse the exchange of a bucket.
    pub losses: Vec<f32>,
    /// By bucket.
    pub buckets: Vec<Exchanged>,
}

/// Where a rank other than the first ends its exchange: all read the same messages, so what they mean, and whether they are refused,
/// is worked out once. Sums change what a method remembers (PowerSGD's factors), so each rank reads its own.
struct Follower(Ran);

impl Place for Follower {
    type Values<'a> = &'a [f32];
    type Mean<'a> = ();
    type Error = std::convert::Infallible;

    fn compress(&self, of: &mut Bucket, values: &[f32], leader: Option<Leader>) -> Result<(), Self::Error> {
        Host.compress(of, values, leader)
    }

    fn take(&self, of: &mut Bucket) -> Result<(), ExchangeError> {
        Host.take(of)
    }

    fn mean(&self, of: &mut Bucket, last: &LastRound<'_>, (): ()) -> Result<Ran, ExchangeError> {
        match last {
            LastRound::Messages(_) => Ok(self.0),
            other => Host.mean(of, other, &mut vec![0.0; of.values()]),
        }
    }
}

/// One rank: what no other has.
struct Rank {
    order: Order,
    buckets: Vec<Bucket>,
    gradient: Vec<f32>,
}

/// All of them. Parameters and their update are the same on every rank, so they are kept once.
pub struct Ranks {
    recipe: Recipe,
    data: Arc<Data>,
    network: Network,
    /// Of the fused gradient, in the order in which backward makes them.
    ranges: Vec<Range<usize>>,
    ranks: Vec<Rank>,
    parameters: Vec<f32>,
    velocity: Vec<f32>,
    mean: Vec<f32>,
    labels: Vec<u8>,
    /// What arrived in a round; and one rank's part.
    buffer: Vec<u8>,
    part: Vec<u8>,
    /// Whether the ranks refused the exchange of a bucket in the last tick.
    refused: bool,
}

/// A copy of what a trial changes but the residuals, of which the buckets keep training's own.
#[derive(Debug, Clone, PartialEq)]
pub struct Saved {
    parameters: Vec<f32>,
    velocity: Vec<f32>,
}

/// A bucket of a network: a layer with parameters, the last one first, as backward makes them.
pub struct Layout {
    /// In the fused gradient.
    pub range: Range<usize>,
    /// Its parameters: weights as rows of inputs, and biases.
    pub params: Vec<Param>,
}

/// The buckets of a network, in the order of backward.
pub fn buckets(network: &Network) -> Vec<Layout> {
    let (mut start, mut id, mut all) = (0, 0, Vec::new());
    for matrix in network.layers().iter().filter_map(|layer| layer.weights()) {
        let weights = Param { id, len: matrix.rows * matrix.cols, cols: matrix.cols };
        let biases = Param { id: id + 1, len: matrix.cols, cols: 1 };
        let end = start + weights.len + biases.len;
        all.push(Layout { range: start..end, params: vec![weights, biases] });
        (start, id) = (end, id + 2);
    }
    all.reverse();
    all
}

/// What stands for step, version and digest; ranks of one process agree by construction.
const CHECK: u32 = 0;

/// Of an exchange that the ranks refuse: of what is not finite nothing is kept.
const LOST: Energy = Energy { sent: 0.0, compensated: f64::INFINITY };

impl Ranks {
    /// Before the first step.
    pub fn new(recipe: Recipe, data: Arc<Data>) -> Result<Self> {
        if data.world() != recipe.world || recipe.batch < recipe.world || recipe.world < 2 {
            bail!("{} ranks with {} images a step and data for {}", recipe.world, recipe.batch, data.world());
        }
        let network = recipe.model.network();
        let layouts = buckets(&network);
        let rank = |index: usize| -> Result<Rank> {
            let member = Member { rank: index as u32, world: recipe.world as u32, ..Member::alone(recipe.seed) };
            let bucket =
                |(number, layout): (usize, &Layout)| Bucket::new(number as u32, layout.params.clone(), member, None);
            let buckets = layouts.iter().enumerate().map(bucket).collect::<Result<_, _>>()?;
            let order = Order::new(data.shards[index].len(), recipe.seed * 1000 + index as u64);
            Ok(Rank { order, buckets, gradient: vec![0.0; network.parameters()] })
        };
        let ranks = (0..recipe.world).map(rank).collect::<Result<_>>().context("make the buckets")?;
        let parameters = network.initial(recipe.seed);
        Ok(Self {
            ranges: layouts.iter().map(|layout| layout.range.clone()).collect(),
            velocity: vec![0.0; parameters.len()],
            mean: vec![0.0; parameters.len()],
            ranks,
            parameters,
            network,
            data,
            recipe,
            labels: Vec::new(),
            buffer: Vec::new(),
            part: Vec::new(),
            refused: false,
        })
    }

    /// How it trains.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// One step of training under a strategy.
    pub fn step(&mut self, step: u64, strategy: &Strategy) -> Result<Stepped> {
        self.tick(&Tick { step, plan: (*strategy).into(), version: Version(0), trial: None })
    }

    /// One step of training, or one iteration of a trial. What the ranks refuse to exchange ends training; in a trial the update takes
    /// a mean of zeros.
    pub fn tick(&mut self, tick: &Tick) -> Result<Stepped> {
        self.refused = false;
        let mut losses = self.gradients(tick.index());
        let rate = self.recipe.rate(tick.step);
        let mut buckets = Vec::new();
        for bucket in 0..self.ranges.len() {
            let mut exchanged = self.exchange(bucket, rate, tick)?;
            if tick.plan.alike().is_none() {
                exchanged.energies = self.weighted(bucket, &exchanged.energies);
            }
            buckets.push(exchanged);
            if self.refused && tick.trial.is_none() {
                bail!("the ranks refuse the exchange of a bucket under {}: values are not finite", tick.plan);
            }
        }
        if self.refused {
            self.mean.fill(0.0);
            losses.fill(f32::NAN);
        }
        self.update(rate, &tick.plan);
        Ok(Stepped { losses, buckets })
    }

    /// Whether the ranks refused to exchange a bucket in the last tick: values were not finite.
    pub fn has_refused(&self) -> bool {
        self.refused
    }

    /// Copies what a trial changes.
    pub fn save(&self) -> Saved {
        Saved { parameters: self.parameters.clone(), velocity: self.velocity.clone() }
    }

    /// Puts everything back: training goes on bit for bit as if nothing had happened. Once for every candidate.
    pub fn restore(&mut self, saved: &Saved) {
        self.ranks.iter_mut().flat_map(|rank| &mut rank.buckets).for_each(Bucket::end_candidate);
        self.parameters.copy_from_slice(&saved.parameters);
        self.velocity.copy_from_slice(&saved.velocity);
    }

    /// A rank's buckets in the order of backward, with the gradients of the last step before error feedback.
    pub fn buckets(&self, rank: usize) -> impl Iterator<Item = (&Bucket, &[f32])> {
        let Rank { buckets, gradient, .. } = &self.ranks[rank];
        buckets.iter().zip(&self.ranges).map(|(bucket, range)| (bucket, &gradient[range.clone()]))
    }

    /// The buckets' means of the last step, in the order of backward.
    pub fn means(&self) -> impl Iterator<Item = &[f32]> {
        self.ranges.iter().map(|range| &self.mean[range.clone()])
    }

    fn gradients(&mut self, index: u64) -> Vec<f32> {
        let each = (self.recipe.batch / self.recipe.world) as u64;
        let mut losses = Vec::new();
        for (rank, images) in self.ranks.iter_mut().zip(&self.data.shards) {
            let positions = index * each..(index + 1) * each;
            images.load_batch(positions.map(|at| rank.order.at(at)), self.network.input(), &mut self.labels);
            losses.push(self.network.gradient(&self.parameters, &self.labels, &mut rank.gradient));
        }
        losses
    }

    fn exchange(&mut self, bucket: usize, rate: f64, tick: &Tick) -> Result<Exchanged> {
        let strategy = tick.strategy(bucket);
        let range = self.ranges[bucket].clone();
        for rank in &mut self.ranks {
            rank.buckets[bucket].enter();
            rank.buckets[bucket].in_trial(tick.trial.is_some())?;
            rank.buckets[bucket].prepare(strategy.spec(), None)?;
        }
        if strategy.is_dense() && !self.ranks[0].buckets[bucket].has_residual() {
            return Ok(self.dense(range));
        }
        let index = tick.index();
        let leader =
            strategy.selection().map(|selection: Selection| Leader::of(selection, index, self.ranks.len() as u32));
        let step = Step { index, learning_rate: rate };
        let mut round = None;
        for rank in &mut self.ranks {
            let Ok(first) = rank.buckets[bucket].begin(&Host, &rank.gradient[range.clone()], step, leader);
            round = Some(first);
        }
        let mut rounds = Vec::new();
        let mut round = round.context("a job has ranks")?;
        loop {
            if round.how != How::Refused {
                let fixed = self.ranks[0].buckets[bucket].fixed_bytes();
                rounds.push(Carried { how: round.how, bytes: round.head_bytes() + round.bytes, fixed });
            }
            self.carry(bucket, round);
            let arrived = round.split(CHECK, self.ranks.len(), &self.buffer);
            let arrived = arrived.map_err(|rank| anyhow::anyhow!("rank {rank} is in another step"))?;
            let mut next = round;
            let (mut mean, mut read) = (Some(&mut self.mean[range.clone()]), None);
            for rank in &mut self.ranks {
                let bucket = &mut rank.buckets[bucket];
                if !round.last {
                    next = bucket.next(&Host, &arrived)?;
                    continue;
                }
                let ran = match (mean.take(), read) {
                    (Some(mean), _) => *read.insert(bucket.finish(&Host, &arrived, mean)?),
                    (None, read) => bucket.finish(&Follower(read.unwrap_or(Ran::Refused)), &arrived, ())?,
                };
                if ran != Ran::Good {
                    if bucket.status() == Status::Failed {
                        bail!("the ranks refuse the exchange of a bucket under {strategy}: {}", bucket.fault());
                    }
                    self.refused = true;
                }
            }
            if round.last {
                let energy = |rank: &Rank| if self.refused { LOST } else { rank.buckets[bucket].energy() };
                let energies = self.ranks.iter().map(energy).collect();
                return Ok(Exchanged { rounds, energies });
            }
            round = next;
        }
    }

    /// What the library's own allreduce does.
    fn dense(&mut self, range: Range<usize>) -> Exchanged {
        let mean = &mut self.mean[range.clone()];
        mean.fill(0.0);
        for rank in &self.ranks {
            mean.iter_mut().zip(&rank.gradient[range.clone()]).for_each(|(sum, value)| *sum += value);
        }
        let scale = 1.0 / self.ranks.len() as f32;
        mean.iter_mut().for_each(|sum| *sum *= scale);
        let how = How::Sum(Element::F32);
        Exchanged { rounds: vec![Carried { how, bytes: 4 * range.len(), fixed: 0 }], energies: Vec::new() }
    }

    /// Runs the collective of a round; what it brings is in the buffer.
    fn carry(&mut self, bucket: usize, round: Round) {
        let block = round.head_bytes() + round.bytes;
        let Self { ranks, buffer, part, .. } = self;
        buffer.clear();
        part.resize(block, 0);
        for (index, rank) in ranks.iter_mut().enumerate() {
            let bucket = &mut rank.buckets[bucket];
            match round.how {
                How::Refused => {}
                How::Gather => {
                    bucket.write(&mut part[round.head_bytes()..]);
                    if round.head_bytes() == HEAD_BYTES {
                        part[..HEAD_BYTES].copy_from_slice(&head(CHECK, bucket.status()));
                    }
                    buffer.extend_from_slice(part);
                }
                How::Broadcast(root) => {
                    bucket.write(part);
                    if index == root as usize {
                        buffer.extend_from_slice(part);
                    }
                }
                How::Sum(element) => {
                    bucket.write(part);
                    match index {
                        0 => buffer.extend_from_slice(part),
                        _ => add_elements(element, buffer, part),
                    }
                }
            }
        }
    }

    /// By rank, of a bucket's exchange. Of one that is dense there are no energies: it sends all of its gradient.
    fn weighted(&self, bucket: usize, energies: &[Energy]) -> Vec<Energy> {
        let fresh = |rank: &Rank| squared_norm(&rank.gradient[self.ranges[bucket].clone()]);
        let all =
            |(number, rank): (usize, &Rank)| weighted(energies.get(number).copied().unwrap_or_default(), fresh(rank));
        self.ranks.iter().enumerate().map(all).collect()
    }

    /// SGD. A memory with a momentum of its own takes the optimizer's place: in all buckets or in none, see
    /// [`flexcomm_domain::Plan::mixes_momentum`].
    fn update(&mut self, rate: f64, plan: &Plan) {
        let own = plan.of(0).spec().memory().is_some_and(|(kind, _)| kind == MemoryKind::Dgc);
        let momentum = if own { 0.0 } else { self.recipe.momentum };
        sgd_update(&mut self.parameters, &mut self.velocity, &self.mean, rate as f32, momentum);
    }

    /// Over all images that are held out.
    pub fn test(&mut self) -> Test {
        /// Bounds the buffers, not the result.
        const BATCH: usize = 500;
        let images = &self.data.held_out;
        let (mut loss, mut correct) = (0.0, 0);
        for start in (0..images.len()).step_by(BATCH) {
            let batch = start..images.len().min(start + BATCH);
            let size = batch.len();
            images.load_batch(batch, self.network.input(), &mut self.labels);
            let Evaluated { loss: mean, correct: right } = self.network.evaluate(&self.parameters, &self.labels);
            (loss, correct) = (loss + f64::from(mean) * size as f64, correct + right);
        }
        let count = images.len().max(1) as f64;
        Test { loss: loss / count, accuracy: correct as f64 / count }
    }
}

/// Of all images that are held out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// Mean cross-entropy.
    pub loss: f64,
    /// Share that is recognised.
    pub accuracy: f64,
}
