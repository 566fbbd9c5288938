//! Marsit (Wu et al. 2022, "Marsit: a multi-hop all-reduce framework by sign bits", algorithm 1): one bit per value on every
//! hop of a ring, without compressing again what was compressed.
//!
//! A step of worker m of M, whose compensation c is the memory of the [`ErrorFeedback`]:
//! 1. [`signs`]: g + c into `compensated`, and its sign bits (bit 1 means negative, as everywhere).
//! 2. Hop h = 1 to M - 1 of the reduction: the segment that arrives holds the bits of h workers; [`combine`] with the own
//!    segment makes it that of h + 1, and it is sent on. Then segments are gathered as they are.
//! 3. The update is eta times the agreed signs: `add(device, Quantizer::Signs, n, bits, Target { out, scale: eta })`; the
//!    compensation of the next step is what that leaves: the same with `Target { out: compensated, scale: -eta }`.
//!
//! Every K steps gradients are exchanged whole instead, and the compensation becomes zeros.

use crate::feedback::ErrorFeedback;
use crate::launch::start;
use crate::quantize::signs_alone;
use crate::random::Random;
use crate::workspace::{check, check_apart, check_count, require};
use crate::{Device, LaunchError, Span};

/// Error feedback and sign bits, n/8 bytes, of the compensated gradient, which stays whole. A gradient that is refused (see the outcome)
/// leaves the memory and is sent as positive signs.
pub fn signs(
    device: &impl Device,
    feedback: &ErrorFeedback,
    payload: Span,
    workspace: Span,
) -> Result<(), LaunchError> {
    signs_alone(device, feedback, payload, workspace)
}

/// A stretch of n sign bits of a tensor. Segments begin at multiples of 32 values, so that their bits begin at whole words.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    /// Bits.
    pub n: u64,
    /// Number of the first in the tensor.
    pub first: u64,
}

/// `received ⊙ own` into `received`, which holds the bits of `workers` - 1 workers before and of `workers` after. Random
/// numbers are of this step and rank.
pub fn combine(
    device: &impl Device,
    segment: Segment,
    workers: u32,
    received: Span,
    own: Span,
    random: Random,
) -> Result<(), LaunchError> {
    let Segment { n, first } = segment;
    check_count(n)?;
    check_count(first.saturating_add(n))?;
    require(workers > 1, "workers", workers.into(), "at least 2: the one before and this one")?;
    check("the received bits", received, n.div_ceil(8), 4)?;
    check("the own bits", own, n.div_ceil(8), 4)?;
    check_apart(("the received bits", received), ("the own bits", own))?;
    let below = (1u64 << 32).div_ceil(u64::from(workers));
    start(device, "marsit", n.div_ceil(32), (received, own, n, first, below, random.stream(0)))
}
