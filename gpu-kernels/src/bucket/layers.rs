//! The layers of a bucket, each compressed by itself in one step on the whole bucket's gradient: for methods whose scope is the
//! tensor. A bucket that is compressed as one is one layer.

use super::{ALIGN, Gradient, Method, Room};
use crate::indices;
use crate::select::pack;
use crate::workspace::{check, check_count, require, split};
use crate::{Device, ErrorFeedback, LaunchError, OUTCOME_BYTES, Selection, Span};

/// Distance between outcomes.
const OUTCOME: u64 = 64;

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer {
    /// Place of its first value in the bucket.
    at: u64,
    n: u64,
    /// The residual of the last step, and that of the next one.
    memory: [Span; 2],
    payload: Span,
    pub(super) outcome: Span,
}

impl Layer {
    /// Of the bucket's gradient its own part.
    pub(super) fn feedback(&self, Gradient { at, dtype, weights: (beta, gamma) }: Gradient) -> ErrorFeedback {
        let (n, size) = (self.n, dtype.bytes());
        let [memory, compensated] = self.memory.map(|span| span.part(0, 4 * n));
        ErrorFeedback { n, dtype, gradient: at.part(size * self.at, size * n), memory, compensated, beta, gamma }
    }
}

/// Layers with their memories. Payloads and outcomes lie on the device until the next step.
#[derive(Debug)]
pub struct Layers {
    layers: Vec<Layer>,
    pub(super) room: Room,
    payloads: Span,
    outcomes: Span,
    /// Of AR-Topk: the compensated gradient, not taken yet.
    pub(super) open: Option<ErrorFeedback>,
}

/// Of memories, payloads and outcomes, then of what all share.
fn sizes(lengths: &[u64], methods: &[Method]) -> [u64; 7] {
    let pairs = || lengths.iter().zip(methods);
    let padded = |bytes: u64| bytes.next_multiple_of(ALIGN);
    let memory: u64 = lengths.iter().map(|n| padded(4 * n)).sum();
    let payloads = pairs().map(|(n, method)| padded(method.payload_bytes(*n))).sum();
    let outcomes = padded(OUTCOME * lengths.len() as u64);
    let mut room = [0; 4];
    for (n, method) in pairs() {
        room.iter_mut().zip(Room::sizes(*n, *method)).for_each(|(most, bytes)| *most = bytes.max(*most));
    }
    let [indices, values, workspace, scratch] = room;
    [2 * memory, payloads, outcomes, indices, values, workspace, scratch]
}

fn check_all(lengths: &[u64], methods: &[Method]) -> Result<(), LaunchError> {
    check_count(lengths.iter().fold(0, |sum: u64, n| sum.saturating_add(*n)))?;
    check_methods(methods, lengths.len())
}

fn check_methods(methods: &[Method], layers: usize) -> Result<(), LaunchError> {
    require(methods.len() == layers, "number of methods", methods.len() as f64, "one for each layer")
}

impl Layers {
    /// Bytes to borrow for layers of these lengths, each with its method (whose random numbers do not count).
    pub fn bytes(lengths: &[u64], methods: &[Method]) -> Result<u64, LaunchError> {
        check_all(lengths, methods)?;
        Ok(sizes(lengths, methods).iter().sum())
    }

    /// With no residual: clears the memories on the device's stream.
    pub fn new(device: &impl Device, lengths: &[u64], methods: &[Method], borrowed: Span) -> Result<Self, LaunchError> {
        check("the bucket's memory", borrowed, Self::bytes(lengths, methods)?, ALIGN)?;
        let [memories, payloads, outcomes, indices, values, workspace, scratch] =
            split(borrowed, sizes(lengths, methods));
        device.zero(memories)?;
        let (mut at, mut memory, mut payload) = (0, 0, 0);
        let mut next = |(n, method): (&u64, &Method)| {
            let (bytes, room) = ((4 * n).next_multiple_of(ALIGN), method.payload_bytes(*n).next_multiple_of(ALIGN));
            let spans = [memories.part(memory, bytes), memories.part(memory + bytes, bytes)];
            let layer = Layer { at, n: *n, memory: spans, payload: payloads.part(payload, room), outcome: Span::NONE };
            (at, memory, payload) = (at + n, memory + 2 * bytes, payload + room);
            layer
        };
        let mut layers: Vec<Layer> = lengths.iter().zip(methods).map(&mut next).collect();
        let place = |i: usize| outcomes.part(OUTCOME * i as u64, OUTCOME_BYTES);
        layers.iter_mut().enumerate().for_each(|(i, layer)| layer.outcome = place(i));
        let room = Room::new([indices, values, workspace, scratch]);
        Ok(Self { layers, room, payloads, outcomes, open: None })
    }

