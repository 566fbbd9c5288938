//! All ranks of a job in one process: real gradients, real compressors, real exchanges; only the wire is missing.

use crate::model::{Evaluated, Network};
use anyhow::{Context, Result, bail};
use flexcomm_compression::Energy;
use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::{Member, Step, add_elements};
use flexcomm_domain::spec::MemoryKind;
use flexcomm_domain::{Selection, Strategy};
use flexcomm_exchange::{
    Bucket, ExchangeError, HEAD_BYTES, Host, How, LastRound, Leader, Param, Place, Ran, Round, head,
};
use flexcomm_lab::worker::{Images, Order, sgd_update};
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
}

/// A bucket's exchange.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exchanged {
    /// Its collectives, in order.
    pub rounds: Vec<Carried>,
    /// By rank: what left the residual, and the compensated gradient.
    pub energies: Vec<Energy>,
}

/// A step of all ranks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stepped {
    /// Mean loss of the batch.
    pub loss: f64,
    /// By bucket.
    pub buckets: Vec<Exchanged>,
}

/// Where a rank other than the first ends its exchange: all read the same messages, so what they mean is worked out once. Sums
/// change what a method remembers (PowerSGD's factors), so each rank reads its own.
struct Follower;

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
            LastRound::Messages(_) => Ok(Ran::Good),
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
        })
    }

    /// How it trains.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// One step of training under a strategy.
    pub fn step(&mut self, step: u64, strategy: &Strategy) -> Result<Stepped> {
        let loss = self.gradients(step);
        let rate = self.recipe.rate(step);
        let buckets = (0..self.ranges.len()).map(|bucket| self.exchange(bucket, (step, rate), strategy));
        let buckets = buckets.collect::<Result<_>>()?;
        self.update(rate, strategy);
        Ok(Stepped { loss, buckets })
    }

    fn gradients(&mut self, step: u64) -> f64 {
        let each = self.recipe.batch / self.recipe.world;
        let mut losses = 0.0;
        for (rank, images) in self.ranks.iter_mut().zip(&self.data.shards) {
            let positions = step * each as u64..(step + 1) * each as u64;
            images.load_batch(positions.map(|at| rank.order.at(at)), self.network.input(), &mut self.labels);
            losses += f64::from(self.network.gradient(&self.parameters, &self.labels, &mut rank.gradient));
        }
        losses / self.recipe.world as f64
    }

    fn exchange(&mut self, bucket: usize, (step, rate): (u64, f64), strategy: &Strategy) -> Result<Exchanged> {
        let range = self.ranges[bucket].clone();
        for rank in &mut self.ranks {
            rank.buckets[bucket].enter();
            rank.buckets[bucket].prepare(strategy.spec(), None)?;
        }
        if strategy.is_dense() && !self.ranks[0].buckets[bucket].has_residual() {
            return Ok(self.dense(range));
        }
        let leader =
            strategy.selection().map(|selection: Selection| Leader::of(selection, step, self.ranks.len() as u32));
        let step = Step { index: step, learning_rate: rate };
        let mut round = None;
        for rank in &mut self.ranks {
            let Ok(first) = rank.buckets[bucket].begin(&Host, &rank.gradient[range.clone()], step, leader);
            round = Some(first);
        }
        let mut rounds = Vec::new();
        let mut round = round.context("a job has ranks")?;
        loop {
            rounds.push(Carried { how: round.how, bytes: round.head_bytes() + round.bytes });
            self.carry(bucket, round);
            let arrived = round.split(CHECK, self.ranks.len(), &self.buffer);
            let arrived = arrived.map_err(|rank| anyhow::anyhow!("rank {rank} is in another step"))?;
            let mut next = round;
            let mut mean = Some(&mut self.mean[range.clone()]);
            for rank in &mut self.ranks {
                let bucket = &mut rank.buckets[bucket];
                if !round.last {
                    next = bucket.next(&Host, &arrived)?;
                    continue;
                }
                let ran = match mean.take() {
                    Some(mean) => bucket.finish(&Host, &arrived, mean)?,
                    None => bucket.finish(&Follower, &arrived, ())?,
                };
                if ran != Ran::Good {
                    bail!("the ranks refuse the exchange of a bucket under {strategy}: {}", bucket.fault());
                }
            }
            if round.last {
                let energies = self.ranks.iter().map(|rank| rank.buckets[bucket].energy()).collect();
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
        Exchanged { rounds: vec![Carried { how, bytes: 4 * range.len() }], energies: Vec::new() }
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

    /// SGD. A memory with a momentum of its own takes the optimizer's place.
    fn update(&mut self, rate: f64, strategy: &Strategy) {
        let own = strategy.spec().memory().is_some_and(|(kind, _)| kind == MemoryKind::Dgc);
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
