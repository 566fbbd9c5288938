//! One DDP bucket: its parameters, its pipeline (momentum, error feedback, compressor), and the exchange under way, as
//! collectives of a library that sums, gathers and broadcasts. No IO: [`Bucket::begin`] and [`Bucket::next`] answer which
//! collective comes, [`Bucket::write`] gives this rank's part, [`Bucket::finish`] takes what arrived.
//!
//! An exchange is one or more rounds, each of which is one collective on every rank:
//!
//! - messages that sum in flight: one allreduce per round of the compressor;
//! - gathered messages of one size: one allgather;
//! - gathered messages whose size depends on the values: an allgather of the sizes, then one of the messages, padded
//!   to the longest;
//! - AR-Topk: under VAR an allgather of the ranks' energies; a broadcast of the leader's indices; an allreduce of the values there.
//!
//! Begin never fails: what is wrong with this rank's part becomes a status that travels with it (`head.rs`), so that no rank
//! is left waiting. An exchange is a transaction: when any rank could not do its part, every rank puts its memory back.

mod device;
mod place;

pub use device::{Answers, DeviceBuffer, NotOnDevice};
pub use place::{Host, LastRound, Place};

use crate::auto::Leader;
use crate::error::ExchangeError;
use crate::head::{Arrived, Status, is_refused, refuse_sum};
use crate::rates::LayerRates;
use device::OnDevice;
use flexcomm_compression::codec::{Element, EncodeError, ReadError, Shape, Size, Travels};
use flexcomm_compression::memory::{Residual, Units};
use flexcomm_compression::pipeline::{Member, Pipeline, Step};
use flexcomm_compression::wire::{Envelope, HEADER_BYTES, Writer, message_length};
use flexcomm_compression::{Energy, Layers, LayersError};
use flexcomm_domain::Digest;
use flexcomm_domain::spec::CompressorSpec;

/// Bytes of a size, or of an energy, on the wire.
const NUMBER_BYTES: usize = 8;

/// Elements that AR-Topk's sum carries behind the values: ‖g_e‖ and ‖g_e‖².
const NORMS: usize = 2;

/// A parameter's place in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// The same for a parameter as long as the model lives.
    pub id: u32,
    /// Values.
    pub len: usize,
    /// Values per row where it is a matrix, 1 where it is a vector; divides `len`.
    pub cols: usize,
}

/// The layers of a bucket, as matrices where they are.
pub fn layers(params: &[Param]) -> Result<Layers, LayersError> {
    let shape = |p: &Param| Shape { rows: p.len / p.cols.max(1), cols: p.cols.max(1) };
    Layers::matrices(&params.iter().map(shape).collect::<Vec<_>>())
}

/// How an exchange ended, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ran {
    /// The mean gradient is there.
    Good,
    /// Some rank had no part, or the mean is not finite: the result is NaN everywhere, the residual is as before.
    Refused,
}

/// The collective of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Every rank gets every rank's bytes.
    Gather,
    /// Every rank gets this rank's bytes.
    Broadcast(u32),
    /// Elements add up.
    Sum(Element),
    /// None: the exchange is refused, on all ranks.
    Refused,
}

/// One collective of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Which.
    pub how: How,
    /// Bytes of the payload, without any header.
    pub bytes: usize,
    /// Number of the header in front of what is gathered, from 0; none where none is.
    pub header: Option<u32>,
    /// Whether it is the exchange's last.
    pub last: bool,
}

impl Round {
    const REFUSED: Self = Self { how: How::Refused, bytes: 0, header: None, last: true };
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Idle,
    /// Gathered, of a size that all know.
    Whole,
    Sizes,
    /// With every rank's size.
    Bodies(Vec<usize>),
    /// With the round of the compressor.
    Sums(u32),
    /// AR-Topk: every rank's energy, the leader's indices, all ranks' values there.
    Energies,
    Indices,
    Values,
    Refused,
}

/// What compresses a bucket, from step to step.
#[derive(Debug)]
struct Run {
    pipeline: Pipeline,
    rates: LayerRates,
    /// Whether it began with a saved state: the same on all ranks, or they are desynchronised.
    restored: bool,
}

impl Run {
    fn of(pipeline: Pipeline) -> Self {
        Self { pipeline, rates: LayerRates::default(), restored: false }
    }
}

fn digest(params: &[Param]) -> Digest {
    let one = |Param { id, len, cols }: &Param| format!("{id}:{len}:{cols} ");
    Digest::of(&params.iter().map(one).collect::<String>())
}

