//! A step of training as what the network and the ranks' cores have to do.

use crate::cells::Cell;
use crate::ranks::{Carried, Exchanged};
use anyhow::{Context, Result};
use flexcomm_collectives::{Goal, Schedule, allgather, allreduce, binomial_broadcast, ring_allgather};
use flexcomm_domain::Rank;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_exchange::How;
use flexcomm_truth::coefficients::{CodecSeconds, Coefficients, Gather};
use flexcomm_truth::job::{Collective, Do, Program, Round, Send, Step};
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

/// What a compressor takes on a cell's machines, by the truth's table. Where that has `none`, it is what dense gradients take to be
/// copied into buckets and back.
pub fn codec(truth: &Coefficients, cell: &Cell, spec: &CompressorSpec) -> Result<CodecSeconds> {
    if *spec == CompressorSpec::NONE {
        return Ok(truth.codec.get("none").map_or(CodecSeconds::default(), |dense| dense.scaled(cell.codec_factor)));
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
#[derive(Debug)]
pub struct Programs {
    /// How blocks are gathered.
    gather: Gather,
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
    Sum(flexcomm_domain::Collective),
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
    /// None yet.
    pub fn new(gather: Gather) -> Self {
        Self { gather, made: BTreeMap::new() }
    }

    /// What a collective transfers whose ranks have such parts, of a gradient of which each value stands for `factor`.
    pub fn of(
        &mut self,
        carried: Carried,
        collective: flexcomm_domain::Collective,
        world: u32,
        factor: f64,
    ) -> Result<Arc<Program>> {
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

/// The group of the gradients' collectives, among [`flexcomm_truth::job::Mesh::groups`].
pub const JOB: usize = 0;
/// The group over which ranks agree on what they run, with connections of its own.
pub const CONTROL: usize = 1;

/// What a step is made of.
#[derive(Debug, Clone, Copy)]
pub struct StepOf<'a> {
    /// By which the buckets were exchanged.
    pub plan: &'a flexcomm_domain::Plan,
    /// The buckets, in the order of backward.
    pub exchanged: &'a [Exchanged],
    /// By bucket: what its compressor takes.
    pub codecs: &'a [CodecSeconds],
    /// Seconds of other work with each bucket; none where it is shorter.
    pub besides: &'a [f64],
    /// What the control group carries, whose bytes no factor multiplies.
    pub control: &'a [Carried],
}

/// A step, and what is measured of it.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// What every rank does.
    pub step: Step,
    /// Seconds that each rank compresses for, within backward.
    pub compress: f64,
    /// And decompresses.
    pub decompress: f64,
    /// Of what a rank does, by number: with this one all buckets are exchanged.
    pub exchanged: usize,
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
    /// Of the control group, whose bytes no factor multiplies.
    control: Programs,
}

/// Of computing: forward takes a third, backward the rest.
const FORWARD: f64 = 1.0 / 3.0;
/// The optimizer's update, of computing.
const UPDATE: f64 = 0.03;

impl Timeline {
    /// Of a job.
    pub fn new(world: usize, buckets: Vec<usize>, compute: Compute, stragglers: Stragglers, gather: Gather) -> Self {
        Self { world, buckets, compute, stragglers, programs: Programs::new(gather), control: Programs::new(gather) }
    }

    /// Values that a bucket stands for.
    pub fn values(&self, bucket: usize) -> f64 {
        self.buckets[bucket] as f64 * self.compute.values_factor
    }

    /// A step as the hook for torch does it on a CPU: the control group's collectives begin with it and are waited for at its end; a
    /// bucket's first collective is launched when backward has it and it is compressed; later rounds follow after backward, each in the
    /// order of the buckets; then all are waited for in that order, and decompressed.
    pub fn step(&mut self, of: &StepOf<'_>, rng: &mut ChaCha8Rng) -> Result<Plan> {
        let StepOf { plan: strategies, exchanged, codecs, besides, control } = *of;
        let all: usize = self.buckets.iter().sum();
        let factors: Vec<f64> = (0..self.world).map(|_| self.straggle(rng)).collect();
        let mut plan = Plan::default();
        let mut launched: Vec<Vec<usize>> = Vec::new();
        let (world, factor) = (self.world as u32, self.compute.values_factor);
        let mut launch = |group: usize, bucket: usize, carried: &Carried| -> Result<usize> {
            let (programs, factor) = if group == JOB { (&mut self.programs, factor) } else { (&mut self.control, 1.0) };
            let program = programs.of(*carried, strategies.of(bucket).collective(), world, factor);
            let program = program.context("find a collective's transfers")?;
            plan.step.collectives.push(Collective { group, program });
            Ok(plan.step.collectives.len() - 1)
        };
        for (bucket, exchanged) in exchanged.iter().enumerate() {
            launched.push(exchanged.rounds.iter().map(|carried| launch(JOB, bucket, carried)).collect::<Result<_>>()?);
        }
        // What the control group carries adds nothing up, so it has no strategy's collective.
        let control: Vec<usize> = control.iter().map(|carried| launch(CONTROL, 0, carried)).collect::<Result<_>>()?;
        let kept = |bucket: usize| strategies.of(bucket).cr().get();
        let compress = |bucket: usize| codecs[bucket].compress(self.values(bucket), kept(bucket));
        let decompress = |bucket: usize| {
            let gathers = exchanged[bucket].rounds.last().is_some_and(|round| round.how == How::Gather);
            let messages = if gathers { self.world as f64 } else { 1.0 };
            messages * codecs[bucket].decompress(self.values(bucket), kept(bucket))
        };
        plan.compress = (0..exchanged.len()).map(compress).sum();
        plan.decompress = (0..exchanged.len()).map(decompress).sum();
        plan.step.ranks = factors
            .iter()
            .map(|factor| {
                let seconds = self.compute.seconds * factor;
                let mut script: Vec<Do> = control.iter().map(|number| Do::Launch(*number)).collect();
                script.push(Do::Compute(FORWARD * seconds));
                for (bucket, rounds) in launched.iter().enumerate() {
                    let backward = (1.0 - FORWARD - UPDATE) * self.buckets[bucket] as f64 / all as f64;
                    let besides = besides.get(bucket).copied().unwrap_or_default();
                    script.push(Do::Compute(backward * seconds + compress(bucket) + besides));
                    script.extend(rounds.first().map(|first| Do::Launch(*first)));
                }
                let most = launched.iter().map(Vec::len).max().unwrap_or_default();
                for round in 1..most {
                    let later = launched.iter().filter(|rounds| rounds.len() > round);
                    script.extend(later.flat_map(|rounds| [Do::Wait(rounds[round - 1]), Do::Launch(rounds[round])]));
                }
                for (bucket, rounds) in launched.iter().enumerate() {
                    script.extend(rounds.last().map(|last| Do::Wait(*last)));
                    script.push(Do::Compute(decompress(bucket)));
                }
                plan.exchanged = script.len() - 1;
                script.push(Do::Compute(UPDATE * seconds));
                script.extend(control.iter().map(|number| Do::Wait(*number)));
                script
            })
            .collect();
        Ok(plan)
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
    use flexcomm_domain::Strategy;
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
            let mut programs = Programs::new(Gather::Ring);
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
        let (strategy, mut programs) = (Strategy::DENSE_RING, Programs::new(Gather::Ring));
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
            let mut programs = Programs::new(gather);
            let made = programs.of(Carried { how, bytes: 8, fixed: 0 }, strategy.collective(), 4, 1.0).unwrap();
            let received = made.ranks[1].iter().map(|round| round.received_bytes).sum::<f64>();
            (made.ranks[1].len(), received, made.segmented)
        };
        assert_eq!(of(Gather::Doubling, How::Gather), (2, 24.0, false));
        assert_eq!(of(Gather::Ring, How::Gather), (3, 24.0, false));
        let dense: Strategy = "none/dense-ring".parse().unwrap();
        let sum = Carried { how: How::Sum(flexcomm_compression::codec::Element::F32), bytes: 8, fixed: 0 };
        let made = Programs::new(Gather::Ring).of(sum, dense.collective(), 4, 1.0).unwrap();
        assert!(made.segmented && made.ranks[3].iter().all(|round| round.senders == [2]));
    }
}
