//! One rank's whole strategy for one bucket: momentum, memory, codecs, messages (GRACE, Algorithm 1, lines 5 to 13).
//!
//! A step: [`Pipeline::compress`], exchange, then [`Pipeline::aggregate`] of the gathered messages, or
//! [`Pipeline::mean`] of the message that the allreduce added up ([`add_messages`]). A codec of several rounds answers
//! [`Outcome::more`]: the summed message goes into [`Pipeline::advance`], which makes the next one.
//!
//! What a change does ([`Pipeline::change`]): an old memory's residual goes into the new one; into a strategy without memory
//! it is added to the next gradient. A memory of the same kind and parameters stays as it is, and so does a codec; of others, what
//! they have besides starts afresh (the velocity of `ef(dgc)`, SIDCo's stages, the noise of `variance`, PowerSGD's Q). A momentum
//! of the same kind goes on, with another decay too. A step that is refused changes nothing; one that was done can be taken back ([`Pipeline::mark`], [`Pipeline::undo`]).
//!
//! Receivers refuse messages of another strategy, length, round or scope, and where ranks must draw alike
//! ([`Codec::draws_together`]) those of another step or seed.

mod artopk;
mod gradient;
mod receive;
mod scale;
mod state;
mod step;
mod sums;
mod undo;

pub use gradient::Gradient;
pub use scale::factor;
pub use state::StateError;
pub use sums::{add_elements, add_messages};

use crate::Build;
use crate::codec::{Codec, Context, EncodeError, Scope, Shape, Size, Stats};
use crate::memory::{Feeding, Memory, Residual, Units};
use crate::momentum::Momentum;
use crate::wire::{Common, DType, Header, Reader, Writer};
use crate::{Energy, Kernel, Layers, Selection, kernels, memory};
use flexcomm_domain::spec::{Class, CompressorSpec, MAX_PARAMETERS, NonFinite, ValueType};
use std::ops::Range;
use undo::Mark;

/// Which process and bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Member {
    /// Of the job: the same on every rank. A strategy's `seed(...)` comes before it.
    pub seed: u64,
    /// Of this process.
    pub rank: u32,
    /// Processes.
    pub world: u32,
    /// Number of the bucket's first tensor within the job.
    pub tensor: u32,
}

impl Member {
    /// Rank 0 of 1.
    pub const fn alone(seed: u64) -> Self {
        Self { seed, rank: 0, world: 1, tensor: 0 }
    }
}

/// Which step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Counts up; the same on every rank.
    pub index: u64,
    /// eta; finite, above 0. Memories rescale their residual when it changes.
    pub learning_rate: f64,
}

/// What a round gave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// ‖C(x)‖² and ‖x‖² of the compensated gradient; of the last round.
    pub energy: Energy,
    /// Whether the sum of the messages must go into [`Pipeline::advance`].
    pub more: bool,
    /// Whether the gradient was not finite and counted as zeros.
    pub skipped: bool,
}

/// A codec with its place in the bucket.
#[derive(Debug)]
struct Unit {
    codec: Box<dyn Codec>,
    range: Range<usize>,
    tensor: u32,
}

/// The step that was begun and needs more rounds.
#[derive(Debug, Clone, Copy)]
struct Open {
    step: Step,
    dtype: DType,
    round: u32,
    skipped: bool,
}

/// Momentum, memory, codecs and buffers.
#[derive(Debug)]
pub struct Pipeline {
    spec: CompressorSpec,
    layers: Layers,
    member: Member,
    kernel: Kernel,
    units: Vec<Unit>,
    momentum: Option<Momentum>,
    memory: Option<Box<dyn Memory>>,
    /// Held back by a memory that is gone; empty when there is nothing.
    leftover: Vec<f32>,
    leftover_units: Units,
    /// eta of the last step that was done.
    learning_rate: f64,
    /// Whether that is only assumed, see [`Self::known_rate`].
    rate_assumed: bool,
    /// Index of the last step that was done.
    last: Option<u64>,
    /// The gradient as f32, or with momentum.
    staged: Vec<f32>,
    /// What the codecs compress, then what they leave.
    compensated: Vec<f32>,
    /// What a pass over each codec's values found.
    seen: Vec<Stats>,
    /// Room for the messages of an aggregation; empty.
    readers: Vec<Reader<'static>>,
    /// Of the messages of an aggregation, tensor by tensor of each.
    factors: Vec<f32>,
    /// Of AR-Topk: what this rank would send, and the indices that all ranks have agreed on.
    selected: Selection,
    agreed: Vec<u32>,
    /// See [`Self::as_on_device`].
    as_on_device: bool,
    open: Option<Open>,
    skipped: u64,
    mark: Mark,
}

