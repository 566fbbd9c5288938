//! How a call's workspace is laid out. The caller allocates it once, for the largest tensor, and every call borrows it.

use crate::{LaunchError, Span};
use flexcomm_compression::Energy;

/// Bytes of `Outcome` in `cuda/state.cuh`.
pub const OUTCOME_BYTES: u64 = 48;
/// Bytes of `State`.
pub const STATE_BYTES: u64 = 53_376;
/// Bytes of `Partials`.
pub const PARTIALS_BYTES: u64 = 5 * 8 * MOST_BLOCKS as u64;
/// Blocks that `Partials` has room for.
pub const MOST_BLOCKS: u32 = 4096;
/// Values that a block compacts at a time.
pub const TILE: u64 = 4096;

/// Values of the longest tensor: counts are 31 bits wide.
pub const MOST_VALUES: u64 = (1 << 31) - 1;

/// Parts begin at multiples of this, as allocators of device memory give it.
const ALIGN: u64 = 256;

/// What a test compares with the sizes in `cuda/state.cuh`.
pub const STRUCTURES: [u64; 5] = [OUTCOME_BYTES, STATE_BYTES, PARTIALS_BYTES, MOST_BLOCKS as u64, TILE];

/// What a call found, in the first bytes of its workspace. Copy it back on the same stream when it is wanted; nothing on
/// the device waits for that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// ‖g_e‖².
    pub compensated: f64,
    /// ‖g_c‖².
    pub sent: f64,
    /// ‖g_e − g_c‖²: of the residual, where there is error feedback.
    pub residual: f64,
    /// Of the payload.
    pub bytes: u64,
    /// Values selected.
    pub kept: u32,
    /// NaN or infinity was met: the memory is as it was, and the payload means zeros.
    pub refused: bool,
    /// max |g_e|.
    pub max: f32,
    /// As sent, of methods with one norm.
    pub norm: f32,
    /// More values reached the threshold than there was room for: those that were not sent stay in the memory.
    pub over: bool,
}

impl Outcome {
    /// From the workspace's first bytes.
    pub fn read(bytes: &[u8; OUTCOME_BYTES as usize]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let wide = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            compensated: f64::from_bits(wide(0)),
            sent: f64::from_bits(wide(8)),
            residual: f64::from_bits(wide(16)),
            bytes: wide(24),
            kept: word(32),
            refused: word(36) as u16 != 0,
            over: word(36) >> 16 != 0,
            max: f32::from_bits(word(40)),
            norm: f32::from_bits(word(44)),
        }
    }

    /// Of the message.
    pub fn energy(&self) -> Energy {
        Energy { sent: self.sent, compensated: self.compensated }
    }

    /// Share of the energy that was sent.
    pub fn gain(&self) -> f64 {
        self.energy().gain()
    }
}

/// Where a payload's values are added: `out += scale * C(x)`.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// f32, as many as the tensor has.
    pub out: Span,
    /// 1 over the number of ranks for a mean.
    pub scale: f32,
}

/// Parts of a workspace for n values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workspace {
    pub(crate) outcome: Span,
    pub(crate) state: Span,
    /// Of a sample's cut.
    pub(crate) sampled: Span,
    pub(crate) tiles: Span,
    pub(crate) partials: Span,
    pub(crate) sums: Span,
    pub(crate) list: Span,
    /// States and tiles: zero when a call starts.
    pub(crate) zeroed: Span,
}

fn padded(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN)
}

/// Keys in play that are listed: more are looked for among all again.
fn listed(n: u64) -> u64 {
    n / 8 + 1024
}

fn sizes(n: u64) -> [u64; 7] {
    let tiles = 8 * n.div_ceil(TILE);
    [OUTCOME_BYTES, STATE_BYTES, STATE_BYTES, tiles, PARTIALS_BYTES, tiles, 4 * listed(n)].map(padded)
}

/// Bytes of workspace that every call with n values is content with: about n/2 and 270 KiB.
pub fn workspace_bytes(n: u64) -> u64 {
    sizes(n).iter().sum()
}

impl Workspace {
    pub(crate) fn new(span: Span, n: u64) -> Result<Self, LaunchError> {
        check("the workspace", span, workspace_bytes(n), ALIGN)?;
        let [outcome, state, sampled, tiles, partials, sums, list] = split(span, sizes(n));
        let zeroed = span.part(padded(OUTCOME_BYTES), state.bytes() + sampled.bytes() + tiles.bytes());
        Ok(Self { outcome, state, sampled, tiles, partials, sums, list, zeroed })
    }

    /// What most kernels end with: the call's state, what it found, and sums of blocks.
    pub(crate) fn ends(&self) -> [Span; 3] {
        [self.state, self.outcome, self.partials]
    }

    pub(crate) fn room_of_list(&self) -> u64 {
        self.list.bytes() / 4
    }
}

/// Parts of these sizes, one after the other.
pub(crate) fn split<const N: usize>(borrowed: Span, sizes: [u64; N]) -> [Span; N] {
    let mut at = 0;
    sizes.map(|bytes| {
        at += bytes;
        borrowed.part(at - bytes, bytes)
    })
}

/// Refuses a buffer that is too small or lies where vector loads cannot reach it.
pub(crate) fn check(what: &'static str, span: Span, need: u64, align: u64) -> Result<(), LaunchError> {
    if span.bytes() < need {
        return Err(LaunchError::TooSmall { what, got: span.bytes(), need });
    }
    if need > 0 && !span.address().is_multiple_of(align) {
        return Err(LaunchError::Misaligned { what, at: span.address(), need: align });
    }
    Ok(())
}

/// Refuses a parameter unless what `rule` says of it holds.
pub(crate) fn require(holds: bool, what: &'static str, value: f64, rule: &'static str) -> Result<(), LaunchError> {
    if holds { Ok(()) } else { Err(LaunchError::Parameter { what, value, rule }) }
}

/// Refuses more values than the kernels count.
pub(crate) fn check_count(n: u64) -> Result<(), LaunchError> {
    if n <= MOST_VALUES { Ok(()) } else { Err(LaunchError::TooLong(n)) }
}

/// Refuses a copy between buffers of different lengths.
pub(crate) fn check_lengths(to: Span, from: Span) -> Result<(), LaunchError> {
    let (to, from) = (to.bytes(), from.bytes());
    if to == from { Ok(()) } else { Err(LaunchError::Lengths { from, to }) }
}

/// Refuses a copy between a buffer and memory of the host of another length.
pub(crate) fn check_as_long(span: Span, host: usize) -> Result<(), LaunchError> {
    let (to, from) = (span.bytes(), host as u64);
    if to == from { Ok(()) } else { Err(LaunchError::Lengths { from, to }) }
}

/// Refuses a memory that is read while another is written.
pub(crate) fn check_apart(a: (&'static str, Span), b: (&'static str, Span)) -> Result<(), LaunchError> {
    if a.1.overlaps(b.1) { Err(LaunchError::Overlap(a.0, b.0)) } else { Ok(()) }
}
