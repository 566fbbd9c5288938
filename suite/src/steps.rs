//! A step of training as what the network and the ranks' cores have to do.

use crate::cells::Cell;
use crate::ranks::{Carried, Exchanged};
use anyhow::{Context, Result};
use flexcomm_collectives::{Goal, Schedule, allgather, allreduce, binomial_broadcast, ring_allgather};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Collective, Rank, Strategy};
use flexcomm_exchange::How;
use flexcomm_truth::coefficients::{CodecSeconds, Coefficients, Gather};
use flexcomm_truth::job::{Piece, Program, Round, Send, Stage, Step};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a step takes besides its transfers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// Seconds of forward and backward on a rank.
    pub seconds: f64,
    /// Each value of the gradient stands for so many; see [`Carried::wire_bytes`].
    pub values_factor: f64,
}

impl Carried {
    /// Bytes of one rank's part where each value of the gradient stands for `values_factor`.
    pub fn wire_bytes(&self, values_factor: f64) -> f64 {
        self.fixed as f64 + self.bytes.saturating_sub(self.fixed) as f64 * values_factor
    }
}

/// What a compressor takes on a cell's machines, by the truth's table.
pub fn codec(truth: &Coefficients, cell: &Cell, spec: &CompressorSpec) -> Result<CodecSeconds> {
    if *spec == CompressorSpec::NONE {
        return Ok(CodecSeconds::default());
    }
    let text = spec.to_string();
    let (compressor, name) = (text.split('+').next().unwrap_or_default(), spec.compressor().name);
    let found = truth.codec.get(compressor).or_else(|| truth.codec.get(name));
    let found =
        found.with_context(|| format!("the truth has no [codec.\"{compressor}\"] and no [codec.\"{name}\"]"))?;
    let own = cell.codec_factors.get(name).copied().unwrap_or(1.0);
    Ok(found.scaled(cell.codec_factor * own))
}

/// How ranks differ from step to step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stragglers {
    /// Standard deviation of the logarithm of a rank's time to compute.
    pub spread: f64,
    /// Share of steps in which a rank pauses (garbage collection, a checkpoint, a neighbour).
    pub pause_share: f64,
    /// How long, in times of a step's computing.
    pub pause: f64,
}

/// Programs of collectives, made once.
#[derive(Debug, Default)]
pub struct Programs {
    /// How blocks are gathered.
    pub gather: Gather,
    made: BTreeMap<(Kind, Parts), Arc<Program>>,
}

/// Bytes of a rank's part, see [`Carried`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Parts {
    bytes: usize,
    fixed: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Sum(Collective),
    Gather,
    Broadcast(u32),
}

/// Of a schedule, for blocks or a buffer of so many bytes.
fn program(schedule: &Schedule, bytes: f64, gathers: bool) -> Program {
    let each = if gathers { bytes } else { bytes / f64::from(schedule.chunks.max(1)) };
    let rounds = |rank: u32| {
        let round = |round: flexcomm_collectives::Round| Round {
            index: round.index,
            sends: round
                .sends
                .iter()
                .map(|m| Send { to: m.peer.index(), bytes: each * f64::from(m.chunks.count) })
                .collect(),
            senders: round.recvs.iter().map(|m| m.peer.index()).collect(),
            received_bytes: round.recvs.iter().map(|m| each * f64::from(m.chunks.count)).sum(),
        };
        schedule.for_rank(Rank(rank)).into_iter().map(round).collect()
    };
    Program { ranks: (0..schedule.ranks).map(rounds).collect(), segmented: schedule.goal == Goal::Allreduce }
}

impl Programs {
    /// What a collective transfers whose ranks have such parts, of a gradient of which each value stands for `factor`.
    pub fn of(&mut self, carried: Carried, collective: Collective, world: u32, factor: f64) -> Result<Arc<Program>> {
        let kind = match carried.how {
            How::Sum(_) => Kind::Sum(collective),
            How::Gather => Kind::Gather,
            How::Broadcast(root) => Kind::Broadcast(root),
            How::Refused => anyhow::bail!("an exchange that the ranks refuse has no transfers"),
        };
        let Carried { bytes, fixed, .. } = carried;
        let key = (kind, Parts { bytes, fixed });
        if let Some(made) = self.made.get(&key) {
            return Ok(made.clone());
        }
        let schedule = match kind {
            Kind::Sum(collective) => (allreduce(collective).schedule)(world)?,
            Kind::Gather if self.gather == Gather::Ring => ring_allgather(world)?,
            Kind::Gather => allgather(world)?,
            Kind::Broadcast(root) => binomial_broadcast(world, Rank(root))?,
        };
        let made = Arc::new(program(&schedule, carried.wire_bytes(factor), kind == Kind::Gather));
        // Messages whose size depends on the values have a new one in every step.
        if self.made.len() > 4096 {
            self.made.clear();
        }
        self.made.insert(key, made.clone());
        Ok(made)
    }
}