    /// Each layer's residual, f32: for checkpoints, and to fill when one is restored.
    pub fn residual(&self) -> impl Iterator<Item = Span> + '_ {
        self.layers.iter().map(|layer| layer.memory[0].part(0, 4 * layer.n))
    }

    /// All payloads, to fetch them at once; where each begins, and how long it may be, is in [`Self::places`].
    pub fn payloads(&self) -> Span {
        self.payloads
    }

    /// Of each payload, within [`Self::payloads`].
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.layers.iter().map(|layer| (layer.payload.address() - self.payloads.address(), layer.payload.bytes()))
    }

    /// [`crate::Outcome`]s of the last step's layers, to fetch at once: one every [`Self::OUTCOME`] bytes.
    pub fn outcomes(&self) -> Span {
        self.outcomes
    }

    /// See [`Self::outcomes`].
    pub const OUTCOME: u64 = OUTCOME;

    /// A part of the step's memory that is free between steps, for [`crate::add_sized`], [`crate::add_lists`] and their like.
    pub fn workspace(&self) -> Span {
        self.room.workspace
    }

    /// The only layer.
    pub(super) fn only(&self) -> Result<&Layer, LaunchError> {
        let count = self.layers.len();
        require(count == 1, "number of layers", count as f64, "AR-Topk takes one")?;
        Ok(&self.layers[0])
    }

    /// Room for k indices and values, in which steps select.
    pub fn lists(&self, k: u64) -> Result<Selection, LaunchError> {
        let Room { indices, values, .. } = self.room;
        check("the indices", indices, 4 * k, ALIGN)?;
        Ok(Selection { len: k, indices: indices.part(0, 4 * k), values: values.part(0, 4 * k) })
    }

    /// The k indices that the last step of a single layer has drawn or selected.
    pub fn indices(&self, k: u64) -> Span {
        self.room.indices.part(0, 4 * k)
    }

    /// Launches a step: every layer's part of `gradient` by its method, with error feedback if `keeps`; else nothing is added to the
    /// gradient, and the residual stays as it is. Where one fails all memories are those of the step before.
    pub fn step(
        &mut self,
        device: &impl Device,
        gradient: Gradient,
        keeps: bool,
        methods: &[Method],
    ) -> Result<(), LaunchError> {
        check_methods(methods, self.layers.len())?;
        for (layer, method) in self.layers.iter().zip(methods) {
            let (payload, feedback) = (layer.payload, layer.feedback(gradient));
            let feedback = if keeps { feedback } else { ErrorFeedback { memory: Span::NONE, ..feedback } };
            check("the payload", payload, method.payload_bytes(layer.n), ALIGN)?;
            if let Some(form) = self.room.compress(device, &feedback, *method, payload)? {
                let selected = self.room.list(*method, layer.n);
                pack(device, &selected, layer.n, payload, form, self.room.workspace)?;
            }
            device.copy(layer.outcome, self.room.outcome())?;
        }
        if keeps {
            self.put_back();
        }
        Ok(())
    }

    /// Sets `bits` of a byte where the last step refused a layer's gradient: a message then says so itself.
    pub fn mark(&self, device: &impl Device, at: Span, bits: u8) -> Result<(), LaunchError> {
        self.layers.iter().try_for_each(|layer| indices::mark(device, at, bits, layer.outcome))
    }

    /// A u32 behind the first outcome, for [`crate::ListRoom::refused`]: one copy then fetches both.
    pub fn refused(&self) -> Span {
        self.outcomes.part(OUTCOME_BYTES, 4)
    }

    /// After a step with error feedback that does not count: the residual is as before it. Once a step.
    pub fn put_back(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.memory.swap(0, 1));
    }
}
