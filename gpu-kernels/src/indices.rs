//! Values at indices that are known: what AR-Topk exchanges, and random-k. Lists are read word by word, so they begin at
//! multiples of 4; payloads as they arrive are for [`crate::add_lists`].

use crate::feedback::{ALIGN, ErrorFeedback, WORD};
use crate::launch::{launch, start};
use crate::random::{Random, RandomK};
use crate::select::Selection;
use crate::workspace::{Target, Workspace, check, check_apart, check_count, require, split};
use crate::{Device, LaunchError, Span};

/// Error feedback alone, for a rank whose own selection is not needed; [`gather`] then takes.
pub fn compensate(device: &impl Device, feedback: &ErrorFeedback, workspace: Span) -> Result<(), LaunchError> {
    feedback.check()?;
    let parts = Workspace::new(workspace, feedback.n)?;
    device.zero(parts.zeroed)?;
    feedback.compensate(device, 0, 0.0, Span::NONE, &parts)
}

/// Takes `factor` times the values at the indices out of what [`compensate`] has compensated with this workspace. Indices that lie
/// beyond n take nothing; the outcome's `over` then says so.
pub fn gather(
    device: &impl Device,
    feedback: &ErrorFeedback,
    at: &Selection,
    factor: f32,
    workspace: Span,
) -> Result<(), LaunchError> {
    feedback.check()?;
    let parts = Workspace::new(workspace, feedback.n)?;
    at.check()?;
    check_apart(("compensated", feedback.compensated), ("the values", at.values))?;
    require(factor.is_finite(), "factor", factor.into(), "it must be finite")?;
    start(device, "keep", feedback.n, (feedback.residual(), parts.outcome))?;
    let lists = (at.indices, at.len, factor, at.values);
    start(device, "gather", at.len, (feedback.compensated, feedback.n, lists, parts.ends()))
}

/// Error feedback, k indices at random to `at`, and the values there, taken out of the compensated gradient. `scratch` has
/// [`subset_scratch`] bytes.
pub fn random_k(
    device: &impl Device,
    compensated: &ErrorFeedback,
    how: RandomK,
    at: &Selection,
    scratch: Span,
    workspace: Span,
) -> Result<(), LaunchError> {
    subset(device, compensated.n, how.k, how.random, scratch, at.indices)?;
    compensate(device, compensated, workspace)?;
    gather(device, compensated, at, how.factor(compensated.n), workspace)
}

/// Puts values where [`crate::topk`] has taken them: the compensated gradient is then whole again. Where the gradient was refused nothing was
/// taken.
pub(crate) fn put(
    device: &impl Device,
    feedback: &ErrorFeedback,
    at: &Selection,
    workspace: Span,
) -> Result<(), LaunchError> {
    feedback.check()?;
    let parts = Workspace::new(workspace, feedback.n)?;
    at.check()?;
    start(device, "put", at.len, (feedback.compensated, feedback.n, at.indices, at.values, at.len, parts.outcome))
}

/// `out += scale * values` at the indices; those beyond n are left out.
pub fn scatter(device: &impl Device, at: &Selection, n: u64, to: Target) -> Result<(), LaunchError> {
    spread(device, "scatter", at, n, to.out, to.scale)
}

/// `out += values / world` at the indices: of every rank's message in turn, a mean with the CPU side's bits.
pub fn add_mean(device: &impl Device, at: &Selection, n: u64, out: Span, world: u32) -> Result<(), LaunchError> {
    spread(device, "add_mean", at, n, out, world as f32)
}

fn spread(
    device: &impl Device,
    kernel: &'static str,
    at: &Selection,
    n: u64,
    out: Span,
    by: f32,
) -> Result<(), LaunchError> {
    at.check()?;
    check_count(n)?;
    check("out", out, 4 * n, WORD)?;
    check_apart(("out", out), ("the values", at.values))?;
    start(device, kernel, at.len, (out, n, at.indices, at.values, at.len, by))
}

/// Sets bits of a byte where the last call with this workspace refused its gradient: a message then says so itself, and
/// nobody waits for the outcome.
pub(crate) fn mark(device: &impl Device, at: Span, bits: u8, outcome: Span) -> Result<(), LaunchError> {
    check("the byte", at, 1, 1)?;
    launch(device, "mark", 1, (at, u32::from(bits), outcome))
}

/// Places per count of [`subset`].
const SET_TILE: u64 = 8192;

/// Bytes of scratch memory that [`subset`] needs for sets of n: a number and a bit per value, and some counts.
pub fn subset_scratch(n: u64) -> u64 {
    let [first, set, counts] = subset_parts(n);
    first + set + counts
}

fn subset_parts(n: u64) -> [u64; 3] {
    let padded = |bytes: u64| bytes.next_multiple_of(256);
    [padded(4 * n), padded(4 * n.div_ceil(32)), padded(4 * n.div_ceil(SET_TILE))]
}

/// k of n indices at random, ascending, to `indices`: the set that random-k draws on the CPU side.
pub fn subset(
    device: &impl Device,
    n: u64,
    k: u64,
    random: Random,
    scratch: Span,
    indices: Span,
) -> Result<(), LaunchError> {
    check_count(n)?;
    require(k <= n, "k", k as f64, "at most n")?;
    check("the scratch memory", scratch, subset_scratch(n), 256)?;
    check("the indices", indices, 4 * k, ALIGN)?;
    check_apart(("the indices", indices), ("the scratch memory", scratch))?;
    let [first, set, counts] = split(scratch, subset_parts(n));
    // Of sets larger than half, those left out are drawn.
    let (few, flip) = (k.min(n - k), k > n - k);
    device.zero(scratch.part(0, subset_scratch(n)))?;
    let drawn = (n, few, random.key(0));
    start(device, "draw_first", few, (first, drawn))?;
    start(device, "draw_set", few, (first, set, drawn))?;
    let words = n.div_ceil(32);
    start(device, "count_set", words, (set, n, flip, counts))?;
    launch(device, "scan_set", 1, (counts, n.div_ceil(SET_TILE)))?;
    start(device, "list_set", words, (set, n, flip, counts, indices, k))
}