/// The parts of a step that do not change.
#[derive(Debug)]
pub struct Timeline {
    world: usize,
    /// Values of each bucket, in the order of backward.
    buckets: Vec<usize>,
    compute: Compute,
    stragglers: Stragglers,
    programs: Programs,
}

/// Of computing: forward takes a third, backward the rest.
const FORWARD: f64 = 1.0 / 3.0;
/// The optimizer's update, of computing.
const UPDATE: f64 = 0.03;

impl Timeline {
    /// Of a job.
    pub fn new(world: usize, buckets: Vec<usize>, compute: Compute, stragglers: Stragglers, gather: Gather) -> Self {
        let programs = Programs { gather, ..Programs::default() };
        Self { world, buckets, compute, stragglers, programs }
    }

    /// Values that a bucket stands for.
    pub fn values(&self, bucket: usize) -> f64 {
        self.buckets[bucket] as f64 * self.compute.values_factor
    }

    /// The step that exchanged these buckets under this strategy.
    pub fn step(
        &mut self,
        strategy: &Strategy,
        exchanged: &[Exchanged],
        codec: CodecSeconds,
        rng: &mut ChaCha8Rng,
    ) -> Result<Step> {
        let all: usize = self.buckets.iter().sum();
        let factors: Vec<f64> = (0..self.world).map(|_| self.straggle(rng)).collect();
        let kept = strategy.cr().get();
        let values = |bucket: usize| self.values(bucket);
        let compress: Vec<f64> = (0..exchanged.len()).map(|b| codec.compress(values(b), kept)).collect();
        let pieces = |factor: &f64| -> Vec<Piece> {
            let backward = |b: usize| (1.0 - FORWARD - UPDATE) * self.buckets[b] as f64 / all as f64;
            let own = |b: usize| if b == 0 { FORWARD + backward(b) } else { backward(b) };
            let piece =
                |b: usize| Piece { seconds: self.compute.seconds * factor * own(b) + compress[b], begins: Some(b) };
            (0..exchanged.len()).map(piece).collect()
        };
        let compute = factors.iter().map(pieces).collect();
        let decompress: Vec<f64> = (0..exchanged.len()).map(|b| codec.decompress(values(b), kept)).collect();
        let mut exchanges = Vec::new();
        for (bucket, exchanged) in exchanged.iter().enumerate() {
            exchanges
                .push(self.stages(strategy, exchanged, decompress[bucket]).context("find a collective's transfers")?);
        }
        let after = factors.iter().map(|factor| self.compute.seconds * factor * UPDATE).collect();
        Ok(Step { compute, exchanges, after })
    }

    fn stages(&mut self, strategy: &Strategy, exchanged: &Exchanged, decompress: f64) -> Result<Vec<Stage>> {
        let (world, factor) = (self.world as u32, self.compute.values_factor);
        let messages = match exchanged.rounds.last().map(|round| round.how) {
            Some(How::Gather) => self.world as f64,
            _ => 1.0,
        };
        let rounds = exchanged.rounds.len();
        let mut stages = Vec::new();
        for (number, carried) in exchanged.rounds.iter().enumerate() {
            stages.push(Stage::Collective(self.programs.of(*carried, strategy.collective(), world, factor)?));
            // What is computed between rounds is part of what the table counts as decompressing.
            let share = if number + 1 == rounds { messages } else { 0.0 };
            stages.push(Stage::Compute(vec![decompress * share; self.world]));
        }
        Ok(stages)
    }

