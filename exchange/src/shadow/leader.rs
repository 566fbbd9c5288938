//! Shadow trials of AR-Topk, of which one rank's indices count for all (Flexible Communication, section 4).
//!
//! No rank can follow such a candidate by itself. So after a trial every rank sends rank 0, step by step, its gradient at
//! coordinates that all ranks have drawn alike, and rank 0 runs the candidates' exchanges over them, with a residual for every rank:
//! the same [`Bucket`]s as in training, under STAR and under VAR. Which steps these are is the agreement's business.

use super::Tally;
use crate::auto::Leader;
use crate::bucket::{Bucket, Host, How, Param, Round};
use crate::error::ExchangeError;
use crate::head::{Arrived, Status};
use flexcomm_compression::Energy;
use flexcomm_compression::pipeline::{Member, Step, add_elements};
use flexcomm_domain::spec::Scope;
use flexcomm_domain::{Selection, Strategy};
use half::bf16;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;
use std::ops::Deref;

/// One of so many values is sampled, about [`LEAST`] at least and about [`MOST`] at most, and one of each parameter: at a ratio of
/// 0.01 a sampled step sends a fifth of what the gradient's own messages do.
const SAMPLED: usize = 200;
const LEAST: usize = 512;
const MOST: usize = 8192;

/// A candidate keeps at least so many values of a sample, and top-k's least of one value of each bucket makes them at most so many
/// times as many: more would overrate it.
const LEAST_KEPT: f64 = 4.0;
const MOST_ABOVE: f64 = 1.25;

/// By what the coordinates are drawn, on all ranks.
const SEED: u64 = 0;

/// A rank's gradient at the sampled coordinates of all parameters.
#[derive(Debug)]
struct SampledGradient {
    /// By parameter, ascending within it.
    coordinates: Vec<Vec<u32>>,
    /// Where the parameter's values begin in a row.
    starts: Vec<usize>,
    row: Vec<f32>,
    filled: usize,
    /// How many values of a row the buckets have: DDP leaves out parameters that it is to ignore.
    whole: usize,
}

impl SampledGradient {
    fn new(model: &[Param]) -> Self {
        let all: usize = model.iter().map(|param| param.len).sum();
        let share = (all / SAMPLED).clamp(LEAST, MOST) as f64 / all.max(1) as f64;
        let mut rng = ChaCha8Rng::seed_from_u64(SEED);
        let draw = |param: &Param| {
            let amount = ((param.len as f64 * share).ceil() as usize).min(param.len);
            let mut drawn: Vec<u32> = sample(&mut rng, param.len, amount).into_iter().map(|i| i as u32).collect();
            drawn.sort_unstable();
            drawn
        };
        let coordinates: Vec<Vec<u32>> = model.iter().map(draw).collect();
        let mut values = 0;
        let start = |drawn: &Vec<u32>| {
            values += drawn.len();
            values - drawn.len()
        };
        let starts = coordinates.iter().map(start).collect();
        Self { coordinates, starts, row: vec![0.0; values], filled: 0, whole: 0 }
    }

    /// Takes in a bucket's values, in the order of its parameters; without values they count as zeros.
    fn observe(&mut self, params: &[Param], values: &[f32]) {
        let mut begin = 0;
        for param in params {
            let id = param.id as usize;
            if let (Some(drawn), Some(start)) = (self.coordinates.get(id), self.starts.get(id)) {
                let row = &mut self.row[*start..start + drawn.len()];
                let value = |i: &u32| values.get(begin + *i as usize).copied().unwrap_or(0.0);
                row.iter_mut().zip(drawn).for_each(|(to, i)| *to = value(i));
                self.filled += drawn.len();
            }
            begin += param.len;
        }
    }

