//! What can go wrong with a bucket.

use flexcomm_compression::LayersError;
use flexcomm_compression::codec::{EncodeError, ReadError};
use flexcomm_compression::pipeline::StateError;
use flexcomm_gpu_kernels::LaunchError;

/// Failed to exchange a bucket. Unless it says otherwise, every rank fails in the same exchange.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// A pipeline that cannot be copied, or cannot go back by a step.
    #[error(transparent)]
    Pipeline(#[from] StateError),
    /// Learning rates of other parameters.
    #[error("exchange bucket {bucket}: take learning rates of {got} parameters: it has {layers}")]
    Rates {
        /// Which bucket.
        bucket: u32,
        /// Rates that were given.
        got: usize,
        /// Layers that there are.
        layers: usize,
    },
    /// A trial's candidate is over, of which no snapshot was taken.
    #[error("restore after a trial: no snapshot was taken before it")]
    NoSnapshot,
    /// On this rank; the other ranks hear of it by the status.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// More values than an index can name.
    #[error(transparent)]
    Layers(#[from] LayersError),
    /// A buffer of another length than the exchange needs.
    #[error("exchange bucket {bucket}: {what} has {got} elements, expected {expected}")]
    Buffer {
        /// Which bucket.
        bucket: u32,
        /// Which buffer.
        what: &'static str,
        /// As given.
        got: usize,
        /// As needed.
        expected: usize,
    },
    /// A rank's size is longer than the method's longest message.
    #[error("read the size of rank {rank}'s message: {got} bytes, the longest has {most}")]
    Long {
        /// Whose.
        rank: usize,
        /// As read.
        got: u64,
        /// Bound of the method here.
        most: u64,
    },
    /// The ranks' messages cannot be read.
    #[error("exchange bucket {bucket}: failed to {source}")]
    Read {
        /// Which bucket.
        bucket: u32,
        /// What was wrong.
        source: ReadError,
    },
    /// A rank's message has another header than this rank's.
    #[error(
        "read the compressed bucket of rank {rank}: its header says another strategy, length or step than this rank's"
    )]
    Header {
        /// Whose.
        rank: usize,
    },
    /// A rank's payload is none of what its header says.
    #[error("read the compressed bucket of rank {rank}: its payload is not what its header says")]
    Payload {
        /// Whose.
        rank: usize,
    },
    /// On the device.
    #[error("exchange a bucket on the device: failed to {0}")]
    Device(#[from] LaunchError),
    /// Calls in another order than an exchange has.
    #[error("exchange bucket {bucket}: {what}")]
    Order {
        /// Which bucket.
        bucket: u32,
        /// What is missing.
        what: &'static str,
    },
    /// A state that does not belong to this model.
    #[error("load saved residuals: {0}")]
    State(String),
}