/// A bucket's pipeline and buffers.
#[derive(Debug)]
pub struct Bucket {
    index: u32,
    params: Vec<Param>,
    layout: Digest,
    member: Member,
    run: Run,
    /// In a trial: training's own, which no candidate touches.
    training: Option<Box<Run>>,
    /// Steps since the layout changed.
    age: u64,
    step: Step,
    phase: Phase,
    round: Round,
    status: Status,
    fault: String,
    energy: Energy,
    /// Headers of the exchange so far.
    headers: u32,
    message: Writer,
    sum: Vec<u8>,
    /// Of AR-Topk: this rank's at the agreed indices, the leader, and the sums over ranks of ‖g_e‖ and ‖g_e‖².
    values: Vec<f32>,
    /// How many indices the leader's message has, whether or not this rank could read it: all ranks sum as many values.
    agreed: usize,
    leader: Option<u32>,
    norms: Option<[f32; NORMS]>,
    /// While the residual lies there; the pipeline's memory is then out of date.
    device: Option<OnDevice>,
}

impl Bucket {
    /// Dense, with its parameters' residuals in units of gradients; none = nothing.
    pub fn new(
        index: u32,
        params: Vec<Param>,
        member: Member,
        residual: Option<&[f32]>,
    ) -> Result<Self, ExchangeError> {
        let (none, layers) = (CompressorSpec::NONE, layers(&params)?);
        let pipeline = match residual {
            Some(values) => {
                Pipeline::with_residual(&none, layers, member, Residual { values, units: Units::GRADIENTS })?
            }
            None => Pipeline::new(&none, layers, member),
        };
        let (status, fault, energy, message, sum, values) = Default::default();
        Ok(Self {
            index,
            layout: digest(&params),
            params,
            member,
            run: Run::of(pipeline),
            training: None,
            age: 0,
            step: Step { index: 0, learning_rate: 1.0 },
            phase: Phase::Idle,
            round: Round::REFUSED,
            status,
            fault,
            energy,
            headers: 0,
            message,
            sum,
            values,
            agreed: 0,
            leader: None,
            norms: None,
            device: None,
        })
    }

    /// Its parameters in order.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Of its parameters in order. Ranks that fill a bucket with different ones would decode indices into the wrong parameters.
    pub fn layout(&self) -> Digest {
        self.layout
    }

    /// n.
    pub fn values(&self) -> usize {
        self.run.pipeline.layers().values()
    }

    /// Counts a step with this layout; answers how many came before it.
    pub fn enter(&mut self) -> u64 {
        self.abandon();
        self.energy = Energy::default();
        self.age += 1;
        self.age - 1
    }

    /// A step begins, of a trial or of training: a trial's candidates begin with training's residual and do not touch it. A trial
    /// that ended without [`Self::end_candidate`] was left: its last candidate goes on as training.
    pub fn in_trial(&mut self, trial: bool) -> Result<(), ExchangeError> {
        self.abandon();
        match trial {
            true if self.training.is_none() => {
                self.copy_to_host()?;
                let pipeline = &self.run.pipeline;
                let fork = pipeline.fork(pipeline.spec())?;
                self.training = Some(Box::new(std::mem::replace(&mut self.run, Run::of(fork))));
            }
            true => {}
            false => self.training = None,
        }
        Ok(())
    }

    /// A trial's candidate is over: training's own pipeline is back, bit for bit.
    pub fn end_candidate(&mut self) {
        if let Some(training) = self.training.take() {
            self.abandon();
            self.device = None;
            self.run = *training;
        }
    }

    /// Compresses by `spec` from the next step on, with the same residual; or goes on from `saved`, the state of a pipeline of
    /// this spec, where that fits.
    pub fn prepare(&mut self, spec: &CompressorSpec, saved: Option<&[u8]>) -> Result<(), ExchangeError> {
        if let Some(saved) = saved {
            let mut pipeline = Pipeline::new(spec, self.run.pipeline.layers().clone(), self.member);
            if pipeline.restore(saved).is_ok() {
                self.device = None;
                self.run = Run { restored: true, ..Run::of(pipeline) };
                return Ok(());
            }
        }
        if self.spec() != spec {
            self.copy_to_host()?;
            self.run.pipeline.change(spec);
        }
        Ok(())
    }

    /// What compresses it.
    pub fn spec(&self) -> &CompressorSpec {
        self.run.pipeline.spec()
    }

