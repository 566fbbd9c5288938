//! 3LC (Lim et al. 2019): three values, five to a byte, runs of zeros in one byte each.

use crate::feedback::{ErrorFeedback, WORD};
use crate::indices;
use crate::launch::{launch, start};
use crate::workspace::{Target, Workspace, check, check_apart, check_count, require};
use crate::{Device, LaunchError, Span};

/// Bytes that a block works on at a time.
const TILE: u64 = 1024;

/// Most bytes of a payload of n values.
pub fn payload_bytes(n: u64) -> u64 {
    4 + n.div_ceil(5)
}

/// Error feedback and the payload, whose length is in the outcome; `s` is the sparsity multiplier, from 1 to below 2.
pub fn compress(
    device: &impl Device,
    feedback: &ErrorFeedback,
    s: f64,
    payload: Span,
    workspace: Span,
) -> Result<(), LaunchError> {
    require((1.0..2.0).contains(&s), "s", s, "from 1 to below 2")?;
    feedback.check_payload(payload, payload_bytes(feedback.n))?;
    indices::compensate(device, feedback, workspace)?;
    let (n, parts, count) = (feedback.n, Workspace::new(workspace, feedback.n)?, feedback.n.div_ceil(5));
    // What is listed elsewhere has room for more bytes than these.
    let Workspace { list: bytes, tiles, sums, outcome, .. } = parts;
    start(device, "quartic", count, (feedback.residual(), s, bytes, tiles, parts.ends()))?;
    launch(device, "scan_last", 1, (tiles, count.div_ceil(TILE)))?;
    start(device, "count_runs", count, (bytes, n, tiles, sums))?;
    launch(device, "scan_runs", 1, (sums, count.div_ceil(TILE), outcome))?;
    start(device, "put_runs", count, (bytes, n, tiles, sums, s, payload, outcome))
}

/// `out += scale * C(x)` of a payload of exactly its length, which may begin at any byte. What says another number of values
/// than n adds nothing.
pub fn add(
    device: &impl Device,
    payload: Span,
    n: u64,
    Target { scale, out }: Target,
    workspace: Span,
) -> Result<(), LaunchError> {
    check_count(n)?;
    check("the payload", payload, 4, 1)?;
    check("out", out, 4 * n, WORD)?;
    check_apart(("out", out), ("the payload", payload))?;
    let codes = payload.bytes() - 4;
    let (bytes, rule) = (payload.bytes() as f64, "at most a byte for every five values, and 4");
    require(codes <= n.div_ceil(5), "bytes of the payload", bytes, rule)?;
    let Workspace { sums, outcome, .. } = Workspace::new(workspace, n)?;
    start(device, "count_codes", codes, (payload, codes, sums))?;
    launch(device, "scan_runs", 1, (sums, codes.div_ceil(TILE), outcome))?;
    start(device, "add_runs", codes, (out, n, payload, codes, sums, outcome, scale))
}
