//! Failures of encoding and decoding.

/// Failed to compress a tensor. No state has changed: neither the codec's nor any memory's.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum EncodeError {
    /// NaN or infinity in the gradient.
    #[error("compress value {index} = {value}: it is not finite")]
    NonFinite {
        /// The first such place.
        index: usize,
        /// As found.
        value: f32,
    },
    /// NaN or infinity in the sum of residual (or momentum) and gradient, which is finite.
    #[error(
        "compress value {index} = {value}: the residual has overflowed, the gradient is finite; a compressor that keeps more \
         of it, or a lower learning rate, leaves less to the residual"
    )]
    Residual {
        /// The first such place.
        index: usize,
        /// As found.
        value: f32,
    },
    /// A buffer of another length than the layers add up to.
    #[error("compress a gradient of {expected} values: {what} has {got}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// n.
        expected: usize,
        /// As given.
        got: usize,
    },
    /// A learning rate that no residual can be scaled by.
    #[error("compress with learning rate {0}: it must be finite and above 0")]
    LearningRate(f64),
    /// AR-Topk of a compressor that chooses no values.
    #[error("choose values for AR-Topk by {0}: take one that selects values, as topk, lwtopk, mstopk or dgc")]
    NoSelection(&'static str),
    /// The rounds of a step out of order.
    #[error("go on with round {asked}: round {next} of {rounds} is next")]
    Round {
        /// Asked for.
        asked: u32,
        /// What comes next.
        next: u32,
        /// How many there are.
        rounds: u32,
    },
    /// The codec cannot read its own message: it is at fault.
    #[error("read back the own message: failed to {0}")]
    Own(#[from] ReadError),
}

impl ReadError {
    /// A number of a field that is not finite or outside its range.
    pub(crate) fn number(what: &'static str, value: impl Into<f64>, rule: &'static str) -> Self {
        Self::Number { what, value: value.into(), rule }
    }

    /// A field with a value that it cannot have.
    pub(crate) fn field(what: &'static str, value: impl Into<u64>, rule: &'static str) -> Self {
        Self::Field { what, value: value.into(), rule }
    }
}

/// Failed to read a message, a payload or a saved state.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum ReadError {
    /// The bytes end too early.
    #[error("read {wanted} bytes of {what}: {left} are left")]
    End {
        /// Of which field.
        what: &'static str,
        /// How many were wanted.
        wanted: u64,
        /// How many there were.
        left: usize,
    },
    /// Bytes behind the end.
    #[error("read a message: {0} bytes follow its end")]
    Trailing(usize),
    /// A field with a value that it cannot have.
    #[error("read {what} = {value}: {rule}")]
    Field {
        /// Which field.
        what: &'static str,
        /// As found.
        value: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// A number that must be finite, and is not, or is outside its range.
    #[error("read {what} = {value}: {rule}")]
    Number {
        /// Which field.
        what: &'static str,
        /// As found.
        value: f64,
        /// What it must be.
        rule: &'static str,
    },
    /// A message for a tensor of another length.
    #[error("read a message of a gradient of {got} values: {expected} were expected")]
    Length {
        /// Of the receiver.
        expected: u64,
        /// Of the message.
        got: u64,
    },
    /// Made by another method, or with other parameters.
    #[error("read a message of method {got}: {expected} is in force here (or with other parameters)")]
    Strategy {
        /// Code of the receiver's method.
        expected: u8,
        /// Code in the message.
        got: u8,
    },
    /// Cut into other tensors.
    #[error("read a message of scope {got}: {expected} is in force here")]
    Scope {
        /// Of the receiver.
        expected: &'static str,
        /// Of the message.
        got: &'static str,
    },
    /// Of another step, by a method whose ranks must be in the same one.
    #[error(
        "read a message of step {got} modulo 64: step {expected} is due, and this method needs the same on every rank"
    )]
    Step {
        /// Of the receiver.
        expected: u64,
        /// Of the message, modulo 64.
        got: u8,
    },
    /// Of another seed, by a method whose ranks must draw the same numbers.
    #[error(
        "read a message drawn by another seed (or for another step or tensor): here it is seed {seed}, step {step}, tensor \
         {tensor}, and this method needs the same on every rank"
    )]
    Draws {
        /// Of the receiver.
        seed: u64,
        /// Of the receiver.
        step: u64,
        /// Of the receiver.
        tensor: u32,
    },
    /// It is not as it was sent.
    #[error("read a message with checksum {got:08x}: its header says {expected:08x}")]
    Checksum {
        /// By the header.
        expected: u32,
        /// Of the bytes.
        got: u32,
    },
    /// A mean over nothing.
    #[error("aggregate 0 messages")]
    NoMessages,
}