    /// What was observed since the last one, as bytes whose number is the same on all ranks: 1 and the values in bfloat16, or zeros
    /// where a bucket was missing or a value was not finite.
    fn take(&mut self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes());
        let is_whole = self.whole > 0 && self.filled == self.whole && self.row.iter().all(|x| x.is_finite());
        self.filled = 0;
        if is_whole {
            bytes.push(1);
            bytes.extend(self.row.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()));
        }
        bytes.resize(self.bytes(), 0);
        bytes
    }

    fn bytes(&self) -> usize {
        1 + 2 * self.row.len()
    }

    /// What a rank has taken; none where it had nothing.
    fn read(&self, bytes: &[u8]) -> Option<Vec<f32>> {
        let (whole, halves) = bytes.split_first().filter(|_| bytes.len() == self.bytes())?;
        let values = halves.as_chunks::<2>().0.iter().map(|half| bf16::from_le_bytes(*half).to_f32());
        (*whole == 1).then(|| values.collect())
    }

    /// A bucket's values out of a row, in the order of its parameters.
    fn of_bucket(&self, params: &[Param], row: &[f32]) -> Vec<f32> {
        let ids = params.iter().map(|param| param.id as usize);
        ids.flat_map(|id| &row[self.starts[id]..self.starts[id] + self.coordinates[id].len()]).copied().collect()
    }

    /// A bucket's parameters, of which each has as many values as are sampled.
    fn sampled(&self, params: &[Param]) -> Vec<Param> {
        let param = |p: &Param| Param { id: p.id, len: self.coordinates[p.id as usize].len(), cols: 1 };
        params.iter().map(param).collect()
    }
}

/// A candidate and its buckets, of all ranks.
#[derive(Debug)]
struct Candidate {
    strategy: Strategy,
    buckets: Vec<Vec<Bucket>>,
    tally: Tally,
}

/// What rank 0 runs.
#[derive(Debug)]
struct Running {
    /// Parameters of each bucket.
    layouts: Vec<Vec<Param>>,
    candidates: Vec<Candidate>,
    steps: u64,
}

impl Running {
    /// Over buckets of these parameters; the ranks' residuals are in `rows`, zeros where one had none.
    fn new(
        candidates: &[Strategy],
        mut layouts: Vec<Vec<Param>>,
        sampled: &SampledGradient,
        rows: &[Vec<u8>],
    ) -> Result<Self, ExchangeError> {
        let rows: Vec<Option<Vec<f32>>> = rows.iter().map(|bytes| sampled.read(bytes)).collect();
        let world = rows.len() as u32;
        let is_known = |param: &Param| (param.id as usize) < sampled.starts.len();
        layouts.retain(|params| params.iter().all(is_known));
        let bucket = |params: &[Param], rank: u32, strategy: &Strategy| {
            let member = Member { rank, world, ..Member::alone(SEED) };
            let residual = rows[rank as usize].as_ref().map(|row| sampled.of_bucket(params, row));
            let mut bucket = Bucket::new(0, sampled.sampled(params), member, residual.as_deref())?;
            bucket.prepare(strategy.spec(), None)?;
            Ok(bucket)
        };
        let candidate = |strategy: &Strategy| {
            let buckets = |params: &Vec<Param>| (0..world).map(|rank| bucket(params, rank, strategy)).collect();
            let buckets = layouts.iter().map(buckets).collect::<Result<_, ExchangeError>>()?;
            Ok(Candidate { strategy: *strategy, buckets, tally: Tally::default() })
        };
        let is_estimate = |strategy: &&Strategy| {
            // What is selected from as one tensor: of each at least one value is kept.
            let tensors = |params: &Vec<Param>| {
                let lengths = sampled.sampled(params).into_iter().map(|param| param.len);
                match strategy.spec().scope() {
                    Scope::Bucket => vec![lengths.sum::<usize>()],
                    Scope::Tensor => lengths.collect(),
                }
            };
            let kept: Vec<f64> = layouts.iter().flat_map(tensors).map(|n| strategy.cr().get() * n as f64).collect();
            let share: f64 = kept.iter().sum();
            share >= LEAST_KEPT && kept.iter().map(|kept| kept.max(1.0)).sum::<f64>() <= MOST_ABOVE * share
        };
        let candidates = candidates.iter().filter(is_estimate).map(candidate).collect::<Result<_, ExchangeError>>()?;
        Ok(Self { layouts, candidates, steps: 0 })
    }

    /// A step of all candidates over the ranks' gradients; nothing where one of them has none.
    fn step(&mut self, sampled: &SampledGradient, rows: &[Vec<u8>]) -> Result<(), ExchangeError> {
        let Some(rows) = rows.iter().map(|bytes| sampled.read(bytes)).collect::<Option<Vec<_>>>() else {
            return Ok(());
        };
        for (number, params) in self.layouts.iter().enumerate() {
            let gradients: Vec<Vec<f32>> = rows.iter().map(|row| sampled.of_bucket(params, row)).collect();
            for Candidate { strategy, buckets, tally } in &mut self.candidates {
                let selection = strategy.selection().unwrap_or(Selection::Star);
                let leader = Leader::of(selection, self.steps, rows.len() as u32);
                tally.add(1.0, exchange(&mut buckets[number], &gradients, leader, self.steps)?);
            }
        }
        self.candidates.iter_mut().for_each(|candidate| candidate.tally.end_step());
        self.steps += 1;
        Ok(())
    }

