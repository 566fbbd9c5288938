//! A bucket under a strategy that a pipeline runs: the pipeline, and its exchange as
//! collectives of a library that only sums or gathers.
//!
//! One exchange is one or more turns, each of which is one collective on every rank:
//!
//! - messages that sum in flight: one allreduce per round of the codec;
//! - gathered messages of one size: one allgather;
//! - gathered messages whose size depends on the values: an allgather of the sizes, then one of the messages, padded
//!   to the longest.
//!
//! As everywhere in this crate an exchange is a transaction: a rank that cannot do its part takes part with a status,
//! and when any rank did, every rank puts its pipeline back.

mod on_device;
mod plan;
mod rates;

use crate::bucket::{Param, Ran};
use crate::error::EngineError;
use flexcomm_compression::codec::{Element, EncodeError, ReadError, Shape, Size, Travels};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, StateError, Step};
use flexcomm_compression::wire::{Envelope, Writer};
use flexcomm_compression::{Energy, Layers, LayersError};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_trainer::{Heard, Status};
use on_device::OnDevice;
use rates::LayerRates;

/// Bytes of a size on the wire.
const SIZE_BYTES: usize = 8;

/// Sends nothing and holds everything back: what makes a memory out of values, in any memory's own units.
const HOLDER: &str = "threshold(v=100000000000000000000000000000000000000)+ef(vanilla)";

/// Stands for a learning rate as long as none above 0 was given: a warm-up's start at 0. Nobody sets exactly this one, so a
/// saved state tells too that its rate is none.
const NO_RATE: f64 = 1.0 + f64::EPSILON;

/// How a turn's payload travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Every rank gets every rank's bytes.
    Gather,
    /// Elements add up.
    Sum(Element),
    /// Not at all: the exchange is refused, on all ranks.
    Over,
}

/// One collective of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Which.
    pub how: How,
    /// Bytes of the payload, without any word.
    pub bytes: usize,
    /// Which of the exchange, from 0.
    pub number: u32,
    /// Whether the control word rides on it.
    pub word: bool,
    /// Whether it is the exchange's last.
    pub last: bool,
}

impl Turn {
    const OVER: Self = Self { how: How::Over, bytes: 0, number: 0, word: false, last: true };
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Idle,
    Whole,
    Sizes,
    /// With every rank's size.
    Bodies(Vec<usize>),
    Sums(u32),
    Refused(Heard),
}

/// A bucket's pipeline with its exchange.
#[derive(Debug)]
pub struct Piped {
    index: u32,
    pipeline: Pipeline,
    message: Writer,
    sum: Vec<u8>,
    step: Step,
    phase: Phase,
    turn: Turn,
    status: Status,
    fault: String,
    energy: Energy,
    restored: bool,
    rates: LayerRates,
    /// While what is held back lies there; the pipeline's memory is then out of date.
    device: Option<OnDevice>,
}

/// The layers of a bucket, as matrices where they are.
pub fn layers(params: &[Param]) -> Result<Layers, LayersError> {
    let shape = |p: &Param| Shape { rows: p.len / p.cols.max(1), cols: p.cols.max(1) };
    Layers::matrices(&params.iter().map(shape).collect::<Vec<_>>())
}

impl Piped {
    /// For the bucket at `index` with these layers; nothing is held back.
    pub fn new(index: u32, strategy: &CompressorSpec, layers: Layers, member: Member) -> Self {
        let (message, sum, fault) = Default::default();
        let mut pipeline = Pipeline::new(strategy, layers, member);
        pipeline.rebase(NO_RATE);
        Self {
            index,
            pipeline,
            message,
            sum,
            step: Step { index: 0, learning_rate: NO_RATE },
            phase: Phase::Idle,
            turn: Turn::OVER,
            status: Status::default(),
            fault,
            energy: Energy::default(),
            restored: false,
            rates: LayerRates::default(),
            device: None,
        }
    }

