//! The interface of a compressor: what every file in `methods/` implements.
//!
//! A codec sees one tensor: f32 values to which memory and momentum were already applied. It does not know error
//! feedback ([`crate::memory`]), messages ([`crate::wire::Header`]) or other tensors; [`crate::pipeline::Pipeline`]
//! puts these together.

mod error;
mod types;

pub use error::{EncodeError, ReadError};
pub use types::{Carried, Element, Scope, Shape, Size, Stats, Target, Travels};

pub use crate::select::filter::CandidateFilter;
use crate::wire::{Reader, Writer};
use crate::{Energy, Kernel, Selection};
#[cfg(doc)]
use flexcomm_domain::spec::CompressorInfo;
use flexcomm_domain::spec::ValueType;

/// A compressor for one tensor (Q and Q^-1 of GRACE's Algorithm 1). Made by [`crate::entry::Entry::build`].
///
/// Rules, which `tests/codecs` checks on every registered codec:
/// - After the first call with a tensor nothing is allocated.
/// - A tensor with NaN or infinity is refused before any state changes ([`Context::stats`] does it).
/// - The same state, values and context give the same bytes, on every kernel.
/// - Decoding accepts any bytes without panic, over-read or allocation of unchecked size, and leaves the reader
///   right behind its payload (payloads of tensors follow one another).
pub trait Codec: Send + std::fmt::Debug {
    /// Appends C(x) to `out`; answers ‖C(x)‖² and ‖x‖², taken in the same pass.
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError>;

    /// C(x), to where the target says. On a refusal its values are unspecified.
    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError>;

    /// As [`Self::encode`], and `x` becomes x − C(x): the update of an error feedback memory. Override it where one pass
    /// does both. On a refusal `x` is unspecified.
    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let start = out.len();
        let energy = self.encode(x, context, out)?;
        self.decode(&mut Reader::new(&out.bytes()[start..]), context, Target::add(-1.0, x))?;
        Ok(energy)
    }

    /// The residual in the tensor that is encoded next, for codecs that tell it from the step's own gradient.
    /// Not called where nothing was added. It is no state: [`Self::encode`] uses it up.
    fn carried(&mut self, _residual: &[f32], _share: Carried) {}

    /// What the next tensor's k largest are to be looked for with, so that the pass that makes it can collect them; empty. A
    /// codec that passes it works the same without.
    fn filter(&mut self) -> Option<&mut CandidateFilter> {
        None
    }

    /// What it would send of `x`, for AR-Topk, which sends one rank's choice of all; None where it selects no values.
    fn select(&mut self, _x: &[f32], _context: &Context) -> Result<Option<&Selection>, EncodeError> {
        Ok(None)
    }

    /// How many values [`Self::select`] chooses at most.
    fn most_selected(&self) -> usize {
        0
    }

    /// How the values that it selects are to travel from now on, where [`CompressorInfo::copies_values`] says that it selects
    /// any.
    fn send_values_as(&mut self, _value_type: ValueType) {}

    /// Codes of a fixed width from now on, also where others take fewer bytes: as kernels on a GPU write them.
    fn pack_codes(&mut self) {}

    /// The tensor that the ranks' messages mean together, into `out`: the mean, if nothing else is defined (Agg).
    /// Never called for what travels as sums, where one message holds the sum.
    fn aggregate(&mut self, from: &mut [Reader<'_>], context: &Context, out: &mut [f32]) -> Result<(), ReadError> {
        mean(self, from, context, out)
    }

    /// Bytes of one payload (of the last round, when there are several), before any values are seen.
    fn size(&self) -> Size;

    /// Exchanges per step. With more than one, `encode` is called for each with its [`Context::round`], and
    /// [`Self::reply`] in between; only the last goes through `encode_taking` and is decoded.
    fn rounds(&self) -> u32 {
        1
    }

    /// Bytes of the payload of one of several rounds.
    fn round_size(&self, _round: u32) -> Size {
        self.size()
    }

    /// Bytes of a payload that travels as a sum at this step, before any values are seen: the same on all ranks.
    fn summed_size(&self, context: &Context) -> usize {
        self.round_size(context.round).most()
    }

    /// The sum of all ranks' payloads of [`Context::round`]; times `scale` it is the mean. Also called after the last.
    fn reply(&mut self, _sum: &mut Reader<'_>, _context: &Context, _scale: f32) -> Result<(), ReadError> {
        Ok(())
    }

    /// Whether all ranks must encode and decode with one seed and step: they draw the same numbers, take turns by step, or
    /// exchange several times. Receivers then refuse messages of others.
    fn draws_together(&self) -> bool {
        self.rounds() > 1
    }

    /// Whether it has a state that [`Self::reply`] must update after the last round (a warm start).
    fn wants_reply(&self) -> bool {
        self.rounds() > 1
    }

    /// Appends the state that outlives a step. Scratch buffers are none.
    fn save(&self, _out: &mut Writer) {}

    /// Puts a saved state back, bit for bit.
    fn restore(&mut self, _from: &mut Reader<'_>) -> Result<(), ReadError> {
        Ok(())
    }
}

