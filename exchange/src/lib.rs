//! The training side of a job, without IO of its own: what a rank does with its gradient buckets, whatever carries their
//! messages.
//!
//! A [`Store`] holds one [`Bucket`] per DDP bucket: parameters, error feedback and compressor, and the state of the exchange under
//! way. An exchange is a transaction: where any rank had no part, every rank's residual goes back to what it was before,
//! so a NaN on one rank changes none. Residuals belong to parameters: when DDP
//! rebuilds its buckets they move along.

mod auto;
mod bucket;
mod deferred;
mod error;
mod head;
mod rates;
mod shadow;
mod shadows;
mod store;

pub use auto::{AutoSelection, Leader};
pub use bucket::{Answers, Bucket, DeviceBuffer, Host, How, LastRound, NotOnDevice, Param, Place, Ran, Round, layers};
pub use deferred::Deferred;
pub use error::ExchangeError;
pub use head::{Arrived, HEAD_BYTES, Status, head};
pub use shadow::{LeaderShadows, Shadow, ShadowGain};
pub use shadows::Shadows;
pub use store::{PipelineState, Shared, Store, lock};
