//! Methods that send some values as they are: exact top-k, and how a selection is packed.

use crate::feedback::{ALIGN, ErrorFeedback, WORD};
use crate::launch::start;
use crate::workspace::{TILE, Workspace, check, check_count, require};
use crate::{Device, LaunchError, Span, THREADS};

/// Indices (u32, all different) and as many values (f32) on the device: of what is selected, or room for it.
#[derive(Debug, Clone, Copy)]
pub struct Selection {
    /// How many; of a selection that is still to come, at most.
    pub len: u64,
    /// Where in the tensor: in ascending order where a kernel selects.
    pub indices: Span,
    /// The values there.
    pub values: Span,
}

impl Selection {
    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        check_count(self.len)?;
        check("the indices", self.indices, 4 * self.len, WORD)?;
        check("the values", self.values, 4 * self.len, WORD)
    }
}

/// What is packed of the indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    /// Nothing: everybody draws them.
    Known,
    /// They alone, for methods that select a fixed number.
    Bare,
    /// How many they are, in front of them.
    Counted,
}

/// How a selection is packed into a payload of version 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// What comes first.
    pub set: Set,
    /// Whether the coding may depend on the indices: for methods whose number of values varies.
    pub gaps: bool,
    /// What follows the indices.
    pub tail: Tail,
}

/// What is packed of each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// As it is.
    Values,
    /// Its code, which stands in its place ([`crate::hybrid`]).
    Codes {
        /// Whether the outcome's norm goes in front.
        led: bool,
        /// Of each code.
        bits: u32,
    },
}

impl Form {
    /// Of top-k, LWTopk, MSTopk and random-k with indices of its own.
    pub const FIXED: Self = Self { set: Set::Counted, gaps: false, tail: Tail::Values };
    /// Of methods with a threshold.
    pub const VARYING: Self = Self { set: Set::Counted, gaps: true, tail: Tail::Values };

    fn words(self) -> [u32; 4] {
        let set = match self.set {
            Set::Bare => 0,
            Set::Counted => 1,
            Set::Known => 2,
        };
        let (led, bits) = match self.tail {
            Tail::Values => (false, 32),
            Tail::Codes { led, bits } => (led, bits),
        };
        [set, self.gaps.into(), led.into(), bits]
    }
}

/// Error feedback, exactly the k largest by magnitude (ties to the lowest index), and the memory's update. Five launches
/// that nothing waits for, all of which a CUDA graph can capture. The outcome is at the front of the workspace.
pub fn topk(
    device: &impl Device,
    feedback: &ErrorFeedback,
    k: u64,
    to: &Selection,
    workspace: Span,
) -> Result<(), LaunchError> {
    feedback.check()?;
    let parts = Workspace::new(workspace, feedback.n)?;
    to.check()?;
    let holds = k <= feedback.n && k <= to.len && (k == 0) == (feedback.n == 0);
    require(holds, "k", k as f64, "from 1 to n, and room for it")?;
    device.zero(parts.zeroed)?;
    begin(device, feedback, k, &parts)?;
    settle(device, feedback, &parts, false)?;
    take(device, feedback, to.len, to, &parts)
}

/// Reads gradient and memory, and cuts by the first digit.
pub(crate) fn begin(
    device: &impl Device,
    feedback: &ErrorFeedback,
    k: u64,
    parts: &Workspace,
) -> Result<(), LaunchError> {
    let kernel = feedback.dtype.of(["compensate_f32", "compensate_f16", "compensate_bf16"]);
    start(device, kernel, feedback.n.div_ceil(4), (feedback.words(), k, parts.ends()))
}

/// Cuts by the other digits; with `mean`, mean |g_e| is found on the way.
pub(crate) fn settle(
    device: &impl Device,
    feedback: &ErrorFeedback,
    parts: &Workspace,
    mean: bool,
) -> Result<(), LaunchError> {
    let keys = (feedback.compensated, feedback.n, parts.state, parts.outcome, parts.list, parts.room_of_list());
    let sums = if mean { parts.partials } else { Span::NONE };
    start(device, "cut_second", feedback.n.div_ceil(4), (keys, sums))?;
    start(device, "cut_third", feedback.n, keys)
}

/// Takes what the state says out of `compensated`.
pub(crate) fn take(
    device: &impl Device,
    feedback: &ErrorFeedback,
    room: u64,
    to: &Selection,
    parts: &Workspace,
) -> Result<(), LaunchError> {
    let found = [parts.state, parts.outcome, parts.tiles, parts.sums];
    let threads = u64::from(THREADS) * feedback.n.div_ceil(TILE);
    start(device, "take", threads, (feedback.residual(), found, to.indices, to.values, room))
}

/// Most bytes of a payload with at most k of n values, rounded up to whole words, which the kernels write.
pub fn payload_room(n: u64, k: u64) -> u64 {
    // No coding of indices that is written takes more than a u32 each.
    (4 + 1 + 4 * k.min(n) + 4 + 4 * k.min(n)).next_multiple_of(4) + 4
}

/// Packs what the last call with this workspace selected as a payload of version 2. Its length is in the outcome.
pub fn pack(
    device: &impl Device,
    from: &Selection,
    n: u64,
    payload: Span,
    form: Form,
    workspace: Span,
) -> Result<(), LaunchError> {
    check_count(n)?;
    let parts = Workspace::new(workspace, n)?;
    from.check()?;
    check("the payload", payload, payload_room(n, from.len), ALIGN)?;
    let (found, threads) = ([parts.state, parts.outcome], 2 * from.len);
    if form.gaps {
        start(device, "gaps", threads, (from.indices, found))?;
    }
    start(device, "clear", threads, (payload, n, found, form.words()))?;
    start(device, "pack", threads, (from.indices, from.values, n, payload, found, form.words()))
}