    fn gains(&self) -> Vec<(Strategy, Energy)> {
        let gains = self.candidates.iter().map(|candidate| (candidate.strategy, candidate.tally.gain()));
        gains.filter(|(_, gain)| gain.steps > 0).map(|(strategy, gain)| (strategy, gain.recent)).collect()
    }
}

/// A rank's part in AR-Topk's shadow trials. What fails in them is dropped: training is not their business.
#[derive(Debug)]
pub struct LeaderShadows {
    sampled: SampledGradient,
    candidates: Vec<Strategy>,
    running: Option<Running>,
}

impl LeaderShadows {
    /// Of a model whose parameters have their places as ids, alike on all ranks.
    pub fn new(model: &[Param]) -> Self {
        Self { sampled: SampledGradient::new(model), candidates: Vec::new(), running: None }
    }

    /// Those of these candidates begin with the next residuals. A number of values that is no share of the bucket says nothing of a
    /// sample: such candidates have no shadow.
    pub fn watch(&mut self, candidates: &[Strategy]) {
        let is_sampled = |s: &Strategy| s.collective().is_art() && s.spec().ratio().is_some();
        self.candidates = candidates.iter().copied().filter(is_sampled).collect();
        self.running = None;
        self.sampled.filled = 0;
    }

    /// Takes in a bucket's gradient, in the order of its parameters, for the next sample.
    pub fn observe(&mut self, params: &[Param], gradient: &[f32]) {
        self.sampled.observe(params, gradient);
    }

    /// What was observed since the last sample, for rank 0: as many bytes on all ranks, zeros where something was missing or not
    /// finite. The shadows begin with a sample of the buckets' residuals, which are copied once per trial for it; of a bucket that
    /// lies on a device there is none.
    pub fn sample(&mut self, begins: bool, buckets: impl IntoIterator<Item = impl Deref<Target = Bucket>>) -> Vec<u8> {
        if begins {
            for bucket in buckets.into_iter().filter(|bucket| !bucket.is_on_device()) {
                self.sampled.observe(bucket.params(), &bucket.residual());
            }
            self.sampled.whole = self.sampled.filled;
        }
        self.sampled.take()
    }

    /// On rank 0: takes in all ranks' samples of a step, in rank order; the first are the residuals, of these buckets.
    pub fn receive(
        &mut self,
        rows: &[Vec<u8>],
        buckets: impl IntoIterator<Item = impl Deref<Target = Bucket>>,
    ) -> Result<(), ExchangeError> {
        let received = match self.running.take() {
            None => {
                let layouts = buckets.into_iter().map(|bucket| bucket.params().to_vec()).collect();
                Running::new(&self.candidates, layouts, &self.sampled, rows)
            }
            Some(mut running) => running.step(&self.sampled, rows).map(|()| running),
        };
        if received.is_err() {
            self.candidates.clear();
        }
        received.map(|running| self.running = Some(running))
    }

    /// What each candidate keeps of the gradient's energy, of all ranks together; nothing where there was no step.
    pub fn gains(&self) -> Vec<(Strategy, Energy)> {
        self.running.as_ref().map_or_else(Vec::new, Running::gains)
    }
}

/// One exchange of a bucket's ranks, all in this process; answers what left their residuals. Nothing where one had no part.
fn exchange(ranks: &mut [Bucket], gradients: &[Vec<f32>], leader: Leader, index: u64) -> Result<Energy, ExchangeError> {
    let step = Step { index, learning_rate: 1.0 };
    let begun = ranks.iter_mut().zip(gradients).map(|(rank, own)| rank.begin(&Host, own, step, Some(leader)));
    let Some(Ok(mut round)) = begun.last() else { return Ok(Energy::default()) };
    loop {
        let refused = ranks.iter().any(|rank| rank.status() != Status::Ready);
        let parts = brought(ranks, round);
        let arrived = Arrived { refused, parts: parts.iter().map(Vec::as_slice).collect() };
        if refused || round.last {
            let mut mean = vec![0.0; gradients.first().map_or(0, Vec::len)];
            for rank in ranks.iter_mut() {
                rank.finish(&Host, &arrived, &mut mean)?;
            }
            return Ok(ranks.iter().map(Bucket::energy).fold(Energy::default(), |sum, own| sum + own));
        }
        for rank in ranks.iter_mut() {
            round = rank.next(&Host, &arrived)?;
        }
    }
}

