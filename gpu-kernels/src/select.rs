//! Methods that send some values as they are: exact top-k, and how a selection is packed.

use crate::device::start;
use crate::feed::{ALIGN, Feed, WORD};
use crate::workspace::{TILE, Workspace, check, check_count, require};
use crate::{Device, LaunchError, Span, THREADS};

/// Where a selection goes: indices that ascend, and the compensated values there.
#[derive(Debug, Clone, Copy)]
pub struct Selected {
    /// `room` u32.
    pub indices: Span,
    /// `room` f32.
    pub values: Span,
    /// Most values that are selected.
    pub room: u64,
}

impl Selected {
    pub(crate) fn check(&self) -> Result<u32, LaunchError> {
        let room = check_count(self.room)?;
        check(("the indices", self.indices, 4 * self.room), WORD)?;
        check(("the values", self.values, 4 * self.room), WORD)?;
        Ok(room)
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

impl Set {
    fn word(self) -> u64 {
        match self {
            Self::Bare => 0,
            Self::Counted => 1,
            Self::Known => 2,
        }
    }
}

impl Tail {
    fn words(self) -> [u64; 2] {
        match self {
            Self::Values => [0, 32],
            Self::Codes { led, bits } => [u64::from(led), u64::from(bits)],
        }
    }
}

impl Form {
    /// Of top-k, LWTopk, MSTopk and random-k with indices of its own.
    pub const FIXED: Self = Self { set: Set::Counted, gaps: false, tail: Tail::Values };
    /// Of methods with a threshold.
    pub const VARYING: Self = Self { set: Set::Counted, gaps: true, tail: Tail::Values };
}

/// Error feedback, exactly the k largest by magnitude (ties to the lowest index), and the memory's update. Five launches
/// that nothing waits for, all of which a CUDA graph can capture. The outcome is at the front of the workspace.
pub fn topk(device: &impl Device, feed: &Feed, (k, to): (u64, &Selected), workspace: Span) -> Result<(), LaunchError> {
    let n = feed.check()?;
    let parts = Workspace::new(workspace, feed.n)?;
    let room = to.check()?;
    let holds = k <= feed.n && k <= to.room && (k == 0) == (feed.n == 0);
    require(holds, "k", k as f64, "from 1 to n, and room for it")?;
    device.zero(parts.zeroed)?;
    begin(device, feed, (n, k as u32), &parts)?;
    settle(device, feed, n, &parts, false)?;
    take(device, feed, (n, room, to), &parts)
}

/// Reads gradient and memory, and cuts by the first digit.
pub(crate) fn begin(
    device: &impl Device,
    feed: &Feed,
    (n, k): (u32, u32),
    parts: &Workspace,
) -> Result<(), LaunchError> {
    let arguments = [
        feed.gradient.address(),
        feed.memory.address(),
        feed.compensated.address(),
        u64::from(n),
        u64::from(feed.beta.to_bits()),
        u64::from(feed.gamma.to_bits()),
        u64::from(k),
        parts.state.address(),
        parts.outcome.address(),
        parts.partials.address(),
    ];
    let kernel = feed.dtype.of(["feed_f32", "feed_f16", "feed_bf16"]);
    start(device, kernel, feed.n.div_ceil(4), &arguments)
}

/// Cuts by the other digits; with `mean`, mean |g_e| is found on the way.
pub(crate) fn settle(
    device: &impl Device,
    feed: &Feed,
    n: u32,
    parts: &Workspace,
    mean: bool,
) -> Result<(), LaunchError> {
    let arguments = [
        feed.compensated.address(),
        u64::from(n),
        parts.state.address(),
        parts.outcome.address(),
        parts.list.address(),
        parts.room_of_list(),
        if mean { parts.partials.address() } else { 0 },
    ];
    start(device, "cut_second", feed.n.div_ceil(4), &arguments)?;
    start(device, "cut_third", feed.n, &arguments[..6])
}

/// Takes what the state says out of `compensated`.
pub(crate) fn take(
    device: &impl Device,
    feed: &Feed,
    (n, room, to): (u32, u32, &Selected),
    parts: &Workspace,
) -> Result<(), LaunchError> {
    let arguments = [
        feed.compensated.address(),
        feed.memory.address(),
        u64::from(n),
        parts.state.address(),
        parts.outcome.address(),
        parts.tiles.address(),
        parts.sums.address(),
        to.indices.address(),
        to.values.address(),
        u64::from(room),
    ];
    let threads = u64::from(THREADS) * feed.n.div_ceil(TILE);
    start(device, "take", threads, &arguments)
}

/// Most bytes of a payload with at most k of n values, rounded up to whole words, which the kernels write.
pub fn payload_room(n: u64, k: u64) -> u64 {
    // No coding of indices that is written takes more than a u32 each.
    (4 + 1 + 4 * k.min(n) + 4 + 4 * k.min(n)).next_multiple_of(4) + 4
}

/// Packs what the last call with this workspace selected as a payload of version 2. Its length is in the outcome.
pub fn pack(
    device: &impl Device,
    (from, n): (&Selected, u64),
    (payload, form): (Span, Form),
    workspace: Span,
) -> Result<(), LaunchError> {
    let (count, parts) = (check_count(n)?, Workspace::new(workspace, n)?);
    from.check()?;
    check(("the payload", payload, payload_room(n, from.room)), ALIGN)?;
    let (state, outcome) = (parts.state.address(), parts.outcome.address());
    let threads = 2 * from.room;
    let (counted, gaps, [led, bits]) = (form.set.word(), u64::from(form.gaps), form.tail.words());
    if form.gaps {
        start(device, "gaps", threads, &[from.indices.address(), state, outcome])?;
    }
    let cleared = [payload.address(), u64::from(count), state, outcome, counted, gaps, led, bits];
    start(device, "clear", threads, &cleared)?;
    let (indices, values) = (from.indices.address(), from.values.address());
    let packed = [indices, values, u64::from(count), payload.address(), state, outcome, counted, gaps, led, bits];
    start(device, "pack", threads, &packed)
}