    /// As [`Self::new`], holding back `values` in units of gradients.
    pub fn holding(
        index: u32,
        strategy: &CompressorSpec,
        (layers, member): (Layers, Member),
        values: &[f32],
    ) -> Result<Self, EngineError> {
        let text = |error: &dyn std::fmt::Display| EngineError::State(format!("failed to {error}"));
        let holder: CompressorSpec = HOLDER.parse().map_err(|e| text(&e))?;
        let mut own = Self::new(index, &holder, layers, member);
        own.pipeline.compress(Gradient::F32(values), own.step, &mut own.message).map_err(|e| text(&e))?;
        own.pipeline.change(strategy);
        Ok(own)
    }

    /// As [`Self::new`], from what [`Self::state`] gave.
    pub fn restored(
        index: u32,
        strategy: &CompressorSpec,
        (layers, member): (Layers, Member),
        state: &[u8],
    ) -> Result<Self, StateError> {
        let mut own = Self::new(index, strategy, layers, member);
        own.pipeline.restore(state)?;
        own.restored = true;
        Ok(own)
    }

    /// Everything that outlives a step, for a checkpoint, whatever holds it on the host: see [`Self::come_home`].
    pub fn state(&self) -> Vec<u8> {
        let mut out = Writer::new();
        self.pipeline.save(&mut out);
        out.into_vec()
    }

    /// Whether it began with a saved state: the same on all ranks, or they ran apart.
    pub fn is_restored(&self) -> bool {
        self.restored
    }

    /// What is held back on the host, in units of gradients; empty when nothing can be. See [`Self::come_home`].
    pub fn held_back(&self) -> Vec<f32> {
        self.pipeline.held_back()
    }

    /// What it runs.
    pub fn spec(&self) -> &CompressorSpec {
        self.pipeline.spec()
    }

    /// Of the last exchange.
    pub fn energy(&self) -> Energy {
        self.energy
    }

    /// The turn under way.
    pub fn turn(&self) -> Turn {
        self.turn
    }

    /// What is wrong with this rank's part of the turn under way.
    pub fn status(&self) -> Status {
        self.status
    }

    fn header_bytes(&self) -> usize {
        Envelope::parse(self.message.bytes()).map_or(0, |envelope| envelope.header.bytes())
    }

    /// Remembers why this rank has no part in the turn, and leaves it without a message.
    fn excuse(&mut self, error: &EncodeError) {
        self.fault = error.to_string();
        let not_finite = matches!(error, EncodeError::NonFinite { .. } | EncodeError::Own(ReadError::Number { .. }));
        self.status = Status { failed: !not_finite, not_finite, ..Status::default() };
        self.message.clear();
    }

    /// The rate to compress at. While `rate` is not above 0 the last one that was, so that nothing is rescaled; and at the
    /// first that is nothing either: what was held back before it was held back at no rate.
    fn rate(&mut self, rate: f64) -> f64 {
        let known = self.pipeline.learning_rate();
        if !(rate.is_finite() && rate > 0.0) {
            return known;
        }
        if known == NO_RATE {
            self.pipeline.rebase(rate);
        }
        rate
    }

    /// Learning rates of the layers at the step to come, in the bucket's order, where they are not all the step's own. Of a
    /// rate that is not above 0 the last one that was counts.
    pub fn layer_rates(&mut self, rates: &[f64]) -> Result<(), EngineError> {
        let layers = self.pipeline.layers().len();
        if !rates.is_empty() && rates.len() != layers {
            let got = rates.len();
            let why = format!("failed to take learning rates of {got} parameters: its bucket has {layers}");
            return Err(EngineError::State(why));
        }
        self.rates.now.clear();
        self.rates.now.extend_from_slice(rates);
        Ok(())
    }

