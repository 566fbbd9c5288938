//! 1-bit SGD, min-max 8-bit and INCEPTIONN: payloads with more than a norm and codes.

use crate::device::start;
use crate::feed::{self, Feed};
use crate::quantize::Call;
use crate::workspace::{Workspace, check, check_apart, check_count};
use crate::{Device, LaunchError, Quantizer, Span};

pub(crate) fn sides(
    device: &impl Device,
    feed: &Feed,
    (threshold, columns): (f32, u32),
    call: &Call,
) -> Result<(), LaunchError> {
    let [state, outcome, partials] = call.ends();
    let (compensated, n, columns) = (feed.compensated.address(), call.n, u64::from(columns));
    let threshold = u64::from(threshold.to_bits());
    if columns > 1 {
        let arguments = [compensated, n / columns, columns, threshold, call.payload, outcome];
        start(device, "side_columns", columns, &arguments)?;
    }
    let arguments = [compensated, feed.memory.address(), n, call.payload, columns, threshold, state, outcome, partials];
    start(device, "sides", n, &arguments)
}

pub(crate) fn minmax(device: &impl Device, feed: &Feed, call: &Call) -> Result<(), LaunchError> {
    let [state, outcome, partials] = call.ends();
    let arguments = [feed.compensated.address(), feed.memory.address(), call.n, call.payload, state, outcome, partials];
    start(device, "minmax", call.n, &arguments)
}

/// Values per tag word of INCEPTIONN, and of a tile.
const WORD: u64 = 16;
const TILE: u64 = 4096;

/// Bits of the fraction in front of the 7 that are sent.
fn skipped(bound: u32) -> u64 {
    u64::from(bound / 2)
}

pub(crate) fn inceptionn(device: &impl Device, feed: &Feed, bound: u32, call: &Call) -> Result<(), LaunchError> {
    count(device, feed.compensated.address(), bound, call)?;
    let [state, outcome, partials] = call.ends();
    let (tiles, sums) = (call.parts.tiles.address(), call.parts.sums.address());
    let (memory, bound, skipped) = (feed.memory.address(), u64::from(bound), skipped(bound));
    let arguments = [
        feed.compensated.address(),
        memory,
        call.n,
        call.payload,
        bound,
        skipped,
        tiles,
        sums,
        state,
        outcome,
        partials,
    ];
    start(device, "put_sizes", call.n.div_ceil(WORD), &arguments)
}

/// Tags and how many of each come before every tile.
fn count(device: &impl Device, compensated: u64, bound: u32, call: &Call) -> Result<(), LaunchError> {
    let [state, outcome, _] = call.ends();
    let (tiles, sums) = (call.parts.tiles.address(), call.parts.sums.address());
    let arguments = [compensated, call.n, call.payload, u64::from(bound), skipped(bound), tiles, sums, outcome];
    start(device, "count_sizes", call.n.div_ceil(WORD), &arguments)?;
    device.launch("scan_sizes", 1, &[tiles, sums, call.n.div_ceil(TILE), state])
}

/// [`crate::add`] for [`Quantizer::Inceptionn`], whose payload is as long as its values need: `out += scale * C(x)`. It may
/// begin at any byte. What claims to be longer than it is adds nothing.
pub fn add_sized(
    device: &impl Device,
    (bound, n): (u32, u64),
    payload: Span,
    (scale, out, workspace): (f32, Span, Span),
) -> Result<(), LaunchError> {
    let count_of = u64::from(check_count(n)?);
    Quantizer::Inceptionn { bound }.check(n)?;
    check(("the payload", payload, n.div_ceil(4)), 1)?;
    check(("out", out, 4 * n), feed::WORD)?;
    check_apart(("out", out), ("the payload", payload))?;
    let call = Call { parts: Workspace::new(workspace, n)?, n: count_of, payload: payload.address() };
    device.zero(call.parts.zeroed)?;
    count(device, 0, bound, &call)?;
    let (tiles, sums, state) = (call.parts.tiles.address(), call.parts.sums.address(), call.parts.state.address());
    let (wide, skipped, scale) = (u64::from(bound), skipped(bound), u64::from(scale.to_bits()));
    let arguments = [out.address(), n, payload.address(), wide, skipped, tiles, sums, state, payload.bytes(), scale];
    start(device, "add_sizes", n.div_ceil(WORD), &arguments)
}