/// The mean of what messages mean.
pub(crate) fn mean<C: Codec + ?Sized>(
    codec: &mut C,
    from: &mut [Reader<'_>],
    context: &Context,
    out: &mut [f32],
) -> Result<(), ReadError> {
    let scale = 1.0 / from.len() as f32;
    let Some((first, others)) = from.split_first_mut() else { return Err(ReadError::NoMessages) };
    codec.decode(first, context, Target::replace(scale, out))?;
    others.iter_mut().try_for_each(|reader| codec.decode(reader, context, Target::add(scale, out)))
}

/// What a codec knows beside the values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Context {
    /// Of the job: the same on every rank.
    pub seed: u64,
    /// Counts up; the same on every rank.
    pub step: u64,
    /// Which tensor of the job; the same on every rank.
    pub tensor: u32,
    /// Of this process.
    pub rank: u32,
    /// Processes.
    pub world: u32,
    /// Which exchange of the step, from 0.
    pub round: u32,
    /// Instructions to use. No result depends on it.
    pub kernel: Kernel,
    /// Of the values, when a pass before has seen them.
    pub known: Option<Stats>,
}

impl Context {
    /// Rank 0 of 1, step 0, tensor 0, with the fastest kernel.
    pub fn new(seed: u64) -> Self {
        Self { seed, step: 0, tensor: 0, rank: 0, world: 1, round: 0, kernel: Kernel::best(), known: None }
    }

    /// ‖x‖² and max |x|, from the pass before or by one of its own; refuses NaN and infinity.
    pub fn stats(&self, x: &[f32]) -> Result<Stats, EncodeError> {
        let stats = self.known.unwrap_or_else(|| crate::kernels::stats(self.kernel, x));
        if stats.is_finite() { Ok(stats) } else { Err(not_finite(x)) }
    }

    /// As [`Self::stats`], in half of the time, for methods whose messages do not depend on ‖x‖²: it is off by up to 2^-20 of it
    /// where no pass before has told it.
    pub(crate) fn approximate_stats(&self, x: &[f32]) -> Result<Stats, EncodeError> {
        let stats = self.known.unwrap_or_else(|| crate::kernels::approximate_stats(self.kernel, x));
        if stats.is_finite() { Ok(stats) } else { Err(not_finite(x)) }
    }

    /// Random numbers that are the same on every rank. `purpose` tells the streams of one codec apart.
    pub fn shared(&self, purpose: u32) -> crate::random::Stream {
        crate::random::Stream::new(self.seed, [self.step, u64::from(self.tensor), u64::from(purpose), u64::MAX])
    }

    /// Random numbers of this rank alone.
    pub fn own(&self, purpose: u32) -> crate::random::Stream {
        let rank = u64::from(self.rank);
        crate::random::Stream::new(self.seed, [self.step, u64::from(self.tensor), u64::from(purpose), rank])
    }
}

/// The error for a tensor that is known to hold a value that is not finite.
#[cold]
pub(crate) fn not_finite(x: &[f32]) -> EncodeError {
    let index = x.iter().position(|v| !v.is_finite()).unwrap_or(0);
    EncodeError::NonFinite { index, value: x.get(index).copied().unwrap_or(f32::NAN) }
}