    /// Compresses; answers the first turn. Never fails: what is wrong goes into [`Self::status`]. The step's learning rate
    /// may be 0, or anything else that is none: then the last one stays in force.
    pub fn begin(&mut self, gradient: &[f32], step: Step) -> Turn {
        let step = Step { learning_rate: self.rate(step.learning_rate), ..step };
        self.abandon_on_device();
        self.fault.clear();
        self.status = Status::default();
        self.energy = Energy::default();
        self.step = step;
        let home = self.come_home();
        if let Some(factors) = self.rates.factors(step.learning_rate) {
            self.pipeline.rescale_layers(&factors);
        }
        self.rates.applied(step.learning_rate);
        self.pipeline.mark();
        match home {
            Ok(()) => self.compress(gradient),
            Err(error) => {
                self.fault = error.to_string();
                self.status = Status { failed: true, ..Status::default() };
                self.message.clear();
            }
        }
        self.turn = self.first_turn();
        self.turn
    }

    fn compress(&mut self, gradient: &[f32]) {
        match self.pipeline.compress(Gradient::F32(gradient), self.step, &mut self.message) {
            Ok(outcome) => self.energy = outcome.energy,
            Err(error) => self.excuse(&error),
        }
    }

    fn first_turn(&mut self) -> Turn {
        match self.pipeline.travels() {
            Travels::Sums(element) => self.sum_turn(element, 0),
            Travels::Gathers => self.gather_turn(),
        }
    }

    fn gather_turn(&mut self) -> Turn {
        let turn = Turn { how: How::Gather, bytes: SIZE_BYTES, number: 0, word: true, last: false };
        match self.pipeline.size() {
            Size::Exact(bytes) => {
                self.phase = Phase::Whole;
                Turn { bytes, last: true, ..turn }
            }
            Size::AtMost(_) => {
                self.phase = Phase::Sizes;
                turn
            }
        }
    }

    fn sum_turn(&mut self, element: Element, round: u32) -> Turn {
        if self.message.is_empty() && round == 0 {
            // The sum needs a part of the same size from every rank; the step is refused by all of them.
            let step = Step { learning_rate: 1.0, ..self.step };
            if self.pipeline.compress(Gradient::Zeros, step, &mut self.message).is_err() {
                self.message.clear();
            }
        }
        let header = self.header_bytes();
        let bytes = match header {
            0 => self.pipeline.round_size(round).most().saturating_sub(self.sum_header()),
            _ => self.message.len() - header,
        };
        self.phase = Phase::Sums(round);
        let last = round + 1 >= self.pipeline.rounds();
        Turn { how: How::Sum(element), bytes, number: round, word: true, last }
    }

    /// Bytes of a message's header, when there is none to look at.
    fn sum_header(&self) -> usize {
        flexcomm_compression::wire::HEADER_BYTES + 8 * self.pipeline.spec().values().all().len()
    }

    /// Writes this rank's part of the turn, of the turn's size.
    pub fn write(&mut self, out: &mut [u8]) {
        out.fill(0);
        let message = self.message.bytes();
        let part = match self.phase {
            Phase::Sizes => &(message.len() as u64).to_le_bytes()[..],
            Phase::Sums(_) => &message[self.header_bytes()..],
            Phase::Whole | Phase::Bodies(_) => message,
            Phase::Idle | Phase::Refused(_) => &[],
        };
        match out.get_mut(..part.len()) {
            Some(room) => room.copy_from_slice(part),
            // The receivers find that it is none; the word of this turn is not written yet.
            None => {
                self.fault = format!("its message has {} bytes, there is room for {}", part.len(), out.len());
                self.status = Status { failed: true, ..Status::default() };
            }
        }
    }

    /// After a turn that is not the last. `parts` are all ranks' in rank order, or the one sum.
    pub fn next(&mut self, heard: &Heard, parts: &[&[u8]]) -> Result<Turn, EngineError> {
        self.turn = match (std::mem::replace(&mut self.phase, Phase::Idle), self.turn.how) {
            _ if !heard.good() => {
                self.phase = Phase::Refused(*heard);
                Turn::OVER
            }
            (Phase::Sizes, _) => self.sizes(parts)?,
            (Phase::Sums(round), How::Sum(element)) => {
                self.whole_sum(parts);
                match self.pipeline.advance(&self.sum, &mut self.message) {
                    Ok(outcome) => self.energy = outcome.energy,
                    Err(error) => self.excuse(&error),
                }
                self.sum_turn(element, round + 1)
            }
            _ => {
                let what = "no turn is under way that another follows";
                return Err(EngineError::Order { bucket: self.index, what });
            }
        };
        Ok(self.turn)
    }