    /// Whether a saved state went on here.
    pub fn is_restored(&self) -> bool {
        self.run.restored
    }

    /// Whether there may be a residual. It decides which collective a dense step runs: so it follows from what all ranks have
    /// done, never from this rank's values, which may happen to be zero.
    pub fn has_residual(&self) -> bool {
        self.run.pipeline.has_residual()
    }

    /// The residual on the host, in units of gradients; empty when there is none. See [`Self::copy_to_host`].
    pub fn residual(&self) -> Vec<f32> {
        self.run.pipeline.residual()
    }

    /// As [`Self::residual`], of training where a trial is under way; none when there is none.
    pub fn own_residual(&self) -> Option<Vec<f32>> {
        let pipeline = &self.training.as_deref().unwrap_or(&self.run).pipeline;
        pipeline.has_residual().then(|| pipeline.residual())
    }

    /// A trial was left, and what its last candidate did stays.
    pub fn leave_trial(&mut self) {
        self.training = None;
    }

    /// Whether a trial is under way.
    pub fn tries(&self) -> bool {
        self.training.is_some()
    }

    /// Replaces the residual; none = nothing, on all ranks. Compresses nothing until [`Self::prepare`].
    pub fn set_residual(&mut self, residual: Option<&[f32]>) -> Result<(), ExchangeError> {
        // A trial's is the candidate's alone.
        let new = Self::new(self.index, self.params.clone(), self.member, residual)?;
        let training = self.training.take();
        *self = Self { age: self.age, training, ..new };
        Ok(())
    }

    /// Everything of the pipeline that outlives a step, for a checkpoint; none where nothing is compressed, or of a trial's
    /// candidate, of which the residual alone goes on. See [`Self::copy_to_host`].
    pub fn state(&self) -> Option<Vec<u8>> {
        if *self.spec() == CompressorSpec::NONE || self.tries() {
            return None;
        }
        let mut out = Writer::new();
        self.run.pipeline.save(&mut out);
        Some(out.into_vec())
    }

    /// Of the last exchange: what left the residual, and the compensated gradient.
    pub fn energy(&self) -> Energy {
        self.energy
    }

    /// The round under way.
    pub fn round(&self) -> Round {
        self.round
    }

    /// Bytes of this rank's part of the round under way, its header included, that do not grow with the gradient: headers, sizes,
    /// energies and norms, and what a message without values has. What travels for each row or column of a matrix is not among them.
    pub fn fixed_bytes(&self) -> usize {
        let Round { bytes, .. } = self.round;
        let empty = || self.run.pipeline.emptied();
        let payload = match self.phase {
            Phase::Sizes | Phase::Energies => bytes,
            Phase::Whole | Phase::Bodies(_) => empty().size().most(),
            Phase::Sums(number) => empty().summed_size(self.step.index, number),
            Phase::Indices => empty().indices_size(),
            Phase::Values => 4 * NORMS,
            Phase::Idle | Phase::Refused => 0,
        };
        self.round.head_bytes() + payload.min(bytes)
    }

    /// Whether this rank has a part in the exchange under way, or had one in the last.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Why it had none; empty when it had one.
    pub fn fault(&self) -> &str {
        &self.fault
    }

    /// Of the last AR-Topk exchange: the leader, and the sums over ranks of ‖g_e‖ and ‖g_e‖².
    pub fn led(&self) -> Option<(u32, [f32; NORMS])> {
        self.leader.zip(self.norms)
    }

    /// Learning rates of the layers at the step to come, in the bucket's order, where they are not all the step's own. Of a
    /// rate that is not above 0 the last one that was counts.
    pub fn layer_rates(&mut self, rates: &[f64]) -> Result<(), ExchangeError> {
        let layers = self.run.pipeline.layers().len();
        if !rates.is_empty() && rates.len() != layers {
            let got = rates.len();
            return Err(ExchangeError::Rates { bucket: self.index, got, layers });
        }
        self.run.rates.now.clear();
        self.run.rates.now.extend_from_slice(rates);
        Ok(())
    }

    /// Compresses; answers the first round, of AR-Topk where that has a leader. What is wrong with this rank's part goes into
    /// [`Self::status`]. The step's learning rate may be 0, or anything else that is none: then the last one stays in force.
    ///
    /// # Errors
    /// The place cannot do it; the host always can.
    pub fn begin<P: Place>(
        &mut self,
        place: &P,
        gradient: P::Values<'_>,
        step: Step,
        leader: Option<Leader>,
    ) -> Result<Round, P::Error> {
        self.start(step);
        place.compress(self, gradient, leader)?;
        self.round = self.first_round(leader);
        Ok(self.round)
    }