impl Pipeline {
    /// With empty memories and the fastest kernel of this machine.
    pub fn new(spec: &CompressorSpec, layers: Layers, member: Member) -> Self {
        let n = layers.values();
        Self {
            spec: *spec,
            member,
            kernel: Kernel::best(),
            units: units(spec, &layers, member),
            momentum: Momentum::build(spec, n),
            memory: memory::build(spec, n),
            leftover: Vec::new(),
            leftover_units: Units::GRADIENTS,
            learning_rate: 1.0,
            rate_assumed: true,
            last: None,
            // Room that is not written to costs nothing; the first gradient in halves may come late.
            staged: Vec::with_capacity(n),
            compensated: Vec::new(),
            seen: Vec::new(),
            readers: Vec::new(),
            factors: Vec::new(),
            selected: Selection::default(),
            agreed: Vec::new(),
            as_on_device: false,
            open: None,
            skipped: 0,
            mark: Mark::default(),
            layers,
        }
    }

    /// As [`Self::new`], with a residual. Its units' rate counts as the last step's.
    pub fn with_residual(
        spec: &CompressorSpec,
        layers: Layers,
        member: Member,
        residual: Residual<'_>,
    ) -> Result<Self, EncodeError> {
        let (expected, got) = (layers.values(), residual.values.len());
        if expected != got {
            return Err(EncodeError::Length { what: "the residual", expected, got });
        }
        let mut own = Self::new(spec, layers, member);
        if let Some(rate) = residual.units.learning_rate {
            (own.learning_rate, own.rate_assumed) = (rate, false);
        }
        own.take_over(residual.values, residual.units);
        Ok(own)
    }

    /// As if this step, none before the first, were the last that was done.
    pub fn after_step(self, last: Option<u64>) -> Self {
        Self { last, ..self }
    }

    /// Another pipeline that goes on from here with `spec`, and leaves this one as it is: for trials.
    pub fn fork(&self, spec: &CompressorSpec) -> Result<Self, StateError> {
        let mut fork = Self::new(&self.spec, self.layers.clone(), self.member).with_kernel(self.kernel);
        let mut state = Writer::new();
        self.save(&mut state);
        fork.restore(state.bytes())?;
        fork.change(spec);
        Ok(if self.as_on_device { fork.as_on_device() } else { fork })
    }

    /// Another one for as many layers without values: the sizes of its messages are those bytes of this one's that do not grow with
    /// the gradient (header, factors, numbers of indices, a scale of a whole tensor).
    pub fn emptied(&self) -> Self {
        let empty = Self::new(&self.spec, self.layers.emptied(), self.member).with_kernel(self.kernel);
        if self.as_on_device { empty.as_on_device() } else { empty }
    }

    /// As [`Self::new`] with given instructions. Results are the same.
    pub fn with_kernel(self, kernel: Kernel) -> Self {
        Self { kernel, ..self }
    }

    /// As kernels on a GPU do it, which scale no tensor and write all codes in a fixed width: to compare with them. Trainings by
    /// it may diverge.
    pub fn as_on_device(mut self) -> Self {
        self.units.iter_mut().for_each(|unit| unit.codec.pack_codes());
        Self { as_on_device: true, ..self }
    }

    /// Whether tensors have factors.
    fn is_scaled(&self) -> bool {
        !self.as_on_device && self.spec.is_scaled()
    }

    /// What is in force.
    pub fn spec(&self) -> &CompressorSpec {
        &self.spec
    }

    /// The layers it was made for.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// How many gradients counted as zeros since the pipeline was made, or restored with its counter.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The residual, in units of gradients at the last step's learning rate; empty when nothing can be. Infinite where
    /// these units leave f32's range.
    pub fn residual(&self) -> Vec<f32> {
        let residual = self.owed();
        let ratio = residual.units.ratio(self.learning_rate) as f32;
        residual.values.iter().map(|value| ratio * value).collect()
    }

    /// The energy of the last step as it counts: under error feedback what has left the residual was sent, ‖e‖² − ‖e − T‖².
    /// Messages that hold the gradient's own values show that themselves.
    pub fn counted(&self, energy: Energy) -> Energy {
        let copies = self.spec.value_type() == ValueType::F32 && self.spec.compressor().class == Class::Sparsification;
        let Some(memory) = self.memory.as_ref().filter(|_| !copies) else { return energy };
        let left = kernels::stats(self.kernel, memory.residual().values).energy;
        Energy { sent: (energy.compensated - left).max(0.0), ..energy }
    }

    /// The rate of a step whose optimizer says `rate`: `rate` itself where that is finite and above 0, else the last that was
    /// (a warm-up begins at 0, a scheduler ends there). The residual before the first such rate is not rescaled by it.
    pub fn known_rate(&mut self, rate: f64) -> f64 {
        if !(rate.is_finite() && rate > 0.0) {
            return self.learning_rate;
        }
        if std::mem::take(&mut self.rate_assumed) {
            self.rebase(rate);
        }
        rate
    }