/// What a round's collective brings every rank.
fn brought(ranks: &mut [Bucket], round: Round) -> Vec<Vec<u8>> {
    let part = |rank: &mut Bucket| {
        let mut bytes = vec![0; round.bytes];
        rank.write(&mut bytes);
        bytes
    };
    let mut parts: Vec<Vec<u8>> = ranks.iter_mut().map(part).collect();
    match round.how {
        How::Gather => parts,
        How::Broadcast(root) => vec![parts.swap_remove(root as usize)],
        How::Sum(element) => {
            let sum = parts.into_iter().reduce(|mut sum, part| {
                add_elements(element, &mut sum, &part);
                sum
            });
            sum.into_iter().collect()
        }
        How::Refused => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::Rng;

    fn model(lengths: &[usize]) -> Vec<Param> {
        lengths.iter().zip(0..).map(|(len, id)| Param { id, len: *len, cols: 1 }).collect()
    }

    /// A rank's gradient in a step: heavy tails at places that the ranks share in part.
    fn gradient(n: usize, rank: u64, step: u64) -> Vec<f32> {
        let mut own = ChaCha8Rng::seed_from_u64(1000 * step + rank);
        let mut shared = ChaCha8Rng::seed_from_u64(7);
        let scale = |shared: &mut ChaCha8Rng| shared.random_range(0.0f32..1.0).powi(6);
        (0..n).map(|_| (own.random_range(-1.0f32..1.0) + 0.3) * scale(&mut shared)).collect()
    }

    /// With all parameters in buckets.
    fn whole(params: &[Param]) -> SampledGradient {
        let sampled = SampledGradient::new(params);
        SampledGradient { whole: sampled.row.len(), ..sampled }
    }

    /// A share that keeps too little of a sample, and a number of values, are left out; so is what was observed before.
    #[test]
    fn shadows_begin_with_the_residuals_of_the_known_buckets() {
        // DDP ignores the last parameter.
        let params = model(&[4000, 50, 30]);
        let mut shadows = LeaderShadows::new(&params);
        let asked = ["topk@0.1/art-ring:star", "topk@0.001/art-ring:star", "topk(k=20)+ef(vanilla)/art-ring:star"];
        let asked: Vec<Strategy> = asked.map(|text| text.parse().unwrap()).to_vec();
        let mut bucket = Bucket::new(0, params[..2].to_vec(), Member::alone(0), None).unwrap();
        bucket.set_residual(Some(&gradient(4050, 0, 0))).unwrap();
        shadows.observe(&params[..2], &gradient(4050, 0, 1));
        shadows.watch(&asked);
        let send = |shadows: &mut LeaderShadows, begins| {
            let row = shadows.sample(begins, [&bucket]);
            assert_eq!(row[0], 1, "it is whole");
            shadows.receive(&[row.clone(), row], [&bucket]).unwrap();
        };
        send(&mut shadows, true);
        assert!(shadows.gains().is_empty());
        shadows.observe(&params[..2], &gradient(4050, 0, 2));
        send(&mut shadows, false);
        assert_eq!(shadows.gains().iter().map(|(strategy, _)| *strategy).collect::<Vec<_>>(), asked[..1]);
    }

    fn strategies() -> Vec<Strategy> {
        ["topk@0.1/art-ring:star", "topk@0.1/art-ring:var", "topk@0.03/art-tree:star"]
            .map(|text| text.parse().unwrap())
            .to_vec()
    }

    #[test]
    fn a_sample_tells_the_gain_of_the_whole_exchange_within_10_percent() {
        let (params, world, steps) = (model(&[40_000, 200, 20_000]), 4u64, 30);
        let n: usize = params.iter().map(|param| param.len).sum();
        let mut sampled = whole(&params);
        assert_eq!(sampled.bytes(), 1 + 2 * (sampled.coordinates.iter().map(Vec::len).sum::<usize>()));
        let take = |sampled: &mut SampledGradient, values: &[f32]| {
            sampled.observe(&params[2..], &values[40_200..]);
            sampled.observe(&params[..2], &values[..40_200]);
            sampled.take()
        };
        let nothing: Vec<Vec<u8>> = (0..world).map(|_| take(&mut sampled, &vec![0.0; n])).collect();
        let mut shadow = Running::new(&strategies(), vec![params.clone()], &sampled, &nothing).unwrap();
        let whole = Param { id: 0, len: n, cols: 1 };
        let mut real: Vec<(Vec<Bucket>, Tally)> = strategies()
            .iter()
            .map(|strategy| {
                let rank = |rank| {
                    let member = Member { rank, world: world as u32, ..Member::alone(0) };
                    let mut bucket = Bucket::new(0, vec![whole], member, None).unwrap();
                    bucket.prepare(strategy.spec(), None).unwrap();
                    bucket
                };
                ((0..world as u32).map(rank).collect(), Tally::default())
            })
            .collect();
        for step in 0..steps {
            let gradients: Vec<Vec<f32>> = (0..world).map(|rank| gradient(n, rank, step)).collect();
            let rows: Vec<Vec<u8>> = gradients.iter().map(|values| take(&mut sampled, values)).collect();
            shadow.step(&sampled, &rows).unwrap();
            for (strategy, (ranks, tally)) in strategies().iter().zip(&mut real) {
                let leader = Leader::of(strategy.selection().unwrap(), step, world as u32);
                tally.add(1.0, exchange(ranks, &gradients, leader, step).unwrap());
                tally.end_step();
            }
        }
        let found = shadow.gains();
        assert_eq!(found.iter().map(|(strategy, _)| *strategy).collect::<Vec<_>>(), strategies());
        for ((strategy, energy), (_, tally)) in found.iter().zip(&real) {
            let (gain, real) = (energy.gain(), tally.gain().recent.gain());
            assert!((gain / real - 1.0).abs() < 0.1, "{strategy}: {gain} for {real}");
            assert!((0.05..0.95).contains(&real), "{strategy}: {real}");
        }
        assert!(found[0].1.gain() > 1.2 * found[2].1.gain(), "{found:?}");
    }

    #[test]
    fn a_step_in_which_a_rank_has_nothing_is_left_out() {
        let params = model(&[600, 10]);
        let mut sampled = whole(&params);
        let values = gradient(610, 0, 0);
        sampled.observe(&params, &values);
        let good = sampled.take();
        sampled.observe(&params[..1], &values[..600]);
        let part = sampled.take();
        sampled.observe(&params, &[f32::NAN; 610]);
        let nan = sampled.take();
        assert!(part.iter().chain(&nan).all(|byte| *byte == 0) && part.len() == good.len());
        let rows = vec![good.clone(), good.clone()];
        let mut shadow = Running::new(&strategies(), vec![params], &sampled, &rows).unwrap();
        for row in [part, nan, vec![1; 3]] {
            shadow.step(&sampled, &[good.clone(), row]).unwrap();
            assert!(shadow.gains().is_empty());
        }
        shadow.step(&sampled, &rows).unwrap();
        assert_eq!(shadow.gains().len(), 3);
    }

    /// A residual that comes with them leaves less of the first step.
    #[test]
    fn they_begin_with_the_ranks_residuals() {
        let params = model(&[600]);
        let mut sampled = whole(&params);
        let mut row = |scale: f32| {
            let values: Vec<f32> = gradient(600, 1, 1).iter().map(|x| scale * x).collect();
            sampled.observe(&params, &values);
            sampled.take()
        };
        let (zeros, flat, step) = (row(0.0), vec![row(0.5); 2], vec![row(1.0); 2]);
        let gain = |residuals: &[Vec<u8>]| {
            let mut shadow = Running::new(&strategies()[..1], vec![params.clone()], &sampled, residuals).unwrap();
            shadow.step(&sampled, &step).unwrap();
            shadow.gains()[0].1.gain()
        };
        let none = gain(&[zeros.clone(), zeros]);
        // Alike in shape, so the same share of it is kept.
        assert!((gain(&flat) / none - 1.0).abs() < 0.01);
        let other: Vec<u8> = {
            sampled.observe(&params, &vec![0.2; 600]);
            sampled.take()
        };
        let spread = {
            let mut shadow =
                Running::new(&strategies()[..1], vec![params.clone()], &sampled, &[other.clone(), other]).unwrap();
            shadow.step(&sampled, &step).unwrap();
            shadow.gains()[0].1.gain()
        };
        assert!(spread < 0.9 * none, "{spread} for {none}");
    }
}
