//! 1-bit SGD, min-max 8-bit and INCEPTIONN: payloads with more than a norm and codes.

use crate::feedback::{ErrorFeedback, WORD};
use crate::launch::{launch, start};
use crate::quantize::Call;
use crate::workspace::{Target, Workspace, check, check_apart, check_count};
use crate::{Device, LaunchError, Quantizer, Span};

pub(crate) fn sides<D: Device>(call: &Call<'_, D>, threshold: f32, columns: u32) -> Result<(), LaunchError> {
    let (ErrorFeedback { compensated, n, .. }, cols) = (*call.feedback, u64::from(columns));
    if cols > 1 {
        let arguments = (compensated, n / cols, cols, threshold, call.payload, call.parts.outcome);
        start(call.device, "side_columns", cols, arguments)?;
    }
    call.take("sides", n, (columns, threshold))
}

/// Values per tag word of INCEPTIONN, and of a tile.
const EACH: u64 = 16;
const TILE: u64 = 4096;

/// The bound, and bits of the fraction in front of the 7 that are sent.
fn sizes(bound: u32) -> [u32; 2] {
    [bound, bound / 2]
}

pub(crate) fn inceptionn<D: Device>(call: &Call<'_, D>, bound: u32) -> Result<(), LaunchError> {
    let (ErrorFeedback { compensated, n, .. }, parts) = (*call.feedback, &call.parts);
    count(call.device, compensated, n, call.payload, bound, parts)?;
    call.take("put_sizes", n.div_ceil(EACH), (sizes(bound), parts.tiles, parts.sums))
}

/// Tags, of the values where they are given, and how many of each come before every tile.
fn count(
    device: &impl Device,
    compensated: Span,
    n: u64,
    payload: Span,
    bound: u32,
    parts: &Workspace,
) -> Result<(), LaunchError> {
    let Workspace { tiles, sums, state, outcome, .. } = *parts;
    start(device, "count_sizes", n.div_ceil(EACH), (compensated, n, payload, sizes(bound), tiles, sums, outcome))?;
    launch(device, "scan_sizes", 1, (tiles, sums, n.div_ceil(TILE), state))
}

/// [`crate::add`] for [`Quantizer::Inceptionn`], whose payload is as long as its values need: `out += scale * C(x)`. It may
/// begin at any byte. What claims to be longer than it is adds nothing.
pub fn add_sized(
    device: &impl Device,
    bound: u32,
    n: u64,
    payload: Span,
    Target { scale, out }: Target,
    workspace: Span,
) -> Result<(), LaunchError> {
    check_count(n)?;
    Quantizer::Inceptionn { bound }.check(n)?;
    check("the payload", payload, n.div_ceil(4), 1)?;
    check("out", out, 4 * n, WORD)?;
    check_apart(("out", out), ("the payload", payload))?;
    let parts = Workspace::new(workspace, n)?;
    device.zero(parts.zeroed)?;
    count(device, Span::NONE, n, payload, bound, &parts)?;
    let found = [parts.tiles, parts.sums, parts.state];
    start(device, "add_sizes", n.div_ceil(EACH), (out, n, payload, sizes(bound), found, payload.bytes(), scale))
}