    /// Whether no rate above 0 was known so far.
    pub fn rate_is_assumed(&self) -> bool {
        self.rate_assumed
    }

    /// eta of the last step that was done; 1 before the first.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// Index of the last step that was done, also where that was before a [`Self::restore`]; none before the first.
    pub fn last_step(&self) -> Option<u64> {
        self.last
    }

    /// Goes on as if the steps so far had been at this rate, (finite, above 0): nothing is rescaled at the next step at it.
    /// For steps at a rate that was only assumed.
    pub fn rebase(&mut self, learning_rate: f64) {
        self.forget_mark();
        let ratio = learning_rate / self.learning_rate;
        self.leftover_units = self.leftover_units.rebased(ratio);
        if let Some(memory) = &mut self.memory {
            memory.rebase(ratio);
        }
        self.learning_rate = learning_rate;
    }

    /// Multiplies each layer's residual by its factor, where it is one that follows learning rates: for layers whose rate
    /// changes by another ratio than the steps'.
    pub fn rescale_layers(&mut self, factors: &[f32]) {
        self.forget_mark();
        let leftover = self.leftover_units.learning_rate.is_some().then_some(&mut self.leftover[..]);
        let memory = self.memory.as_mut().and_then(|memory| memory.follows_rates());
        for values in memory.into_iter().chain(leftover) {
            for (range, factor) in self.layers.ranges().zip(factors) {
                values.get_mut(range).into_iter().flatten().for_each(|value| *value *= factor);
            }
        }
    }