    fn start(&mut self, step: Step) {
        self.abandon();
        let before = self.run.pipeline.learning_rate();
        let learning_rate = self.run.pipeline.known_rate(step.learning_rate);
        let now = self.run.pipeline.learning_rate();
        if let Some(device) = self.device.as_mut().filter(|_| now != before) {
            device.rebase(now);
        }
        self.step = Step { learning_rate, ..step };
        self.fault.clear();
        self.status = Status::Ready;
        self.energy = Energy::default();
        self.headers = 0;
        (self.leader, self.norms) = (None, None);
        self.message.clear();
    }

    /// The step's rate; none before the first above 0.
    fn known_rate(&self) -> Option<f64> {
        (!self.run.pipeline.rate_is_assumed()).then_some(self.step.learning_rate)
    }

    /// The number of the next header.
    fn next_header(&mut self) -> Option<u32> {
        self.headers += 1;
        Some(self.headers - 1)
    }

    /// An exchange that was begun and never finished (an exception came in between) does not count.
    fn abandon(&mut self) {
        if self.phase != Phase::Idle {
            // There is a mark since the exchange began.
            drop(self.put_back());
        }
    }

    /// Remembers why this rank has no part in the round, and leaves it without a message.
    fn excuse(&mut self, error: &EncodeError) {
        self.fail(error);
        match error {
            EncodeError::NonFinite { .. } | EncodeError::Own(ReadError::Number { .. }) => {
                self.status = Status::NotFinite
            }
            EncodeError::Residual { .. } => self.status = Status::Overflowed,
            _ => {}
        }
    }

    fn fail(&mut self, error: &dyn std::fmt::Display) {
        self.fault = error.to_string();
        self.status = Status::Failed;
        self.message.clear();
    }

    fn is_good(&self) -> bool {
        self.status == Status::Ready
    }

    fn first_round(&mut self, leader: Option<Leader>) -> Round {
        match (leader, self.run.pipeline.travels()) {
            (Some(Leader::Rank(leader)), _) => self.indices_round(leader),
            (Some(Leader::Largest), _) => {
                self.phase = Phase::Energies;
                Round { how: How::Gather, bytes: NUMBER_BYTES, header: self.next_header(), last: false }
            }
            (None, Travels::Sums(element)) => self.sum_round(element, 0),
            (None, Travels::Gathers) => self.gather_round(),
        }
    }

    fn gather_round(&mut self) -> Round {
        let round = Round { how: How::Gather, bytes: NUMBER_BYTES, header: self.next_header(), last: false };
        match self.run.pipeline.size() {
            Size::Exact(bytes) => {
                self.phase = Phase::Whole;
                Round { bytes, last: true, ..round }
            }
            Size::AtMost(_) => {
                self.phase = Phase::Sizes;
                round
            }
        }
    }

    fn sum_round(&mut self, element: Element, number: u32) -> Round {
        let pipeline = &self.run.pipeline;
        // The sum needs a part of the same size from every rank, also from one that has none: the step is refused by all of them.
        let bytes = pipeline.summed_size(self.step.index, number);
        self.phase = Phase::Sums(number);
        let last = number + 1 >= pipeline.rounds();
        Round { how: How::Sum(element), bytes, header: None, last }
    }

    fn indices_round(&mut self, leader: u32) -> Round {
        self.leader = Some(leader);
        self.message.clear();
        if leader == self.member.rank
            && self.is_good()
            && let Err(error) = self.write_indices()
        {
            self.fail(&error);
        }
        self.phase = Phase::Indices;
        let bytes = self.run.pipeline.indices_size();
        Round { how: How::Broadcast(leader), bytes, header: None, last: false }
    }

    fn write_indices(&mut self) -> Result<(), EncodeError> {
        let Self { run, message, device, step, .. } = self;
        match device {
            Some(device) => run.pipeline.frame_indices(device.selected(), *step, message),
            None => run.pipeline.write_indices(message),
        }
    }

    fn values_round(&mut self) -> Round {
        self.phase = Phase::Values;
        let bytes = 4 * (self.agreed + NORMS);
        Round { how: How::Sum(Element::F32), bytes, header: None, last: true }
    }