    fn straggle(&self, rng: &mut ChaCha8Rng) -> f64 {
        let Stragglers { spread, pause_share, pause } = self.stragglers;
        let (a, b): (f64, f64) = (rng.random::<f64>().max(1e-12), rng.random());
        let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        let pauses = rng.random::<f64>() < pause_share;
        (spread * normal).exp() + if pauses { pause } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::{Data, Model, Ranks, Recipe};
    use flexcomm_exchange::HEAD_BYTES;

    /// Message by message, as the network gets them.
    #[test]
    fn what_does_not_grow_with_the_gradient_is_not_multiplied() {
        const FACTOR: f64 = 1000.0;
        let (model, world) = (Model::Convolutional, 2);
        let recipe = Recipe { model, world, momentum: 0.9, learning_rate: 0.05, batch: 32, steps: 1, seed: 1 };
        let mut ranks = Ranks::new(recipe, Arc::new(Data::synthetic(world))).unwrap();
        let mut sent = |text: &str| -> Vec<(Carried, f64)> {
            let strategy: Strategy = text.parse().unwrap();
            let rounds: Vec<Carried> =
                ranks.step(0, &strategy).unwrap().buckets.into_iter().flat_map(|bucket| bucket.rounds).collect();
            let mut programs = Programs::default();
            let mut bytes = |carried: &Carried| {
                let made = programs.of(*carried, strategy.collective(), world as u32, FACTOR).unwrap();
                made.ranks.iter().flatten().flat_map(|round| &round.sends).map(|send| send.bytes).sum()
            };
            rounds.iter().map(|carried| (*carried, bytes(carried))).collect()
        };
        // Header with one parameter, number of indices, and the byte that names how they are written.
        let header = 32 + 8 + 4 + 1;
        for (carried, bytes) in sent("topk(k=0.01)+ef(vanilla)/allgather") {
            let fixed = HEAD_BYTES + header;
            assert_eq!(carried.fixed, fixed);
            // Each of two ranks sends its message to the other.
            let expected = fixed as f64 + (carried.bytes - fixed) as f64 * FACTOR;
            assert_eq!((carried.wire_bytes(FACTOR), bytes), (expected, 2.0 * expected));
        }
        for rounds in sent("topk(k=0.01)+ef(vanilla)/art-ring:var").chunks(3) {
            let [energies, indices, values] = rounds else { panic!("{rounds:?}") };
            assert_eq!((energies.0.bytes, energies.1), (HEAD_BYTES + 8, 2.0 * (HEAD_BYTES as f64 + 8.0)));
            assert_eq!((indices.0.fixed, values.0.fixed), (header, 8));
        }
        for (carried, bytes) in sent("none/dense-ring") {
            assert_eq!((carried.fixed, bytes), (0, 2.0 * carried.bytes as f64 * FACTOR));
        }
    }

    #[test]
    fn parts_of_one_size_and_other_fixed_bytes_are_told_apart() {
        let (strategy, mut programs) = (Strategy::DENSE_RING, Programs::default());
        let mut received = |fixed| {
            let carried = Carried { how: How::Gather, bytes: 50, fixed };
            programs.of(carried, strategy.collective(), 2, 10.0).unwrap().ranks[0][0].received_bytes
        };
        assert_eq!([0, 48, 50].map(&mut received), [500.0, 68.0, 50.0]);
    }

    #[test]
    fn blocks_are_gathered_as_the_truth_has_it_and_only_allreduces_are_segmented() {
        let strategy: Strategy = "topk(k=0.01)+ef(vanilla)/allgather".parse().unwrap();
        let of = |gather, how| {
            let mut programs = Programs { gather, ..Programs::default() };
            let made = programs.of(Carried { how, bytes: 8, fixed: 0 }, strategy.collective(), 4, 1.0).unwrap();
            let received = made.ranks[1].iter().map(|round| round.received_bytes).sum::<f64>();
            (made.ranks[1].len(), received, made.segmented)
        };
        assert_eq!(of(Gather::Doubling, How::Gather), (2, 24.0, false));
        assert_eq!(of(Gather::Ring, How::Gather), (3, 24.0, false));
        let dense: Strategy = "none/dense-ring".parse().unwrap();
        let sum = Carried { how: How::Sum(flexcomm_compression::codec::Element::F32), bytes: 8, fixed: 0 };
        let made = Programs::default().of(sum, dense.collective(), 4, 1.0).unwrap();
        assert!(made.segmented && made.ranks[3].iter().all(|round| round.senders == [2]));
    }
}