    fn owed(&self) -> Residual<'_> {
        let leftover = Residual { values: &self.leftover, units: self.leftover_units };
        self.memory.as_ref().map_or(leftover, |memory| memory.residual())
    }

    /// Bytes of a step's messages of all rounds, headers included, before any values are seen: what a cost model charges.
    pub fn size(&self) -> Size {
        (0..self.rounds()).map(|round| self.round_size(round)).fold(Size::Exact(0), Size::and)
    }

    /// Bytes that travel at a round of a step, of messages that add up: known before any values are, the same on all ranks.
    pub fn summed_size(&self, step: u64, round: u32) -> usize {
        let context = self.context(step, round);
        self.units.iter().fold(self.factor_bytes(), |sum, unit| sum + unit.codec.summed_size(&context))
    }

    /// Bytes of a round's message, header included.
    pub fn round_size(&self, round: u32) -> Size {
        Size::Exact(self.header(&Open::first(), 0).bytes()).and(self.payload_size(round))
    }

    /// Bytes of a round's message without its header, of all tensors together: no message of whatever values needs more.
    pub fn payload_size(&self, round: u32) -> Size {
        let factors = Size::Exact(self.factor_bytes());
        self.units.iter().fold(factors, |sum, unit| sum.and(unit.codec.round_size(round)))
    }

    /// Bytes of the factors that a message's payload begins with; 0 where there are none.
    pub fn factor_bytes(&self) -> usize {
        if self.is_scaled() { scale::FACTOR_BYTES * self.units.len() } else { 0 }
    }

    /// Tensors that are compressed by themselves.
    pub fn tensors(&self) -> usize {
        self.units.len()
    }

    /// Exchanges per step.
    pub fn rounds(&self) -> u32 {
        self.units.iter().map(|unit| unit.codec.rounds()).max().unwrap_or(1)
    }

    /// Another strategy from the next step on. See the module for what becomes of the memory.
    pub fn change(&mut self, spec: &CompressorSpec) {
        self.open = None;
        self.forget_mark();
        let n = self.layers.values();
        let old = self.momentum.take();
        self.momentum = Momentum::build(spec, n);
        if let (Some(old), Some(new)) = (old, &mut self.momentum)
            && spec.momentum().map(|m| m.0) == self.spec.momentum().map(|m| m.0)
        {
            new.take_over(old);
        }
        if !spec.same_memory(&self.spec) {
            let owed = self.owed();
            let (values, units) = (owed.values.to_vec(), owed.units);
            self.memory = memory::build(spec, n);
            self.take_over(&values, units);
        }
        if !spec.same_codec(&self.spec) {
            self.units = units(spec, &self.layers, self.member);
            if self.as_on_device {
                self.units.iter_mut().for_each(|unit| unit.codec.pack_codes());
            }
        }
        self.spec = *spec;
    }

    /// Holds these values back, in the memory or for the next step.
    fn take_over(&mut self, values: &[f32], units: Units) {
        self.leftover.clear();
        match &mut self.memory {
            Some(memory) if !values.is_empty() => memory.take_over(Residual { values, units }, self.learning_rate),
            Some(_) => {}
            None => {
                self.leftover.extend_from_slice(values);
                self.leftover_units = units;
            }
        }
    }

    /// Whether there may be a residual: of a memory, or of one that is gone, for the next step. It follows from what was done,
    /// not from values.
    pub fn has_residual(&self) -> bool {
        self.memory.is_some() || !self.leftover.is_empty()
    }

    /// Replaces `out` by this rank's message. With one round the step is done and the memory has moved on.
    pub fn compress(&mut self, gradient: Gradient<'_>, step: Step, out: &mut Writer) -> Result<Outcome, EncodeError> {
        self.open_step(gradient, step, |own, gradient, open| own.begin(gradient, open, out))
    }

    /// Begins a step by a gradient, or by zeros where one that is not finite counts as such.
    fn open_step<T>(
        &mut self,
        gradient: Gradient<'_>,
        step: Step,
        mut begin: impl FnMut(&mut Self, Gradient<'_>, Open) -> Result<T, EncodeError>,
    ) -> Result<T, EncodeError> {
        self.open = None;
        if !(step.learning_rate.is_finite() && step.learning_rate > 0.0) {
            return Err(EncodeError::LearningRate(step.learning_rate));
        }
        let open = Open { step, dtype: gradient.dtype(), round: 0, skipped: false };
        match begin(self, gradient, open) {
            Err(EncodeError::NonFinite { .. }) if self.spec.non_finite() == NonFinite::Skip => {
                let zeros = Gradient::Zeros;
                begin(self, zeros, Open { skipped: true, ..open }).map_err(|error| zeros.clear(error))
            }
            begun => begun.map_err(|error| gradient.clear(error)),
        }
    }

    /// The next round's message, from the sum of the messages of the round before.
    pub fn advance(&mut self, sum: &[u8], out: &mut Writer) -> Result<Outcome, EncodeError> {
        let rounds = self.rounds();
        let Some(open) = self.open.filter(|open| open.round + 1 < rounds) else {
            return Err(EncodeError::Round { asked: 0, next: 0, rounds });
        };
        self.reply(sum, open.step.index, open.round)?;
        self.round(Open { round: open.round + 1, ..open }, out)
    }

    /// How much of what is sent makes one unit of gradient.
    fn unit(&self) -> f32 {
        let step = Feeding { learning_rate: self.learning_rate, kernel: self.kernel };
        self.memory.as_ref().map_or(1.0, |memory| memory.unit(step) as f32)
    }

    /// Header of the first round's message of a step, for payloads that a device makes.
    pub fn message_header(&self, step: Step) -> Header {
        self.header(&Open { step, ..Open::first() }, 0)
    }

    fn header(&self, open: &Open, round: u32) -> Header {
        let values = self.spec.values().all();
        let mut parameters = [0.0; MAX_PARAMETERS];
        parameters[..values.len()].copy_from_slice(values);
        Header {
            method: self.spec.entry().code,
            dtype: open.dtype,
            round: round as u8,
            n: self.layers.values() as u64,
            count: values.len(),
            parameters,
            checksum: self.spec.checksum(),
            factors: self.is_scaled(),
            value_type: self.spec.value_type(),
            common: Some(self.common(open.step.index)),
        }
    }

    /// What a step's messages of all ranks have in common.
    fn common(&self, step: u64) -> Common {
        // No codec draws for a purpose this large.
        let draw = (self.context(step, 0).shared(u32::MAX).word(0) >> 24) as u8;
        Common { scope: self.spec.scope(), step: (step % 64) as u8, draw }
    }

    /// By which codecs draw.
    fn seed(&self) -> u64 {
        self.spec.seed().unwrap_or(self.member.seed)
    }

    fn context(&self, step: u64, round: u32) -> Context {
        Context {
            seed: self.seed(),
            step,
            tensor: self.member.tensor,
            rank: self.member.rank,
            world: self.member.world,
            round,
            kernel: self.kernel,
            known: None,
        }
    }
}

impl Open {
    /// Any: for sizes, which do not depend on it.
    fn first() -> Self {
        let step = Step { index: 0, learning_rate: 1.0 };
        Self { step, dtype: DType::F32, round: 0, skipped: false }
    }
}

fn units(spec: &CompressorSpec, layers: &Layers, member: Member) -> Vec<Unit> {
    match spec.scope() {
        Scope::Bucket => {
            // One layer alone keeps its shape.
            let n = layers.values();
            let shape = layers.shapes().find(|shape| shape.values() == n).unwrap_or(Shape::vector(n));
            vec![Unit { codec: spec.codec(shape), range: 0..n, tensor: member.tensor }]
        }
        Scope::Tensor => {
            let unit = |(i, (range, shape))| Unit { codec: spec.codec(shape), range, tensor: member.tensor + i };
            (0..).zip(layers.ranges().zip(layers.shapes())).map(unit).collect()
        }
    }
}