    fn sizes(&mut self, parts: &[&[u8]]) -> Result<Turn, EngineError> {
        let size = |part: &&[u8]| part.first_chunk().map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes));
        let (most, sizes) = (self.pipeline.size().most() as u64, parts.iter().map(size));
        // Every rank sees the same sizes, so all of them refuse.
        if let Some((rank, got)) = sizes.clone().enumerate().find(|(_, size)| *size > most) {
            self.put_back()?;
            return Err(EngineError::Long { rank, got, most });
        }
        let sizes: Vec<usize> = sizes.map(|size| size as usize).collect();
        let bytes = sizes.iter().copied().max().unwrap_or(0);
        self.phase = Phase::Bodies(sizes);
        Ok(Turn { how: How::Gather, bytes, number: 1, word: false, last: true })
    }

    /// The sum as a message: this rank's header before what arrived.
    fn whole_sum(&mut self, parts: &[&[u8]]) {
        self.sum.clear();
        self.sum.extend_from_slice(&self.message.bytes()[..self.header_bytes()]);
        self.sum.extend_from_slice(parts.first().copied().unwrap_or_default());
    }

    /// Of what error feedback makes up for, what counts as sent is what left the residual.
    fn count_what_left(&mut self) {
        if let Some(left) = self.pipeline.left_energy() {
            self.energy.sent = (self.energy.fed - left).max(0.0);
        }
    }

    fn put_back(&mut self) -> Result<(), EngineError> {
        self.phase = Phase::Idle;
        self.energy = Energy::default();
        if self.device.is_some() {
            self.abandon_on_device();
            return Ok(());
        }
        self.pipeline.undo().map_err(|e| EngineError::State(format!("failed to {e}")))
    }

    /// After the last turn: `out`, which holds the gradient until then, becomes the mean gradient. `heard` is of the
    /// turn's word, where it had one.
    pub fn end(&mut self, heard: Option<&Heard>, parts: &[&[u8]], out: &mut [f32]) -> Result<Ran, EngineError> {
        let phase = std::mem::replace(&mut self.phase, Phase::Idle);
        let refused = match &phase {
            Phase::Refused(heard) => Some(*heard),
            _ => heard.filter(|heard| !heard.good()).copied(),
        };
        if let Some(heard) = refused {
            self.put_back()?;
            return self.refuse(&heard, out);
        }
        let read = match phase {
            Phase::Whole => self.pipeline.aggregate(parts, self.step.index, out),
            Phase::Bodies(sizes) => {
                let parts: Vec<&[u8]> = parts.iter().zip(sizes).map(|(p, size)| &p[..size.min(p.len())]).collect();
                self.pipeline.aggregate(&parts, self.step.index, out)
            }
            Phase::Sums(_) => {
                self.whole_sum(parts);
                self.pipeline.mean(&self.sum, self.step.index, out)
            }
            Phase::Idle | Phase::Sizes | Phase::Refused(_) => {
                return Err(EngineError::Order { bucket: self.index, what: "no turn is under way" });
            }
        };
        match read {
            Ok(()) => {
                self.count_what_left();
                Ok(Ran::Good)
            }
            // All ranks read the same bytes, so all of them come here.
            Err(ReadError::Number { .. }) => {
                self.put_back()?;
                out.fill(f32::NAN);
                Ok(Ran::NotFinite)
            }
            Err(source) => {
                self.put_back()?;
                Err(EngineError::Text { bucket: self.index, source })
            }
        }
    }

    fn refuse(&self, heard: &Heard, out: &mut [f32]) -> Result<Ran, EngineError> {
        if heard.failed > 0 {
            return Err(EngineError::peer(self.index, heard, &self.fault));
        }
        out.fill(f32::NAN);
        Ok(Ran::NotFinite)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: [Param; 3] =
        [Param { id: 0, len: 96, cols: 12 }, Param { id: 1, len: 5, cols: 1 }, Param { id: 2, len: 64, cols: 8 }];
    const GOOD: Heard = Heard { failed: 0, first_failed: None, not_finite: 0, first_not_finite: None };

    fn ranks(text: &str, world: u32) -> Vec<Piped> {
        let strategy: CompressorSpec = text.parse().unwrap();
        let rank =
            |rank| Piped::new(0, &strategy, layers(&PARAMS).unwrap(), Member { rank, world, ..Member::alone(7) });
        (0..world).map(rank).collect()
    }

    fn gradient(step: u64, rank: u64) -> Vec<f32> {
        (0..165u64).map(|i| ((i * 37 + step * 101 + rank * 59) % 97) as f32 / 50.0 - 0.97).collect()
    }

    /// What torch.distributed would do with the ranks' parts.
    fn carry(turn: Turn, parts: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let How::Sum(element) = turn.how else { return parts.to_vec() };
        assert_eq!(element, Element::F32);
        let float = |part: &[u8], i: usize| f32::from_le_bytes(part[4 * i..4 * i + 4].try_into().unwrap());
        let sum = |i| parts.iter().map(|p| float(p, i)).sum::<f32>().to_le_bytes();
        vec![(0..turn.bytes / 4).flat_map(sum).collect()]
    }

    fn heard(ranks: &[Piped]) -> Heard {
        let count = |which: fn(Status) -> bool| ranks.iter().filter(|r| which(r.status())).count() as u32;
        Heard { failed: count(|s| s.failed), not_finite: count(|s| s.not_finite), ..GOOD }
    }

    /// One step on all ranks; every rank's result.
    fn step(ranks: &mut [Piped], index: u64, gradients: &[Vec<f32>]) -> Vec<(Result<Ran, String>, Vec<f32>)> {
        step_at(ranks, Step { index, learning_rate: 0.1 }, gradients)
    }

    fn step_at(ranks: &mut [Piped], at: Step, gradients: &[Vec<f32>]) -> Vec<(Result<Ran, String>, Vec<f32>)> {
        let mut turns: Vec<Turn> = ranks.iter_mut().zip(gradients).map(|(r, g)| r.begin(g, at)).collect();
        loop {
            let turn = turns[0];
            assert!(turns.iter().all(|t| *t == turn), "{turns:?}");
            let mut parts = vec![vec![1; turn.bytes]; ranks.len()];
            ranks.iter_mut().zip(&mut parts).for_each(|(r, p)| r.write(p));
            let arrived = carry(turn, &parts);
            let (views, heard) = (arrived.iter().map(Vec::as_slice).collect::<Vec<_>>(), heard(ranks));
            if turn.last {
                let end = |(rank, gradient): (&mut Piped, &Vec<f32>)| {
                    let mut out = gradient.clone();
                    let ran = rank.end(turn.word.then_some(&heard), &views, &mut out);
                    (ran.map_err(|e| e.to_string()), out)
                };
                return ranks.iter_mut().zip(gradients).map(end).collect();
            }
            turns = ranks.iter_mut().map(|r| r.next(&heard, &views).unwrap()).collect();
        }
    }

    fn gradients(index: u64, world: usize) -> Vec<Vec<f32>> {
        (0..world as u64).map(|rank| gradient(index, rank)).collect()
    }

    const TEXTS: [&str; 6] = [
        "qsgd(s=4)",
        "threshold(v=0.5)+ef(vanilla)",
        "topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)",
        "powersgd(rank=2)+ef(vanilla)",
        "randomk(k=0.2)+ef(vanilla)",
        "gradiveq(d=2,slice=8,every=2)",
    ];

    #[test]
    fn all_ranks_get_the_same_bits() {
        for text in TEXTS {
            let mut ranks = ranks(text, 3);
            for index in 0..6 {
                let done = step(&mut ranks, index, &gradients(index, 3));
                assert!(done.iter().all(|d| *d == done[0]), "{text}");
                assert_eq!(done[0].0, Ok(Ran::Good), "{text}");
                assert!(done[0].1.iter().any(|v| *v != 0.0), "{text}");
            }
        }
    }

    #[test]
    fn a_nan_on_one_rank_is_nan_on_all_and_leaves_the_state() {
        for text in TEXTS {
            let mut ranks = ranks(text, 3);
            for index in 0..4 {
                step(&mut ranks, index, &gradients(index, 3));
            }
            let before: Vec<_> = ranks.iter().map(Piped::state).collect();
            let mut bad = gradients(4, 3);
            bad[1][7] = f32::INFINITY;
            for (ran, out) in step(&mut ranks, 4, &bad) {
                assert_eq!(ran, Ok(Ran::NotFinite), "{text}");
                assert!(out.iter().all(|v| v.is_nan()), "{text}");
            }
            assert_eq!(ranks.iter().map(Piped::state).collect::<Vec<_>>(), before, "{text}");
        }
    }

    #[test]
    fn a_failed_rank_is_an_error_on_all() {
        for text in TEXTS {
            let mut ranks = ranks(text, 2);
            let short = vec![gradient(0, 0), vec![0.0; 3]];
            for (ran, _) in step(&mut ranks, 0, &short) {
                assert!(ran.unwrap_err().contains("could not do its part"), "{text}");
            }
        }
    }

    #[test]
    fn saved_states_go_on_bit_for_bit_and_held_back_values_move_over() {
        let strategy: CompressorSpec = "topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)".parse().unwrap();
        let mut own = ranks(&strategy.to_string(), 1);
        for index in 0..5 {
            step(&mut own, index, &gradients(index, 1));
        }
        let parts = || (layers(&PARAMS).unwrap(), Member::alone(7));
        let mut again = vec![Piped::restored(0, &strategy, parts(), &own[0].state()).unwrap()];
        assert!(again[0].is_restored() && !own[0].is_restored());
        assert_eq!(step(&mut again, 5, &gradients(5, 1)), step(&mut own, 5, &gradients(5, 1)));
        assert_eq!(again[0].state(), own[0].state());
        assert!(Piped::restored(0, &"signsgd".parse().unwrap(), parts(), &own[0].state()).is_err());

        let held = own[0].held_back();
        for text in ["topk(k=0.1)+ef(vanilla)", "topk(k=0.1)+ef(dgc,mu=0.9)", "topk(k=0.1)"] {
            let moved = Piped::holding(0, &text.parse().unwrap(), parts(), &held).unwrap();
            assert_eq!(moved.held_back(), held, "{text}");
        }
    }

    const MEMORIES: [&str; 5] = ["vanilla", "efsign", "efsign,gamma=0.5", "dgc,mu=0.9", "sgc,alpha=0.5,epsilon=0.5"];

    /// After a step at `rate`, of a rank alone that sends a value in ten.
    fn held_after(own: &mut [Piped], (index, rate): (u64, f64), gradient: Vec<f32>) -> Vec<f32> {
        let done = step_at(own, Step { index, learning_rate: rate }, &[gradient]);
        assert_eq!(done[0].0, Ok(Ran::Good));
        own[0].held_back()
    }

    fn close(a: &[f32], b: &[f32]) -> bool {
        a.len() == b.len() && !a.is_empty() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0))
    }

    #[test]
    fn a_first_rate_above_0_rescales_nothing_and_a_rate_of_0_keeps_the_last() {
        for memory in MEMORIES {
            let text = format!("topk(k=0.1)+ef({memory})");
            let run = |rates: [f64; 4]| {
                let mut own = ranks(&text, 1);
                let mut held = Vec::new();
                for (index, rate) in (0..).zip(rates) {
                    held.push(held_after(&mut own, (index, rate), gradient(index, 0)));
                }
                held
            };
            let constant = run([1e-5; 4]);
            for rates in [[0.0, 0.0, 1e-5, 1e-5], [0.0, f64::NAN, 1e-5, 0.0], [1e-5, 0.0, -1.0, 1e-5]] {
                let held = run(rates);
                assert!(held.iter().zip(&constant).all(|(a, b)| close(a, b)), "{memory} at {rates:?}");
            }
            let falls = run([1e-5, 0.0, 1e-6, 1e-6]);
            let rescales = !memory.starts_with("dgc") && !memory.starts_with("sgc") && !memory.contains("gamma");
            assert_eq!(!close(&falls[3], &constant[3]), rescales, "{memory}");
        }
    }

    /// Each layer's residual follows its own learning rate, whichever group's is the first.
    #[test]
    fn residuals_are_rescaled_by_the_rates_of_their_own_layers() {
        let ratios = |rates: [[f64; 2]; 3]| {
            let mut own = ranks(HOLDER, 1);
            let (gradient, mut held) = (gradient(0, 0), Vec::new());
            for (index, [first, other]) in (0..).zip(rates) {
                own[0].layer_rates(&[first, first, other]).unwrap();
                held = held_after(&mut own, (index, first), gradient.clone());
            }
            let ratio = |at: usize| (held[at] / gradient[at] * 1e3).round() / 1e3;
            (ratio(0), ratio(gradient.len() - 1))
        };
        assert_eq!(ratios([[0.1, 0.2]; 3]), (3.0, 3.0));
        assert_eq!(ratios([[0.1, 0.2], [0.1, 0.02], [0.1, 0.02]]), (3.0, 12.0));
        assert_eq!(ratios([[0.1, 0.2], [0.01, 0.2], [0.01, 0.2]]), (12.0, 3.0));
        assert_eq!(ratios([[0.1, 0.2], [0.05, 0.1], [0.05, 0.1]]), (4.0, 4.0));
        // A frozen group, and one that is warmed up later, are scaled by their own first and last rates above 0 alone.
        assert_eq!(ratios([[0.1, 0.2], [0.1, 0.0], [0.01, 0.0]]), (21.0, 3.0));
        assert_eq!(ratios([[0.1, 0.0], [0.1, 0.2], [0.1, 0.1]]), (3.0, 5.0));
        let two = ranks("topk(k=0.1)+ef(vanilla)", 1)[0].layer_rates(&[0.1; 2]).unwrap_err().to_string();
        assert!(two.contains("2 parameters") && two.contains("has 3"), "{two}");
    }

    #[test]
    fn what_moves_over_or_was_saved_without_a_rate_is_not_rescaled_by_the_first() {
        let parts = || (layers(&PARAMS).unwrap(), Member::alone(7));
        for memory in MEMORIES {
            let strategy: CompressorSpec = format!("topk(k=0.1)+ef({memory})").parse().unwrap();
            let values = gradient(9, 0);
            let run = |rate: f64| {
                let mut own = vec![Piped::holding(0, &strategy, parts(), &values).unwrap()];
                held_after(&mut own, (0, rate), gradient(1, 0))
            };
            assert!(close(&run(1e-5), &run(1.0)), "{memory}");
            let mut own = ranks(&strategy.to_string(), 1);
            held_after(&mut own, (0, 0.0), gradient(0, 0));
            let mut again = vec![Piped::restored(0, &strategy, parts(), &own[0].state()).unwrap()];
            let (own, again) = (&mut own, &mut again);
            let wants = held_after(own, (1, 1.0), gradient(1, 0));
            assert!(close(&held_after(again, (1, 1e-5), gradient(1, 0)), &wants), "{memory}");
        }
    }
}
