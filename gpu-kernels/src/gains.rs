//! Gains of all candidate ratios at the price of one read: what five trials cost before.

use crate::feedback::{ALIGN, ErrorFeedback};
use crate::launch::start;
use crate::workspace::{Workspace, check, require};
use crate::{DType, Device, LaunchError, Span};

/// Most candidates of one call.
pub const MOST_CANDIDATES: u64 = 4096;

/// For each of `count` candidates k (u32 each at `ks`) the gain of top-k with error feedback and by how much it may be off,
/// two f64 each at `to`. Gradient and memory are read once and nothing else is written; `feedback.compensated` may be
/// [`Span::NONE`]. A gradient that is not finite has gain 0, off by up to 1.
pub fn gains(
    device: &impl Device,
    feedback: &ErrorFeedback,
    ks: Span,
    count: u64,
    to: Span,
    workspace: Span,
) -> Result<(), LaunchError> {
    feedback.check_inputs()?;
    require(count <= MOST_CANDIDATES, "candidates", count as f64, "at most 4096")?;
    check("the candidates", ks, 4 * count, ALIGN)?;
    check("the gains", to, 16 * count, ALIGN)?;
    let parts = Workspace::new(workspace, feedback.n)?;
    device.zero(parts.zeroed)?;
    let kernel = feedback.dtype.of(["gains_f32", "gains_f16", "gains_bf16"]);
    start(device, kernel, feedback.n.div_ceil(4), (feedback.inputs(), ks, count, to, parts.ends()))
}

/// The bits of the largest |x| of an f32 gradient with its memory (u32 at `to`), which may be NaN's. Both are read as [`gains`]
/// reads them, and hardly anything else is done: its time is the bound of that pass.
pub fn largest(device: &impl Device, feedback: &ErrorFeedback, to: Span) -> Result<(), LaunchError> {
    feedback.check_inputs()?;
    require(feedback.dtype == DType::F32, "bytes of a value", feedback.dtype.bytes() as f64, "4: f32")?;
    check("the largest magnitude", to, 4, ALIGN)?;
    device.zero(to.part(0, 4))?;
    start(device, "largest_f32", feedback.n.div_ceil(4), (feedback.inputs(), to))
}