    fn header_bytes(&self) -> usize {
        Envelope::parse(self.message.bytes()).map_or(0, |envelope| envelope.header.bytes())
    }

    /// Bytes of a message's header, when there is none to look at.
    fn sum_header(&self) -> usize {
        HEADER_BYTES + 8 * self.spec().values().all().len()
    }

    /// Writes this rank's part of the round, of the round's size.
    pub fn write(&mut self, out: &mut [u8]) {
        out.fill(0);
        let values;
        let part = match self.phase {
            Phase::Sizes => &(self.message.len() as u64).to_le_bytes()[..],
            Phase::Sums(_) => &self.message.bytes()[self.header_bytes()..],
            Phase::Whole | Phase::Bodies(_) | Phase::Indices => self.message.bytes(),
            // Below all others where this rank has none.
            Phase::Energies => &(if self.is_good() { self.energy.sent } else { f64::NEG_INFINITY }).to_le_bytes()[..],
            Phase::Values if self.is_good() => {
                values = self.values_and_norms();
                &values[..]
            }
            Phase::Idle | Phase::Values | Phase::Refused => &[],
        };
        match out.get_mut(..part.len()) {
            Some(room) => room.copy_from_slice(part),
            // The receivers find that it is none; the header of this round is not written yet.
            None => {
                let why = format!("its message has {} bytes, there is room for {}", part.len(), out.len());
                self.fail(&why);
            }
        }
        if let How::Sum(element) = self.round.how
            && !self.is_good()
        {
            refuse_sum(element, out);
        }
    }

    /// AR-Topk: this rank's at the agreed indices, and what the leaders' choice is made by.
    fn values_and_norms(&self) -> Vec<u8> {
        let norms = [self.energy.compensated.sqrt() as f32, self.energy.compensated as f32];
        self.values.iter().chain(&norms).flat_map(|value| value.to_le_bytes()).collect()
    }

    /// After a round that is not the last, in the place where it began.
    pub fn next<P: Place>(&mut self, place: &P, arrived: &Arrived<'_>) -> Result<Round, ExchangeError> {
        let parts = &arrived.parts[..];
        self.round = match (std::mem::replace(&mut self.phase, Phase::Idle), self.round.how) {
            (phase, _) if self.is_refused(&phase, arrived) => {
                self.phase = Phase::Refused;
                Round::REFUSED
            }
            (Phase::Sizes, _) => self.sizes(parts)?,
            (Phase::Energies, _) => self.indices_round(largest(parts)),
            (Phase::Indices, _) => {
                self.agree(parts.first().copied().unwrap_or_default());
                if self.is_good()
                    && let Err(error) = place.take(self)
                {
                    self.fail(&error);
                }
                self.values_round()
            }
            (Phase::Sums(number), How::Sum(element)) => {
                let sum = self.whole_sum(parts);
                match self.run.pipeline.advance(&sum, &mut self.message) {
                    Ok(outcome) => self.energy = outcome.energy,
                    Err(error) => self.excuse(&error),
                }
                self.sum = sum;
                self.sum_round(element, number + 1)
            }
            _ => {
                let what = "no round is under way that another follows";
                return Err(ExchangeError::Order { bucket: self.index, what });
            }
        };
        Ok(self.round)
    }

    /// Reads the leader's indices. A leader that has no part sends zeros, which is no message, and says so in the next round;
    /// what cannot be read otherwise fails here, on all ranks alike.
    fn agree(&mut self, message: &[u8]) {
        let length = message_length(message).unwrap_or(0).min(message.len());
        let k = Envelope::parse(&message[..length]).ok().and_then(|envelope| envelope.payload.first_chunk().copied());
        self.agreed = k.map_or(0, |k| u32::from_le_bytes(k) as usize).min(self.values());
        if let Err(error) = self.run.pipeline.agree(&message[..length], self.step.index)
            && self.is_good()
            && message.iter().any(|byte| *byte != 0)
        {
            self.fail(&error);
        }
    }

    fn sizes(&mut self, parts: &[&[u8]]) -> Result<Round, ExchangeError> {
        let size = |part: &&[u8]| part.first_chunk().map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes));
        let (most, sizes) = (self.run.pipeline.size().most() as u64, parts.iter().map(size));
        // Every rank sees the same sizes, so all of them refuse.
        if let Some((rank, got)) = sizes.clone().enumerate().find(|(_, size)| *size > most) {
            self.put_back()?;
            return Err(ExchangeError::Long { rank, got, most });
        }
        let sizes: Vec<usize> = sizes.map(|size| size as usize).collect();
        let bytes = sizes.iter().copied().max().unwrap_or(0);
        self.phase = Phase::Bodies(sizes);
        Ok(Round { how: How::Gather, bytes, header: None, last: true })
    }

    /// The sum as a message, in the room of `self.sum`: this rank's header before what arrived.
    fn whole_sum(&mut self, parts: &[&[u8]]) -> Vec<u8> {
        let mut sum = std::mem::take(&mut self.sum);
        sum.clear();
        sum.extend_from_slice(&self.message.bytes()[..self.header_bytes()]);
        sum.extend_from_slice(parts.first().copied().unwrap_or_default());
        sum
    }

    fn put_back(&mut self) -> Result<(), ExchangeError> {
        self.phase = Phase::Idle;
        self.energy = Energy::default();
        if let Some(device) = &mut self.device {
            device.put_back();
            return Ok(());
        }
        Ok(self.run.pipeline.undo()?)
    }

    /// After the last round, in the place where the exchange began: `out` becomes the mean gradient, see [`Place::mean`].
    pub fn finish<P: Place>(&mut self, place: &P, got: &Arrived<'_>, out: P::Mean<'_>) -> Result<Ran, ExchangeError> {
        let phase = self.take_phase()?;
        let last = if self.is_refused(&phase, got) { LastRound::Refused } else { self.last(&phase, &got.parts) };
        let ran = place.mean(self, &last, out);
        if let LastRound::Sum(sum) = last {
            self.sum = sum;
        }
        match ran {
            Ok(Ran::Good) => _ = self.commit(),
            _ => self.put_back()?,
        }
        ran
    }

    /// Ends an exchange that counts; returns its energies.
    pub(crate) fn commit(&mut self) -> Energy {
        self.phase = Phase::Idle;
        match &mut self.device {
            Some(device) => device.keep(),
            None => self.energy = self.run.pipeline.counted(self.energy),
        }
        self.energy
    }

    fn is_refused(&self, phase: &Phase, arrived: &Arrived<'_>) -> bool {
        let sum = arrived.parts.first();
        *phase == Phase::Refused
            || arrived.refused
            || matches!((self.round.how, sum), (How::Sum(element), Some(sum)) if is_refused(element, sum))
    }

    fn take_phase(&mut self) -> Result<Phase, ExchangeError> {
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Idle => Err(ExchangeError::Order { bucket: self.index, what: "no exchange is under way" }),
            phase => Ok(phase),
        }
    }

    /// What the last round brought.
    fn last<'a>(&mut self, phase: &Phase, parts: &[&'a [u8]]) -> LastRound<'a> {
        match phase {
            Phase::Whole => LastRound::Messages(parts.to_vec()),
            Phase::Bodies(sizes) => LastRound::Messages(cut(parts, sizes)),
            Phase::Sums(_) => LastRound::Sum(self.whole_sum(parts)),
            Phase::Values => LastRound::Values(self.sums_of(parts)),
            // No last one, and no messages.
            Phase::Idle | Phase::Sizes | Phase::Energies | Phase::Indices | Phase::Refused => {
                LastRound::Messages(vec![])
            }
        }
    }

    /// AR-Topk's sums at the agreed indices; remembers the norms behind them.
    fn sums_of(&mut self, parts: &[&[u8]]) -> Vec<f32> {
        let floats = parts.first().copied().unwrap_or_default().as_chunks::<4>().0;
        let mut sums: Vec<f32> = floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if let Some(norms) = sums.last_chunk::<NORMS>() {
            self.norms = Some(*norms);
        }
        sums.truncate(sums.len().saturating_sub(NORMS));
        sums
    }
}

/// Messages without what pads them to the longest.
fn cut<'a>(parts: &[&'a [u8]], sizes: &[usize]) -> Vec<&'a [u8]> {
    parts.iter().zip(sizes).map(|(part, size)| &part[..*size.min(&part.len())]).collect()
}

/// The rank with the most energy, the lowest among equals, a number that is none below all: all ranks see the same bytes.
fn largest(energies: &[&[u8]]) -> u32 {
    let mut best = (0, f64::NEG_INFINITY);
    for (rank, bytes) in (0..).zip(energies) {
        let energy = bytes.first_chunk().map_or(f64::NAN, |bytes| f64::from_le_bytes(*bytes));
        if energy > best.1 {
            best = (rank, energy);
        }
    }
    best.0
}
